// One expert that every token goes to, the shared expert, for up to a few hundred tokens. For up to 64 each weight is
// read once, by one multiprocessor, and meets them all in wgmma.
//
// With so few tokens there are not enough rows of weights to give every multiprocessor some of its own without each of
// them reading all of x. So the columns are split as well: a cluster of blocks has the same rows, each of its blocks a
// part of the columns, which fits into shared memory as a whole: all copies are asked for at once. Then each block is
// sent a share of the rows' sums by all blocks of its cluster, and adds them in a fixed order.
//
// The first product leaves v in the order and the swizzle in which the second has it in shared memory. The second is
// a launch of its own that begins while the first still adds up: its weights are there when v comes. It does not wait
// for the first to end, but for what it needs of v, by a counter for each of the first's clusters.
#pragma once

#include <cuda_bf16.h>

#include "launch.cuh"
#include "ptx.cuh"
#include "sm90_units.cuh"
#include "sm90_wgmma.cuh"

namespace dense {

using namespace ptx;
using bf16 = __nv_bfloat16;

constexpr float LIMIT = 10.f;
constexpr int CHUNKS = 8, PAIRS = CHUNKS / 2;  // of 64 columns, that a block has weights of at a time; a copy has two
constexpr int MOST_TOKENS = 64;  // of a block
constexpr int FIRST_ROWS = 8, FIRST_SPLITS = 8;  // of the first product, see Form
// A block of each product, of 512 and of 256 threads, run on a multiprocessor at a time and share its 65536 registers.
constexpr int BOUND = 768;

// A block has ROWS unit rows and one of SPLITS parts of the columns, for 8 EIGHTS tokens. A warp has 16 rows. The FIRST
// product brings x into wgmma's order. The second has v, which lies in it and comes by bulk copies, into fewer places
// than there are chunks: the first product's block shall have room beside it.
template <int ROWS_, int SPLITS_, int EIGHTS_, bool FIRST_>
struct Form {
    static constexpr int ROWS = ROWS_, SPLITS = SPLITS_, EIGHTS = EIGHTS_, TOKENS = 8 * EIGHTS;
    static constexpr bool FIRST = FIRST_;
    static constexpr int THREADS = 64 * ROWS;
    static constexpr int PLACES = FIRST ? CHUNKS : 6;  // for chunks of x
    static constexpr int BEHIND = 2;  // chunks that a place is asked for again later than it could be

    // Shared memory in bytes from a multiple of 1024.
    static constexpr uint32_t IMAGE = TOKENS * 128;  // a chunk of x
    static constexpr uint32_t WEIGHTS = PLACES * IMAGE, FULL = WEIGHTS + ROWS * CHUNKS * units::BYTES;
    static constexpr uint32_t X_FULL = FULL + 8 * PAIRS, X_EMPTY = X_FULL + 8 * PLACES;
    static constexpr uint32_t SENT = X_EMPTY + 8 * PLACES, SCALE = SENT + 8;
    static constexpr uint32_t LIST = SCALE + 8, BYTES = LIST + TOKENS * 8;  // of tokens: routing weight, if it is one

