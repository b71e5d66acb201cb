// fmha_decode with wgmma: two warpgroups score tiles in turn, and each sums half of the values' dims.
//
// A block of 512 threads has one query, 64 of its heads (rows of wgmma) and a share of its entries, tile by tile:
//   warpgroups 0 and 1  ask for entries and decode BLOCK_N of them into a tile in shared memory (sm90_gather.cuh)
//   warpgroups 2 and 3  have dims 0 to 255 and 256 to 511 of O. Of its own tiles, every second one, a warpgroup makes
//                       S = Q K^T and P, adds P V with P in registers, and leaves P in shared memory for the other
// So one warpgroup's softmax runs beside the other's products. A warpgroup's turn at tile t:
//   ask for the scores of t; take P of t - 1 from the other and ask for its P V; softmax of t, beside that;
//   leave P of t and the factors of O; add P V of t
// Each warpgroup has a barrier that says that its P is there. One place for P is enough: whoever writes P of t has read P of t - 1, and the other
// had read P of t - 2 before it wrote that. The maximum that P of t is based on comes with P of t - 1.
//
// Tensors as in sm90_wgmma.cu, whose launch for tiles of 48 this replaces.
#pragma once

#include "sm90_block.cuh"
#include "sm90_products.cuh"

namespace fmha::seesaw {

constexpr int BLOCK_N = 48;
constexpr int NUM_THREADS = 512, NUM_PRODUCER_THREADS = 256, NUM_CONSUMER_THREADS = 256;
constexpr int NUM_STAGES = Shape<BLOCK_N>::NUM_STAGES;
static_assert(NUM_STAGES == 2, "a tile's stage and phase are bits of its number");
static_assert(PARTS == 2, "a part is half of what each warpgroup of values adds");

// Registers a thread of each warpgroup while it works.
constexpr int PRODUCER_REGISTERS = 48, CONSUMER_REGISTERS = 208, LAUNCH_REGISTERS = 128;
static_assert(2 * (PRODUCER_REGISTERS + CONSUMER_REGISTERS) <= LAUNCH_REGISTERS * NUM_THREADS / 128);

// Shared memory in bytes from a multiple of 1024.
struct Layout {
    static constexpr uint32_t Q_TILE = BLOCK_M * 128, TILE = BLOCK_N * 128;  // a sub-tile of 64 dims
    static constexpr uint32_t SMEM_Q = 0, SMEM_K = SMEM_Q + TILES * Q_TILE;
    static constexpr uint32_t SMEM_P = SMEM_K + NUM_STAGES * TILES * TILE, P_TILE = BLOCK_M * 128;
    static constexpr uint32_t SMEM_STAGING = SMEM_P + P_TILE;  // see Gathered
    // float [BLOCK_M]: factors of O, and the maxima after them
    static constexpr uint32_t ALPHA = SMEM_STAGING + NUM_STAGING_STAGES * Shape<BLOCK_N>::GROUPS * STAGED;
    static constexpr uint32_t TOP = ALPHA + BLOCK_M * 4;
    static constexpr uint32_t FACTOR = ALPHA;                // in the end, float [2][BLOCK_M]: 1 / denominator
    static constexpr uint32_t MASKS = TOP + BLOCK_M * 4;     // [4][8], see Gathered
    static constexpr uint32_t MOVED = MASKS + 32;            // int [4], of warps of rows: has any maximum moved
    // Barriers, 8 bytes each: four kinds as Gathered has them, then of P from each warpgroup.
    static constexpr uint32_t STAGING_FULL_BARRIERS = MOVED + 16,
                              STAGING_EMPTY_BARRIERS = STAGING_FULL_BARRIERS + 8 * NUM_STAGING_STAGES,
                              FULL_BARRIERS = STAGING_EMPTY_BARRIERS + 8 * NUM_STAGING_STAGES,
                              EMPTY_BARRIERS = FULL_BARRIERS + 8 * NUM_STAGES * PARTS,
                              P_FULL_BARRIERS = EMPTY_BARRIERS + 8 * NUM_STAGES * PARTS;
    static constexpr uint32_t BYTES = P_FULL_BARRIERS + 2 * 8;
    static constexpr uint32_t SUMS = SMEM_P;  // in the end, float2 [2][BLOCK_M]: what each warpgroup has summed
    static_assert(SMEM_K % 1024 == 0 && TILE % 1024 == 0 && SMEM_P % 1024 == 0, "a swizzle repeats every 1024 bytes");
    static_assert(MASKS % 16 == 0 && FULL_BARRIERS % 8 == 0, "vector loads, barriers");
    static_assert(BYTES + 1024 <= SHARED_LIMIT, "with room to align the start");
};

// ---- device helpers

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
// d (64, 128) = a (64, 16) b (16, 128) + (add ? d : 0): a in registers, rows of b are the contraction.
__device__ __forceinline__ void wgmma_registers(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
        "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
        "%60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
        : FOUR(d, 0), FOUR(d, 4), FOUR(d, 8), FOUR(d, 12), FOUR(d, 16), FOUR(d, 20), FOUR(d, 24), FOUR(d, 28),
          FOUR(d, 32), FOUR(d, 36), FOUR(d, 40), FOUR(d, 44), FOUR(d, 48), FOUR(d, 52), FOUR(d, 56), FOUR(d, 60)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
}
#undef FOUR

// ---- consumer: warpgroups 2 and 3

// What a lane keeps of its two rows, 16 warp + lane / 4 and 8 below.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY};  // running maximum, up to RESCALE_THRESHOLD too small; -inf: no entry so far
    float sum[2] = {0, 0}, rounded[2] = {0, 0};  // of this lane's columns of the warpgroup's own tiles: of p; in bf16
};

