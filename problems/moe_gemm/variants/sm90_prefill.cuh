// moe_gemm for many tokens: both products with wgmma, weights decoded into registers, in one persistent kernel.
//
//   route    sorts slots by expert into items of at most 128 (sm90_routing.cuh), and x's columns into wgmma's order
//   experts  256 rows of weights (units, sm90_units.cuh) times an item's slots, of w13 and behind all these of w2
//   combine  adds the k rows of each token
//
// A block of `experts` takes tile after tile from a counter. A warpgroup asks for weights and rows of activations, for
// chunks of 64 columns, into a ring of stages. Two others have four units each of a chunk, a warp one: it decodes half
// a unit (two steps of 16 columns, of 32 rows) into registers while the products of the half before run. N is the
// item's count, rounded up to eights. The first product's epilogue leaves silu(gate) * up * weight in the order and the
// swizzle in which the second product wants its rows in shared memory, so that these take one bulk copy a chunk. The
// second product's tiles come behind all of the first's, and wait for those of their item by a counter: blocks take
// tiles in order, so whatever a tile waits for is being worked on.
//
// Sums have a fixed order: results repeat bit by bit.
#pragma once

#include "launch.cuh"
#include "sm90_prefill_ptx.cuh"
#include "sm90_routing.cuh"
#include "sm90_units.cuh"

namespace prefill {

using bf16 = __nv_bfloat16;

constexpr float LIMIT = 10.f, LOG2E = 1.4426950408889634f;
constexpr int THREADS = 384;  // a warpgroup that asks, two that multiply
constexpr int UNITS = 8, HALF = 4;  // of a tile; of a warpgroup
constexpr int STAGES = 7;
constexpr int SKEW = 2;  // chunks by which one warpgroup begins before the other: it multiplies while that one finishes
constexpr int CLAIM_BEFORE = 3;  // chunks before its last a block claims its next tile: the answer takes 1 or 2
static_assert(SKEW >= 1 && SKEW < STAGES, "stages are free again only behind both warpgroups");

// Registers a thread, of those that ask and of those that multiply.
constexpr int ASK_REGISTERS = 56, MULTIPLY_REGISTERS = 224, LAUNCH_REGISTERS = 168;
static_assert(ASK_REGISTERS + 2 * MULTIPLY_REGISTERS <= 3 * LAUNCH_REGISTERS, "what a launch gives is all there is");

// Shared memory in bytes from a multiple of 1024.
struct Layout {
    static constexpr uint32_t ROWS = 0, WEIGHTS = ITEM * 128, STAGE = WEIGHTS + UNITS * units::BYTES;  // of a stage
    static constexpr uint32_t STAGING = STAGES * STAGE, STAGED = ITEM * 128;  // of each warpgroup: results
    static constexpr uint32_t LISTS = STAGING + 2 * STAGED, LIST = ITEM * 4;  // of each: weights or slots of its tokens
    static constexpr uint32_t TILES = LISTS + 2 * LIST;                       // Tile [2]
    static constexpr uint32_t FULL = TILES + 2 * 32, EMPTY = FULL + 8 * STAGES, TOLD = EMPTY + 8 * STAGES;
    static constexpr uint32_t HEARD = TOLD + 8 * 2, BEGUN = HEARD + 8 * 2, BYTES = BEGUN + 8;
    static_assert(STAGE % 1024 == 0 && STAGING % 1024 == 0, "a swizzle repeats every 1024 bytes");
    static_assert(BYTES + 1024 <= 227 * 1024, "with room to align the start");
};

enum { FIRST, SECOND, END };  // which product

struct Product {
    const uint8_t* units;  // [experts][rows][chunks]
    const float* scale;    // [experts]
    int rows, chunks;      // of an expert, in units
    int blocks;            // of UNITS rows
};

struct Problem {
    Product product[2];
    const bf16* x;  // permuted
    bf16* inner;    // [I / 64][slots in their order][64], permuted, and swizzled from each item's first slot on
    bf16* parts;    // [slots][H]
    Tables tables;
    int slots, hidden;
};

struct Tile {
    int product, expert, first, count, block, item, alone;  // first: position in the order; alone: item of its expert
};

// Turns of a ring of COUNT.
template <int COUNT>
struct Turn {
    uint32_t at = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++at == COUNT) at = 0, parity ^= 1;
    }
};

