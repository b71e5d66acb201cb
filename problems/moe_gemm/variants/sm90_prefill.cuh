// moe_gemm for many tokens: both products with wgmma, weights decoded into registers, in one persistent kernel.
//
//   route    sorts slots by expert into items (sm90_routing.cuh), and x's columns into wgmma's order
//   gather   for few tokens an expert: x's rows in the order of the slots
//   experts  128 rows of weights (units, sm90_units.cuh) a warpgroup times an item's slots, of w13 and then of w2
//   combine  adds the k rows of each token
//
// A block of `experts` takes tile after tile from a counter. A warpgroup asks for weights and rows of activations, for
// chunks of 64 columns, into a ring of stages. The others have four units each of a chunk, a warp one: it decodes half
// a unit (two steps of 16 columns, of 32 rows) into registers while the products of the half before run. N is the
// item's count, rounded up to eights. The first product's epilogue leaves silu(gate) * up * weight in the order and the
// swizzle in which the second product wants its rows in shared memory, so that these take one bulk copy a chunk. The
// second product's tiles come behind all of the first's, and wait for those of their item by a counter: blocks take
// tiles in order, so whatever a tile waits for is being worked on.
//
// Two forms. With few tokens an expert a warp mostly waits for its own instructions, so four warpgroups multiply, with
// sums for 48 slots, and the rows of the first product are gathered beforehand, into what the second product has. With
// many, two warpgroups have sums for 128, and those who ask gather the rows as they go.
//
// Sums have a fixed order: results repeat bit by bit.
#pragma once

#include "launch.cuh"
#include "ptx.cuh"
#include "sm90_routing.cuh"
#include "sm90_units.cuh"
#include "sm90_wgmma.cuh"

namespace prefill {

using namespace ptx;
using bf16 = __nv_bfloat16;

constexpr float LIMIT = 10.f, LOG2E = 1.4426950408889634f;
constexpr int HALF = 4;          // units of a warpgroup's share of a tile
constexpr int CLAIM_BEFORE = 3;  // chunks before its last a block claims its next tile: the answer takes 1 or 2

// GROUPS warpgroups multiply, for items of at most ITEM slots. SKEW: chunks by which one of two begins before the other
// so that it multiplies while that one finishes; or 0. GATHERED: rows of the first product lie as those of the second.
// Registers are a thread's, of those that ask, of those that multiply, and at the launch.
template <int GROUPS_, int ITEM_, int STAGES_, int SKEW_, bool GATHERED_, int ASK_, int MULTIPLY_, int LAUNCH_>
struct Form {
    static constexpr int GROUPS = GROUPS_, ITEM = ITEM_, STAGES = STAGES_, SKEW = SKEW_;
    static constexpr bool GATHERED = GATHERED_;
    static constexpr int ASK_REGISTERS = ASK_, MULTIPLY_REGISTERS = MULTIPLY_;
    static constexpr int THREADS = 128 * (1 + GROUPS), UNITS = HALF * GROUPS;
    static constexpr int EIGHTS = ITEM / 8;
    static_assert(ASK_ + GROUPS * MULTIPLY_ <= (1 + GROUPS) * LAUNCH_, "what a launch gives is all there is");
    static_assert((1 + GROUPS) * LAUNCH_ <= 512, "65536 for a processor");
    static_assert(SKEW < STAGES && (SKEW == 0 || GROUPS == 2), "stages are free again only behind all warpgroups");
    static_assert(ITEM % 16 == 0, "results leave in two halves");