struct Consumer {
    uint32_t smem;
    int me, warp, lane;  // me: 0 or 1, which half of the dims, and which tiles are its own
    float o[2][64];      // of this half's halves: wgmma may name no more registers than a thread has at the launch
    float s[BLOCK_N / 2];
    Softmax softmax;

    // Ask for the scores of a tile.
    __device__ __forceinline__ void multiply_keys(int tile) {
        int const stage = tile % 2;
        uint32_t const phase = tile / 2 % 2;
        uint64_t const query = make_smem_desc(smem + Layout::SMEM_Q);
        uint64_t const key = make_smem_desc(smem + Layout::SMEM_K + stage * (TILES * Layout::TILE));
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            int const t = i / 2 % 2 * 4 + i / 4 * 2 + i % 2;  // 0 1 4 5 2 3 6 7
            if (i % (TILES / PARTS) == 0) {
                wait(smem + Layout::FULL_BARRIERS + 8 * (PARTS * stage + i / (TILES / PARTS)), phase);
                fence_proxy_async_shared();  // for the writers, who would wait for what they have asked for since
                warpgroup_arrive();
            }
#pragma unroll
            for (int k = 0; k < 4; ++k)  // 16 dims, 32 bytes
                wgmma(s, query + t * (Layout::Q_TILE / 16) + 2 * k, key + t * (Layout::TILE / 16) + 2 * k, i + k > 0);
        }
        warpgroup_commit_batch();
    }
    __device__ __forceinline__ uint64_t values(int tile) const {
        uint32_t const first = (TILES * (tile % 2) + TILES / 2 * me) * Layout::TILE;
        return make_smem_desc(smem + Layout::SMEM_K + first, Layout::TILE);
    }
    __device__ __forceinline__ void free(int tile, int part) const {
        warp_arrive(smem + Layout::EMPTY_BARRIERS + 8 * (PARTS * (tile % 2) + part));
    }
    __device__ __forceinline__ void rescale(float upper, float lower) {
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i / 64][i % 64] *= i % 4 < 2 ? upper : lower;
        softmax.sum[0] *= upper, softmax.rounded[0] *= upper;
        softmax.sum[1] *= lower, softmax.rounded[1] *= lower;
    }
    // Ask for P V of the other warpgroup's tile, in two commits, and take its maxima.
    __device__ __forceinline__ void multiply_others(int tile) {
        wait(smem + Layout::P_FULL_BARRIERS + 8 * (1 - me), tile / 2 % 2);
        fence_proxy_async_shared();
        if (load_shared(smem + Layout::MOVED + 4 * warp)) {
            uint32_t const at = smem + 4 * (16 * warp + lane / 4);
            rescale(__uint_as_float(load_shared(at + Layout::ALPHA)),
                    __uint_as_float(load_shared(at + Layout::ALPHA + 32)));
            softmax.top[0] = __uint_as_float(load_shared(at + Layout::TOP));
            softmax.top[1] = __uint_as_float(load_shared(at + Layout::TOP + 32));
        }
        uint64_t const probs = make_smem_desc(smem + Layout::SMEM_P), value = values(tile);
        warpgroup_fence_operand(o[0]), warpgroup_fence_operand(o[1]);
        warpgroup_arrive();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int k = 0; k < BLOCK_N / 16; ++k)
                wgmma_rows(o[h], probs + 2 * k, value + (k * (16 * 128) + 2 * h * Layout::TILE) / 16, tile + k > 0);
            warpgroup_commit_batch();
        }
    }
    // Add P V of the own tile.
    __device__ __forceinline__ void multiply_own(int tile, const uint32_t (&pairs)[BLOCK_N / 16][4]) {
        uint64_t const value = values(tile);
        warpgroup_fence_operand(o[0]), warpgroup_fence_operand(o[1]);
        warpgroup_arrive();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int k = 0; k < BLOCK_N / 16; ++k)
                wgmma_registers(o[h], pairs[k], value + (k * (16 * 128) + 2 * h * Layout::TILE) / 16, tile + k > 0);
            warpgroup_commit_batch();
        }
        warpgroup_wait<1>();
        free(tile, 0);
        warpgroup_wait<0>();
        warpgroup_fence_operand(o[0]), warpgroup_fence_operand(o[1]);
        free(tile, 1);
    }

    __device__ __forceinline__ void mask(int tile) {
        uint2 const masks = load_shared8(smem + Layout::MASKS + 8 * (tile & 3));
        // Column 8 i + j of the tile is row j of group i.
        if (masks.x == ~0u && (masks.y & 0xFFFF) == 0xFFFF) return;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) {
            uint32_t const mask = (i < 4 ? masks.x : masks.y) >> (8 * (i % 4) + 2 * (lane % 4));
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (!(mask >> e & 1)) s[4 * i + e] = s[4 * i + 2 + e] = -INFINITY;
        }
    }
    // Move the maxima if any score of the warp is above one by more than the threshold. Returns whether; the factors.
    __device__ __forceinline__ bool move(float (&alpha)[2]) {
        float largest[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            largest[h] = s[2 * h];
#pragma unroll
            for (int i = 0; i < BLOCK_N / 8; ++i)
                largest[h] = fmaxf(largest[h], fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
            largest[h] *= TO_LOG2;
        }
        bool const moved = __any_sync(~0u, largest[0] > softmax.top[0] + RESCALE_THRESHOLD ||
                                               largest[1] > softmax.top[1] + RESCALE_THRESHOLD);
        if (!moved) return false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
            bool const moves = largest[h] > softmax.top[h] + RESCALE_THRESHOLD;
            alpha[h] = moves ? exp2_fast(softmax.top[h] - largest[h]) : 1.f;
            softmax.top[h] = moves ? largest[h] : softmax.top[h];
        }
        return true;
    }
    // Scores to P, as the A fragments of P V, and to the sums.
    __device__ __forceinline__ void exponentials(uint32_t (&pairs)[BLOCK_N / 16][4], float (&exact)[2],
                                                 float (&as_bf16)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float const zero = softmax.top[h] == -INFINITY ? 0.f : softmax.top[h];
            exact[h] = as_bf16[h] = 0;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 8; ++i) {
                float const a = exp2_fast(fmaf(s[4 * i + 2 * h], TO_LOG2, -zero));
                float const b = exp2_fast(fmaf(s[4 * i + 2 * h + 1], TO_LOG2, -zero));
                uint32_t const pair = pairs[i / 2][i % 2 * 2 + h] = pack_bf16x2(a, b);
                exact[h] += a + b;
                as_bf16[h] += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xFFFF0000);
            }
        }
    }
    // P, and where they moved factors and maxima, for the other warpgroup.
    __device__ __forceinline__ void leave(const uint32_t (&pairs)[BLOCK_N / 16][4], bool moved,
                                          const float (&alpha)[2]) const {
        // Of the four matrices of a store: lanes 0-15 rows 0-15 of the left 8 columns, lanes 16-31 of the right ones.
        int const row = 16 * warp + lane % 16;
#pragma unroll
        for (int k = 0; k < BLOCK_N / 16; ++k)
            stmatrix_x4(smem + Layout::SMEM_P + row * 128 + ((2 * k + lane / 16) ^ row % 8) * 16, pairs[k][0],
                        pairs[k][1], pairs[k][2], pairs[k][3]);
        // Lane 0, which arrives at the barrier, writes for all.
#pragma unroll 1
        for (int i = 0; i < 16 && moved; ++i) {
            float const factor = __shfl_sync(~0u, i < 8 ? alpha[0] : alpha[1], i % 8 * 4);
            float const top = __shfl_sync(~0u, i < 8 ? softmax.top[0] : softmax.top[1], i % 8 * 4);
            uint32_t const to = smem + 4 * (16 * warp + i);
            if (lane == 0) store_shared(to + Layout::ALPHA, __float_as_uint(factor));
            if (lane == 0) store_shared(to + Layout::TOP, __float_as_uint(top));
        }
        if (lane == 0) store_shared(smem + Layout::MOVED + 4 * warp, uint32_t(moved));
        warp_arrive(smem + Layout::P_FULL_BARRIERS + 8 * me);
    }

    // From the scores of an own tile to its P V. FIRST: no P V of the tile before is under way.
    template <bool FIRST>
    __device__ __forceinline__ void turn(int tile) {
        uint32_t pairs[BLOCK_N / 16][4];
        float alpha[2] = {1, 1}, exact[2], as_bf16[2];
        if (FIRST) {
            warpgroup_wait<0>();
        } else {
            warpgroup_wait<2>();
        }
        warpgroup_fence_operand(s);
        mask(tile);
        bool const moved = move(alpha);
        if (!FIRST) {
            warpgroup_wait<1>();
            free(tile - 1, 0);
        }
        exponentials(pairs, exact, as_bf16);
        if (!FIRST) {
            warpgroup_wait<0>();
            warpgroup_fence_operand(o[0]), warpgroup_fence_operand(o[1]);
            free(tile - 1, 1);
        }
        if (!FIRST) named_barrier_sync<128>(3 + me);  // every warp's product has read P of the tile before
        leave(pairs, moved, alpha);
        if (moved) rescale(alpha[0], alpha[1]);
#pragma unroll
        for (int h = 0; h < 2; ++h) softmax.sum[h] += exact[h], softmax.rounded[h] += as_bf16[h];
        multiply_own(tile, pairs);
    }

    __device__ __forceinline__ void add_tiles(int count) {
        undefined(o[0]), undefined(o[1]), undefined(s);
        if (me == 0 && count > 0) {
            multiply_keys(0);
            turn<true>(0);
        }
#pragma unroll 1
        for (int tile = 2 - me; tile < count; tile += 2) {
            multiply_keys(tile);
            multiply_others(tile - 1);
            turn<false>(tile);
        }
        if (count > 0 && (count - 1) % 2 != me) {
            multiply_others(count - 1);
            warpgroup_wait<0>();
            warpgroup_fence_operand(o[0]), warpgroup_fence_operand(o[1]);
        }
    }

    // Join both warpgroups' sums; write lse or the split's, and factors of the rows, of which each has a copy.
    template <bool SPLIT>
    __device__ __forceinline__ void finish(const Problem& p, const Item& item) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int lanes = 1; lanes < 4; lanes *= 2) {
                softmax.sum[h] += __shfl_xor_sync(~0u, softmax.sum[h], lanes);
                softmax.rounded[h] += __shfl_xor_sync(~0u, softmax.rounded[h], lanes);
            }
        }
        named_barrier_sync<NUM_CONSUMER_THREADS>(2);  // all products are done: the places of P and of factors are free
        uint32_t const row = 16 * warp + lane / 4;
        if (lane % 4 == 0) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint32_t const to = smem + Layout::SUMS + 8 * (BLOCK_M * me + row + 8 * h);
                store_shared(to, __float_as_uint(softmax.sum[h]));
                store_shared(to + 4, __float_as_uint(softmax.rounded[h]));
            }
        }
        named_barrier_sync<NUM_CONSUMER_THREADS>(2);
        if (lane % 4 == 0) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint32_t const from = smem + Layout::SUMS + 8 * (row + 8 * h);
                float2 const first = load_shared_pair(from), second = load_shared_pair(from + 8 * BLOCK_M);
                float const sum = first.x + second.x;
                float denominator = first.y + second.y;
                bool const any = softmax.top[h] > -INFINITY;  // then one p at least is 2^-RESCALE_THRESHOLD
                float const log2_sum = softmax.top[h] + log2f(sum);
                int const head = item.head + row + 8 * h;
                if (int(row) + 8 * h < item.heads) {
                    int64_t const at = int64_t(item.query) * p.heads + head;
                    if (SPLIT) {
                        if (me == 0) p.stats[int64_t(item.split) * p.rows + at].x = any ? log2_sum : -INFINITY;
                    } else {
                        if (me == 0) p.lse[at] = any ? log2_sum / LOG2E : INFINITY;
                        denominator += exp2_fast(__ldg(p.sink + head) * LOG2E - softmax.top[h]);  // infinite: drowns all
                    }
                }
                store_shared(smem + Layout::FACTOR + 4 * (BLOCK_M * me + row + 8 * h),
                             __float_as_uint(any ? 1.f / denominator : 0.f));
            }
        }
        __syncwarp();
    }
};

