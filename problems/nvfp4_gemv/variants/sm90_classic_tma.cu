// NVFP4 GEMV for sm_90a: TMA boxes into shared memory, full and empty mbarriers, one producer lane, 8 consumer warps.
//
//   a 128-row block of A       one tile = 32 rows: 8 neighbours in each quarter, so that their scales, in the 512-byte
//   +------+ rows 0..31        block layout [row % 32][row / 32 % 4][k-block % 4], are 128 bytes in a row:
//   | #### |   8 of the tile   [8 rows][4 quarters][4 scales]
//   +------+ rows 32..63       A step is the tile times 1024 elements of K: four boxes of 8 rows x 512 bytes and one
//   | #### |   8 of the tile   box of 16 k-blocks x 128 bytes. Warp r of the consumers owns row r of each quarter, lane
//   ...                        c the 32 elements from 32 c on.
//
// b is brought once for up to 16384 elements of K (a segment), decoded to bytes by all consumers and kept; the first
// steps of A are on their way meanwhile. Only K beyond a segment makes every tile bring b anew.
// Doubled e2m1 values are the integers -12..12, so the dot of a 16-block is an exact integer (dp4a).
// What lies outside the tensors (rows past M, K past its end, whole tiles past the last) is filled with zeros by TMA
// and still counts on the mbarriers, so every CTA goes through the same steps and no barrier is left waiting.

#include <cstdint>

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "nvfp4.cuh"
#include "ptx.cuh"
#include "tma.cuh"

// ------------------------------------------------------------------------------------------------- constants

constexpr int CONSUMER_WARPS = 8;    // one for each of the 8 rows of a quarter
constexpr int NUM_THREADS = 32 * (1 + CONSUMER_WARPS);
constexpr int CLUSTER = 2;           // CTAs of the rank-3 kernel that share one b
constexpr int BLOCK_M = 32;          // 4 quarters x 8 rows
constexpr int BLOCK_K = 1024;        // elements of K in one step: 32 lanes x 32
constexpr int SEGMENT_STEPS = 16;    // steps of b kept decoded
constexpr int MAX_STAGES = 2;        // of 18 KiB, 72 KiB in flight an SM; an H200 got slower with 3, 4 and 6
constexpr int BLOCKS_PER_SM = 2;

constexpr int BOX_A_BYTES = 8 * BLOCK_K / 2;                 // one quarter
constexpr int A_BYTES = 4 * BOX_A_BYTES;
constexpr int SFA_BYTES = BLOCK_K / 64 * 128;
constexpr int STAGE_BYTES = A_BYTES + SFA_BYTES;            // 18 KiB
constexpr int B_BYTES = BLOCK_K / 2;                         // raw codes of b in a step
constexpr int SFB_BYTES = BLOCK_K / 64 * 16;                 // row group 0 of 16 blocks: 4 scales of row 0, 12 others
constexpr int X_BYTES = BLOCK_K;                             // decoded b: int8, two planes of 16 bytes a lane
constexpr int XS_BYTES = 32 * sizeof(float2);               // its block scales / 4, two a lane
constexpr int VECTOR_STEP_BYTES = B_BYTES + SFB_BYTES + X_BYTES + XS_BYTES;
constexpr int ALIGNMENT = 1024;                             // where the pattern of the 128-byte swizzle starts anew
constexpr int SHARED_PER_BLOCK = (228 * 1024) / BLOCKS_PER_SM - 1024;  // bytes; 1 KiB of each block is the system's
static_assert(STAGE_BYTES % ALIGNMENT == 0, "every stage's scales must start the swizzle pattern");
static_assert(SFA_BYTES / 128 == 16, "the scale box is 16 rows of one 128-byte swizzle span");

// ------------------------------------------------------------------------------------------------- the host's side

using ptx::smem_address;
using tma::Tensor;

struct Maps {
    CUtensorMap a, b, sfa, sfb;
};

struct Shape {
    int m, steps, segments;  // steps: of BLOCK_K, over all of K
    int rest_k;              // 512-byte scale blocks in a block of 128 rows
    int rounds, stages;      // tiles of each CTA; stages of the pipeline
};

