// One expert that every token goes to, for up to a few hundred tokens: the shared expert, and dense NVFP4 products. Each
// weight is read once, by one multiprocessor, and meets all tokens (of up to 64) in wgmma.
//
// With so few tokens there are not enough rows of weights to give every multiprocessor some of its own without each of
// them reading all of x. So the columns are split as well: a cluster of blocks has the same rows, and each of its blocks
// a part of the columns, which fits into shared memory as a whole: all copies are asked for at once. Then each block
// takes a share of the rows' sums from all blocks of its cluster, and adds them in a fixed order.
//
// The first product leaves v in the order and the swizzle in which the second has it in shared memory. The second is
// a launch of its own that begins while the first still adds up: its weights are there when v comes. It does not wait
// for the first to end, but for what it needs of v, by a counter for each of the first's clusters.
#pragma once

#include <cuda_bf16.h>

#include "launch.cuh"
#include "sm90_prefill_ptx.cuh"
#include "sm90_units.cuh"

namespace dense {

using bf16 = __nv_bfloat16;
namespace ptx = prefill;

constexpr float LIMIT = 10.f;
constexpr int CHUNKS = 8, PAIRS = CHUNKS / 2;  // of 64 columns, that a block has weights of at a time; a copy has two
constexpr int MOST_TOKENS = 64;                // of a block
// Blocks of both products run on a multiprocessor at a time, and share its 65536 registers: this bound, above what is
// launched, is what gives a thread at most 72 of them.
constexpr int BOUND = 896;

// A block has ROWS unit rows and one of SPLITS parts of the columns, for 8 EIGHTS tokens. A warp has 16 rows. PREPARED:
// x lies in wgmma's order, and comes by bulk copies, into fewer places than there are chunks: the first product's block
// shall have room beside it.
template <int ROWS_, int SPLITS_, int EIGHTS_, bool PREPARED_>
struct Form {
    static constexpr int ROWS = ROWS_, SPLITS = SPLITS_, EIGHTS = EIGHTS_, TOKENS = 8 * EIGHTS;
    static constexpr bool PREPARED = PREPARED_;
    static constexpr int MULTIPLYING = 64 * ROWS, THREADS = MULTIPLYING + 32;  // and a warp that helps
    static constexpr int PLACES = PREPARED ? 6 : CHUNKS;                       // for chunks of x

    // Shared memory in bytes from a multiple of 1024.
    static constexpr uint32_t IMAGE = TOKENS * 128;  // a chunk of x
    static constexpr uint32_t WEIGHTS = PLACES * IMAGE, FULL = WEIGHTS + ROWS * CHUNKS * units::BYTES;
    static constexpr uint32_t X_FULL = FULL + 8 * PAIRS, X_EMPTY = X_FULL + 8 * PLACES, BYTES = X_EMPTY + 8 * PLACES;
    static constexpr int SUMS = MULTIPLYING * EIGHTS;  // of four: where x was, [eighth][thread]
    static_assert(SUMS * 16 <= WEIGHTS && SUMS % (32 * SPLITS) == 0 && ROWS % 4 == 0 && SPLITS <= 8);
};

struct Product {
    const uint8_t* units;  // [rows][columns]
    const float* scale;
    const bf16* x;         // (tokens, 64 columns); or prepared, as v
    bf16* out;             // (tokens, 32 rows); of the first product v, [16 rows / 64][padded][64]
    const int* ids;        // of the first product
    const float* routing;
    int* ready;            // [tiles of tokens][tiles of the first product's rows]: blocks that have written their v
    int tokens, padded, rows, columns;  // in units
    int tiles, wanted;                  // of the first product's rows; how often each is counted
};

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of the cluster meet; what they wrote before is known after.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// From the same place in shared memory of another block.
__device__ __forceinline__ float4 load_from(uint32_t rank, uint32_t at) {
    uint32_t there;
    float4 v;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(there)
                 : "memory");
    return v;
}
__device__ __forceinline__ void store_shared16(uint32_t to, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// Threads that multiply.
template <class F>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(F::MULTIPLYING) : "memory");
}