// ---- tiles

// Tells the block that its tile number `turn` is the one of that index: items by blocks of rows, of w13, then of w2.
__device__ __forceinline__ void tell(const Problem& p, uint32_t shared, Turn<2> turn, unsigned index, unsigned items) {
    int product = FIRST;
    unsigned blocks = p.product[FIRST].blocks;
    if (index >= items * blocks) {
        index -= items * blocks;
        blocks = p.product[SECOND].blocks;
        product = index < items * blocks ? SECOND : END;
    }
    const unsigned item = product == END ? 0 : index / blocks, block = index - item * blocks;
    const int4 of = product == END ? make_int4(0, 0, 0, 0) : __ldcg(p.tables.items + item);
    wait(shared + Layout::HEARD + 8 * turn.at, turn.parity ^ 1);
    const uint32_t to = shared + Layout::TILES + 32 * turn.at;
    store_shared16(to, product, of.x, of.y, of.z);
    store_shared16(to + 16, block, item, of.w == 1, 0);
    arrive(shared + Layout::TOLD + 8 * turn.at);
}

__device__ __forceinline__ Tile hear(uint32_t shared, Turn<2> turn) {
    wait(shared + Layout::TOLD + 8 * turn.at, turn.parity);
    const uint32_t from = shared + Layout::TILES + 32 * turn.at;
    const uint4 a = load_shared16(from), b = load_shared16(from + 16);
    warp_arrive(shared + Layout::HEARD + 8 * turn.at);
    return Tile{int(a.x), int(a.y), int(a.z), int(a.w), int(b.x), int(b.y), int(b.z)};
}

// ---- the warpgroup that asks

// Until all of the first product of an item is written.
__device__ __forceinline__ void await_item(const Problem& p, int item) {
    const int wanted = p.product[SECOND].chunks;  // each is what one warpgroup leaves
#ifdef MOE_DEBUG
    for (int tries = 0; count_of(p.tables.ready + item) < wanted; __nanosleep(100))
        if (++tries == 1 << 20) {
            printf("block %d waits in vain for item %d\n", blockIdx.x, item);
            break;
        }
#else
    while (count_of(p.tables.ready + item) < wanted) __nanosleep(100);
#endif
    fence_async();
}