    // Shared memory in bytes from a multiple of 1024.
    static constexpr uint32_t ROWS = 0, WEIGHTS = ITEM * 128, STAGE = WEIGHTS + UNITS * units::BYTES;  // of a stage
    static constexpr uint32_t STAGING = STAGES * STAGE, STAGED = ITEM * 128;            // of each warpgroup: results
    static constexpr uint32_t LISTS = STAGING + GROUPS * STAGED, LIST = 16 + ITEM * 4;  // scale, item stored; of slots
    static constexpr uint32_t TILES = LISTS + GROUPS * LIST;                            // Tile [2]
    static constexpr uint32_t FULL = TILES + 2 * 32, EMPTY = FULL + 8 * STAGES, TOLD = EMPTY + 8 * STAGES;
    static constexpr uint32_t HEARD = TOLD + 8 * 2, BEGUN = HEARD + 8 * 2, BYTES = BEGUN + 8;
    static_assert(STAGE % 1024 == 0 && STAGING % 1024 == 0 && STAGED % 1024 == 0, "a swizzle repeats every 1024 bytes");
    static_assert(BYTES + 1024 <= 227 * 1024, "with room to align the start");
};
using Few = Form<4, 48, 8, 0, true, 32, 112, 96>;
using Many = Form<2, 128, 7, 2, false, 56, 224, 168>;

enum { FIRST, SECOND, END };  // which product

struct Product {
    const uint8_t* units;  // [experts][rows][chunks]
    const float* scale;    // [experts]
    int rows, chunks;      // of an expert, in units
    int blocks;            // of Form::UNITS rows
};

struct Problem {
    Product product[2];
    const bf16* x;  // permuted; or gathered, [H / 64] and then like `inner`
    bf16* inner;    // [I / 64][slots in their order][64], permuted, and swizzled from each item's first slot on
    bf16* parts;    // [slots][H]
    Tables tables;
    int slots, hidden;
};

struct Tile {
    int product, expert, first, count, block, item, alone;  // first: position in the order; alone: item of its expert
};

// Turns of a ring of COUNT. With a power of two one number tells all.
template <int COUNT>
struct Turn {
    static constexpr bool POWER = (COUNT & (COUNT - 1)) == 0;
    uint32_t turns = 0, rounds = 0;
    __device__ __forceinline__ uint32_t at() const { return POWER ? turns % COUNT : turns; }
    __device__ __forceinline__ uint32_t parity() const { return POWER ? turns / COUNT % 2 : rounds; }
    __device__ __forceinline__ void next() {
        ++turns;
        if (!POWER && turns == COUNT) turns = 0, rounds ^= 1;
    }
};

// ---- tiles

// Tells the block that its tile number `turn` is the one of that index: items by blocks of rows, of w13, then of w2.
template <class F>
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
    wait(shared + F::HEARD + 8 * turn.at(), turn.parity() ^ 1);
    const uint32_t to = shared + F::TILES + 32 * turn.at();
    store_shared16(to, make_uint4(product, of.x, of.y, of.z));
    store_shared16(to + 16, make_uint4(block, item, of.w == 1, 0));
    arrive(shared + F::TOLD + 8 * turn.at());
}

// Of that number, once it is told; and that this warp has no more need to ask.
template <class F>
__device__ __forceinline__ Tile tile_of(uint32_t shared, Turn<2> turn) {
    wait(shared + F::TOLD + 8 * turn.at(), turn.parity());
    const uint32_t from = shared + F::TILES + 32 * turn.at();
    const uint4 a = load_shared16(from), b = load_shared16(from + 16);
    return Tile{int(a.x), int(a.y), int(a.z), int(a.w), int(b.x), int(b.y), int(b.z)};
}
template <class F>
__device__ __forceinline__ void heard(uint32_t shared, Turn<2>& turn) {
    warp_arrive(shared + F::HEARD + 8 * turn.at());
    turn.next();
}

// ---- the warpgroup that asks