// ------------------------------------------------------------------------------------------------- device helpers

// Arrive on the barrier at the same place in CTA `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* bar, uint32_t rank) {
    asm volatile(
        "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(smem_address(bar)),
        "r"(rank)
        : "memory");
}

// Wait until the phase of this parity is over. A barrier starts in phase 0; parity 1 then counts as over.
__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
    uint32_t over = 0;
    do {
        asm volatile(
            "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            " selp.u32 %0, 1, 0, p;\n}"
            : "=r"(over)
            : "r"(smem_address(bar)), "r"(parity)
            : "memory");
    } while (!over);
}

// All threads of all CTAs of the cluster (of the block where there is no cluster).
template <int CTAS>
__device__ __forceinline__ void sync_all() {
    if constexpr (CTAS == 1) {
        __syncthreads();
    } else {
        asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}

__device__ __forceinline__ void sync_consumers() {
    ptx::named_barrier_sync<32 * CONSUMER_WARPS>(1);
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Bring the box at (x, y) or (x, y, z), innermost first, to `to` of this CTA; its bytes count on `bar`.
template <int RANK>
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, uint64_t* bar, int x, int y, int z) {
    if constexpr (RANK == 2) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
            "[%2];" ::"r"(smem_address(to)), "l"(map), "r"(smem_address(bar)), "r"(x), "r"(y)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
            "%5}], [%2];" ::"r"(smem_address(to)), "l"(map), "r"(smem_address(bar)), "r"(x), "r"(y), "r"(z)
            : "memory");
    }
}

// The same into every CTA of the cluster, at the same place, counting on each one's own barrier.
__device__ __forceinline__ void load_box_to_cluster(void* to, const CUtensorMap* map, uint64_t* bar, int x, int y,
                                                    int z) {
    const uint16_t all = (1 << CLUSTER) - 1;
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(to)), "l"(map), "r"(smem_address(bar)), "r"(x), "r"(y),
        "r"(z), "h"(all)
        : "memory");
}

// |2w| of the e2m1 codes 0 to 7, a byte each.
constexpr uint32_t TABLE_LOW = 0x03020100u, TABLE_HIGH = 0x0C080604u;

// Four codes, the low 16 bits of `codes`, to bytes: |2w| where the code is positive, else 0. prmt's selector bit 3 asks
// for the sign of the table's byte, replicated, and no byte of the table has one. With signs flipped: the negatives.
// Not __byte_perm, which clears that bit first.
__device__ __forceinline__ uint32_t positive_bytes(uint32_t codes) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(TABLE_LOW), "r"(TABLE_HIGH), "r"(codes));
    return bytes;
}

__device__ __forceinline__ int dp4a(uint32_t unsigned_bytes, uint32_t signed_bytes, int sum) {
    int result;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(unsigned_bytes), "r"(signed_bytes), "r"(sum));
    return result;
}

// Sum of 16 products (2 w)(2 x), exact: |sum| <= 2304. codes: 16 e2m1, low nibble first; x: 16 doubled values as bytes.
__device__ __forceinline__ float block_dot(uint32_t codes0, uint32_t codes1, uint4 x) {
    // 12582912 = 1.5 * 2^23: as a float's bits plus a small integer it reads as the float plus that integer.
    int plus = 0x4B400000, minus = 0;
    const uint32_t flip0 = codes0 ^ 0x88888888u, flip1 = codes1 ^ 0x88888888u;
    plus = dp4a(positive_bytes(codes0), x.x, plus);
    minus = dp4a(positive_bytes(flip0), x.x, minus);
    plus = dp4a(positive_bytes(codes0 >> 16), x.y, plus);
    minus = dp4a(positive_bytes(flip0 >> 16), x.y, minus);
    plus = dp4a(positive_bytes(codes1), x.z, plus);
    minus = dp4a(positive_bytes(flip1), x.z, minus);
    plus = dp4a(positive_bytes(codes1 >> 16), x.w, plus);
    minus = dp4a(positive_bytes(flip1 >> 16), x.w, minus);
    return __int_as_float(plus - minus) - 12582912.0f;
}