    // Sums, four of a thread: of each eighth of the tokens, every SPLITSth warp's are one block's share.
    static constexpr int WARPS = 2 * ROWS, TURNS = WARPS / SPLITS, SHARE = EIGHTS * TURNS * 32;
    static_assert(WARPS % SPLITS == 0 && SPLITS <= 8 && (SPLITS & SPLITS - 1) == 0);
    static_assert(SPLITS * SHARE * 16 <= WEIGHTS, "they come to where x was");
    static_assert(ROWS % 4 == 0 && TOKENS <= THREADS);
};

struct Product {
    const uint8_t* units;  // [rows][columns]
    const float* scale;
    const bf16* x;         // of the first product (tokens, 64 columns); of the second v, as the first leaves it
    bf16* out;             // (tokens, 32 rows); of the first product v, [16 rows / 64][padded][64]
    const int* ids;        // of the first product
    const float* routing;
    int* ready;            // [tiles of tokens][tiles of the first product's rows]: blocks that have written their v
    int tokens, padded, rows, columns;  // in units
    int tiles;                          // of the first product's rows
};

// All threads of the cluster meet. What they wrote before need not be known after.
__device__ __forceinline__ void meet_cluster_loosely() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// To another block's shared memory, of which its barrier is told.
__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, float a, float b, float c, float d) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
        "r"(barrier), "f"(a), "f"(b), "f"(c), "f"(d)
        : "memory");
}
// As wait, for what other blocks have sent.
__device__ __forceinline__ void wait_for_sent(uint32_t barrier) {
    uint32_t over;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(over)
            : "r"(barrier)
            : "memory");
    } while (!over);
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
    const uint64_t policy = gridDim.y == 1 ? keep_short() : keep();
    const uint8_t* from =
        p.units + (int64_t(part.row + row) * p.columns + part.chunk + done) * units::BYTES;
    for (int pair = threadIdx.x / 32 / F::ROWS; pair < PAIRS; pair += 2) {
        const uint32_t bytes = min(count - 2 * pair, 2) * units::BYTES, full = shared + F::FULL + 8 * pair;
        if (2 * pair >= count) break;
        if (row == 0) arrive_expecting(full, part.rows * bytes);
        if (row < part.rows)
            bulk_load(shared + F::WEIGHTS + (row * CHUNKS + 2 * pair) * units::BYTES, from + 2 * pair * units::BYTES,
                      bytes, full, policy);
    }
}

// x of those chunks, into wgmma's order: 16 c + 2 p and one on of a chunk's columns go to 8 p + 2 c. A thread has 16
// bytes of a row and chunk, four p. The threads of a warp have four rows, which the swizzle keeps on different banks.
template <int AT_ONCE, class F>
__device__ __forceinline__ void load_x(const Product& p, const Part<F>& part, uint32_t shared, int done) {
    const int count = min(part.chunks - done, CHUNKS), piece = threadIdx.x % 8, c = piece / 2, first = piece % 2 * 4;
#pragma unroll 1
    for (int row = threadIdx.x / 8; row < F::TOKENS; row += F::THREADS / 8) {
        const bool real = part.token + row < p.tokens;
        const uint4* from = reinterpret_cast<const uint4*>(p.x + int64_t(part.token + row) * p.columns * 64) +
                            (part.chunk + done) * 8 + piece;
        const uint32_t to = shared + row * 128 + 4 * c;
#pragma unroll 1
        for (int chunk = 0; chunk < count; chunk += AT_ONCE) {
            uint4 v[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                v[i] = make_uint4(0, 0, 0, 0);
                if (real && chunk + i < count) v[i] = __ldg(from + 8 * (chunk + i));
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (chunk + i >= count) break;
                const uint32_t image = to + (chunk + i) * F::IMAGE;
                store_shared(image + ((first + 0) ^ row % 8) * 16, v[i].x);
                store_shared(image + ((first + 1) ^ row % 8) * 16, v[i].y);
                store_shared(image + ((first + 2) ^ row % 8) * 16, v[i].z);
                store_shared(image + ((first + 3) ^ row % 8) * 16, v[i].w);
            }
        }
    }
    fence_async_shared();
}

