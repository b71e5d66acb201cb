// sm90_mma: the input to shared memory.
#pragma once

#include "sm90_mma_quantise.cuh"

namespace linear_mma {

// Read where they are needed: what follows from them is then worked out again, and not kept in registers.
__device__ __forceinline__ int block_index() {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}
__device__ __forceinline__ int thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// What a warp has of a link.
struct Share {
    int rank, first_pass;     // of the block in the cluster; of the cluster
    int place, begin, slice;  // the tile's place among those under way; units where the chunk and the block's begin
    int count;                // columns of the block
    uint32_t length;          // units of the chunk

    __device__ __forceinline__ Share(const Link& p, const Geometry& at, int granule) {
        const int block = block_index(), warp = thread_index() / 32;
        rank = block & p.cluster - 1, first_pass = block >> at.cluster_shift;
        const int local = 1 << at.local_shift, chunk = (rank << at.local_shift) + (warp & local - 1);
        const Cut cut = {p.k_units, at.chunk_shift, granule};
        place = warp >> at.local_shift, begin = cut.begin(chunk), length = cut.begin(chunk + 1) - begin;
        slice = cut.begin(rank << at.local_shift);
        count = (cut.begin(rank + 1 << at.local_shift) - slice) * COLUMNS;
    }
};

// ---- the input to shared memory: columns from first_unit on, of one group of the link

// One thread asks for all rows. What the block read there before must be behind a barrier.
__device__ __forceinline__ void copy_input(const Link& p, const Geometry& at, uint8_t* smem, const __nv_bfloat16* x,
                                           int first, int count) {
    const uint32_t barrier = ptx::smem_address(smem + at.x - BARRIER);
    const uint64_t policy = ptx::l2_evict_normal();
    ptx::fence_proxy_async_shared();
    ptx::arrive_and_expect_tx(barrier, p.tokens * count * 2);
#pragma unroll 1
    for (int token = 0; token < p.tokens; ++token)
        ptx::tma_load_1d(barrier + BARRIER + token * at.row_bytes,
                         x + static_cast<int64_t>(token) * p.x_columns + first, 2 * count, barrier, policy);
}

// How a block's threads share the input that they convert, up to 8 tokens: a piece each, then the next THREADS.
template <int FORMAT>
struct Pieces {
    Divisor of_token;
    int count, all, whole;  // columns of the block; pieces; these up to whole warps, whose lanes meet in them

    __device__ __forceinline__ Pieces(const Link& p, int count)
        : of_token(FORMAT == FP8 ? (count + BLOCK - 1) / BLOCK * (BLOCK / PIECE) : count / PIECE, p.tokens > 1),
          count(count),
          all(p.tokens * of_token.by),
          whole((all + 31) / 32 * 32) {}

