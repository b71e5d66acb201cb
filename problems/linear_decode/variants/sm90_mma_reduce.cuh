// sm90_mma's sums: those of a tile's chunks are added in the order of k, in a block, a cluster, or, where more blocks
// share the tile, by way of global memory. Then the epilogue: SwiGLU, bf16, and the next link's input.
#pragma once

#include <cassert>

#include "ptx.cuh"
#include "sm90_mma_quantise.cuh"
#include "tagged_words.cuh"

namespace linear_mma {

// ---- barriers

// ptx::cluster_sync, with this warp as the one that releases.
template <int WARP>
__device__ __forceinline__ void cluster_sync() {
    __syncthreads();
    if (threadIdx.x / 32 == WARP)
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else
        ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
}

// Of the grid's counter, before this block has arrived.
__device__ __forceinline__ uint32_t first_bit(const uint32_t* counter) {
    return ptx::load_relaxed(counter) & 0x80000000u;
}

// Between links of a chain. `phase` is the counter's first bit, which changes when the last of all blocks arrives.
__device__ __forceinline__ void grid_sync(uint32_t* counter, uint32_t& phase) {
    const uint32_t add = blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1);
    ptx::red_add_release(counter, add);
    while ((ptx::ld_acquire(reinterpret_cast<const int*>(counter)) & 0x80000000u) == phase);
    phase ^= 0x80000000u;
}

// ---- sums in shared memory, of a block or a cluster

__device__ __forceinline__ float4 as_floats(const uint4& v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
template <bool CLUSTER>
__device__ __forceinline__ float4 load_sums(uint32_t from) {
    return as_floats(CLUSTER ? ptx::load_cluster16(from) : ptx::load_shared16(from));
}
__device__ __forceinline__ void add(float4& to, const float4& v) { to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w; }

// The sums, of four rows, of `block_chunks` chunks, the first at from(block) and each WARP_SUMS floats behind the one
// before, of blocks 0 to blocks - 1. Every `section_chunks` are added up by themselves first. AT_ONCE of them are
// loaded before the first is added. All counts are powers of two. -0 changes no sum. CLUSTER: from ptx::in_block.
template <int AT_ONCE, bool CLUSTER, class From>
__device__ __forceinline__ float4 add_chunks(int blocks, int block_chunks, int section_chunks, const From& from) {
    const int batch = min(min(AT_ONCE, section_chunks), block_chunks);
    float4 total = make_float4(-0.f, -0.f, -0.f, -0.f), sum = total;
    int added = 0;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        uint32_t address = from(block);
#pragma unroll 1
        for (int i = 0; i < block_chunks; i += batch) {
            float4 loaded[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                if (j < batch) loaded[j] = load_sums<CLUSTER>(address + j * WARP_SUMS * 4);
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                if (j < batch) add(sum, loaded[j]);
            address += batch * WARP_SUMS * 4, added += batch;
            if (added & section_chunks - 1) continue;
            add(total, sum);
            sum = make_float4(-0.f, -0.f, -0.f, -0.f);
        }
    }
    return total;
}

// A warp's sums of token tiles first to first + 2^shift - 1 to shared memory.
template <class C>
__device__ __forceinline__ void store_sums(const Link& link, uint32_t smem_sums,
                                           const float (&sum)[2][C::TOKEN_TILES][4], float factor, int first, int shift,
                                           int warp, int g, int c, bool is_math_warp) {
#pragma unroll
    for (int t = 0; t < C::TOKEN_TILES; ++t)
        if (t >> shift == first >> shift)
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int token = 2 * c + odd;
                if (MMA_M * t + token >= link.tokens || !is_math_warp) continue;
                const uint32_t to = smem_sums + 4 * (((t - first) * WARPS + warp) * WARP_SUMS + token * SUM_STRIDE + g);
#pragma unroll
                for (int r = 0; r < 4; ++r) {  // row g + 8 r
                    const float v = sum[r / 2][t][odd + r % 2 * 2];
                    ptx::store_shared(to + 32 * r, __float_as_uint(v * factor));
                }
            }
}

// Where four rows of a warp's sums are; token: of those in shared memory.
__device__ __forceinline__ uint32_t sums_of(uint32_t smem_sums, int warp, int token, int lane) {
    return smem_sums + 4 * ((token / MMA_M * WARPS + warp) * WARP_SUMS + token % MMA_M * SUM_STRIDE + 4 * (lane & 7));
}

// ---- sums by way of global memory

// What blocks that are no cluster exchange as tagged_words.cuh says: at first two words of 8 bytes with the state; then
// sums of sections, [pass][block of the team][tile of the pass][token][row], with the launch's tag. A graph may replay
// the launch.
struct Exchange {
    uint64_t* words;