// What a block has to do.
template <class F>
struct Part {
    int row, rows;       // in units
    int chunk, chunks;   // all of its columns
    int token, tile;     // its first; of rows
    uint32_t rank;
    __device__ __forceinline__ Part(const Product& p) {
        rank = cluster_rank(), tile = blockIdx.x / F::SPLITS;
        row = tile * F::ROWS, rows = min(p.rows - row, F::ROWS);
        chunk = p.columns * rank / F::SPLITS, chunks = p.columns * (rank + 1) / F::SPLITS - chunk;
        token = blockIdx.y * F::TOKENS;
    }
};

// ---- what comes

// Weights of up to CHUNKS chunks from number `done` of the block's on. Each warp asks for a row's.
template <class F>
__device__ __forceinline__ void ask_weights(const Product& p, const Part<F>& part, uint32_t shared, int done) {
    const int count = min(part.chunks - done, CHUNKS), row = threadIdx.x / 32 % F::ROWS;
    if (threadIdx.x % 32 != 0) return;
    // Nobody but this block wants them, unless others have the same rows with other tokens.
    const uint64_t policy = gridDim.y == 1 ? ptx::keep_short() : ptx::keep();
    const uint8_t* from =
        p.units + (int64_t(part.row + row) * p.columns + part.chunk + done) * units::BYTES;
    for (int pair = threadIdx.x / 32 / F::ROWS; pair < PAIRS; pair += 2) {
        const uint32_t bytes = min(count - 2 * pair, 2) * units::BYTES, full = shared + F::FULL + 8 * pair;
        if (2 * pair >= count) break;
        if (row == 0) ptx::arrive_expecting(full, part.rows * bytes);
        if (row < part.rows)
            ptx::bulk_load(shared + F::WEIGHTS + (row * CHUNKS + 2 * pair) * units::BYTES,
                           from + 2 * pair * units::BYTES, bytes, full, policy);
    }
}

// x of those chunks, into wgmma's order: 16 c + 2 p and one on of a chunk's columns go to 8 p + 2 c. A thread has 16
// bytes of a row and chunk, four p. The threads of a warp have four rows, which the swizzle keeps on different banks.
template <class F>
__device__ __forceinline__ void load_x(const Product& p, const Part<F>& part, uint32_t shared, int done) {
    const int count = min(part.chunks - done, CHUNKS), piece = threadIdx.x % 8, c = piece / 2, first = piece % 2 * 4;
#pragma unroll 1
    for (int row = threadIdx.x / 8; row < F::TOKENS; row += F::MULTIPLYING / 8) {
        const bool real = part.token + row < p.tokens;
        const uint4* from = reinterpret_cast<const uint4*>(p.x + int64_t(part.token + row) * p.columns * 64) +
                            (part.chunk + done) * 8 + piece;
        uint4 v[CHUNKS];
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            v[i] = make_uint4(0, 0, 0, 0);
            if (real && i < count) v[i] = __ldg(from + 8 * i);
        }
        const uint32_t to = shared + row * 128 + 4 * c;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            if (i >= count) break;
            ptx::store_shared(to + i * F::IMAGE + ((first + 0) ^ row % 8) * 16, v[i].x);
            ptx::store_shared(to + i * F::IMAGE + ((first + 1) ^ row % 8) * 16, v[i].y);
            ptx::store_shared(to + i * F::IMAGE + ((first + 2) ^ row % 8) * 16, v[i].z);
            ptx::store_shared(to + i * F::IMAGE + ((first + 3) ^ row % 8) * 16, v[i].w);
        }
    }
    ptx::fence_async_shared();
}

