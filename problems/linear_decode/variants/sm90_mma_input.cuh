// sm90_mma's input to shared memory, as the products take it: copied as it is, or converted by the block. fp8 lies
// there as fp16 beside the scales, nvfp4 as bf16 of code * scale, bf16 as it is.
#pragma once

#include "ptx.cuh"
#include "sm90_mma_quantise.cuh"

namespace linear_mma {

// A warp's part of a link.
struct WarpWork {
    int rank, first_pass;          // of the block in its team; of the team
    int slot;                      // of the warp's tile among the team's in a pass
    int chunk_begin, block_begin;  // units where the warp's chunk and the block's chunks begin
    int block_columns;             // of k
    uint32_t chunk_units;

    __device__ __forceinline__ WarpWork(const Link& link, const Geometry& geo, int granule) {
        const int block = ptx::block_index(), warp = ptx::thread_index() / 32;
        rank = block & link.num_splits - 1, first_pass = block >> geo.split_shift;
        const int block_chunks = 1 << geo.block_chunk_shift;
        const int chunk = (rank << geo.block_chunk_shift) + (warp & block_chunks - 1);
        const Chunks chunks = {link.k_units, geo.chunk_shift, granule};
        slot = warp >> geo.block_chunk_shift;
        chunk_begin = chunks.begin(chunk), chunk_units = chunks.begin(chunk + 1) - chunk_begin;
        block_begin = chunks.begin(rank << geo.block_chunk_shift);
        block_columns = (chunks.begin(rank + 1 << geo.block_chunk_shift) - block_begin) * BLOCK_K;
    }
};

// Any link's WarpWork: up to 8 tokens of a single link there are registers to keep it, else it is worked out again.
template <class C>
struct WorkOf {
    const JobsOf<C>& jobs;
    const WarpWork first;

    __device__ __forceinline__ explicit WorkOf(const JobsOf<C>& jobs)
        : jobs(jobs), first(jobs.job[0].link, jobs.job[0].geo, C::CHUNK_UNITS) {}
    __device__ __forceinline__ const Job& job(int link_index) const { return jobs.job[C::CHAIN ? link_index : 0]; }
    __device__ __forceinline__ WarpWork operator()(int link_index) const {
        const Job& job = this->job(link_index);
        return C::CHAIN || C::BLOCK_M > 8 ? WarpWork(job.link, job.geo, C::CHUNK_UNITS) : first;
    }
};

// The address of InputState, which begins with the barrier, and where its other members are.
__device__ __forceinline__ uint32_t input_state(uint8_t* smem, const Geometry& geo) {
    return ptx::smem_address(smem + geo.smem_input - INPUT_STATE);
}

// One thread asks for all rows of a group. What the block read there before must be behind a barrier.
__device__ __forceinline__ void copy_input(const Link& link, const Geometry& geo, uint8_t* smem, int group,
                                           const WarpWork& work) {
    const __nv_bfloat16* x = link.x + group * link.group_stride;
    const int first = work.block_begin * BLOCK_K, columns = work.block_columns;
    const uint32_t barrier = input_state(smem, geo);
    const uint64_t policy = ptx::l2_evict_normal();
    ptx::fence_proxy_async_shared();
    ptx::arrive_and_expect_tx(barrier, link.tokens * columns * 2);
#pragma unroll 1
    for (int token = 0; token < link.tokens; ++token)
        ptx::tma_load_1d(barrier + INPUT_STATE + token * geo.input_row_bytes,
                         x + static_cast<int64_t>(token) * link.x_stride + first, 2 * columns, barrier, policy);
}

// How a block's threads share the input that they convert, up to 8 tokens: a piece each, then the next MATH_THREADS.
template <Format FORMAT>
struct Pieces {
    Divisor of_token;
    int columns, count, whole;  // of the block; pieces; these up to whole warps, whose lanes meet in them

    __device__ __forceinline__ Pieces(const Link& link, int columns)
        : of_token(FORMAT == FP8 ? (columns + SCALE_K - 1) / SCALE_K * (SCALE_K / PIECE) : columns / PIECE,
                   link.tokens > 1),
          columns(columns),
          count(link.tokens * of_token.by),
          whole((count + 31) / 32 * 32) {}

