// What the host and both roles of sm90_classic_tma agree on: the tile, a stage of the pipeline, shared memory.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_runtime.h>

#include "ptx.cuh"

namespace classic {

constexpr int QUARTERS = 4;          // of a block of 128 rows, whose scales lie side by side
constexpr int ROWS = 8;              // of a tile in each quarter
constexpr int BLOCK_M = QUARTERS * ROWS;
constexpr int BLOCK_K = 1024;        // elements of K in one step: 32 lanes x 32; sm90_classic_tma.py has it too
constexpr int CONSUMER_WARPS = ROWS, CONSUMER_THREADS = 32 * CONSUMER_WARPS, CONSUMER_BARRIER = 1;
constexpr int NUM_THREADS = 32 + CONSUMER_THREADS;
constexpr int CLUSTER = 2;           // CTAs of the rank-3 kernel that share one b
constexpr int SEGMENT_STEPS = 16;    // steps of b kept decoded
constexpr int MAX_STAGES = 2;        // of 18 KiB, 72 KiB in flight an SM; an H200 got slower with 3, 4 and 6
constexpr int BLOCKS_PER_SM = 2;
// A step in the coordinates of the tensor maps: words of eight codes, blocks of 128 rows x 4 scales.
constexpr int STEP_CODES = BLOCK_K / 8, STEP_BLOCKS = BLOCK_K / 64;

constexpr int BOX_A_BYTES = ROWS * BLOCK_K / 2;              // one quarter
constexpr int A_BYTES = QUARTERS * BOX_A_BYTES;
constexpr int SFA_BYTES = STEP_BLOCKS * 128;
constexpr int STAGE_BYTES = A_BYTES + SFA_BYTES;             // 18 KiB
constexpr int B_BYTES = BLOCK_K / 2;                         // raw codes of b in a step
constexpr int SFB_BYTES = STEP_BLOCKS * 16;                  // row group 0 of 16 blocks: 4 scales of row 0, 12 others
constexpr int X_BYTES = BLOCK_K;                             // decoded b: int8, two planes of 16 bytes a lane
constexpr int XS_BYTES = 32 * sizeof(float2);                // its block scales / 4, two a lane
constexpr int VECTOR_STEP_BYTES = B_BYTES + SFB_BYTES + X_BYTES + XS_BYTES;
constexpr int ALIGNMENT = 1024;                              // where the pattern of the 128-byte swizzle starts anew
constexpr int SHARED_PER_BLOCK = (228 * 1024) / BLOCKS_PER_SM - 1024;  // bytes; 1 KiB of each block is the system's
static_assert(BLOCK_K == 32 * 32, "a lane has 32 elements of a step: 16 bytes of codes, two scales");
static_assert(128 % BLOCK_M == 0 && ROWS * QUARTERS * 4 == 128, "a tile's scales of a k-block are one swizzle span");
static_assert(STAGE_BYTES % ALIGNMENT == 0 && A_BYTES % ALIGNMENT == 0, "scales must start the swizzle pattern");
static_assert(SHARED_PER_BLOCK >= STAGE_BYTES + SEGMENT_STEPS * VECTOR_STEP_BYTES + 1024, "room for a stage");

// ------------------------------------------------------------------------------------------------- the host's side

struct Maps {
    CUtensorMap a, b, sfa, sfb;
};

struct Shape {
    int m, steps, segments;  // steps: of BLOCK_K, over all of K
    int rest_k;              // 512-byte scale blocks in a block of 128 rows
    int rounds, stages;      // tiles of each CTA; stages of the pipeline
};

// ------------------------------------------------------------------------------------------------- shared memory

struct Barriers {
    uint64_t full_barriers[MAX_STAGES];        // stage filled (bytes)
    uint64_t empty_barriers[MAX_STAGES];       // stage read by all consumer warps
    uint64_t b_full_barrier, b_empty_barrier;  // the same for b; b_empty_barrier counts the warps of the whole cluster
};

// Of a CTA; how many stages and steps of b there are depends on K.
struct SharedStorage {
    uint8_t *stages, *b, *sfb, *x;
    float2* xs;
    Barriers* barriers;

    __device__ SharedStorage(uint8_t* base, const Shape& s) {
        const int vector_steps = min(s.steps, SEGMENT_STEPS);
        stages = base;
        b = stages + s.stages * STAGE_BYTES;
        sfb = b + vector_steps * B_BYTES;
        x = sfb + vector_steps * SFB_BYTES;
        xs = reinterpret_cast<float2*>(x + vector_steps * X_BYTES);
        barriers = reinterpret_cast<Barriers*>(xs + vector_steps * 32);
    }
};

// Bytes of b, raw and decoded, in SharedStorage.
inline int vector_bytes(const Shape& s) { return min(s.steps, SEGMENT_STEPS) * VECTOR_STEP_BYTES; }

// Position in the ring of stages. `phase` is the parity that a consumer waits for.
struct PipelineState {
    int index = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance(int stages) {
        if (++index == stages) index = 0, phase ^= 1;
    }
};

// ------------------------------------------------------------------------------------------------- instructions

using ptx::smem_address;

// Arrive on the barrier at the same place in CTA `rank` of the cluster.
__device__ __forceinline__ void arrive_at(uint64_t* barrier, uint32_t rank) {
    asm volatile(
        "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(smem_address(barrier)),
        "r"(rank)
        : "memory");
}

// ptx::wait for barriers at which other CTAs of the cluster arrive too, and so of the cluster's scope.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
    ptx::wait_cluster(smem_address(barrier), parity);
}

// All threads of all CTAs of the cluster (of the block where there is no cluster).
template <int CTAS>
__device__ __forceinline__ void sync_all() {
    if constexpr (CTAS == 1)
        __syncthreads();
    else
        asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Bring the box at (x, y) or (x, y, z), innermost first, to `to` of this CTA; its bytes count on the barrier.
template <int RANK>
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                                         int z) {
    if constexpr (RANK == 2) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
            "[%2];" ::"r"(smem_address(to)), "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
            "%5}], [%2];" ::"r"(smem_address(to)), "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z)
            : "memory");
    }
}

// The same into every CTA of the cluster, at the same place, counting on each one's own barrier.
__device__ __forceinline__ void load_box_to_cluster(void* to, const CUtensorMap* map, uint64_t* barrier, int x,
                                                    int y, int z) {
    const uint16_t all = (1 << CLUSTER) - 1;
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(to)), "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y),
        "r"(z), "h"(all)
        : "memory");
}

}  // namespace classic
