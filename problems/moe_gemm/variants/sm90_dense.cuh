// One expert that every token goes to, the shared expert, for up to a few hundred tokens. For up to 64 each weight is
// read once, by one multiprocessor, and meets them all in wgmma.
//
// With so few tokens there are not enough rows of weights to give every multiprocessor some of its own without each of
// them reading all of x. So the columns are split as well: a cluster of blocks has the same rows, each of its blocks a
// part of the columns, which fits into shared memory as a whole: all copies are asked for at once. Then each block is
// sent a share of the rows' sums by all blocks of its cluster, and adds them in a fixed order.
//
// Both products are one launch. The first leaves v in the order and the swizzle in which the second has it in shared
// memory. Weights of the second have a separate place and are loaded as soon as x is there: when all blocks have
// met, v is all that is missing. They wait for each other, so no more clusters are launched than run at once, and each
// takes tiles, of tokens and rows, until there are no more: first all that it has of the first product.
//
// A cluster runs within one of the groups of up to 18 multiprocessors that the GPU has, and what a group has beyond a
// multiple of eight is lost. However 132 multiprocessors lie in eight groups, in pairs, 13 clusters of 8 find room at
// once, and 16 often do not. So tiles have 10 unit rows, of which 13 make the 128 of either product of the shared
// expert.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "ptx.cuh"
#include "sm90_dense_block.cuh"
#include "nvfp4_units.cuh"
#include "sm90_wgmma.cuh"

namespace dense {

// ---- products

struct Words {
    uint4 codes;
    uint32_t scales;  // of both rows
};

// Fragments of steps 2 HALF and one on. upper, lower: codes of the two rows.
__device__ __forceinline__ void decode(uint32_t upper, uint32_t lower, uint32_t scales, uint32_t (&a)[2][4]) {
    uint32_t above[4], below[4];
    units::decode(upper, units::scale<0>(scales), above);
    units::decode(lower, units::scale<1>(scales), below);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        a[step][0] = above[2 * step], a[step][1] = below[2 * step];
        a[step][2] = above[2 * step + 1], a[step][3] = below[2 * step + 1];
    }
}

// Two steps of 16 columns, which are 32 bytes. x: matrix_half of where they begin.
template <class F>
__device__ __forceinline__ void mma(float (&d)[4 * F::EIGHTS], const uint32_t (&a)[2][4], uint32_t x) {
    warpgroup_arrive();
    wgmma<F::TOKENS>(d, a[0], smem_desc_of(x));
    wgmma<F::TOKENS>(d, a[1], smem_desc_of(x + 2));
    warpgroup_commit_batch();
}

// Of both steps.
__device__ __forceinline__ void hold(const uint32_t (&a)[2][4]) { ptx::hold(a[0]), ptx::hold(a[1]); }

// d += this warp's 16 rows times the block's tokens, over all of the block's columns. Ends with nothing on its way.
// parity: of the product's barriers, with a phase for each at_once chunks, over all tiles.
template <class F>
__device__ __forceinline__ void mma_all(const Problem& problem, const Part<F>& part, uint32_t smem,
                                             uint32_t& parity, float (&d)[4 * F::EIGHTS]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = warp % 2;
    const uint32_t unit = smem + part.weights + warp / 2 * part.at_once * units::BYTES;
    const uint32_t codes_at = unit + 512 * q + 16 * lane, scales_at = unit + units::SCALES + 4 * lane;
#pragma unroll 1
    for (int done = 0; done < part.chunks; done += part.at_once) {
        if (done) {  // all have used what they had
            fence_proxy_async_shared();
            __syncthreads();
            load_weights(problem, part, smem, done);
            if (!part.second)
                load_x<3>(problem, part, smem, done);  // there are no registers for more
            else if (threadIdx.x == 0)
                load_v(problem, part, smem, done);
            __syncthreads();
        }
        uint32_t a[2][2][4] = {};
        const int count = min(part.chunks - done, part.at_once);
        const auto load = [&](int i) {
            if (i % 2 == 0) wait(smem + part.full + 4 * i, parity);
            return Words{load_shared16(codes_at + i * units::BYTES),
                         load_shared(scales_at + i * units::BYTES) >> 16 * q};
        };
        uint32_t x = smem_desc_low(smem + part.x);
        Words words = load(0);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            decode(words.codes.x, words.codes.y, words.scales, a[0]);
            if (part.second) wait(smem + F::V_FULL_BARRIERS + 8 * i, parity);
            mma<F>(d, a[0], x);
            warpgroup_wait<1>();
            hold(a[1]);
            decode(words.codes.z, words.codes.w, words.scales, a[1]);
            mma<F>(d, a[1], x + 4);
            x += F::IMAGE / 16;
            if (i + 1 < count) words = load(i + 1);
            warpgroup_wait<1>();
            hold(a[0]);
        }
        warpgroup_wait<0>();
        hold(a[1]);
        parity ^= 1;
    }
    warpgroup_fence_operand(d);
}