// Until all of the first product of an item is written.
__device__ __forceinline__ void await_item(const Problem& p, int item) {
    const int wanted = p.product[SECOND].chunks;  // each is what one warpgroup leaves
#ifdef KERNEL_DEBUG
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

template <class F>
__device__ __forceinline__ void ask(const Problem& p, uint32_t shared) {
    constexpr int EACH = F::UNITS / 4;                      // units that a warp asks for
    constexpr int COPIES = F::GATHERED ? 0 : F::ITEM / 16;  // 16 bytes each, of a thread
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Of rows 16 i + 4 warp + lane / 8 of a stage this thread copies 16-byte chunk lane % 8.
    const int row = 4 * warp + lane / 8;
    const uint32_t place = row * 128 + (lane % 8 ^ row % 8) * 16;
    const uint4* const x = reinterpret_cast<const uint4*>(p.x);
    const int items = __ldcg(p.tables.head);
    int next = threadIdx.x == 0 ? atomicAdd(p.tables.head + 1, 1) : 0;  // thread 0: the block's next tile
    Turn<2> turn;
    Turn<F::STAGES> stage;
#pragma unroll 1
    while (true) {
        if (threadIdx.x == 0) tell<F>(p, shared, turn, next, items);
        const Tile tile = tile_of<F>(shared, turn);
        heard<F>(shared, turn);
        if (tile.product == END) return;
        const Product& product = p.product[tile.product];
        const int chunks = product.chunks, unit = F::UNITS * tile.block + EACH * warp;
        const int real = min(max(product.rows - unit, 0), EACH);
        const uint32_t next_unit = chunks * units::BYTES;
        const bool brings_rows = (F::GATHERED || tile.product == SECOND) && warp == 0;
        const uint32_t bytes = real * units::BYTES + (brings_rows ? tile.count * 128 : 0);  // of the warp, a chunk
        // Of each chunk a lane asks for one unit, and lane 0 of warp 0 for the rows.
        const uint8_t* weights = product.units + (int64_t(tile.expert) * product.rows + unit + lane) * next_unit;
        const uint32_t place_of = F::WEIGHTS + (EACH * warp + lane) * units::BYTES;
        const uint64_t policy = tile.alone ? keep_short() : keep();
        if (tile.product == SECOND && threadIdx.x == 0) await_item(p, tile.item);
        const bf16* rows = (tile.product == SECOND ? p.inner : p.x) + int64_t(tile.first) * 64;
        uint32_t from[COPIES + 1];  // in 16 bytes of x
        int mine = tile.product == FIRST ? tile.count - row : 0;  // row 16 i is this thread's if below
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            from[i] = 0;
            if (16 * i < mine)
                from[i] = __ldcg(p.tables.token + tile.first + row + 16 * i) * (p.hidden / 8) + lane % 8;
        }
        const int claim = max(chunks - CLAIM_BEFORE, 0);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk, stage.next()) {
            const uint32_t to = shared + stage.at() * F::STAGE, full = shared + F::FULL + 8 * stage.at();
            wait(shared + F::EMPTY + 8 * stage.at(), stage.parity() ^ 1);
            if (lane == 0) arrive_expecting(full, bytes);
            if (lane < real) bulk_load(to + place_of, weights, units::BYTES, full, policy);
            weights += units::BYTES;
            if (brings_rows) {
                if (lane == 0) bulk_load(to + F::ROWS, rows, tile.count * 128, full, keep());
                rows += int64_t(p.slots) * 64;
            }
            if constexpr (COPIES != 0) {
                asm volatile("" : "+r"(mine));  // or the comparisons move before the loop, and take registers
#pragma unroll
                for (int i = 0; i < COPIES; ++i)
                    if (16 * i < mine) copy16(to + F::ROWS + place + i * 2048, x + from[i] + 8 * chunk);
                copies_arrive(full);
            }
            if (chunk == claim && threadIdx.x == 0) next = atomicAdd(p.tables.head + 1, 1);
        }
    }
}

// ---- the warpgroups that multiply

// Or the compiler would compute it again for each use.
__device__ __forceinline__ void keep_in_registers(uint32_t& v) { asm volatile("" : "+r"(v)); }

struct Words {
    uint4 group[2];
    uint32_t scales;
};