__device__ __forceinline__ void ask(const Problem& p, uint32_t shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Of rows 16 i + 4 warp + lane / 8 of a stage this thread copies 16-byte chunk lane % 8.
    const int row = 4 * warp + lane / 8;
    const uint32_t place = row * 128 + (lane % 8 ^ row % 8) * 16;
    const uint4* const x = reinterpret_cast<const uint4*>(p.x);
    const int items = __ldcg(p.tables.head);
    int next = threadIdx.x == 0 ? atomicAdd(p.tables.head + 1, 1) : 0;  // thread 0: the block's next tile
    Turn<2> turn;
    Turn<STAGES> stage;
#pragma unroll 1
    while (true) {
        if (threadIdx.x == 0) tell(p, shared, turn, next, items);
        const Tile tile = hear(shared, turn);
        turn.next();
        if (tile.product == END) return;
        const Product& product = p.product[tile.product];
        const int chunks = product.chunks, unit = UNITS * tile.block + 2 * warp;  // this warp asks for it and the next
        const bool real = unit < product.rows;                                    // rows are even
        const uint32_t next_unit = chunks * units::BYTES;
        const uint8_t* weights = product.units + (int64_t(tile.expert) * product.rows + unit) * next_unit;
        const uint64_t policy = tile.alone ? keep_short() : keep();
        const bool brings_rows = tile.product == SECOND && threadIdx.x == 0;
        if (brings_rows) await_item(p, tile.item);
        const uint32_t bytes = (real ? 2 * units::BYTES : 0) + (brings_rows ? tile.count * 128 : 0);
        uint32_t from[ITEM / 16];  // in 16 bytes of x
        int mine = tile.product == FIRST ? tile.count - row : 0;  // row 16 i is this thread's if below
#pragma unroll
        for (int i = 0; i < ITEM / 16; ++i) {
            from[i] = 0;
            if (16 * i < mine)
                from[i] = __ldcg(p.tables.token + tile.first + row + 16 * i) * (p.hidden / 8) + lane % 8;
        }
        const int claim = max(chunks - CLAIM_BEFORE, 0);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk, stage.next()) {
            const uint32_t to = shared + stage.at * Layout::STAGE, full = shared + Layout::FULL + 8 * stage.at;
            wait(shared + Layout::EMPTY + 8 * stage.at, stage.parity ^ 1);
            if (lane == 0) {
                arrive_expecting(full, bytes);
                if (real) {
                    const uint32_t at = to + Layout::WEIGHTS + 2 * warp * units::BYTES;
                    bulk_load(at, weights, units::BYTES, full, policy);
                    bulk_load(at + units::BYTES, weights + next_unit, units::BYTES, full, policy);
                    weights += units::BYTES;
                }
                if (brings_rows)
                    bulk_load(to + Layout::ROWS, p.inner + (int64_t(chunk) * p.slots + tile.first) * 64,
                              tile.count * 128, full, keep());
            }
            asm volatile("" : "+r"(mine));  // or the comparisons move before the loop, and take registers
#pragma unroll
            for (int i = 0; i < ITEM / 16; ++i)
                if (16 * i < mine) copy16(to + Layout::ROWS + place + i * 2048, x + from[i] + 8 * chunk);
            copies_arrive(full);
            if (chunk == claim && threadIdx.x == 0) next = atomicAdd(p.tables.head + 1, 1);
        }
    }
}

// ---- the warpgroups that multiply

struct Words {
    uint4 group[2];
    uint32_t scales;
};

__device__ __forceinline__ Words load_unit(uint32_t unit) {
    const int lane = threadIdx.x % 32;
    return Words{{load_shared16(unit + 16 * lane), load_shared16(unit + 512 + 16 * lane)},
                 load_shared(unit + units::SCALES + 4 * lane)};
}

// a[step][group]: fragments of steps 2 HALF and one on.
template <int SECOND_HALF>
__device__ __forceinline__ void decode_half(const Words& words, uint32_t (&a)[2][2][4]) {
    const uint32_t scale[2][2] = {{units::scale<0>(words.scales), units::scale<1>(words.scales)},
                                  {units::scale<2>(words.scales), units::scale<3>(words.scales)}};
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        uint32_t upper[4], lower[4];
        units::decode(SECOND_HALF ? words.group[q].z : words.group[q].x, scale[q][0], upper);
        units::decode(SECOND_HALF ? words.group[q].w : words.group[q].y, scale[q][1], lower);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            a[step][q][0] = upper[2 * step], a[step][q][1] = lower[2 * step];
            a[step][q][2] = upper[2 * step + 1], a[step][q][3] = lower[2 * step + 1];
        }
    }
}

// Sums are what wgmma made of them only from here on.
__device__ __forceinline__ void pin(float (&d)[2][64]) {
#pragma unroll
    for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i / 64][i % 64])::"memory");
}

// Keeps fragments where they are up to here: wgmma reads them long after it is issued.
__device__ __forceinline__ void hold(uint32_t (&a)[2][2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm volatile("" ::"r"(a[i / 2][i % 2][0]), "r"(a[i / 2][i % 2][1]), "r"(a[i / 2][i % 2][2]),
                     "r"(a[i / 2][i % 2][3])
                     : "memory");
}

template <int N>
__device__ __forceinline__ void multiply_rows(float (&d)[2][64], const uint32_t (&a)[2][2][4], uint64_t rows) {
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        wgmma<N>(d[0], a[step][0], rows + 2 * step);  // 16 columns are 32 bytes
        wgmma<N>(d[1], a[step][1], rows + 2 * step);
    }
    wgmma_commit();
}