// ---- sums

// Which four sums number `index` of a block's share are: of tokens 2 c and 2 c + 1 of an eighth, in rows g and g + 8 of
// group q of a unit of the block's.
struct Share {
    int eighth, unit, q, g, c;
    __device__ __forceinline__ Share(uint32_t rank, int index) {
        const int number = index / 32 * SPLITS + rank, warp = number % WARPS;
        eighth = number / WARPS, unit = warp / 2, q = warp % 2, g = index % 32 / 4, c = index % 4;
    }
};

// Sends this thread's sums to those who add them: at one time the warps send to different blocks.
template <class F>
__device__ __forceinline__ void send_sums(const float (&d)[4 * F::EIGHTS], uint32_t smem, uint32_t rank) {
    const int warp = thread_index() / 32, lane = threadIdx.x % 32;
    const uint32_t at = smem + (rank * F::SHARE + lane) * 16;
#pragma unroll
    for (int i = 0; i < F::EIGHTS; ++i) {
        const uint32_t number = i * WARPS + warp, to = number % SPLITS;
        const uint4 sums = {__float_as_uint(d[4 * i]), __float_as_uint(d[4 * i + 1]), __float_as_uint(d[4 * i + 2]),
                            __float_as_uint(d[4 * i + 3])};
        st_async16(in_block(to, at + number / SPLITS * 512), sums, in_block(to, smem + F::SENT_BARRIER));
    }
}

template <class F>
__device__ __forceinline__ float4 add_up(uint32_t smem, int index) {
    float4 sum = {};
#pragma unroll
    for (int i = 0; i < SPLITS; ++i) {
        const uint4 v = load_shared16(smem + (i * F::SHARE + index) * 16);
        sum.x += __uint_as_float(v.x), sum.y += __uint_as_float(v.y);
        sum.z += __uint_as_float(v.z), sum.w += __uint_as_float(v.w);
    }
    return sum;
}

// silu(gate) * up, both clamped.
__device__ __forceinline__ float activate(float gate, float up) {
    gate = fminf(gate, LIMIT), up = fminf(fmaxf(up, -LIMIT), LIMIT);
    return __fdividef(gate, 1.f + __expf(-gate)) * up;
}

// A row's values of tokens 2 c and 2 c + 1, with those of the row that lane ^ 4 has -> both rows' of token 2 c + g % 2.
__device__ __forceinline__ uint32_t paired(float first, float second, int g) {
    const uint32_t own = pack_bf16x2(first, second), other = __shfl_xor_sync(~0u, own, 4);
    return __byte_perm(own, other, g % 2 ? 0x3276 : 0x5410);
}