// v of all chunks as it gets ready. One warp.
template <class F>
__device__ __forceinline__ void bring_v(const Product& p, const Part<F>& part, uint32_t shared) {
    const int lane = threadIdx.x % 32, of_tile = (p.padded, 2);  // chunks that a block of the first product makes
    const int* ready = p.ready + blockIdx.y * p.tiles;
    const auto is_ready = [&](int i) { return ptx::count_of(ready + (part.chunk + i) / of_tile) >= p.wanted; };
    const auto ask = [&](int i) {
        ptx::fence_async();
        const uint32_t full = shared + F::X_FULL + 8 * (i % F::PLACES);
        ptx::arrive_expecting(full, F::IMAGE);
        const bf16* from = p.x + (int64_t(part.chunk + i) * p.padded + part.token) * 64;
        ptx::bulk_load(shared + i % F::PLACES * F::IMAGE, from, F::IMAGE, full, ptx::keep());
    };
    bool waits = lane < min(part.chunks, F::PLACES);  // for chunk number `lane`
    do {
        if (waits && is_ready(lane)) ask(lane), waits = false;
    } while (__any_sync(~0u, waits));
    if (lane == 0)
        for (int i = F::PLACES; i < part.chunks; ++i) {
            while (!is_ready(i)) {}
            ptx::wait(shared + F::X_EMPTY + 8 * (i % F::PLACES), (i / F::PLACES - 1) % 2);
            ask(i);
        }
    __syncwarp();
}

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

// Two steps of 16 columns, which are 32 bytes.
template <class F>
__device__ __forceinline__ void multiply(float (&d)[4 * F::EIGHTS], const uint32_t (&a)[2][4], uint64_t rows) {
    ptx::wgmma_begin();
    ptx::wgmma<F::TOKENS>(d, a[0], rows);
    ptx::wgmma<F::TOKENS>(d, a[1], rows + 2);
    ptx::wgmma_commit();
}