// Eight codes to eight signed bytes of 2x.
__device__ __forceinline__ uint2 doubled_bytes(uint32_t codes) {
    const uint32_t flip = codes ^ 0x88888888u;
    return make_uint2(__vsub4(positive_bytes(codes), positive_bytes(flip)),
                      __vsub4(positive_bytes(codes >> 16), positive_bytes(flip >> 16)));
}

// Two e4m3 scales, low byte first. Exact.
__device__ __forceinline__ float2 scale_pair(uint32_t two_bytes) {
    const uint32_t halves = nvfp4::e4m3x2_to_half2_bits(two_bytes);
    return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, offset);
    return v;
}

// ------------------------------------------------------------------------------------------------- shared memory

struct Barriers {
    uint64_t full_barriers[MAX_STAGES];   // stage filled (bytes)
    uint64_t empty_barriers[MAX_STAGES];  // stage read by all consumer warps
    uint64_t b_full_barrier, b_empty_barrier;  // the same for b; b_empty_barrier counts the warps of the whole cluster
};

struct SharedStorage {
    uint8_t *stages, *b, *sfb, *x;
    float2* xs;
    Barriers* bars;

    __device__ SharedStorage(uint8_t* base, const Shape& s) {
        const int vector_steps = min(s.steps, SEGMENT_STEPS);
        stages = base;
        b = stages + s.stages * STAGE_BYTES;
        sfb = b + vector_steps * B_BYTES;
        x = sfb + vector_steps * SFB_BYTES;
        xs = reinterpret_cast<float2*>(x + vector_steps * X_BYTES);
        bars = reinterpret_cast<Barriers*>(xs + vector_steps * 32);
    }
};

// Position in the ring of stages. `phase` is the parity that a consumer waits for.
struct PipelineState {
    int index = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance(int stages) {
        if (++index == stages) {
            index = 0;
            phase ^= 1;
        }
    }
};

// ------------------------------------------------------------------------------------------------- the two roles

// One lane: issue every load of this CTA, in the order in which the consumers use them.
template <int RANK, int CTAS>
__device__ void producer(const Maps& maps, const Shape& s, const SharedStorage& smem, int batch) {
    PipelineState pipe;
    uint32_t vectors = 0;  // loads of b so far
    for (int round = 0; round < s.rounds; ++round) {
        const int tile = blockIdx.x + round * gridDim.x;
        const int block = tile / 4, row = tile % 4 * 8;  // block of 128 rows; first row in each quarter
        for (int segment = 0; segment < s.segments; ++segment) {
            const int first = segment * SEGMENT_STEPS, last = min(first + SEGMENT_STEPS, s.steps);
            if (round == 0 || s.segments > 1) {
                // Parity (vectors - 1) & 1: the previous b is read, in every CTA of the cluster; at once for the first.
                barrier_wait(&smem.bars->b_empty_barrier, (vectors + 1) & 1);
                ++vectors;
                ptx::arrive_and_expect_tx(smem_address(&smem.bars->b_full_barrier), (last - first) * (B_BYTES + SFB_BYTES));
                for (int step = first; step < last; ++step) {
                    uint8_t* b = smem.b + (step - first) * B_BYTES;
                    uint8_t* sfb = smem.sfb + (step - first) * SFB_BYTES;
                    if constexpr (CTAS == 1) {
                        load_box<RANK>(b, &maps.b, &smem.bars->b_full_barrier, step * (BLOCK_K / 8), 0, batch);
                        load_box<RANK>(sfb, &maps.sfb, &smem.bars->b_full_barrier, 0, step * (BLOCK_K / 64), batch);
                    } else if (step % CTAS == ptx::cluster_rank()) {  // each brings its share to all
                        load_box_to_cluster(b, &maps.b, &smem.bars->b_full_barrier, step * (BLOCK_K / 8), 0, batch);
                        load_box_to_cluster(sfb, &maps.sfb, &smem.bars->b_full_barrier, 0, step * (BLOCK_K / 64),
                                            batch);
                    }
                }
            }
            for (int step = first; step < last; ++step, pipe.advance(s.stages)) {
                barrier_wait(&smem.bars->empty_barriers[pipe.index], pipe.phase ^ 1);
                uint64_t* full = &smem.bars->full_barriers[pipe.index];
                uint8_t* a = smem.stages + pipe.index * STAGE_BYTES;
                ptx::arrive_and_expect_tx(smem_address(full), STAGE_BYTES);
#pragma unroll
                for (int quarter = 0; quarter < 4; ++quarter) {
                    load_box<RANK>(a + quarter * BOX_A_BYTES, &maps.a, full, step * (BLOCK_K / 8),
                                   block * 128 + quarter * 32 + row, batch);
                }
                load_box<RANK>(a + A_BYTES, &maps.sfa, full, row * 16, block * s.rest_k + step * (BLOCK_K / 64), batch);
            }
        }
    }
}