// The second product's x: v, chunk by chunk.
template <class F>
struct Prepared {
    const Product& p;
    const Part<F>& part;
    uint32_t shared;
    __device__ __forceinline__ bool ready(int i) const {
        constexpr int OF_TILE = FIRST_ROWS / 4;  // chunks that a tile of the first product makes
        return count_of(p.ready + blockIdx.y * p.tiles + (part.chunk + i) / OF_TILE) >= FIRST_SPLITS;
    }
    __device__ __forceinline__ void ask(int i) const {
        fence_async_global();
        const uint32_t place = i % F::PLACES, full = shared + F::X_FULL + 8 * place;
        arrive_expecting(full, F::IMAGE);
        bulk_load(shared + place * F::IMAGE, p.x + (int64_t(part.chunk + i) * p.padded + part.token) * 64, F::IMAGE,
                  full, keep());
    }
    // For the first of each place, in the order in which they get ready. One warp.
    __device__ __forceinline__ void begin() const {
        const int lane = threadIdx.x % 32;
        bool waits = lane < min(part.chunks, F::PLACES);
        while (__any_sync(~0u, waits))
            if (waits && ready(lane)) ask(lane), waits = false;
    }
    // For what comes in the place of number i. One thread.
    __device__ __forceinline__ void after(int i) const {
        if (i < 0 || i + F::PLACES >= part.chunks) return;
        while (!ready(i + F::PLACES)) {}
        wait(shared + F::X_EMPTY + 8 * (i % F::PLACES), i / F::PLACES % 2);
        ask(i + F::PLACES);
    }
};

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
    wgmma_begin();
    wgmma<F::TOKENS>(d, a[0], rows);
    wgmma<F::TOKENS>(d, a[1], rows + 2);
    wgmma_commit();
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
    uint32_t place = 0, parity = 0;  // of v
    const Prepared<F> prepared{p, part, shared};
    if (!F::FIRST && warp == 0) prepared.begin();
#pragma unroll 1
    for (int done = 0, round = 0; done < part.chunks; done += CHUNKS, ++round) {
        if (round) {  // all have used what they had
            fence_async_shared();
            __syncthreads();
            ask_weights(p, part, shared, done);
            if constexpr (F::FIRST) {
                load_x<1>(p, part, shared, done);  // there are no registers for more
                __syncthreads();
            }
        }
        const int count = min(part.chunks - done, CHUNKS);
        const auto load = [&](int i) {
            if (i % 2 == 0) wait(shared + F::FULL + 4 * i, round % 2);
            return Words{load_shared16(codes_at + i * units::BYTES),
                         load_shared(scales_at + i * units::BYTES) >> 16 * q};
        };
        Words words = load(0);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const uint64_t rows = matrix(shared + (F::FIRST ? i : place) * F::IMAGE);
            decode(words.codes.x, words.codes.y, words.scales, a[0]);
            if (!F::FIRST) wait(shared + F::X_FULL + 8 * place, parity);
            multiply<F>(d, a[0], rows);
            wgmma_end_but<1>();
            hold(a[1]);
            if (!F::FIRST) {
                if (done + i) warp_arrive(shared + F::X_EMPTY + 8 * (place ? place - 1 : F::PLACES - 1));
                if (++place == F::PLACES) place = 0, parity ^= 1;
                if (threadIdx.x == 0) prepared.after(done + i - F::BEHIND);
            }
            decode(words.codes.z, words.codes.w, words.scales, a[1]);
            multiply<F>(d, a[1], rows + 4);
            // Not before: weights of the next launch shall come behind this block's.
            if (F::FIRST && threadIdx.x == 0 && done == 0 && i == max(count - 2, 0)) programmatic::trigger();
            if (i + 1 < count) words = load(i + 1);
            wgmma_end_but<1>();
            hold(a[0]);
        }
        wgmma_end();
        hold(a[1]);
    }
    pin(d);
}

// ---- sums

// Which four sums number `index` of a block's share are: of tokens 2 c and 2 c + 1 of an eighth, in rows g and g + 8 of
// group q of a unit of the block's.
template <class F>
struct Share {
    int eighth, unit, q, g, c;
    __device__ __forceinline__ Share(uint32_t rank, int index) {
        eighth = index / (32 * F::TURNS);
        const int turn = index / 32 % F::TURNS, warp = (int(rank) - eighth & F::SPLITS - 1) + F::SPLITS * turn;
        unit = warp / 2, q = warp % 2, g = index % 32 / 4, c = index % 4;
    }
};