    struct Place {
        int token, piece;
        bool inside;
    };
    __device__ __forceinline__ Place place(int i) const {
        const int token = of_token.quotient(i), piece = i - token * of_token.by;
        return {token, piece, i < all && (FORMAT != FP8 || PIECE * piece < count)};
    }
};

// One of them, from bf16 to what the products take, to where that is kept.
template <int FORMAT>
__device__ __forceinline__ void convert_piece(const Link& p, const Geometry& at, uint8_t* smem,
                                              const typename Pieces<FORMAT>::Place& place, uint4 v, float input_scale,
                                              float inverse) {
    if constexpr (FORMAT == FP8) {
        float scale;
        v = fp8_piece(v, p.quantise, scale);
        if (place.inside && place.piece % (BLOCK / PIECE) == 0)
            reinterpret_cast<float*>(smem + at.x_scales)[place.piece / (BLOCK / PIECE) * 8 + place.token] = scale;
    } else {
        v = nvfp4_piece(v, input_scale, inverse);
    }
    const uint32_t to = ptx::smem_address(smem + at.x) + place.token * at.row_bytes + 2 * PIECE * place.piece;
    if (place.inside) ptx::store_shared16(to, v);
}

// RMSNorm of the input in registers, rounded to bf16; weights: of the same pieces; sums: of warps, 32 floats. Each warp
// has pieces of one token. Values and the order of sums are those of dsv4_forward's rms_norm (kernels/fused.cu).
template <int FORMAT>
__device__ __forceinline__ void norm_pieces(const Link& p, const Pieces<FORMAT>& pieces, float* sums,
                                            uint4 (&raw)[DIRECT], const uint4 (&weights)[DIRECT]) {
    const int of_token = pieces.of_token.by / 32;  // warps
#pragma unroll
    for (int j = 0; j < DIRECT; ++j) {
        const int i = threadIdx.x + j * THREADS;
        if (i >= pieces.all) continue;
        const uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
        float square = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float low = __uint_as_float(words[w] << 16), high = __uint_as_float(words[w] & 0xFFFF0000u);
            square += fmaf(low, low, high * high);
        }
#pragma unroll
        for (int apart = 16; apart; apart /= 2) square += __shfl_xor_sync(~0u, square, apart);
        if (i % 32 == 0) sums[i / 32] = square;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < DIRECT; ++j) {
        const int i = threadIdx.x + j * THREADS;
        if (i >= pieces.all) continue;
        float total = 0;
        const float* mine = sums + pieces.place(i).token * of_token;
#pragma unroll 1
        for (int w = 0; w < of_token; ++w) total += mine[w];
        const float inverse = rsqrtf(total / pieces.count + p.eps);
        uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
        const uint32_t factors[4] = {weights[j].x, weights[j].y, weights[j].z, weights[j].w};
#pragma unroll
        for (int w = 0; w < 4; ++w)
            words[w] = ptx::pack_bf16x2(
                __uint_as_float(words[w] << 16) * inverse * __uint_as_float(factors[w] << 16),
                __uint_as_float(words[w] & 0xFFFF0000u) * inverse * __uint_as_float(factors[w] & 0xFFFF0000u));
        raw[j] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// All in place, of fp8: a lane takes two pieces of a group at a time, eight lanes a group.
template <bool QUANTISE, int NT>
__device__ __forceinline__ void convert_fp8_input(const Link& p, const Geometry& at, uint8_t* smem, int count,
                                                  int thread) {
    constexpr int LANES = BLOCK / PIECE / 2;
    const Divisor of_token((count + BLOCK - 1) / BLOCK * LANES);
    const int all = p.tokens * of_token.by;
#pragma unroll 1
    for (int i = thread; i < (all + 31) / 32 * 32; i += THREADS) {  // lanes meet in whole warps
        const int token = of_token.quotient(i), rest = i - token * of_token.by, group = rest / LANES;
        const int first = BLOCK * group + PIECE * (rest % LANES), second = first + BLOCK / 2;  // columns
        const bool inside[2] = {i < all, i < all && second < count};
        const uint32_t here = ptx::smem_address(smem + at.x) + token * at.row_bytes + 2 * first;
        uint4 pieces[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (inside[half]) pieces[half] = ptx::load_shared16(here + BLOCK * half);
        float scale;
        fp8_pieces(pieces, QUANTISE, scale);
        if (inside[0] && rest % LANES == 0)
            reinterpret_cast<float*>(smem + at.x_scales)[group * NT * 8 + token] = scale;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (inside[half]) ptx::store_shared16(here + BLOCK * half, pieces[half]);
    }
}

// All in place, of nvfp4.
__device__ __forceinline__ void convert_nvfp4_input(const Link& p, const Geometry& at, uint8_t* smem,
                                                    const Pieces<NVFP4>& pieces, float input_scale, int thread) {
    const float inverse = __frcp_rn(input_scale);
#pragma unroll 1
    for (int i = thread; i < pieces.whole; i += THREADS) {
        const auto place = pieces.place(i);
        const uint32_t here = ptx::smem_address(smem + at.x) + place.token * at.row_bytes + 2 * PIECE * place.piece;
        const uint4 v = place.inside ? ptx::load_shared16(here) : make_uint4(0, 0, 0, 0);
        convert_piece<NVFP4>(p, at, smem, place, v, input_scale, inverse);
    }
}

// Scales of an input taken ahead.
template <int NT>
__device__ __forceinline__ void take_scales(const Link& p, const Geometry& at, uint8_t* smem, int group,
                                            const Share& own) {
    const int of_k = (p.k_units * COLUMNS + BLOCK - 1) / BLOCK, first = own.slice * COLUMNS / BLOCK;
    const Divisor blocks((own.count + BLOCK - 1) / BLOCK);
    float* scales = reinterpret_cast<float*>(smem + at.x_scales);
#pragma unroll 1
    for (int i = threadIdx.x; i < p.tokens * blocks.by; i += THREADS) {
        const int token = blocks.quotient(i), block = i - token * blocks.by;
        scales[block * NT * 8 + token] = p.taken_scales[(token * p.groups() + group) * of_k + first + block];
    }
}

}  // namespace linear_mma