// For 8 (eights + 1) rows, by the bits of `eights` from SPAN / 2 down. A switch around each loop would be the obvious
// thing; but ptxas wants registers for the fragments of all loops at once, and gives up. A switch here costs a table.
template <int SPAN, int LEAST>
__device__ __forceinline__ void multiply_half(float (&d)[2][64], const uint32_t (&a)[2][2][4], uint64_t rows,
                                              unsigned eights) {
    if constexpr (SPAN == 1) {
        multiply_rows<8 * (LEAST + 1)>(d, a, rows);
    } else if (eights & SPAN / 2) {
        multiply_half<SPAN / 2, LEAST + SPAN / 2>(d, a, rows, eights);
    } else {
        multiply_half<SPAN / 2, LEAST>(d, a, rows, eights);
    }
}

// d[q] += group q of the units of this warpgroup, times 8 (eights + 1) rows, over all chunks of a tile. begins: tells
// the other warpgroup once SKEW chunks are behind it.
__device__ __forceinline__ void multiply(float (&d)[2][64], uint32_t shared, Turn<STAGES>& stage, int chunks, int unit,
                                         bool copied, unsigned eights, bool begins) {
    uint32_t a[2][2][2][4] = {};
    const uint32_t weights = shared + Layout::WEIGHTS + unit * units::BYTES;
    const auto arrived = [&] {
        wait(shared + Layout::FULL + 8 * stage.at, stage.parity);
        if (copied) fence_async_shared();  // for the writers, who would wait for what they have asked for since
        return load_unit(weights + stage.at * Layout::STAGE);
    };
    Words words = arrived();
    uint32_t before = 0;  // barrier of the stage before, or none
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const uint64_t rows = matrix(shared + stage.at * Layout::STAGE + Layout::ROWS);
        decode_half<0>(words, a[0]);
        multiply_half<ITEM / 8, 0>(d, a[0], rows, eights);
        wgmma_end_but<1>();
        hold(a[1]);
        if (before) warp_arrive(before);
        before = shared + Layout::EMPTY + 8 * stage.at;
        decode_half<1>(words, a[1]);
        multiply_half<ITEM / 8, 0>(d, a[1], rows + 4, eights);
        stage.next();
        if (chunk + 1 < chunks) words = arrived();
        if (begins && chunk == min(SKEW, chunks) - 1) warp_arrive(shared + Layout::BEGUN);
        wgmma_end_but<1>();
        hold(a[0]);
    }
    wgmma_end_but<0>();
    hold(a[1]);
    pin(d);
    warp_arrive(before);
}

// silu(gate) * up, both clamped, times the routing weight.
__device__ __forceinline__ float activate(float gate, float up, float weight) {
    gate = fminf(gate, LIMIT), up = fminf(fmaxf(up, -LIMIT), LIMIT);
    return gate * reciprocal_fast(1.f + exp2_fast(-LOG2E * gate)) * up * weight;
}

// d of the first product -> rows of `inner` in staging. weights: of the item's slots, in shared memory.
__device__ __forceinline__ void stage_inner(const float (&d)[2][64], int count, float factor, uint32_t weights,
                                            uint32_t staging) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    // Lanes g and g ^ 1 have neighbouring channels of slots 2 c and 2 c + 1 of each eight: each takes one slot of both.
    const int mine = 2 * c + g % 2;
    const uint32_t both = g % 2 ? 0x3276 : 0x5410;
    // Channel 16 warp + 8 q + g has position 16 (2 q + g / 4) + 8 (g / 2 % 2) + 2 warp + g % 2.
    const uint32_t row = staging + mine * 128 + 4 * warp;
    const uint32_t to[2] = {row + (g / 2 ^ mine) * 16, row + ((4 + g / 2) ^ mine) * 16};