// words, scales: where this lane's begin.
__device__ __forceinline__ Words load_unit(uint32_t words, uint32_t scales) {
    return Words{{load_shared16(words), load_shared16(words + 512)}, load_shared(scales)};
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
template <int SUMS>
__device__ __forceinline__ void pin(float (&d)[2][SUMS]) {
#pragma unroll
    for (int i = 0; i < 2 * SUMS; ++i) asm volatile("" : "+f"(d[i / SUMS][i % SUMS])::"memory");
}

// Keeps fragments where they are up to here: wgmma reads them long after it is issued.
__device__ __forceinline__ void hold(uint32_t (&a)[2][2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm volatile("" ::"r"(a[i / 2][i % 2][0]), "r"(a[i / 2][i % 2][1]), "r"(a[i / 2][i % 2][2]),
                     "r"(a[i / 2][i % 2][3])
                     : "memory");
}

template <int N, int SUMS>
__device__ __forceinline__ void multiply_rows(float (&d)[2][SUMS], const uint32_t (&a)[2][2][4], uint32_t rows) {
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        wgmma<N>(d[0], a[step][0], matrix_of(rows + 2 * step));  // 16 columns are 32 bytes
        wgmma<N>(d[1], a[step][1], matrix_of(rows + 2 * step));
    }
    wgmma_commit();
}

// For 8 (eights + 1) rows, by the bits of `eights` from SPAN / 2 down. A switch around each loop would be the obvious
// thing; but ptxas wants registers for the fragments of all loops at once, and gives up. A switch here costs a table.
template <int SPAN, int LEAST, int SUMS>
__device__ __forceinline__ void multiply_half(float (&d)[2][SUMS], const uint32_t (&a)[2][2][4], uint32_t rows,
                                              unsigned eights) {
    if constexpr (SPAN == 1) {
        multiply_rows<8 * (LEAST + 1)>(d, a, rows);
    } else if constexpr (8 * LEAST + 4 * SPAN >= 2 * SUMS) {  // there is no upper half
        multiply_half<SPAN / 2, LEAST>(d, a, rows, eights);
    } else if (eights & SPAN / 2) {
        multiply_half<SPAN / 2, LEAST + SPAN / 2>(d, a, rows, eights);
    } else {
        multiply_half<SPAN / 2, LEAST>(d, a, rows, eights);
    }
}

// d[q] += group q of the units of this warpgroup, times 8 (eights + 1) rows, over all chunks of a tile. begins: tells
// the other warpgroup once SKEW chunks are behind it.
template <class F, int SUMS>
__device__ __forceinline__ void multiply(float (&d)[2][SUMS], uint32_t shared, Turn<F::STAGES>& stage, int chunks,
                                         int unit, bool copied, unsigned eights, bool begins) {
    constexpr int SPAN = F::EIGHTS <= 8 ? 8 : 16;
    static_assert(F::EIGHTS <= 16 && SUMS == F::ITEM / 2);
    uint32_t a[2][2][2][4] = {};
    const int lane = threadIdx.x % 32;
    uint32_t words_at = shared + F::WEIGHTS + unit * units::BYTES + 16 * lane;
    uint32_t scales_at = shared + F::WEIGHTS + unit * units::BYTES + units::SCALES + 4 * lane;
    uint32_t frees = lane == 0 ? shared + F::EMPTY : 0;
    keep_in_registers(words_at), keep_in_registers(scales_at), keep_in_registers(frees);
    const auto arrived = [&] {
        const uint32_t at = stage.at();
        wait(shared + F::FULL + 8 * at, stage.parity());
        // For the writers, who would wait for what they have asked for since.
        if (!F::GATHERED && copied) fence_async_shared();
        return load_unit(words_at + at * F::STAGE, scales_at + at * F::STAGE);
    };
    Words words = arrived();
    uint32_t before = 0;  // lane 0: barrier of the stage before, or none
#pragma unroll 1
    for (int left = chunks; left > 0; --left) {
        const uint32_t at = stage.at();
        // From lane 0, so that the compiler knows it to be the same for all.
        const uint32_t rows = __shfl_sync(~0u, matrix_half(shared + F::ROWS + at * F::STAGE), 0);
        decode_half<0>(words, a[0]);
        multiply_half<SPAN, 0>(d, a[0], rows, eights);
        wgmma_end_but<1>();
        hold(a[1]);
        __syncwarp();
        if (before) arrive(before);
        before = frees ? frees + 8 * at : 0;
        decode_half<1>(words, a[1]);
        multiply_half<SPAN, 0>(d, a[1], rows + 4, eights);
        stage.next();
        if (left > 1) words = arrived();
        if (F::SKEW && begins && chunks - left == min(F::SKEW, chunks) - 1) warp_arrive(shared + F::BEGUN);
        wgmma_end_but<1>();
        hold(a[0]);
    }
    wgmma_end();
    hold(a[1]);
    pin(d);
    __syncwarp();
    if (before) arrive(before);
}

// silu(gate) * up, both clamped, times the routing weight.
__device__ __forceinline__ float activate(float gate, float up, float weight) {
    gate = fminf(gate, LIMIT), up = fminf(fmaxf(up, -LIMIT), LIMIT);
    return gate * reciprocal_fast(1.f + exp2_fast(-LOG2E * gate)) * up * weight;
}

// d of the first product -> rows of `inner` in staging. weights: of the item's slots, in shared memory.
template <int SUMS>
__device__ __forceinline__ void stage_inner(const float (&d)[2][SUMS], int count, float factor, uint32_t weights,
                                            uint32_t staging) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    // Lanes g and g ^ 1 have neighbouring channels of slots 2 c and 2 c + 1 of each eight: each takes one slot of both.
    const int mine = 2 * c + g % 2;
    const uint32_t both = g % 2 ? 0x3276 : 0x5410;
    // Channel 16 warp + 8 q + g has position 16 (2 q + g / 4) + 8 (g / 2 % 2) + 2 warp + g % 2.
    const uint32_t row = staging + mine * 128 + 4 * warp;
    const uint32_t to[2] = {row + (g / 2 ^ mine) * 16, row + ((4 + g / 2) ^ mine) * 16};
#pragma unroll
    for (int i = 0; i < SUMS / 4; ++i) {
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
template <int SUMS>
__device__ __forceinline__ void write_parts(const Problem& p, const float (&d)[2][SUMS], int count, float factor,
                                            int first, int features, uint32_t slots, uint32_t staging, int barrier) {
    constexpr int EIGHTS = SUMS / 8;  // of tokens, in half of them
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    // Rows of 128 features, 256 bytes: chunk c of row r stands at c ^ r % 8. A store has 8 rows of 32 features.
    const uint32_t to = staging + lane % 8 * 256 + ((4 * warp + lane / 8) ^ lane % 8) * 16;
    const int chunk = thread % 16, row = thread / 16;
    const uint32_t from = staging + row * 256 + (chunk ^ row) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int before = 8 * EIGHTS * half;
        if (before >= count) break;
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            if (before + 8 * i >= count) break;
            const auto pair = [&](int q, int lower) {
                const int at = 4 * (EIGHTS * half + i) + 2 * lower;
                return bf16_pair(d[q][at] * factor, d[q][at + 1] * factor);
            };
            store_transposed(to + i * 2048, pair(0, 0), pair(0, 1), pair(1, 0), pair(1, 1));
        }
        meet<128>(barrier);
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const int token = before + 8 * i + row;
            if (token >= count || 8 * chunk >= features) break;
            const uint4 v = load_shared16(from + i * 2048);
            const int64_t slot = load_shared(slots + 4 * token);
            *reinterpret_cast<uint4*>(p.parts + slot * p.hidden + first + 8 * chunk) = v;
        }
        meet<128>(barrier);  // staging and slots are read
    }
}