// All consumers: raw b of `steps` steps to signed bytes and fp32 scales. Lane c's 32 elements of a step are split into
// two planes of 16 bytes a lane, so that reading them is free of bank conflicts.
__device__ void decode_vector(const SharedStorage& smem, int steps, int thread) {
    for (int i = thread; i < steps * 32; i += 32 * CONSUMER_WARPS) {
        const int step = i / 32, c = i % 32;
        const uint4 codes = reinterpret_cast<const uint4*>(smem.b)[i];
        const uint2 x0 = doubled_bytes(codes.x), x1 = doubled_bytes(codes.y);
        const uint2 x2 = doubled_bytes(codes.z), x3 = doubled_bytes(codes.w);
        uint4* planes = reinterpret_cast<uint4*>(smem.x + step * X_BYTES);
        planes[c] = make_uint4(x0.x, x0.y, x1.x, x1.y);
        planes[32 + c] = make_uint4(x2.x, x2.y, x3.x, x3.y);
        // 16 bytes a k-block of 64; the first 4 are row 0's, lane c's two are the first or the second pair.
        const float2 scale = scale_pair(*reinterpret_cast<const uint16_t*>(smem.sfb + i / 2 * 16 + i % 2 * 2));
        smem.xs[i] = make_float2(0.25f * scale.x, 0.25f * scale.y);  // both operands of a dot are doubled
    }
}

// Consumer warp r, lane c: rows r of the four quarters, elements 32 c to 32 c + 31 of each step.
template <int CTAS>
__device__ void consumer(const Shape& s, const SharedStorage& smem, half* d) {
    const int r = threadIdx.x / 32 - 1, c = threadIdx.x % 32;
    PipelineState pipe;
    uint32_t vectors = 0;
    for (int round = 0; round < s.rounds; ++round) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int segment = 0; segment < s.segments; ++segment) {
            const int steps = min(SEGMENT_STEPS, s.steps - segment * SEGMENT_STEPS);
            if (round == 0 || s.segments > 1) {
                sync_consumers();  // no thread reads the previous x any more
                barrier_wait(&smem.bars->b_full_barrier, vectors++ & 1);
                decode_vector(smem, steps, threadIdx.x - 32);
                sync_consumers();
                if (c < CTAS) {  // the raw b is free: tell every producer that may write it
                    if constexpr (CTAS == 1) {
                        ptx::arrive(smem_address(&smem.bars->b_empty_barrier));
                    } else {
                        barrier_arrive_at(&smem.bars->b_empty_barrier, c);
                    }
                }
            }
            for (int step = 0; step < steps; ++step, pipe.advance(s.stages)) {
                const uint4 x0 = reinterpret_cast<const uint4*>(smem.x + step * X_BYTES)[c];
                const uint4 x1 = reinterpret_cast<const uint4*>(smem.x + step * X_BYTES)[32 + c];
                const float2 xs = smem.xs[step * 32 + c];
                barrier_wait(&smem.bars->full_barriers[pipe.index], pipe.phase);
                const uint8_t* stage = smem.stages + pipe.index * STAGE_BYTES;
                uint4 codes[4];
#pragma unroll
                for (int quarter = 0; quarter < 4; ++quarter) {
                    codes[quarter] = reinterpret_cast<const uint4*>(stage + quarter * BOX_A_BYTES)[r * 32 + c];
                }
                // k-block c / 2 is a row of 8 16-byte chunks, chunk r stored at r ^ (row % 8) by the swizzle.
                const uint4 scales = reinterpret_cast<const uint4*>(stage + A_BYTES)[c / 2 * 8 + (r ^ (c / 2 % 8))];
                __syncwarp();
                if (c == 0) ptx::arrive(smem_address(&smem.bars->empty_barriers[pipe.index]));  // the stage is in registers
                const uint32_t four[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
                for (int quarter = 0; quarter < 4; ++quarter) {
                    const float2 as = scale_pair(c % 2 ? four[quarter] >> 16 : four[quarter]);
                    const float dot0 = block_dot(codes[quarter].x, codes[quarter].y, x0);
                    const float dot1 = block_dot(codes[quarter].z, codes[quarter].w, x1);
                    acc[quarter] = fmaf(dot0, as.x * xs.x, acc[quarter]);  // the product of scales is exact
                    acc[quarter] = fmaf(dot1, as.y * xs.y, acc[quarter]);
                }
            }
        }
        const int tile = blockIdx.x + round * gridDim.x;
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            const float sum = warp_sum(acc[quarter]);
            const int row = tile / 4 * 128 + quarter * 32 + tile % 4 * 8 + r;
            if (c == quarter && row < s.m) d[row] = __float2half_rn(sum);
        }
    }
}

