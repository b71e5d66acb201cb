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
//
// sm90_classic_tma_config.cuh has the tile, shared memory and the copies into it.
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "nvfp4.cuh"
#include "ptx.cuh"
#include "sm90_classic_tma_config.cuh"
#include "tma.cuh"

namespace classic {

using tma::Tensor;

// ------------------------------------------------------------------------------------------------- arithmetic

// Doubled e2m1 values are the integers -12 to 12, so the dot of a block of 16 is an exact integer (dp4a).

// |2w| of the e2m1 codes 0 to 7, a byte each.
constexpr uint32_t TABLE_LOW = 0x03020100u, TABLE_HIGH = 0x0C080604u;
constexpr uint32_t SIGNS = 0x88888888u;  // of eight codes

// Four codes, the low 16 bits of `codes`, to bytes: |2w| where the code is positive, else 0. prmt's selector bit 3 asks
// for the sign of the table's byte, replicated, and no byte of the table has one. With signs flipped: the negatives.
__device__ __forceinline__ uint32_t positive_bytes(uint32_t codes) {
    return ptx::prmt(TABLE_LOW, TABLE_HIGH, codes);
}

// Sum of 16 products (2 w)(2 x), exact: |sum| <= 2304. codes: 16 e2m1, low nibble first; x: 16 doubled values as bytes.
__device__ __forceinline__ float block_dot(uint32_t codes0, uint32_t codes1, uint4 x) {
    // 12582912 = 1.5 * 2^23: as a float's bits plus a small integer it reads as the float plus that integer.
    int plus = 0x4B400000, minus = 0;
    const uint32_t flipped0 = codes0 ^ SIGNS, flipped1 = codes1 ^ SIGNS;
    plus = ptx::dp4a(positive_bytes(codes0), x.x, plus);
    minus = ptx::dp4a(positive_bytes(flipped0), x.x, minus);
    plus = ptx::dp4a(positive_bytes(codes0 >> 16), x.y, plus);
    minus = ptx::dp4a(positive_bytes(flipped0 >> 16), x.y, minus);
    plus = ptx::dp4a(positive_bytes(codes1), x.z, plus);
    minus = ptx::dp4a(positive_bytes(flipped1), x.z, minus);
    plus = ptx::dp4a(positive_bytes(codes1 >> 16), x.w, plus);
    minus = ptx::dp4a(positive_bytes(flipped1 >> 16), x.w, minus);
    return __int_as_float(plus - minus) - 12582912.0f;
}

// Eight codes to eight signed bytes of 2x.
__device__ __forceinline__ uint2 doubled_bytes(uint32_t codes) {
    const uint32_t flipped = codes ^ SIGNS;
    return make_uint2(__vsub4(positive_bytes(codes), positive_bytes(flipped)),
                      __vsub4(positive_bytes(codes >> 16), positive_bytes(flipped >> 16)));
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

// ------------------------------------------------------------------------------------------------- the two roles

// One lane: issue every load of this CTA, in the order in which the consumers use them.
template <int RANK, int CTAS>
__device__ void producer(const Maps& maps, const Shape& s, const SharedStorage& smem, int batch) {
    PipelineState pipe;
    uint32_t b_loads = 0;  // so far
    for (int round = 0; round < s.rounds; ++round) {
        const int tile = blockIdx.x + round * gridDim.x;
        const int block = tile / 4, row = tile % 4 * ROWS;  // block of 128 rows; first row in each quarter
        for (int segment = 0; segment < s.segments; ++segment) {
            const int first = segment * SEGMENT_STEPS, last = min(first + SEGMENT_STEPS, s.steps);
            if (round == 0 || s.segments > 1) {
                // Parity (b_loads - 1) & 1: the previous b is read, in every CTA of the cluster; at once for the first.
                wait(&smem.barriers->b_empty_barrier, (b_loads + 1) & 1);
                ++b_loads;
                ptx::arrive_and_expect_tx(smem_address(&smem.barriers->b_full_barrier),
                                          (last - first) * (B_BYTES + SFB_BYTES));
                for (int step = first; step < last; ++step) {
                    uint8_t* b = smem.b + (step - first) * B_BYTES;
                    uint8_t* sfb = smem.sfb + (step - first) * SFB_BYTES;
                    if constexpr (CTAS == 1) {
                        load_box<RANK>(b, &maps.b, &smem.barriers->b_full_barrier, step * STEP_CODES, 0, batch);
                        load_box<RANK>(sfb, &maps.sfb, &smem.barriers->b_full_barrier, 0, step * STEP_BLOCKS, batch);
                    } else if (step % CTAS == ptx::cluster_rank()) {  // each brings its share to all
                        load_box_to_cluster(b, &maps.b, &smem.barriers->b_full_barrier, step * STEP_CODES, 0, batch);
                        load_box_to_cluster(sfb, &maps.sfb, &smem.barriers->b_full_barrier, 0, step * STEP_BLOCKS,
                                            batch);
                    }
                }
            }
            for (int step = first; step < last; ++step, pipe.advance(s.stages)) {
                wait(&smem.barriers->empty_barriers[pipe.index], pipe.phase ^ 1);
                uint64_t* full = &smem.barriers->full_barriers[pipe.index];
                uint8_t* a = smem.stages + pipe.index * STAGE_BYTES;
                ptx::arrive_and_expect_tx(smem_address(full), STAGE_BYTES);
#pragma unroll
                for (int quarter = 0; quarter < QUARTERS; ++quarter)
                    load_box<RANK>(a + quarter * BOX_A_BYTES, &maps.a, full, step * STEP_CODES,
                                   block * 128 + quarter * 32 + row, batch);
                load_box<RANK>(a + A_BYTES, &maps.sfa, full, row * 16, block * s.rest_k + step * STEP_BLOCKS, batch);
            }
        }
    }
}

// All consumers: raw b of `steps` steps to signed bytes and fp32 scales. Lane c's 32 elements of a step are split into
// two planes of 16 bytes a lane, so that reading them is free of bank conflicts.
__device__ void decode_vector(const SharedStorage& smem, int steps, int thread) {
    for (int i = thread; i < steps * 32; i += CONSUMER_THREADS) {
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

// Wait for b of a segment and decode it; then every producer that may write the raw one may do so.
template <int CTAS>
__device__ __forceinline__ void consume_vector(const SharedStorage& smem, int steps, uint32_t parity, int c) {
    ptx::named_barrier_sync<CONSUMER_THREADS>(CONSUMER_BARRIER);  // no thread reads the previous x any more
    wait(&smem.barriers->b_full_barrier, parity);
    decode_vector(smem, steps, threadIdx.x - 32);
    ptx::named_barrier_sync<CONSUMER_THREADS>(CONSUMER_BARRIER);
    if (c < CTAS) {
        if constexpr (CTAS == 1)
            ptx::arrive(smem_address(&smem.barriers->b_empty_barrier));
        else
            arrive_at(&smem.barriers->b_empty_barrier, c);
    }
}

// Consumer warp r, lane c: rows r of the four quarters, elements 32 c to 32 c + 31 of each step.
template <int CTAS>
__device__ void consumer(const Shape& s, const SharedStorage& smem, half* d) {
    const int r = threadIdx.x / 32 - 1, c = threadIdx.x % 32;
    PipelineState pipe;
    uint32_t b_loads = 0;
    for (int round = 0; round < s.rounds; ++round) {
        float sums[QUARTERS] = {};
        for (int segment = 0; segment < s.segments; ++segment) {
            const int steps = min(SEGMENT_STEPS, s.steps - segment * SEGMENT_STEPS);
            if (round == 0 || s.segments > 1) consume_vector<CTAS>(smem, steps, b_loads++ & 1, c);
            for (int step = 0; step < steps; ++step, pipe.advance(s.stages)) {
                const uint4 x0 = reinterpret_cast<const uint4*>(smem.x + step * X_BYTES)[c];
                const uint4 x1 = reinterpret_cast<const uint4*>(smem.x + step * X_BYTES)[32 + c];
                const float2 x_scale = smem.xs[step * 32 + c];
                wait(&smem.barriers->full_barriers[pipe.index], pipe.phase);
                const uint8_t* stage = smem.stages + pipe.index * STAGE_BYTES;
                uint4 codes[QUARTERS];
#pragma unroll
                for (int quarter = 0; quarter < QUARTERS; ++quarter)
                    codes[quarter] = reinterpret_cast<const uint4*>(stage + quarter * BOX_A_BYTES)[r * 32 + c];
                // k-block c / 2 is a row of 8 16-byte chunks, chunk r stored at r ^ (row % 8) by the swizzle.
                const uint4 all_scales =
                    reinterpret_cast<const uint4*>(stage + A_BYTES)[c / 2 * ROWS + (r ^ (c / 2 % 8))];
                __syncwarp();
                // The stage is in registers.
                if (c == 0) ptx::arrive(smem_address(&smem.barriers->empty_barriers[pipe.index]));
                const uint32_t scales[QUARTERS] = {all_scales.x, all_scales.y, all_scales.z, all_scales.w};
#pragma unroll
                for (int quarter = 0; quarter < QUARTERS; ++quarter) {
                    const float2 a_scale = scale_pair(c % 2 ? scales[quarter] >> 16 : scales[quarter]);
                    const float dot0 = block_dot(codes[quarter].x, codes[quarter].y, x0);
                    const float dot1 = block_dot(codes[quarter].z, codes[quarter].w, x1);
                    sums[quarter] = fmaf(dot0, a_scale.x * x_scale.x, sums[quarter]);  // the product of scales is exact
                    sums[quarter] = fmaf(dot1, a_scale.y * x_scale.y, sums[quarter]);
                }
            }
        }
        const int tile = blockIdx.x + round * gridDim.x;
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; ++quarter) {
            const float sum = warp_sum(sums[quarter]);
            const int row = tile / 4 * 128 + quarter * 32 + tile % 4 * ROWS + r;
            if (c == quarter && row < s.m) d[row] = __float2half_rn(sum);
        }
    }
}

// ------------------------------------------------------------------------------------------------- kernels

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
            ptx::barrier_init(smem_address(&smem.barriers->full_barriers[i]), 1);
            ptx::barrier_init(smem_address(&smem.barriers->empty_barriers[i]), CONSUMER_WARPS);
        }
        ptx::barrier_init(smem_address(&smem.barriers->b_full_barrier), 1);
        ptx::barrier_init(smem_address(&smem.barriers->b_empty_barrier), CTAS * CONSUMER_WARPS);
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

// How a CTA's tiles and pipeline are cut on a device of so many multiprocessors. -> CTAs of a batch.
inline int plan(int m, int k, int l, int multiprocessors, Shape* s) {
    s->m = m;
    s->steps = (k + BLOCK_K - 1) / BLOCK_K;
    s->segments = (s->steps + SEGMENT_STEPS - 1) / SEGMENT_STEPS;
    s->rest_k = k / 64;
    const int free_bytes = SHARED_PER_BLOCK - vector_bytes(*s) - static_cast<int>(sizeof(Barriers));
    s->stages = min(free_bytes / STAGE_BYTES, MAX_STAGES);

    // As few rounds as the resident CTAs allow, then as few CTAs as make these rounds: every CTA gets the same.
    const int ctas_of_cluster = l == 1 ? 1 : CLUSTER, tiles = (m + 127) / 128 * (128 / BLOCK_M);
    const int resident = max(multiprocessors * BLOCKS_PER_SM / l, 1);
    s->rounds = (tiles + resident - 1) / resident;
    const int ctas = (tiles + s->rounds - 1) / s->rounds;
    return (ctas + ctas_of_cluster - 1) / ctas_of_cluster * ctas_of_cluster;  // the last tiles may lie past m
}

// d = a b for l problems. a, b: codes; sfa, sfb: scales in 512-byte blocks; d: fp16 (l, m); k_scales_padded: scales of
// a row, padded to whole blocks of 4. All on the current device and its default queue. -> the first error.
inline cudaError_t launch_gemv(const Tensor& a, const Tensor& b, const Tensor& sfa, const Tensor& sfb, half* d, int m,
                               int k, int l, int k_scales_padded) {
    const uint32_t rank = l == 1 ? 2 : 3;
    if (a.rank != rank || b.rank != rank || sfa.rank != rank || sfb.rank != rank) return cudaErrorInvalidValue;
    if (k % 64 || k_scales_padded != k / 16 || m < 1 || l < 1 || l > 65535) return cudaErrorInvalidValue;

    tma::Encode encode;
    if (const cudaError_t error = tma::find_encode(&encode)) return error;
    Maps maps;
    if (!tma::encode_map(encode, a, &maps.a) || !tma::encode_map(encode, b, &maps.b) ||
        !tma::encode_map(encode, sfa, &maps.sfa) || !tma::encode_map(encode, sfb, &maps.sfb))
        return cudaErrorInvalidValue;

    int device = 0, count = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    if (const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device)) return error;
    Shape shape{};
    const int ctas = plan(m, k, l, count, &shape);
    const int bytes = shape.stages * STAGE_BYTES + vector_bytes(shape) + static_cast<int>(sizeof(Barriers));

    cudaLaunchConfig_t config{};
    config.gridDim = dim3(ctas, l);
    config.blockDim = dim3(NUM_THREADS);
    config.dynamicSmemBytes = bytes;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {CLUSTER, 1, 1};
    if (l > 1) config.attrs = &cluster, config.numAttrs = 1;
    auto* kernel = l == 1 ? fp4_gemv_rank2_cta : fp4_gemv_rank3_cluster;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    if (const cudaError_t error = cudaLaunchKernelEx(&config, kernel, maps, shape, d)) return error;
    return cudaGetLastError();
}

}  // namespace classic

extern "C" int launch(const void* a, const void* b, const void* sfa, const void* sfb, void* d, int m, int k, int l,
                      int k_scales_padded) {
    auto tensor = [](const void* map) -> const tma::Tensor& { return *static_cast<const tma::Tensor*>(map); };
    return classic::launch_gemv(tensor(a), tensor(b), tensor(sfa), tensor(sfb), static_cast<half*>(d), m, k, l,
                                k_scales_padded);
}
