// sm90_mma: sums of chunks.
#pragma once

#include <cassert>

#include "ptx.cuh"
#include "sm90_mma_formats.cuh"
#include "tagged_words.cuh"

namespace linear_mma {

// ptx::cluster_sync, with this warp as the one that releases.
template <int WARP>
__device__ __forceinline__ void cluster_sync() {
    __syncthreads();
    if (threadIdx.x / 32 == WARP)
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* from) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

// Of a counter, before this block has arrived.
__device__ __forceinline__ uint32_t first_bit(const uint32_t* met) { return load_relaxed(met) & 0x80000000u; }

// Between links of a chain. `phase` is the first bit of *met, which changes when the last of all blocks arrives.
__device__ __forceinline__ void meet_grid(uint32_t* met, uint32_t& phase) {
    const uint32_t add = blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1);
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(met), "r"(add) : "memory");
    while ((ptx::ld_acquire(reinterpret_cast<const int*>(met)) & 0x80000000u) == phase);
    phase ^= 0x80000000u;
}

// ---- sums of four rows of a chunk

__device__ __forceinline__ float4 as_floats(const uint4& v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
template <bool CLUSTER>
__device__ __forceinline__ float4 load_sums(uint32_t from) {
    return as_floats(CLUSTER ? ptx::load_cluster16(from) : ptx::load_shared16(from));
}

// ---- sums by way of memory

// What blocks that are no cluster tell each other by tagged_words.cuh: at first two words of 8 bytes with the state; then
// sums of sections, [pass][block of those that share][tile at once][token][row], with the launch's tag. A graph may
// replay the launch.
struct Exchange {
    uint64_t* words;

    __device__ __forceinline__ tagged::State* state() const { return reinterpret_cast<tagged::State*>(words); }
    // From a block's word to the next block's.
    __device__ __forceinline__ int apart(const Link& p, const Geometry& at) const {
        return p.tokens * TILE << at.tile_shift;
    }
    // The first block's, of the first row; place: of the tile among those at once.
    __device__ __forceinline__ uint64_t* line(const Link& p, const Geometry& at, int pass, int place, int token) const {
        return words + 2 + static_cast<int64_t>(pass << at.cluster_shift) * apart(p, at) +
               (place * p.tokens + token) * TILE;
    }
};

__device__ __forceinline__ void tell(uint64_t* to, const float4& sum, uint32_t tag) {
    tagged::publish_pair(to, sum.x, sum.y, tag);
    tagged::publish_pair(to + 2, sum.z, sum.w, tag);
}

__device__ __forceinline__ void add(float4& to, const float4& v) { to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w; }

// The sums of `count` times four words at from, from + apart, ..., in this order. HEARD times are asked for at once, and
// again until they have the tag.
__device__ __forceinline__ float4 hear(const uint64_t* from, int apart, int count, uint32_t tag) {
    float4 total = make_float4(-0.f, -0.f, -0.f, -0.f);  // changes no sum
    int tries = 0;
#pragma unroll 1
    for (int begin = 0; begin < count;) {
        uint64_t word[HEARD][4];
        bool all = true;
#pragma unroll
        for (int i = 0; i < HEARD; ++i)
            if (begin + i < count)
#pragma unroll
                for (int two = 0; two < 4; two += 2)
                    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                                 : "=l"(word[i][two]), "=l"(word[i][two + 1])
                                 : "l"(from + (begin + i) * apart + two)
                                 : "memory");
#pragma unroll
        for (int i = 0; i < HEARD; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) all &= begin + i >= count || static_cast<uint32_t>(word[i][e] >> 32) == tag;
        if (all) {
            const auto low = [](uint64_t one) { return __uint_as_float(static_cast<uint32_t>(one)); };
#pragma unroll
            for (int i = 0; i < HEARD; ++i)
                if (begin + i < count)
                    add(total, make_float4(low(word[i][0]), low(word[i][1]), low(word[i][2]), low(word[i][3])));
            begin += HEARD;
        } else if (++tries == tagged::MOST_TRIES) {  // ends the launch with cudaErrorAssert and this line
            assert(!"linear_decode: time-out, a block waited for the sums of another that never came");
            __trap();
        }
    }
    return total;
}

// The sums of `local` chunks, the first at from(block) and each SUMS floats behind the one before, of blocks 0 to
// blocks - 1. Every `section` chunks are added up by themselves first. TOGETHER of them are loaded before the first is
// added. All counts are powers of two. -0 changes no sum. CLUSTER: of blocks of a cluster, from ptx::in_block.
template <int TOGETHER, bool CLUSTER, class From>
__device__ __forceinline__ float4 add_up(int blocks, int local, int section, const From& from) {
    const int batch = min(min(TOGETHER, section), local);
    float4 total = make_float4(-0.f, -0.f, -0.f, -0.f), sum = total;
    int added = 0;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        uint32_t at = from(block);
#pragma unroll 1
        for (int i = 0; i < local; i += batch) {
            float4 some[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
                if (j < batch) some[j] = load_sums<CLUSTER>(at + j * SUMS * 4);
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
                if (j < batch) add(sum, some[j]);
            at += batch * SUMS * 4, added += batch;
            if (added & section - 1) continue;
            add(total, sum);
            sum = make_float4(-0.f, -0.f, -0.f, -0.f);
        }
    }
    return total;
}

}  // namespace linear_mma