template <class F>
__device__ __forceinline__ void multiply_tiles(const Problem& p, uint32_t shared) {
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, barrier = 1 + group;
    const int unit = HALF * group + thread / 32;  // of a tile's
    const uint32_t staging = shared + F::STAGING + group * F::STAGED;
    const uint32_t scale = shared + F::LISTS + group * F::LIST, list = scale + 16;
    constexpr int SUMS = F::ITEM / 2;
    float d[2][SUMS];
    // Thread 0: an item of which a bulk copy may still be on its way, plus one, or none.
    const uint32_t stored = scale + 4;
    if (thread == 0) store_shared(stored, 0);
    const auto finish_store = [&] {
        if (thread != 0) return;
        const int item = int(load_shared(stored)) - 1;
        if (item < 0) return;
        bulk_stores_done();
        fence_async();
        count_up(p.tables.ready + item);
        store_shared(stored, 0);
    };
    Turn<2> turn;
    Turn<F::STAGES> stage;
    bool begins = true;
#pragma unroll 1
    while (true) {
        {
            const Tile tile = tile_of<F>(shared, turn);
            if (tile.product != FIRST) finish_store();  // this tile may wait for it
            if (tile.product == END) return;
            const bool is_first = tile.product == FIRST;
            // What the epilogue needs comes while the products run, and takes no registers.
            const void* const of = is_first ? static_cast<const void*>(p.tables.weight) : p.tables.slot;
            if (thread < tile.count) copy4(list + 4 * thread, static_cast<const int*>(of) + tile.first + thread);
            if (thread == 0) copy4(scale, p.product[tile.product].scale + tile.expert);
#pragma unroll
            for (int i = 0; i < 2 * SUMS; ++i) d[i / SUMS][i % SUMS] = 0;
            if (F::SKEW && begins && group == 1) wait(shared + F::BEGUN, 0);
            multiply<F>(d, shared, stage, p.product[tile.product].chunks, unit, is_first, unsigned(tile.count - 1) / 8,
                        begins && group == 0);
            begins = false;
        }
        // Again, instead of in registers.
        const Tile tile = tile_of<F>(shared, turn);
        heard<F>(shared, turn);
        const Product& product = p.product[tile.product];
        finish_store();  // long done: staging is free again
        copies_done();
        meet<128>(barrier);
        const float factor = __uint_as_float(load_shared(scale)) * units::REST;
        const int begin = F::UNITS * tile.block + HALF * group;  // units of rows, this warpgroup's first
        const int features = (product.rows - begin) * units::ROWS;
        if (tile.product == FIRST) {
            if (features > 0) {  // units come in fours, then
                stage_inner(d, tile.count, factor, list, staging);
                fence_async_shared();
                meet<128>(barrier);
                if (thread == 0) {
                    bf16* const to = p.inner + (int64_t(begin / HALF) * p.slots + tile.first) * 64;
                    bulk_store(to, staging, tile.count * 128);
                    store_shared(stored, tile.item + 1);
                }
            }
        } else {
            write_parts(p, d, tile.count, factor, begin * units::ROWS, features, list, staging, barrier);
        }
    }
}