// Adds up this thread's share of a tile's sums and writes what they make.
template <class F>
__device__ __forceinline__ void epilogue(const Problem& problem, const Part<F>& part, uint32_t smem, uint32_t rank) {
    if (threadIdx.x >= F::SHARE) return;  // whole warps
    const Product& p = problem.product[part.second];
    const float factor = __uint_as_float(load_shared(smem + F::SCALES + 4 * part.second));
    const int index = thread_index();
    const Share share(rank, index);
    const float4 sum = add_up<F>(smem, index);
    const int row = part.row + share.unit, mine = 2 * share.c + share.g % 2;  // mine: of an eighth, as paired()
    const int token = part.token + 8 * share.eighth + mine;
    if (!part.second) {
        const uint32_t list = smem + F::LIST + 8 * (8 * share.eighth + 2 * share.c);
        const float2 first = load_shared_pair(list), second = load_shared_pair(list + 8);
        const float a = activate(sum.x * factor, sum.z * factor) * first.x;
        const float b = activate(sum.y * factor, sum.w * factor) * second.x;
        const uint32_t both = paired(__float_as_uint(first.y) ? a : 0.f, __float_as_uint(second.y) ? b : 0.f, share.g);
        if (share.unit < part.rows) {
            const int chunk = (4 * share.q + share.g / 2) ^ mine;
            const int64_t at = int64_t(row / 4) * problem.padded + token;
            reinterpret_cast<uint32_t*>(p.out)[at * 32 + chunk * 4 + row % 4] = both;
        }
    } else {
        const uint32_t upper = paired(sum.x * factor, sum.y * factor, share.g);
        const uint32_t lower = paired(sum.z * factor, sum.w * factor, share.g);
        if (share.unit < part.rows && token < problem.tokens) {
            const int64_t at = int64_t(token) * p.rows * 32 + row * 32 + 16 * share.q;
            uint32_t* const to = reinterpret_cast<uint32_t*>(p.out + at) + share.g / 2;
            to[0] = upper, to[4] = lower;
        }
    }
}

template <class F>
__global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(NUM_THREADS, 1)
    products(const __grid_constant__ Problem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // only Hopper has wgmma
    extern __shared__ uint8_t raw[];
    const uint32_t smem = __shfl_sync(~0u, (uint32_t(__cvta_generic_to_shared(raw)) + 1023) / 1024 * 1024, 0);
    const uint32_t rank = cluster_rank();
    const int cluster = blockIdx.x / SPLITS, clusters = gridDim.x / SPLITS;
    const int first_tiles = problem.product[0].tiles, second_tiles = problem.product[1].tiles;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PAIRS; ++i) barrier_init(smem + F::FULL_BARRIERS + 8 * i, 1);
        for (int i = 0; i < SECOND_CHUNKS / 2; ++i) barrier_init(smem + F::SECOND_FULL_BARRIERS + 8 * i, 1);
        for (int i = 0; i < SECOND_CHUNKS; ++i) barrier_init(smem + F::V_FULL_BARRIERS + 8 * i, 1);
        barrier_init(smem + F::SENT_BARRIER, 1);
        barrier_publish();
        arrive_and_expect_tx(smem + F::SENT_BARRIER, SPLITS * F::SHARE * 16);
    }
    __syncthreads();

    uint32_t sent = 0;  // parity of that barrier, with a phase for each tile
#pragma unroll 1
    for (int second = 0; second < 2; ++second) {  // not unrolled: what the first ran is in the instruction cache
        const int tiles = second ? second_tiles : first_tiles;
        if (second) {
            const Part<F> part(problem.product[1], true, rank, cluster);
            const bool works = cluster < second_tiles && part.chunks;
            if (cluster >= first_tiles) {  // nothing has come before
                if (works) load_weights(problem, part, smem, 0);
                load_rest<F>(problem, 0, smem);
                __syncthreads();
            }
            if (threadIdx.x == 0) {  // behind all of v that the block has written
                grid_arrive(problem.met);
                if (works) {
                    grid_wait(problem.met, load_shared(smem + F::BEFORE));
                    load_v(problem, part, smem, 0);
                }
            }
            __syncwarp();
        }
        uint32_t parity = 0;
#pragma unroll 1
        for (int tile = cluster; tile < tiles; tile += clusters) {
            const Part<F> part(problem.product[second], second, rank, tile);
            if (!second) {
                if (part.chunks) load_weights(problem, part, smem, 0);
                load_x<CHUNKS>(problem, part, smem, 0);
                load_rest<F>(problem, part.token, smem);
                __syncthreads();
                if (tile == cluster && tile < second_tiles) {
                    const Part<F> later(problem.product[1], true, rank, tile);
                    if (later.chunks) load_weights(problem, later, smem, 0);
                }
            }
            {
                float d[4 * F::EIGHTS];
#pragma unroll
                for (int i = 0; i < 4 * F::EIGHTS; ++i) d[i] = 0;
                mma_all<F>(problem, part, smem, parity, d);
                cluster_sync_relaxed();  // no thread needs x or weights any more, nor the sums of the tile before
                send_sums<F>(d, smem, rank);
            }
            if (second && tile + clusters < tiles && part.chunks) {
                const Part<F> next(problem.product[1], true, rank, tile + clusters);
                fence_proxy_async_shared();
                __syncthreads();
                load_weights(problem, next, smem, 0);
                if (threadIdx.x == 0) load_v(problem, next, smem, 0);
            }
            wait_cluster(smem + F::SENT_BARRIER, sent);
            sent ^= 1;
            if (threadIdx.x == 0)
                arrive_and_expect_tx(smem + F::SENT_BARRIER, SPLITS * F::SHARE * 16);  // before any are sent
            epilogue<F>(problem, part, smem, rank);
            if (!second) {  // copies may come to where sums were
                fence_proxy_async_shared();
                __syncthreads();
            }
        }
    }