template <int RANK, int CTAS>
__device__ __forceinline__ void gemv(const Maps& maps, const Shape& s, half* d) {
    extern __shared__ __align__(ALIGNMENT) uint8_t memory[];
    const SharedStorage smem(memory, s);
    if (threadIdx.x == 0) {
        if (smem_address(memory) % ALIGNMENT) __trap();  // the swizzle pattern hangs on address bits
        prefetch_map(&maps.b);
        prefetch_map(&maps.sfb);
        prefetch_map(&maps.a);
        prefetch_map(&maps.sfa);
        for (int i = 0; i < s.stages; ++i) {
            ptx::barrier_init(smem_address(&smem.bars->full_barriers[i]), 1);
            ptx::barrier_init(smem_address(&smem.bars->empty_barriers[i]), CONSUMER_WARPS);
        }
        ptx::barrier_init(smem_address(&smem.bars->b_full_barrier), 1);
        ptx::barrier_init(smem_address(&smem.bars->b_empty_barrier), CTAS * CONSUMER_WARPS);
        ptx::barrier_publish();
        ptx::fence_proxy_async_shared();
    }
    sync_all<CTAS>();  // no load may reach a CTA whose barriers are not set up
    if (threadIdx.x / 32 == 0) {
        if (threadIdx.x == 0) producer<RANK, CTAS>(maps, s, smem, blockIdx.y);
        __syncwarp();
    } else {
        consumer<CTAS>(s, smem, d + static_cast<int64_t>(blockIdx.y) * s.m);
    }
    if constexpr (CTAS > 1) sync_all<CTAS>();  // a CTA must outlive the arrivals and loads of its neighbours
}

// ------------------------------------------------------------------------------------------------- kernels

// L = 1. a (k / 8, m) and b (k / 8, 128) of 8 codes; sfa (512, rest_k * rest_m), sfb (512, rest_k) bytes; d fp16 (m).
// Grid (tiles of this round); no two CTAs share anything.
__global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM)
    fp4_gemv_rank2_cta(const __grid_constant__ Maps maps, const __grid_constant__ Shape shape, half* __restrict__ d) {
    gemv<2, 1>(maps, shape, d);
}

// L > 1: the same with l as third dimension, d fp16 (l, m). Grid (tiles, l), clusters of CLUSTER tiles of one l, whose
// CTAs each bring a share of b to all.
__global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM)
    fp4_gemv_rank3_cluster(const __grid_constant__ Maps maps, const __grid_constant__ Shape shape,
                           half* __restrict__ d) {
    gemv<3, CLUSTER>(maps, shape, d);
}