// ---- kernels

template <class F>
__global__ void __launch_bounds__(F::THREADS, 1) experts(const __grid_constant__ Problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // wgmma is Hopper's alone
    extern __shared__ uint8_t raw[];
    // From lane 0, or else it would be computed again for each use.
    const uint32_t shared = __shfl_sync(~0u, (uint32_t(__cvta_generic_to_shared(raw)) + 1023) / 1024 * 1024, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < F::STAGES; ++i) {
            // Warps that ask, for their bulk copies, and all their threads if these copy.
            barrier_init(shared + F::FULL + 8 * i, 4 + (F::GATHERED ? 0 : 128));
            barrier_init(shared + F::EMPTY + 8 * i, 4 * F::GROUPS);  // warps that multiply
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared + F::TOLD + 8 * i, 1);
            barrier_init(shared + F::HEARD + 8 * i, F::THREADS / 32);
        }
        barrier_init(shared + F::BEGUN, 4);  // warps of the warpgroup that begins
        barrier_publish();
    }
    programmatic::trigger();
    __syncthreads();
    programmatic::wait();
    if (threadIdx.x < 128) {
        fewer_registers<F::ASK_REGISTERS>();
        ask<F>(p, shared);
    } else {
        more_registers<F::MULTIPLY_REGISTERS>();
        multiply_tiles<F>(p, shared);
    }