// Sends this thread's sums to those who add them: at one time the warps send to different blocks.
template <class F>
__device__ __forceinline__ void send_sums(const float (&d)[4 * F::EIGHTS], uint32_t shared, uint32_t rank) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t at = shared + (rank * F::SHARE + warp / F::SPLITS * 32 + lane) * 16;
#pragma unroll
    for (int i = 0; i < F::EIGHTS; ++i) {
        const uint32_t to = (warp + i) % F::SPLITS;
        send(in_block(to, at + i * F::TURNS * 512), in_block(to, shared + F::SENT), d[4 * i], d[4 * i + 1],
             d[4 * i + 2], d[4 * i + 3]);
    }
}

template <class F>
__device__ __forceinline__ float4 add_up(uint32_t shared, int index) {
    float4 sum = {};
#pragma unroll
    for (int i = 0; i < F::SPLITS; ++i) {
        const uint4 v = load_shared16(shared + (i * F::SHARE + index) * 16);
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
    const uint32_t own = bf16_pair(first, second), other = __shfl_xor_sync(~0u, own, 4);
    return __byte_perm(own, other, g % 2 ? 0x3276 : 0x5410);
}

template <class F>
__global__ void __cluster_dims__(F::SPLITS, 1, 1) __launch_bounds__(BOUND)
    product(const __grid_constant__ Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // wgmma is Hopper's alone
    extern __shared__ uint8_t raw[];
    const uint32_t shared = __shfl_sync(~0u, (uint32_t(__cvta_generic_to_shared(raw)) + 1023) / 1024 * 1024, 0);
    const Part<F> part(p);
    int* const ready = p.ready + blockIdx.y * p.tiles + part.tile;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PAIRS; ++i) barrier_init(shared + F::FULL + 8 * i, 1);
        if (!F::FIRST)
            for (int i = 0; i < F::PLACES; ++i) {
                barrier_init(shared + F::X_FULL + 8 * i, 1);
                barrier_init(shared + F::X_EMPTY + 8 * i, F::WARPS);
            }
        barrier_init(shared + F::SENT, 1);
        barrier_publish();
        arrive_expecting(shared + F::SENT, F::SPLITS * F::SHARE * 16);
    }
    __syncthreads();
    if (part.chunks) ask_weights(p, part, shared, 0);
    {
        // What the end needs comes along with x. `zeroed` is used as well, so that the exchange has happened before
        // this block lets the next launch begin, which must not see the counts of a call before.
        const int token = part.token + threadIdx.x;
        const bool lists = F::FIRST && threadIdx.x < F::TOKENS && token < p.tokens;
        const int zeroed = F::FIRST && threadIdx.x == 0 && part.rank == 0 ? atomicExch(ready, 0) : 0;
        const int id = lists ? __ldg(p.ids + token) : -1;
        const float routing = lists ? __ldg(p.routing + token) : 0.f;
        const float scale = threadIdx.x == 0 ? __ldg(p.scale) : 0.f;
        if constexpr (F::FIRST) load_x<CHUNKS>(p, part, shared, 0);
        if (F::FIRST && threadIdx.x < F::TOKENS) {
            store_shared(shared + F::LIST + 8 * threadIdx.x, __float_as_uint(routing));
            store_shared(shared + F::LIST + 8 * threadIdx.x + 4, id == 0);
        }
        if (threadIdx.x == 0) {
            store_shared(shared + F::SCALE, __float_as_uint(scale * units::REST));
            if (F::FIRST) store_shared(shared + F::SCALE + 4, zeroed);
        }
    }
    __syncthreads();
    {
        float d[4 * F::EIGHTS];
#pragma unroll
        for (int i = 0; i < 4 * F::EIGHTS; ++i) d[i] = 0;
        multiply_all<F>(p, part, shared, d);
        meet_cluster_loosely();  // nobody needs x any more
        send_sums<F>(d, shared, part.rank);
    }
    wait_for_sent(shared + F::SENT);

    const float factor = __uint_as_float(load_shared(shared + F::SCALE));
    if (!F::FIRST) programmatic::wait();  // has long happened: this launch shall not end before the one ahead