// ------------------------------------------------------------------------------------------------- launcher

// d = A b for L problems. A, B: codes; SFA, SFB: scales in 512-byte blocks; D: fp16 (L, M); K_scales_padded: scales of
// a row, padded to whole blocks of 4. All on the current device and its default queue. Returns the first error.
cudaError_t launch_fp4_gemv_optimized(const Tensor& A, const Tensor& B, const Tensor& SFA, const Tensor& SFB, half* D,
                                      int M, int K, int L, int K_scales_padded) {
    const uint32_t rank = L == 1 ? 2 : 3;
    if (A.rank != rank || B.rank != rank || SFA.rank != rank || SFB.rank != rank) return cudaErrorInvalidValue;
    if (K % 64 || K_scales_padded != K / 16 || M < 1 || L < 1 || L > 65535) return cudaErrorInvalidValue;

    tma::Encode encode;
    cudaError_t error = tma::find_encode(&encode);
    if (error != cudaSuccess) return error;
    Maps maps;
    if (!tma::encode_map(encode, A, &maps.a) || !tma::encode_map(encode, B, &maps.b) ||
        !tma::encode_map(encode, SFA, &maps.sfa) || !tma::encode_map(encode, SFB, &maps.sfb)) {
        return cudaErrorInvalidValue;
    }

    int device = 0, processors = 0;
    if ((error = cudaGetDevice(&device)) != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;

    Shape s{};
    s.m = M;
    s.steps = (K + BLOCK_K - 1) / BLOCK_K;
    s.segments = (s.steps + SEGMENT_STEPS - 1) / SEGMENT_STEPS;
    s.rest_k = K_scales_padded / 4;
    const int vector_bytes = (s.steps < SEGMENT_STEPS ? s.steps : SEGMENT_STEPS) * VECTOR_STEP_BYTES;
    const int free_bytes = SHARED_PER_BLOCK - vector_bytes - static_cast<int>(sizeof(Barriers));
    s.stages = free_bytes / STAGE_BYTES < MAX_STAGES ? free_bytes / STAGE_BYTES : MAX_STAGES;

    // As few rounds as the resident CTAs allow, then as few CTAs as make these rounds: every CTA gets the same.
    const int ctas_of_cluster = L == 1 ? 1 : CLUSTER;
    const int tiles = (M + 127) / 128 * (128 / BLOCK_M);
    const int slots = processors * BLOCKS_PER_SM / L > 1 ? processors * BLOCKS_PER_SM / L : 1;
    s.rounds = (tiles + slots - 1) / slots;
    int ctas = (tiles + s.rounds - 1) / s.rounds;
    ctas = (ctas + ctas_of_cluster - 1) / ctas_of_cluster * ctas_of_cluster;  // the last tiles may lie past M

    cudaLaunchConfig_t config{};
    config.gridDim = dim3(ctas, L);
    config.blockDim = dim3(NUM_THREADS);
    config.dynamicSmemBytes = s.stages * STAGE_BYTES + vector_bytes + sizeof(Barriers);
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {CLUSTER, 1, 1};
    if (L > 1) {
        config.attrs = &cluster;
        config.numAttrs = 1;
    }
    auto* kernel = L == 1 ? fp4_gemv_rank2_cta : fp4_gemv_rank3_cluster;
    const int shared_bytes = static_cast<int>(config.dynamicSmemBytes);
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    error = cudaLaunchKernelEx(&config, kernel, maps, s, D);
    return error != cudaSuccess ? error : cudaGetLastError();
}

extern "C" int launch(const void* a, const void* b, const void* sfa, const void* sfb, void* d, int m, int k, int l,
                      int k_scales_padded) {
    return launch_fp4_gemv_optimized(*static_cast<const Tensor*>(a), *static_cast<const Tensor*>(b),
                                     *static_cast<const Tensor*>(sfa), *static_cast<const Tensor*>(sfb),
                                     static_cast<half*>(d), m, k, l, k_scales_padded);
}