#endif
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

// Slots an expert on average up to which Few is quicker, although it takes two items where Many takes one.
constexpr int FEW_SLOTS = 64;
inline bool few(int64_t slots, int experts) { return slots <= int64_t(FEW_SLOTS) * experts; }

// What is kept while a call runs, one after the other in memory.
struct Workspace {
    bf16 *x, *inner, *parts;  // of Problem
    Tables tables;
    size_t bytes;
    Workspace(void* base, int tokens, int topk, int experts, int hidden, int inner_size) : bytes(0) {
        const size_t slots = size_t(tokens) * topk;
        const size_t items = most_items(slots, experts, few(slots, experts) ? Few::ITEM : Many::ITEM);
        const auto take = [&](size_t size) {
            const size_t at = bytes;
            bytes += (size + 255) / 256 * 256;
            return static_cast<uint8_t*>(base) + at;
        };
        x = reinterpret_cast<bf16*>(take(2 * (few(slots, experts) ? slots : tokens) * hidden));
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

template <class F>
inline int launch_experts(Problem& problem, int processors) {
    constexpr int bytes = F::BYTES + 1024;
    if (const cudaError_t error =
            cudaFuncSetAttribute(experts<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    for (Product& product : problem.product) product.blocks = (product.rows + F::UNITS - 1) / F::UNITS;
    return programmatic::launch(experts<F>, processors, F::THREADS, bytes, problem);
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
    const bool is_few = few(slots, experts);
    const int most = is_few ? Few::ITEM : Many::ITEM;

    const size_t route_bytes = route_shared_bytes(experts);
    if (const cudaError_t error =
            cudaFuncSetAttribute(route, cudaFuncAttributeMaxDynamicSharedMemorySize, int(route_bytes)))
        return error;
    const int64_t wanted = is_few ? 0 : (pieces + ROUTE_THREADS * 4 - 1) / (ROUTE_THREADS * 4);
    const int permuting = int(wanted < processors - 1 ? wanted : processors - 1);
    route<<<1 + permuting, ROUTE_THREADS, route_bytes>>>(ids, topk_weights, x, space.x, space.tables, int(slots), topk,
                                                         experts, most, pieces / 8);
    if (const cudaError_t error = cudaGetLastError()) return error;
    if (is_few) {
        const dim3 grid(unsigned(most_items(slots, experts, most)), (hidden / 64 + GATHER_CHUNKS - 1) / GATHER_CHUNKS);
        if (const cudaError_t error = programmatic::launch(gather, grid, GATHER_THREADS, 0, x, space.x, space.tables,
                                                           int(slots), hidden))
            return error;
    }

    const auto product = [](const uint8_t* of, const float* scale, int rows, int columns) {
        return Product{of, scale, rows / units::ROWS, columns / units::COLUMNS, 0};
    };
    Problem problem{{product(w13_units, g13, 2 * inner_size, hidden), product(w2_units, g2, hidden, inner_size)},
                    space.x,
                    space.inner,
                    space.parts,
                    space.tables,
                    int(slots),
                    hidden};
    if (const int error = is_few ? launch_experts<Few>(problem, processors) : launch_experts<Many>(problem, processors))
        return error;
    return programmatic::launch(combine, unsigned((pieces + COMBINE_THREADS - 1) / COMBINE_THREADS), COMBINE_THREADS, 0,
                                static_cast<const bf16*>(space.parts), ids, out, pieces, topk, experts, hidden);
}

}  // namespace prefill