    struct Place {
        int token, piece;
        bool inside;
    };
    __device__ __forceinline__ Place place(int i) const {
        const int token = of_token.quotient(i), piece = i - token * of_token.by;
        return {token, piece, i < count && (FORMAT != FP8 || PIECE * piece < columns)};
    }
};

// A thread's pieces of the weights of the norm, which no kernel writes, and of a group's input.
template <Format FORMAT>
__device__ __forceinline__ void load_norm_weights(const Link& link, const Pieces<FORMAT>& pieces,
                                                  uint4 (&weights)[MAX_DIRECT]) {
#pragma unroll
    for (int j = 0; j < MAX_DIRECT; ++j)
        if (const auto place = pieces.place(threadIdx.x + j * MATH_THREADS); place.inside)
            weights[j] = reinterpret_cast<const uint4*>(link.norm_weights)[place.piece];
}
template <Format FORMAT>
__device__ __forceinline__ void load_direct(const Link& link, const Pieces<FORMAT>& pieces, int group,
                                            int first, bool is_math_warp, uint4 (&raw)[MAX_DIRECT]) {
#pragma unroll
    for (int j = 0; j < MAX_DIRECT; ++j) {
        const auto place = pieces.place(threadIdx.x + j * MATH_THREADS);
        if (is_math_warp && place.inside)  // the control warp's would be pieces of warp 0
            raw[j] = load_input(
                link.x + (place.token * link.x_stride + group * link.group_stride + first + PIECE * place.piece));
    }
}

// Converts a piece and stores it.
template <Format FORMAT>
__device__ __forceinline__ void convert_piece(const Link& link, const Geometry& geo, uint8_t* smem,
                                              const typename Pieces<FORMAT>::Place& place, uint4 v, float input_scale,
                                              float inverse) {
    if constexpr (FORMAT == FP8) {
        float scale;
        v = fp8_piece(v, link.quantise, scale);
        if (place.inside && place.piece % (SCALE_K / PIECE) == 0)
            reinterpret_cast<float*>(smem + geo.smem_input_scales)[place.piece / (SCALE_K / PIECE) * MMA_M +
                                                                   place.token] = scale;
    } else {
        v = nvfp4_piece(v, input_scale, inverse);
    }
    const uint32_t to =
        ptx::smem_address(smem + geo.smem_input) + place.token * geo.input_row_bytes + 2 * PIECE * place.piece;
    if (place.inside) ptx::store_shared16(to, v);
}

// RMSNorm of the input in registers, rounded to bf16; weights: of the same pieces; squares: of warps, 32 floats. Each
// warp has pieces of one token. Values and the order of sums are those of dsv4_forward's rms_norm (kernels/norm.cu).
template <Format FORMAT>
__device__ __forceinline__ void norm_pieces(const Link& link, const Pieces<FORMAT>& pieces, float* squares,
                                            uint4 (&raw)[MAX_DIRECT], const uint4 (&weights)[MAX_DIRECT]) {
    const int token_warps = pieces.of_token.by / 32;
#pragma unroll
    for (int j = 0; j < MAX_DIRECT; ++j) {
        const int i = threadIdx.x + j * MATH_THREADS;
        if (i >= pieces.count) continue;
        const uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
        float square = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float low = __uint_as_float(words[w] << 16), high = __uint_as_float(words[w] & 0xFFFF0000u);
            square += fmaf(low, low, high * high);
        }
#pragma unroll
        for (int distance = 16; distance; distance /= 2) square += __shfl_xor_sync(~0u, square, distance);
        if (i % 32 == 0) squares[i / 32] = square;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < MAX_DIRECT; ++j) {
        const int i = threadIdx.x + j * MATH_THREADS;
        if (i >= pieces.count) continue;
        float total = 0;
        const float* token_squares = squares + pieces.place(i).token * token_warps;
#pragma unroll 1
        for (int w = 0; w < token_warps; ++w) total += token_squares[w];
        const float inverse = rsqrtf(total / pieces.columns + link.eps);
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

// All of a group in place, of fp8: a lane takes two pieces at a time, eight lanes share a scale.
template <bool QUANTISE, int BLOCK_M>
__device__ __forceinline__ void convert_fp8_input(const Link& link, const Geometry& geo, uint8_t* smem, int columns,
                                                  int thread) {
    constexpr int LANES = SCALE_K / PIECE / 2;
    const Divisor of_token((columns + SCALE_K - 1) / SCALE_K * LANES);
    const int count = link.tokens * of_token.by;
#pragma unroll 1
    for (int i = thread; i < (count + 31) / 32 * 32; i += MATH_THREADS) {  // lanes meet in whole warps
        const int token = of_token.quotient(i), rest = i - token * of_token.by, block = rest / LANES;
        const int first = SCALE_K * block + PIECE * (rest % LANES), second = first + SCALE_K / 2;  // columns
        const bool inside[2] = {i < count, i < count && second < columns};
        const uint32_t address = ptx::smem_address(smem + geo.smem_input) + token * geo.input_row_bytes + 2 * first;
        uint4 pieces[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (inside[half]) pieces[half] = ptx::load_shared16(address + SCALE_K * half);
        float scale;
        fp8_pieces(pieces, QUANTISE, scale);
        if (inside[0] && rest % LANES == 0)
            reinterpret_cast<float*>(smem + geo.smem_input_scales)[block * BLOCK_M + token] = scale;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (inside[half]) ptx::store_shared16(address + SCALE_K * half, pieces[half]);
    }
}

// All of a group in place, of nvfp4.
__device__ __forceinline__ void convert_nvfp4_input(const Link& link, const Geometry& geo, uint8_t* smem,
                                                    const Pieces<NVFP4>& pieces, float input_scale, int thread) {
    const float inverse = __frcp_rn(input_scale);
#pragma unroll 1
    for (int i = thread; i < pieces.whole; i += MATH_THREADS) {
        const auto place = pieces.place(i);
        const uint32_t address =
            ptx::smem_address(smem + geo.smem_input) + place.token * geo.input_row_bytes + 2 * PIECE * place.piece;
        const uint4 v = place.inside ? ptx::load_shared16(address) : make_uint4(0, 0, 0, 0);
        convert_piece<NVFP4>(link, geo, smem, place, v, input_scale, inverse);
    }
}

// Scales of an input that was quantised before this kernel.
template <int BLOCK_M>
__device__ __forceinline__ void copy_input_scales(const Link& link, const Geometry& geo, uint8_t* smem, int group,
                                                  const WarpWork& work) {
    const int of_k = (link.k_units * BLOCK_K + SCALE_K - 1) / SCALE_K, first = work.block_begin * BLOCK_K / SCALE_K;
    const Divisor blocks((work.block_columns + SCALE_K - 1) / SCALE_K);
    float* scales = reinterpret_cast<float*>(smem + geo.smem_input_scales);
#pragma unroll 1
    for (int i = threadIdx.x; i < link.tokens * blocks.by; i += MATH_THREADS) {
        const int token = blocks.quotient(i), block = i - token * blocks.by;
        scales[block * BLOCK_M + token] = link.quantised_scales[(token * link.groups() + group) * of_k + first + block];
    }
}

}  // namespace linear_mma