#endif
}

// ---- launches

// Tiles of tokens, each of so many eights.
struct Tiling {
    int tiles, eights;
    explicit Tiling(int tokens) {
        tiles = (tokens + MOST_TOKENS - 1) / MOST_TOKENS;
        eights = ((tokens + tiles - 1) / tiles + 15) / 16 * 2;
    }
    int padded() const { return tiles * eights * 8; }
};

// How many clusters run at once on the current device.
template <class F>
inline cudaError_t clusters_at_once(const cudaLaunchConfig_t& config, int* clusters) {
    static std::atomic<int> known[64];  // of each device, once asked
    int device;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    if (device < 64 && (*clusters = known[device])) return cudaSuccess;
    if (const cudaError_t error = cudaOccupancyMaxActiveClusters(clusters, products<F>, &config)) return error;
    if (*clusters < 1) return cudaErrorCooperativeLaunchTooLarge;
    if (device < 64) known[device] = *clusters;
    return cudaSuccess;
}

template <class F>
inline cudaError_t launch(const Problem& p) {
    constexpr int bytes = F::BYTES + 1024;
    if (const cudaError_t error =
            cudaFuncSetAttribute(products<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;  // blocks wait for each other, so all have to run at once
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = SPLITS, config.blockDim = NUM_THREADS, config.dynamicSmemBytes = bytes;
    int clusters;
    if (const cudaError_t error = clusters_at_once<F>(config, &clusters)) return error;
    config.gridDim = SPLITS * std::min(clusters, std::max(p.product[0].tiles, p.product[1].tiles));
    config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, products<F>, p);
}

// Bytes that run() needs, at a multiple of 256. Their content may be anything.
inline size_t workspace(int tokens, int /* hidden */, int inner) {
    return tokens <= 0 ? 0 : size_t(2) * Tiling(tokens).padded() * inner;
}

// One expert for T tokens; H, I multiples of 64. w13: units [2 I / 32][H / 64], w2: [H / 32][I / 64]; g13, g2 fp32 ();
// x, out bf16 (T, H); ids int32, routing fp32 (T,): with another id than 0 a token gets zeros. met: 0 before the first
// launch, and kept for those that follow, one at a time.
inline cudaError_t run(const uint8_t* w13_units, const float* g13, const uint8_t* w2_units, const float* g2,
                       const bf16* x, const int* ids, const float* routing, bf16* out, void* workspace, int* met,
                       int tokens, int hidden, int inner) {
    if (tokens <= 0) return cudaSuccess;
    if (hidden <= 0 || inner <= 0 || hidden % 64 || inner % 64) return cudaErrorInvalidValue;
    const Tiling tiling(tokens);
    bf16* const v = static_cast<bf16*>(workspace);
    const auto product = [&](const uint8_t* units, const float* scale, const bf16* from, bf16* to, int rows,
                             int columns) {
        const int row_tiles = (rows + ROWS - 1) / ROWS;
        return Product{units, scale, from, to, rows, columns, row_tiles, row_tiles * tiling.tiles};
    };
    const Problem problem{{product(w13_units, g13, x, v, inner / 16, hidden / 64),
                           product(w2_units, g2, v, out, hidden / 32, inner / 64)},
                          ids, routing, met, tokens, tiling.padded()};
    switch (tiling.eights) {
        case 2: return launch<Form<2>>(problem);
        case 4: return launch<Form<4>>(problem);
        case 6: return launch<Form<6>>(problem);
        default: return launch<Form<8>>(problem);
    }
}

}  // namespace dense