// Keeps fragments where they are up to here: wgmma reads them long after it is issued.
__device__ __forceinline__ void hold(const uint32_t (&a)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
        asm volatile("" ::"r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]) : "memory");
}

// d += this warp's 16 rows times the block's tokens, over all of the block's columns. Ends with nothing on its way.
template <class F>
__device__ __forceinline__ void multiply_all(const Product& p, const Part<F>& part, uint32_t shared,
                                             float (&d)[4 * F::EIGHTS]) {
    uint32_t a[2][2][4] = {};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = warp % 2;
    const uint32_t unit = shared + F::WEIGHTS + warp / 2 * CHUNKS * units::BYTES;
    const uint32_t codes_at = unit + 512 * q + 16 * lane, scales_at = unit + units::SCALES + 4 * lane;
    uint32_t place = 0, parity = 0;  // of prepared x
#pragma unroll 1
    for (int done = 0, round = 0; done < part.chunks; done += CHUNKS, ++round) {
        if (round) {  // all have used what they had
            ptx::fence_async_shared();
            meet<F>();
            ask_weights(p, part, shared, done);
        }
        if constexpr (!F::PREPARED) {
            load_x(p, part, shared, done);
            meet<F>();
        }
        const int count = min(part.chunks - done, CHUNKS);
        const auto load = [&](int i) {
            if (i % 2 == 0) ptx::wait(shared + F::FULL + 4 * i, round % 2);
            return Words{ptx::load_shared16(codes_at + i * units::BYTES),
                         ptx::load_shared(scales_at + i * units::BYTES) >> 16 * q};
        };
        Words words = load(0);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const uint64_t rows = ptx::matrix(shared + (F::PREPARED ? place : i) * F::IMAGE);
            decode(words.codes.x, words.codes.y, words.scales, a[0]);
            if (F::PREPARED) ptx::wait(shared + F::X_FULL + 8 * place, parity);
            multiply<F>(d, a[0], rows);
            ptx::wgmma_end_but<1>();
            hold(a[1]);
            if (F::PREPARED) {
                if (done + i) ptx::warp_arrive(shared + F::X_EMPTY + 8 * (place ? place - 1 : F::PLACES - 1));
                if (++place == F::PLACES) place = 0, parity ^= 1;
            }
            decode(words.codes.z, words.codes.w, words.scales, a[1]);
            multiply<F>(d, a[1], rows + 4);
            if (i + 1 < count) words = load(i + 1);
            ptx::wgmma_end_but<1>();
            hold(a[0]);
        }
        ptx::wgmma_end_but<0>();
        hold(a[1]);
    }
    // Sums are what wgmma made of them only from here on.
#pragma unroll
    for (int i = 0; i < 4 * F::EIGHTS; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- sums

// A share of the cluster's sums: number `index` of four, which is thread index % MULTIPLYING's, of an eighth of tokens.
struct Share {
    int eighth, unit, q, g, c;  // unit: row of the block's
    template <class F>
    __device__ __forceinline__ void set(int index) {
        eighth = index / F::MULTIPLYING;
        const int thread = index % F::MULTIPLYING;
        unit = thread / 64, q = thread / 32 % 2, g = thread % 32 / 4, c = thread % 4;
    }
};

// From all blocks, in an order that depends on who adds alone.
template <class F>
__device__ __forceinline__ float4 add_up(uint32_t shared, uint32_t rank, int index) {
    float4 v[F::SPLITS];
#pragma unroll
    for (int i = 0; i < F::SPLITS; ++i) v[i] = load_from((rank + i) % F::SPLITS, shared + index * 16);
#pragma unroll
    for (int i = 1; i < F::SPLITS; ++i)
        v[0].x += v[i].x, v[0].y += v[i].y, v[0].z += v[i].z, v[0].w += v[i].w;
    return v[0];
}

// silu(gate) * up, both clamped.
__device__ __forceinline__ float activate(float gate, float up) {
    gate = fminf(gate, LIMIT), up = fminf(fmaxf(up, -LIMIT), LIMIT);
    return __fdividef(gate, 1.f + __expf(-gate)) * up;
}

// A row's values for tokens 2 c and 2 c + 1, with those of the row that lane ^ 4 has -> of token 2 c + g % 2 both rows'.
__device__ __forceinline__ uint32_t paired(float first, float second, int g) {
    const uint32_t own = ptx::bf16_pair(first, second), other = __shfl_xor_sync(~0u, own, 4);
    return __byte_perm(own, other, g % 2 ? 0x3276 : 0x5410);
}

template <class F, bool FIRST>
__global__ void __cluster_dims__(F::SPLITS, 1, 1) __launch_bounds__(BOUND)
    product(const __grid_constant__ Product p) {
    extern __shared__ uint8_t raw[];
    const uint32_t shared = __shfl_sync(~0u, (uint32_t(__cvta_generic_to_shared(raw)) + 1023) / 1024 * 1024, 0);
    const bool helps = threadIdx.x >= F::MULTIPLYING;
    const Part<F> part(p);
    int* const ready = p.ready + blockIdx.y * p.tiles + part.tile;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PAIRS; ++i) ptx::barrier_init(shared + F::FULL + 8 * i, 1);
        if (F::PREPARED)
            for (int i = 0; i < F::PLACES; ++i) {
                ptx::barrier_init(shared + F::X_FULL + 8 * i, 1);
                ptx::barrier_init(shared + F::X_EMPTY + 8 * i, F::MULTIPLYING / 32);
            }
        ptx::barrier_publish();
    }
    __syncthreads();
    if (!helps) {
        if (part.chunks) ask_weights(p, part, shared, 0);
        float d[4 * F::EIGHTS];
#pragma unroll
        for (int i = 0; i < 4 * F::EIGHTS; ++i) d[i] = 0;
        multiply_all(p, part, shared, d);
        meet<F>();  // x is not needed any more
#pragma unroll
        for (int i = 0; i < F::EIGHTS; ++i)
            store_shared16(shared + (i * F::MULTIPLYING + threadIdx.x) * 16, d[4 * i], d[4 * i + 1], d[4 * i + 2],
                           d[4 * i + 3]);
    } else if (F::PREPARED) {
        bring_v(p, part, shared);
    } else if (FIRST) {
        // The next launch shall see zero, and must not take bandwidth before this block's weights are here.
        if (threadIdx.x == F::MULTIPLYING) {
            if (part.rank == 0) *ready = 0, __threadfence();
            if (part.chunks) ptx::wait(shared + F::FULL + 8 * ((min(part.chunks, CHUNKS) - 1) / 2), 0);
            programmatic::trigger();
        }
        __syncwarp();
    }

    constexpr int EACH = F::SUMS / F::SPLITS;
    Share share;
    share.set<F>(part.rank * EACH + threadIdx.x);
    float routing[2] = {};
    bool here[2] = {};
    const float factor = __ldg(p.scale) * units::REST;
    if constexpr (FIRST) {
        static_assert(EACH <= F::MULTIPLYING);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = part.token + 8 * share.eighth + 2 * share.c + i;
            here[i] = threadIdx.x < EACH && token < p.tokens && __ldg(p.ids + token) == 0;
            if (here[i]) routing[i] = __ldg(p.routing + token);
        }
    }
    meet_cluster();
    if constexpr (FIRST) {
        if (threadIdx.x < EACH) {
            const float4 sum = add_up<F>(shared, part.rank, part.rank * EACH + threadIdx.x);
            const float v[2] = {here[0] ? activate(sum.x * factor, sum.z * factor) * routing[0] : 0.f,
                                here[1] ? activate(sum.y * factor, sum.w * factor) * routing[1] : 0.f};
            const uint32_t both = paired(v[0], v[1], share.g);
            const int mine = 2 * share.c + share.g % 2, row = part.row + share.unit;  // 16 channels
            if (share.unit < part.rows) {
                const int64_t at = int64_t(row / 4) * p.padded + part.token + 8 * share.eighth + mine;
                const int chunk = (4 * share.q + share.g / 2) ^ mine;
                reinterpret_cast<uint32_t*>(p.out)[at * 32 + chunk * 4 + row % 4] = both;
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            ptx::fence_async();
            ptx::count_up(ready);
        }
    } else if (!helps) {
        if (F::PREPARED) programmatic::wait();  // has long happened: this launch shall not end before the one ahead
#pragma unroll 1
        for (int i = threadIdx.x; i < EACH; i += F::MULTIPLYING) {
            share.set<F>(part.rank * EACH + i);
            const float4 sum = add_up<F>(shared, part.rank, part.rank * EACH + i);
            const uint32_t upper = paired(sum.x * factor, sum.y * factor, share.g);
            const uint32_t lower = paired(sum.z * factor, sum.w * factor, share.g);
            const int token = part.token + 8 * share.eighth + 2 * share.c + share.g % 2;
            if (share.unit < part.rows && token < p.tokens) {
                const int64_t at = int64_t(token) * p.rows * 32 + (part.row + share.unit) * 32 + 16 * share.q;
                uint32_t* const to = reinterpret_cast<uint32_t*>(p.out + at) + share.g / 2;
                to[0] = upper, to[4] = lower;
            }
        }
    }
    meet_cluster();  // all have read what this block has
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

template <class F, bool FIRST>
inline cudaError_t launch(const Product& p, int tiles) {
    constexpr int bytes = F::BYTES + 1024;
    if (const cudaError_t error =
            cudaFuncSetAttribute(product<F, FIRST>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    const dim3 grid((p.rows + F::ROWS - 1) / F::ROWS * F::SPLITS, tiles);
    if (F::PREPARED) return programmatic::launch(product<F, FIRST>, grid, F::THREADS, bytes, p);
    product<F, FIRST><<<grid, F::THREADS, bytes>>>(p);
    return cudaGetLastError();
}

template <int ROWS, int SPLITS, bool PREPARED, bool FIRST>
inline cudaError_t launch_for(const Product& p, const Tiling& tiling) {
    switch (tiling.eights) {
        case 2: return launch<Form<ROWS, SPLITS, 2, PREPARED>, FIRST>(p, tiling.tiles);
        case 4: return launch<Form<ROWS, SPLITS, 4, PREPARED>, FIRST>(p, tiling.tiles);
        case 6: return launch<Form<ROWS, SPLITS, 6, PREPARED>, FIRST>(p, tiling.tiles);
        default: return launch<Form<ROWS, SPLITS, 8, PREPARED>, FIRST>(p, tiling.tiles);
    }
}

constexpr int FIRST_ROWS = 8, FIRST_SPLITS = 8;

// Tiles of the first product's rows: 16 of v's columns are a unit row.
inline int first_tiles(int inner) { return (inner / 16 + FIRST_ROWS - 1) / FIRST_ROWS; }

// Bytes that run() needs, at a multiple of 256. Their content may be anything.
inline size_t workspace(int tokens, int /* hidden */, int inner) {
    if (tokens <= 0) return 0;
    const Tiling tiling(tokens);
    return size_t(2) * tiling.padded() * inner + size_t(4) * tiling.tiles * first_tiles(inner);
}

// One expert for T tokens; H, I multiples of 64. w13: units [2 I / 32][H / 64], w2: [H / 32][I / 64]; g13, g2 fp32 ();
// x, out bf16 (T, H); ids int32, routing fp32 (T,): with another id than 0 a token gets zeros.
inline cudaError_t run(const uint8_t* w13_units, const float* g13, const uint8_t* w2_units, const float* g2,
                       const bf16* x, const int* ids, const float* routing, bf16* out, void* workspace, int tokens,
                       int hidden, int inner) {
    if (tokens <= 0) return cudaSuccess;
    if (hidden <= 0 || inner <= 0 || hidden % 64 || inner % 64) return cudaErrorInvalidValue;
    const Tiling tiling(tokens);
    bf16* const v = static_cast<bf16*>(workspace);
    int* const ready = reinterpret_cast<int*>(v + size_t(tiling.padded()) * inner);
    const int tiles = first_tiles(inner);
    const Product first{w13_units, g13,    x,           v,          ids,   routing,     ready,
                        tokens,    tiling.padded(), inner / 16, hidden / 64, tiles, FIRST_SPLITS};
    const Product second{w2_units, g2,     v,           out,        nullptr, nullptr,   ready,
                         tokens,   tiling.padded(), hidden / 32, inner / 64, tiles, FIRST_SPLITS};
    if (const cudaError_t error = launch_for<FIRST_ROWS, FIRST_SPLITS, false, true>(first, tiling)) return error;
    return launch_for<4, 4, true, false>(second, tiling);
}

// out (T, rows) = x (T, columns) by units [rows / 32][columns / 64]; rows, columns multiples of 64. Takes no workspace.
inline cudaError_t linear(const uint8_t* units, const float* g, const bf16* x, bf16* out, void* /* workspace */,
                          int tokens, int rows, int columns) {
    if (tokens <= 0) return cudaSuccess;
    if (rows <= 0 || columns <= 0 || rows % 64 || columns % 64) return cudaErrorInvalidValue;
    const Tiling tiling(tokens);
    const Product p{units,  g,      x,      out, nullptr, nullptr, nullptr, tokens, tiling.padded(), rows / 32,
                    columns / 64, 0, 0};
    // Blocks, but for SPLITS / ROWS, are as many as unit rows; with fewer splits there is less to add up, and more of x.
    if (rows <= 2048) return launch_for<4, 8, false, false>(p, tiling);
    if (columns <= 2048) return launch_for<4, 4, false, false>(p, tiling);
    return launch_for<8, 8, false, false>(p, tiling);
}

}  // namespace dense
