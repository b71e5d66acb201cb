// nvfp4_gemv by byte tables and dp4a; warp_ring.cuh moves the data and says what a, b, sfa, sfb and c are.
//
// A doubled e2m1 value is an integer of -12 to 12, so a block's dot product is an exact integer of at most 16 * 144.
#include "nvfp4.cuh"
#include "warp_ring.cuh"

constexpr int MAGIC = 0x4B400000;  // 1.5 * 2^23 as a float: small integers added to it are its low bits
constexpr float MAGIC_VALUE = 12582912.f;

// ---- device helpers

__device__ __forceinline__ float2 scale_pair(uint16_t bytes) {
    uint32_t const pair = nvfp4::e4m3x2_to_half2_bits(bytes);
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// 32 values of x: 2 x and -2 x as signed bytes, their two scales, and -MAGIC_VALUE times them.
struct Bytes {
    static constexpr float UNIT = 0.25f;  // both operands are doubled
    int plus[8], minus[8];
    float scale[2], shift[2];
    uint32_t low, high;  // |2 w| of the codes 0 to 7

    __device__ __forceinline__ Bytes(uint4 codes, uint16_t scales, bool inside) {
        // + threadIdx.z, which is 0: else the compiler moves these constants to a register for every single use.
        low = 0x03020100u + threadIdx.z, high = 0x0C080604u + threadIdx.z;
        uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
        float2 const s = scale_pair(inside ? scales : 0);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t const four = (inside ? words[i / 2] : 0u) >> (16 * (i % 2));
            uint32_t const up = positive(four), down = positive(four ^ 0x8888u);
            // (0x80 - n) ^ 0x80 is -n as a byte, with no borrow between bytes; of up and down one is 0.
            plus[i] = int(up | ((0x80808080u - down) ^ 0x80808080u));
            minus[i] = int(down | ((0x80808080u - up) ^ 0x80808080u));
        }
        scale[0] = s.x, scale[1] = s.y;
        shift[0] = -MAGIC_VALUE * s.x, shift[1] = -MAGIC_VALUE * s.y;
    }

    // Four codes in bits 15:0 -> bytes |2 w| where the sign bit is 0, else 0. With all signs flipped: the others.
    __device__ __forceinline__ uint32_t positive(uint32_t four) const { return ptx::prmt(low, high, four); }

    // Positive codes meet 2 x and negative ones -2 x. Exact but for the last two roundings: MAGIC + dot is a float,
    // and dot times x's scale has 12 + 4 bits.
    __device__ __forceinline__ float row_sum(uint4 codes, uint16_t scales) const {
        uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
        float2 const s = scale_pair(scales);
        float terms[2];
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            int dot = MAGIC;
#pragma unroll
            for (int i = 2 * block; i < 2 * block + 2; ++i) {
                uint32_t const flipped = words[i] ^ 0x88888888u;
                dot = ptx::dp4a(positive(words[i]), plus[2 * i], dot);
                dot = ptx::dp4a(positive(words[i] >> 16), plus[2 * i + 1], dot);
                dot = ptx::dp4a(positive(flipped), minus[2 * i], dot);
                dot = ptx::dp4a(positive(flipped >> 16), minus[2 * i + 1], dot);
            }
            terms[block] = fmaf(__int_as_float(dot), scale[block], shift[block]);
        }
        return fmaf(terms[1], s.y, terms[0] * s.x);
    }
};

// ---- launcher

// Arrays as in warp_ring.cuh, on the device; -> a cudaError_t.
extern "C" int launch(const uint8_t* a, const uint8_t* b, const uint8_t* sfa, const uint8_t* sfb, __half* c, int m,
                      int k, int l) {
    // Rows a step, steps under way, warps a CTA, CTAs an SM. With few slices a CTA's groups of rows are many and its
    // steps few: a ring of one slot is 2 % faster at k = 2048, 4 % slower at k = 7168.
    auto const choice = k > 4096 ? warp_ring::run<Bytes, 2, 2, 32, 1> : warp_ring::run<Bytes, 2, 1, 32, 1>;
    return choice(a, b, sfa, sfb, c, m, k, l);
}
