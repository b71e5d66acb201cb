// sm90_mxfp4's results of the first product: to the second's activations, in FP8.
#pragma once

#include "sm90_mxfp4_gather.cuh"
#include "sm90_prefill_epilogue.cuh"

namespace mxfp4 {

// Bytes of four lanes 4 apart, turned: lane j of them gets byte j of each one's, in their order.
__device__ __forceinline__ uint32_t turn_bytes(uint32_t own) {
    const int g = thread_index() % 32 / 4;
    const uint32_t first = __byte_perm(own, __shfl_xor_sync(~0u, own, 4), g & 1 ? 0x3715 : 0x6240);
    return __byte_perm(first, __shfl_xor_sync(~0u, first, 8), g & 2 ? 0x3276 : 0x5410);
}

// Pairs in d[q][4 i] -> rows of v in staging, 128 bytes a slot. least: of the slots that prefill::activate_all says, as
// decode::least_normal gives it. unit: of the block's eight, and part of it, which the warp has first.
template <class F>
__device__ __forceinline__ void stage_codes(const float (&d)[F::PARTS][F::SUMS],
                                            const uint32_t (&least)[F::LARGEST_WORDS], int count, uint32_t staging,
                                            int unit, int part) {
    // Channel 16 unit + 8 q + g has position 32 (2 (unit % 2) + q) + 16 (g / 4) + 4 (unit / 2) + g % 4. Lanes g of four
    // have neighbouring channels of two slots, in both parts or of two eights. After the turn a lane has four of one.
    constexpr int STEP = 2 / F::PARTS;  // eights
    const int g = thread_index() % 32 / 4, c = thread_index() % 4;
    const int slot = 2 * c + g % 2, q = F::PARTS == 2 ? g / 2 % 2 : part;
    const int piece = 4 * (unit % 2) + 2 * q + g / 4, eighth = F::PARTS == 2 ? 0 : g / 2 % 2;
    const uint32_t to = staging + (8 * eighth + slot) * 128 + (piece ^ slot) * 16 + unit / 2 * 4;
#pragma unroll
    for (int i = 0; i < F::EIGHTS; i += STEP) {
        if (8 * i >= count) break;
        uint32_t own = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = F::PARTS == 2 ? i : i + half, of = F::PARTS == 2 ? half : 0;
            const uint32_t shared = __shfl_sync(~0u, least[at / 8], at % 8 * 4 + c);
            own |= codes_of(__float_as_uint(d[of][4 * at]), inverse_of(shared << 16), inverse_of(shared)) << 16 * half;
        }
        store_shared(to + 1024 * i, turn_bytes(own));
    }
}

// d of the first product -> rows of v and their scales in staging, in FP8. weights: of the item's slots; largest: room
// for the warps' magnitudes; all in shared memory. sync: all of the warps that multiply.
template <class F, class Sync>
__device__ __forceinline__ void stage_v(float (&d)[F::PARTS][F::SUMS], int count, float factor, uint32_t weights,
                                        uint32_t staging, uint32_t scales, uint32_t largest, int unit, int part,
                                        Sync sync) {
    const int g = thread_index() % 32 / 4, c = thread_index() % 4;
    uint32_t block[F::LARGEST_WORDS] = {};
    prefill::activate_all(d, block, count, factor, weights, thread_index() % 32 / 4, thread_index() % 4);
    prefill::share_blocks<F>(block, decode::InputScale(0), largest, sync);
    stage_codes<F>(d, block, count, staging, unit, part);
    if (thread_index() / 32 == 4)
#pragma unroll
        for (int k = 0; k < F::LARGEST_WORDS; ++k) {
            const uint32_t to = scales + 4 * scale_at(64 * k + 8 * g + 2 * c);
            store_shared(to, __float_as_uint(scale_of(block[k] << 16)));
            store_shared(to + 4, __float_as_uint(scale_of(block[k])));
        }
}

}  // namespace mxfp4