#pragma unroll
    for (int i = 0; i < ITEM / 8; ++i) {
        if (8 * i >= count) break;
        const float2 weight = load_shared_pair(weights + 4 * (8 * i + 2 * c));
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const float a = activate(d[q][4 * i] * factor, d[q][4 * i + 2] * factor, weight.x);
            const float b = activate(d[q][4 * i + 1] * factor, d[q][4 * i + 3] * factor, weight.y);
            const uint32_t own = bf16_pair(a, b), other = __shfl_xor_sync(~0u, own, 4);
            store_shared(to[q] + i * 1024, __byte_perm(own, other, both));
        }
    }
}

// d of the second product, 128 features -> parts, by way of staging, half of the tokens at a time. slots: of the item,
// in shared memory. features: that exist, of this warpgroup's, from `first` on.
__device__ __forceinline__ void write_parts(const Problem& p, const float (&d)[2][64], int count, float factor,
                                            int first, int features, uint32_t slots, uint32_t staging, int barrier) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    // Rows of 128 features, 256 bytes: chunk c of row r stands at c ^ r % 8. A store has 8 rows of 32 features.
    const uint32_t to = staging + lane % 8 * 256 + ((4 * warp + lane / 8) ^ lane % 8) * 16;
    const int chunk = thread % 16, row = thread / 16;
    const uint32_t from = staging + row * 256 + (chunk ^ row) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int before = 64 * half;
        if (before >= count) break;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (before + 8 * i >= count) break;
            const auto pair = [&](int q, int lower) {
                const int at = 4 * (8 * half + i) + 2 * lower;
                return bf16_pair(d[q][at] * factor, d[q][at + 1] * factor);
            };
            store_transposed(to + i * 2048, pair(0, 0), pair(0, 1), pair(1, 0), pair(1, 1));
        }
        meet(barrier);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int token = before + 8 * i + row;
            if (token >= count || 8 * chunk >= features) break;
            const uint4 v = load_shared16(from + i * 2048);
            const int64_t slot = load_shared(slots + 4 * token);
            *reinterpret_cast<uint4*>(p.parts + slot * p.hidden + first + 8 * chunk) = v;
        }
        meet(barrier);  // staging and slots are read
    }
}

__device__ __forceinline__ void multiply_tiles(const Problem& p, uint32_t shared) {
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, barrier = 1 + group;
    const int unit = HALF * group + thread / 32;  // of a tile's
    const uint32_t staging = shared + Layout::STAGING + group * Layout::STAGED;
    const uint32_t list = shared + Layout::LISTS + group * Layout::LIST;
    int stored = -1;  // thread 0: an item of which a bulk copy may still be on its way
    const auto finish_store = [&] {
        if (stored < 0) return;
        bulk_stores_done();
        fence_async();
        count_up(p.tables.ready + stored);
        stored = -1;
    };
    Turn<2> turn;
    Turn<STAGES> stage;
    bool begins = true;
#pragma unroll 1
    while (true) {
        const Tile tile = hear(shared, turn);
        turn.next();
        if (tile.product != FIRST) finish_store();  // this tile may wait for it
        if (tile.product == END) return;
        const Product& product = p.product[tile.product];
        const int position = tile.first + thread;
        const bool is_first = tile.product == FIRST;
        int listed = 0;  // of slot number `thread` of the item
        if (thread < tile.count)
            listed = __ldcg(is_first ? reinterpret_cast<const int*>(p.tables.weight) + position
                                     : p.tables.slot + position);
        const float factor = __ldg(product.scale + tile.expert) * units::REST;

        float d[2][64];
#pragma unroll
        for (int i = 0; i < 128; ++i) d[i / 64][i % 64] = 0;
        if (begins && group == 1) wait(shared + Layout::BEGUN, 0);
        multiply(d, shared, stage, product.chunks, unit, is_first, unsigned(tile.count - 1) / 8, begins && group == 0);
        begins = false;

        finish_store();  // long done: staging is free again
        store_shared(list + 4 * thread, listed);
        meet(barrier);
        const int begin = UNITS * tile.block + HALF * group;  // units of rows, this warpgroup's first
        const int features = (product.rows - begin) * units::ROWS;
        if (is_first) {
            if (features > 0) {  // units come in fours, then
                stage_inner(d, tile.count, factor, list, staging);
                fence_async_shared();
                meet(barrier);
                if (thread == 0) {
                    bf16* const to = p.inner + (int64_t(begin / HALF) * p.slots + tile.first) * 64;
                    bulk_store(to, staging, tile.count * 128);
                    stored = tile.item;
                }
            }
        } else {
            write_parts(p, d, tile.count, factor, begin * units::ROWS, features, list, staging, barrier);
        }
    }
}