#pragma unroll 1
    for (int i = threadIdx.x; i < F::SHARE; i += F::THREADS) {
        const Share<F> share(part.rank, i);
        const float4 sum = add_up<F>(shared, i);
        const int row = part.row + share.unit, mine = 2 * share.c + share.g % 2;  // mine: of an eighth, as paired()
        const int token = part.token + 8 * share.eighth + mine;
        if constexpr (F::FIRST) {
            const uint32_t list = shared + F::LIST + 8 * (8 * share.eighth + 2 * share.c);
            const float2 first = load_shared_pair(list), second = load_shared_pair(list + 8);
            const float a = activate(sum.x * factor, sum.z * factor) * first.x;
            const float b = activate(sum.y * factor, sum.w * factor) * second.x;
            const uint32_t both =
                paired(__float_as_uint(first.y) ? a : 0.f, __float_as_uint(second.y) ? b : 0.f, share.g);
            if (share.unit < part.rows) {
                const int chunk = (4 * share.q + share.g / 2) ^ mine;
                reinterpret_cast<uint32_t*>(p.out)[(int64_t(row / 4) * p.padded + token) * 32 + chunk * 4 + row % 4] =
                    both;
            }
        } else {
            const uint32_t upper = paired(sum.x * factor, sum.y * factor, share.g);
            const uint32_t lower = paired(sum.z * factor, sum.w * factor, share.g);
            if (share.unit < part.rows && token < p.tokens) {
                const int64_t at = int64_t(token) * p.rows * 32 + row * 32 + 16 * share.q;
                uint32_t* const to = reinterpret_cast<uint32_t*>(p.out + at) + share.g / 2;
                to[0] = upper, to[4] = lower;
            }
        }
    }
    if constexpr (F::FIRST) {
        __syncthreads();
        if (threadIdx.x == 0) count_up(ready);
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

template <class F>
inline cudaError_t launch(const Product& p, int tiles) {
    constexpr int bytes = F::BYTES + 1024;
    if (const cudaError_t error =
            cudaFuncSetAttribute(product<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    // Or a multiprocessor has shared memory for blocks of the one kernel alone, until they have ended.
    if (const cudaError_t error = cudaFuncSetAttribute(
            product<F>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared))
        return error;
    const dim3 grid((p.rows + F::ROWS - 1) / F::ROWS * F::SPLITS, tiles);
    if (!F::FIRST) return programmatic::launch(product<F>, grid, F::THREADS, bytes, p);
    product<F><<<grid, F::THREADS, bytes>>>(p);
    return cudaGetLastError();
}

template <int ROWS, int SPLITS, bool FIRST>
inline cudaError_t launch_for(const Product& p, const Tiling& tiling) {
    switch (tiling.eights) {
        case 2: return launch<Form<ROWS, SPLITS, 2, FIRST>>(p, tiling.tiles);
        case 4: return launch<Form<ROWS, SPLITS, 4, FIRST>>(p, tiling.tiles);
        case 6: return launch<Form<ROWS, SPLITS, 6, FIRST>>(p, tiling.tiles);
        default: return launch<Form<ROWS, SPLITS, 8, FIRST>>(p, tiling.tiles);
    }
}

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
    const int padded = tiling.padded();
    const Product first{w13_units, g13,    x,      v,          ids,         routing, ready,
                        tokens,    padded, inner / 16, hidden / 64, tiles};
    const Product second{w2_units, g2,     v,      out,         nullptr,    nullptr, ready,
                         tokens,   padded, hidden / 32, inner / 64, tiles};
    if (const cudaError_t error = launch_for<FIRST_ROWS, FIRST_SPLITS, true>(first, tiling)) return error;
    return launch_for<4, 4, false>(second, tiling);
}

}  // namespace dense