template <bool SPLIT>
__device__ __forceinline__ void consume(const Problem& p, const Item& item, uint32_t smem) {
    load_queries<NUM_CONSUMER_THREADS>(p, item, smem + Layout::SMEM_Q);
    int2 const length = lengths(p, item.batch);
    int const count = share<BLOCK_N, SPLIT>(length.x, length.y, item.split, p.splits).count;
    Consumer consumer;
    consumer.smem = smem, consumer.me = threadIdx.x / 128 - 2;
    consumer.warp = threadIdx.x / 32 % 4, consumer.lane = threadIdx.x % 32;
    cp_async_wait_all();
    fence_proxy_async_shared();
    named_barrier_sync<NUM_CONSUMER_THREADS>(2);
    consumer.add_tiles(count);
    consumer.finish<SPLIT>(p, item);
    if (count)
        write_result<SPLIT>(p, item, consumer.o, consumer.me, smem + Layout::SMEM_Q,
                            smem + Layout::FACTOR + 4 * BLOCK_M * consumer.me);
}

// ---- kernel

// Grid (B S tiles, splits). The tiles of a query lie side by side: they read the same entries.
template <bool SPLIT>
__global__ void __launch_bounds__(NUM_THREADS, 1) attend(const __grid_constant__ Problem p) {
    extern __shared__ uint8_t dynamic[];
    uint32_t const smem = (smem_address(dynamic) + 1023) & ~1023u;
    Item const item(p);
    Lists const lists = {p.window, p.compressed, p.window_index + int64_t(item.query) * p.nw,
                         p.compressed_index + int64_t(item.query) * p.nc};
    if (SPLIT) programmatic::trigger();

    // Barrier 1: the mbarriers exist; barrier 2 is the consumers' own, 3 and 4 each warpgroup's of them.
    if (threadIdx.x < NUM_PRODUCER_THREADS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp - Shape<BLOCK_N>::LOAD_WARPS;
        Producer<BLOCK_N, SPLIT> const producer = {
            {smem + Layout::SMEM_K, smem + Layout::SMEM_STAGING, smem + Layout::MASKS,
             smem + Layout::STAGING_FULL_BARRIERS, smem + Layout::STAGING_EMPTY_BARRIERS, smem + Layout::FULL_BARRIERS,
             smem + Layout::EMPTY_BARRIERS},
            int(threadIdx.x % 32)};
        auto const begin = [] { named_barrier_sync<NUM_THREADS>(1); };
        auto const length = [&] { return lengths(p, item.batch); };
        if (group < 0) {
            producer.load(lists, length, p.nw, p.nc, item.split, p.splits, warp, begin);
        } else {
            begin();
            int2 const n = length();
            producer.decode(share<BLOCK_N, SPLIT>(n.x, n.y, item.split, p.splits).count, group);
        }
        return;
    }
    if (threadIdx.x == NUM_PRODUCER_THREADS) {
        for (int i = 0; i < PARTS * NUM_STAGES; ++i) {
            barrier_init(smem + Layout::FULL_BARRIERS + 8 * i, Shape<BLOCK_N>::GROUPS);  // warps that decode
            barrier_init(smem + Layout::EMPTY_BARRIERS + 8 * i, 8);                      // warps that add values
        }
        for (int i = 0; i < NUM_STAGING_STAGES; ++i) {
            // Threads, and once a warp.
            barrier_init(smem + Layout::STAGING_FULL_BARRIERS + 8 * i, Shape<BLOCK_N>::LOAD_WARPS * 33);
            barrier_init(smem + Layout::STAGING_EMPTY_BARRIERS + 8 * i, Shape<BLOCK_N>::GROUPS);
        }
        for (int i = 0; i < 2; ++i) barrier_init(smem + Layout::P_FULL_BARRIERS + 8 * i, 4);  // warps that score
        barrier_publish();
    }
    named_barrier_arrive<NUM_THREADS>(1);
    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    consume<SPLIT>(p, item, smem);
}