// ---- kernels

__global__ void __launch_bounds__(THREADS, 1) experts(const __grid_constant__ Problem p) {
    extern __shared__ uint8_t raw[];
    // From lane 0, or else it would be computed again for each use.
    const uint32_t shared = __shfl_sync(~0u, (uint32_t(__cvta_generic_to_shared(raw)) + 1023) / 1024 * 1024, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared + Layout::FULL + 8 * i, 128 + 4);  // threads that ask, and their warps' bulk copies
            barrier_init(shared + Layout::EMPTY + 8 * i, 8);       // warps that multiply
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared + Layout::TOLD + 8 * i, 1);
            barrier_init(shared + Layout::HEARD + 8 * i, THREADS / 32);
        }
        barrier_init(shared + Layout::BEGUN, 4);  // warps of the warpgroup that begins
        barrier_publish();
    }
    programmatic::trigger();
    __syncthreads();
    programmatic::wait();
    if (threadIdx.x < 128) {
        fewer_registers<ASK_REGISTERS>();
        ask(p, shared);
    } else {
        more_registers<MULTIPLY_REGISTERS>();
        multiply_tiles(p, shared);
    }
}

constexpr int COMBINE_THREADS = 256, COMBINE_AT_ONCE = 6;

// out[t] = the sum of parts[t k + j] in the order of j. A thread has 8 columns.
__global__ void __launch_bounds__(COMBINE_THREADS)
    combine(const bf16* parts, const int* ids, bf16* out, int64_t pieces, int topk, int experts, int hidden) {
    programmatic::wait();
    const int64_t piece = int64_t(blockIdx.x) * COMBINE_THREADS + threadIdx.x;
    if (piece >= pieces) return;
    const int64_t token = piece / (hidden / 8);
    const int column = int(piece % (hidden / 8));
    const uint4* const from = reinterpret_cast<const uint4*>(parts) + token * topk * (hidden / 8) + column;
    float sum[8] = {};
#pragma unroll 1
    for (int first = 0; first < topk; first += COMBINE_AT_ONCE) {
        uint4 v[COMBINE_AT_ONCE];
#pragma unroll
        for (int j = 0; j < COMBINE_AT_ONCE; ++j) {
            v[j] = make_uint4(0, 0, 0, 0);
            // What is no expert has left its row as it was.
            if (first + j < topk && unsigned(__ldg(ids + token * topk + first + j)) < unsigned(experts))
                v[j] = __ldcg(from + int64_t(first + j) * (hidden / 8));
        }
#pragma unroll
        for (int j = 0; j < COMBINE_AT_ONCE; ++j) {
            const uint32_t words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[2 * i] += __uint_as_float(words[i] << 16);
                sum[2 * i + 1] += __uint_as_float(words[i] & 0xFFFF0000);
            }
        }
    }
    reinterpret_cast<uint4*>(out)[piece] = make_uint4(bf16_pair(sum[0], sum[1]), bf16_pair(sum[2], sum[3]),
                                                      bf16_pair(sum[4], sum[5]), bf16_pair(sum[6], sum[7]));
}

// ---- launches