    __device__ __forceinline__ tagged::State* state() const { return reinterpret_cast<tagged::State*>(words); }
    // From a block's word to the next block's.
    __device__ __forceinline__ int block_stride(const Link& link, const Geometry& geo) const {
        return link.tokens * BLOCK_N << geo.tile_shift;
    }
    // The first block's, of the first row.
    __device__ __forceinline__ uint64_t* line(const Link& link, const Geometry& geo, int pass, int slot,
                                              int token) const {
        return words + 2 + static_cast<int64_t>(pass << geo.split_shift) * block_stride(link, geo) +
               (slot * link.tokens + token) * BLOCK_N;
    }
};

__device__ __forceinline__ void publish_sums(uint64_t* to, const float4& sum, uint32_t tag) {
    tagged::publish_pair(to, sum.x, sum.y, tag);
    tagged::publish_pair(to + 2, sum.z, sum.w, tag);
}

// The sums of `count` times four words at from, from + stride, ..., in this order. SECTIONS_AT_ONCE times are loaded at
// once, and again until they have the tag.
__device__ __forceinline__ float4 add_published(const uint64_t* from, int stride, int count, uint32_t tag) {
    float4 total = make_float4(-0.f, -0.f, -0.f, -0.f);  // changes no sum
    int tries = 0;
#pragma unroll 1
    for (int begin = 0; begin < count;) {
        uint64_t word[SECTIONS_AT_ONCE][4];
        bool all = true;
#pragma unroll
        for (int i = 0; i < SECTIONS_AT_ONCE; ++i)
            if (begin + i < count)
#pragma unroll
                for (int pair = 0; pair < 4; pair += 2)
                    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                                 : "=l"(word[i][pair]), "=l"(word[i][pair + 1])
                                 : "l"(from + (begin + i) * stride + pair)
                                 : "memory");
#pragma unroll
        for (int i = 0; i < SECTIONS_AT_ONCE; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) all &= begin + i >= count || static_cast<uint32_t>(word[i][e] >> 32) == tag;
        if (all) {
            const auto low = [](uint64_t word) { return __uint_as_float(static_cast<uint32_t>(word)); };
#pragma unroll
            for (int i = 0; i < SECTIONS_AT_ONCE; ++i)
                if (begin + i < count)
                    add(total, make_float4(low(word[i][0]), low(word[i][1]), low(word[i][2]), low(word[i][3])));
            begin += SECTIONS_AT_ONCE;
        } else if (++tries == tagged::MOST_TRIES) {  // ends the launch with cudaErrorAssert and this line
            assert(!"linear_decode: time-out, a block waited for the sums of another that never came");
            __trap();
        }
    }
    return total;
}

// ---- epilogue

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    gate = fminf(gate, limit);
    return gate / (1 + __expf(-gate)) * fminf(fmaxf(up, -limit), limit);
}

// Writes the outputs of a link. Eight lanes have the rows of a tile, of one token, four each.
template <class C>
struct Epilogue {
    const Link& link;
    const Geometry& geo;
    const Next& next;
    const float next_scale;  // as write_next's lane_scale
    const int warp, lane;
    const bool is_math_warp;

    // gates: of the same rows. All lanes call this.
    __device__ __forceinline__ void write_rows(bool inside, int tile, int token, const float4& gates,
                                               float4 total) const {
        if (link.gated)
            total = make_float4(swiglu(gates.x, total.x, link.limit), swiglu(gates.y, total.y, link.limit),
                                swiglu(gates.z, total.z, link.limit), swiglu(gates.w, total.w, link.limit));
        int index = 0;
#pragma unroll
        for (int i = 1; i < MAX_OUTPUTS; ++i) index += i < link.num_outputs && tile >= link.outputs[i].first_tile;
        const Output& output = link.outputs[index];
        const int column = (tile - output.first_tile >> link.gated) * BLOCK_N + 4 * (lane & 7);
        const uint2 rounded = {ptx::pack_bf16x2(total.x, total.y), ptx::pack_bf16x2(total.z, total.w)};
        if (inside)
            *reinterpret_cast<uint2*>(output.out + static_cast<int64_t>(token) * output.columns + column) = rounded;
        if (C::FORMAT == NVFP4 && next.quantised)
            write_next(next, inside && index == 0, token, column, rounded, next_scale);
    }
};

// Publishes a block's sums of a pass.
template <class C>
__device__ __forceinline__ void publish_pass(const Link& link, const Geometry& geo, const Exchange& exchange,
                                             uint32_t smem_sums, int block_chunks, uint32_t tag, int pass, int rank,
                                             int first_token, int tokens, int warp, int lane) {
#pragma unroll 1
    for (int line = 4 * warp + lane / 8; line < tokens << geo.tile_shift; line += 4 * WARPS) {
        const int token = line >> geo.tile_shift, slot = line & (1 << geo.tile_shift) - 1;
        const uint32_t from = sums_of(smem_sums, slot << geo.block_chunk_shift, token, lane);
        const float4 total =
            add_chunks<C::SUMS_AT_ONCE, false>(1, block_chunks, block_chunks, [&](int) { return from; });
        uint64_t* to = exchange.line(link, geo, pass, slot, first_token + token);
        publish_sums(to + rank * exchange.block_stride(link, geo) + 4 * (lane & 7), total, tag);
    }
}

}  // namespace linear_mma