// ---- launcher

template <bool SPLIT>
cudaError_t run(const Problem& p) {
    constexpr int SHARED = Layout::BYTES + 1024;
    auto const error = cudaFuncSetAttribute(attend<SPLIT>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (error != cudaSuccess) return error;
    attend<SPLIT><<<dim3(p.rows / p.heads * p.tiles.by, p.splits.by), NUM_THREADS, SHARED>>>(p);
    auto const started = cudaGetLastError();
    if (!SPLIT || started != cudaSuccess) return started;
    return join(p);
}

}  // namespace fmha::seesaw

// As sm90_wgmma.cu's, with tiles of 48 entries.
extern "C" int launch_seesaw(const void* q, const uint8_t* window, const int* window_index, const int* window_length,
                      const uint8_t* compressed, const int* compressed_index, const int* compressed_length,
                      const float* sink, void* out, float* lse, void* partial, void* stats, int batch, int queries,
                      int heads, int nw, int nc, int page_window, int stride_window, int page_compressed,
                      int stride_compressed, int splits, int) {
    fmha::Problem const p = {
        static_cast<const __nv_bfloat16*>(q),
        {window, uint32_t(stride_window), uint32_t(page_window)},
        {compressed, uint32_t(stride_compressed), uint32_t(page_compressed)},
        window_index, window_length, compressed_index, compressed_length, sink,
        static_cast<__nv_bfloat16*>(out), lse, static_cast<__half*>(partial), static_cast<float4*>(stats),
        batch * queries * heads, heads, nw, nc, fmha::Divisor(queries),
        fmha::Divisor((heads + fmha::BLOCK_M - 1) / fmha::BLOCK_M), fmha::Divisor(splits),
    };
    return splits == 1 ? fmha::seesaw::run<false>(p) : fmha::seesaw::run<true>(p);
}