// What is kept while a call runs, one after the other in memory.
struct Workspace {
    bf16 *permuted, *inner, *parts;
    Tables tables;
    size_t bytes;
    Workspace(void* base, int tokens, int topk, int experts, int hidden, int inner_size) : bytes(0) {
        const size_t slots = size_t(tokens) * topk, items = most_items(slots, experts);
        const auto take = [&](size_t size) {
            const size_t at = bytes;
            bytes += (size + 255) / 256 * 256;
            return static_cast<uint8_t*>(base) + at;
        };
        permuted = reinterpret_cast<bf16*>(take(2 * size_t(tokens) * hidden));
        inner = reinterpret_cast<bf16*>(take(2 * slots * inner_size));
        parts = reinterpret_cast<bf16*>(take(2 * slots * hidden));
        tables.slot = reinterpret_cast<int*>(take(4 * slots));
        tables.token = reinterpret_cast<int*>(take(4 * slots));
        tables.weight = reinterpret_cast<float*>(take(4 * slots));
        tables.items = reinterpret_cast<int4*>(take(16 * items));
        tables.ready = reinterpret_cast<int*>(take(4 * items));
        tables.head = reinterpret_cast<int*>(take(8));
    }
};

// Bytes that run() needs, at a multiple of 256. Their content may be anything.
inline size_t workspace(int tokens, int topk, int experts, int hidden, int inner_size) {
    return Workspace(nullptr, tokens, topk, experts, hidden, inner_size).bytes;
}

// T tokens, E experts of k for each; H, I multiples of 64. w13: units [E][2 I / 32][H / 64], w2: [E][H / 32][I / 64];
// g13, g2 fp32 (E,); x, out bf16 (T, H); ids int32, topk_weights fp32 (T, k). -> a cudaError_t.
inline int run(const uint8_t* w13_units, const float* g13, const uint8_t* w2_units, const float* g2, const bf16* x,
               const int* ids, const float* topk_weights, bf16* out, void* workspace, int tokens, int topk, int experts,
               int hidden, int inner_size) {
    const int64_t slots = int64_t(tokens) * topk, pieces = int64_t(tokens) * hidden / 8;
    if (experts > ROUTE_EXPERTS || slots >= 1 << 30 || pieces >= int64_t(1) << 31) return cudaErrorInvalidValue;
    int device, processors;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device))
        return error;
    const Workspace space(workspace, tokens, topk, experts, hidden, inner_size);

    const size_t route_bytes = route_shared_bytes(experts);
    if (const cudaError_t error =
            cudaFuncSetAttribute(route, cudaFuncAttributeMaxDynamicSharedMemorySize, int(route_bytes)))
        return error;
    const int64_t wanted = (pieces + ROUTE_THREADS * 4 - 1) / (ROUTE_THREADS * 4);
    const int permuting = int(wanted < processors - 1 ? wanted : processors - 1);
    route<<<1 + permuting, ROUTE_THREADS, route_bytes>>>(ids, topk_weights, x, space.permuted, space.tables, int(slots),
                                                         topk, experts, pieces / 8);
    if (const cudaError_t error = cudaGetLastError()) return error;

    constexpr int bytes = Layout::BYTES + 1024;
    if (const cudaError_t error =
            cudaFuncSetAttribute(prefill::experts, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    const auto product = [](const uint8_t* of, const float* scale, int rows, int columns) {
        const int in_units = rows / units::ROWS;
        return Product{of, scale, in_units, columns / units::COLUMNS, (in_units + UNITS - 1) / UNITS};
    };
    const Problem problem{{product(w13_units, g13, 2 * inner_size, hidden), product(w2_units, g2, hidden, inner_size)},
                          space.permuted,
                          space.inner,
                          space.parts,
                          space.tables,
                          int(slots),
                          hidden};
    if (const cudaError_t error = programmatic::launch(prefill::experts, processors, THREADS, bytes, problem))
        return error;
    return programmatic::launch(combine, unsigned((pieces + COMBINE_THREADS - 1) / COMBINE_THREADS), COMBINE_THREADS, 0,
                                static_cast<const bf16*>(space.parts), ids, out, pieces, topk, experts, hidden);
}

}  // namespace prefill
