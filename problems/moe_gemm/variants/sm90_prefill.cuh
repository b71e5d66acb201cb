// moe_gemm for many tokens: both products with wgmma, weights decoded into registers, in a persistent kernel.
//
//   route    sorts slots by expert into two lists of items (sm90_routing.cuh)
//   gather   x's rows, quantised, in the order of the slots, their columns in wgmma's, as the second product has them
//   experts  weights (units, nvfp4_units.cuh) times an item's slots, of w13 and then of w2; once for each list
//   combine  adds the k rows of each token (sm90_prefill_run.cuh, as the launches)
//
// A block of `experts` takes tile after tile from a counter: some 64 rows of weights for each of four warpgroups. A
// fifth asks for weights and rows of activations, for chunks of 64 columns, into a ring of stages. A warp of the others
// decodes its rows of a chunk into registers, issues the chunk's products, and waits for them before it decodes again:
// meanwhile those of the other warpgroups run. N is the item's count, rounded up to eights. The first product's
// epilogue leaves silu(gate) * up * weight in the order and the swizzle in which the second product wants its rows in
// shared memory, so that these take one bulk copy a chunk. The second product's tiles come behind all of the first's,
// and wait for those of their item by a counter: blocks take tiles in order, so whatever a tile waits for is being
// worked on.
//
// Two forms, one for each list. With few slots decoding is most of the work, so a warp has 32 rows, for experts of up
// to 48; with many, registers for the sums are the limit: 16 rows, for items of up to 128. Two items of the first would
// decode an expert's weights twice, and take longer than one of the second.
//
// Sums have a fixed order: results repeat bit by bit.
#pragma once

#include "launch.cuh"
#include "ptx.cuh"
#include "sm90_routing.cuh"
#include "nvfp4_units.cuh"
#include "sm90_wgmma.cuh"
#include "tma.cuh"

namespace prefill {

using namespace ptx;
using bf16 = __nv_bfloat16;

constexpr float LIMIT = 10.f, LOG2E = 1.4426950408889634f;
constexpr int BOX = 8;                   // unit rows that one copy brings
constexpr int WORDS = units::BYTES / 8;  // elements of a unit in the tensor map
constexpr int TEAM_UNITS = 4;    // of a team's share of a tile: 64 channels of the first product
constexpr int CLAIM_BEFORE = 3;  // chunks before its last a block claims its next tile: the answer takes 1 or 2

// GROUPS warpgroups multiply, a warp 16 PARTS rows, for items of at most BLOCK_N slots. Registers are a thread's, of
// those that load, of those that multiply, and at the launch. v leaves as ACTIVATION has it: WARPS warps have a block,
// or group of FP8, of its channels; with FP8 two teams meet where else each meets by itself.
template <int ACTIVATION_, int PARTS_, int BLOCK_N_, int NUM_STAGES_>
struct Form {
    static constexpr int GROUPS = 4, PARTS = PARTS_, BLOCK_N = BLOCK_N_, NUM_STAGES = NUM_STAGES_;
    static constexpr int ACTIVATION = ACTIVATION_, WARPS = (ACTIVATION == FP8 ? 16 : 2) / PARTS,
                         TEAMS = ACTIVATION == FP8 ? 2 : 1;
    static constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = 112, LAUNCH_REGISTERS = 96;
    static constexpr int NUM_THREADS = 128 * (1 + GROUPS);
    static constexpr int SHARE = 2 * PARTS, UNITS = SHARE * GROUPS;  // of a warpgroup, of a tile
    static_assert(UNITS % BOX == 0);
    static constexpr int TEAM = TEAM_UNITS / SHARE;                                                // warpgroups
    static constexpr int EIGHTS = BLOCK_N / 8, SUMS = BLOCK_N / 2;  // sums of a thread, for each 16 of its warp's rows
    static_assert(PRODUCER_REGISTERS + GROUPS * CONSUMER_REGISTERS <= (1 + GROUPS) * LAUNCH_REGISTERS, "of the launch");
    static_assert((1 + GROUPS) * LAUNCH_REGISTERS <= 512, "65536 for a processor");
    static_assert(PARTS == 1 || PARTS == 2, "a unit has two");
    static_assert(BLOCK_N % 32 == 0 || PARTS == 2 && BLOCK_N % 16 == 0, "results leave in two halves");

    // Shared memory in bytes from a multiple of 1024.
    // In a stage: B, rows of activations; A, units of weights. D: results of each warpgroup. List: scale, item, slots.
    static constexpr uint32_t SMEM_B = 0, SMEM_A = BLOCK_N * 128, STAGE_BYTES = SMEM_A + UNITS * units::BYTES;
    static constexpr uint32_t SMEM_D = NUM_STAGES * STAGE_BYTES, D_BYTES = BLOCK_N * 64 * PARTS;
    static constexpr uint32_t LISTS = SMEM_D + GROUPS * D_BYTES, LIST = 16 + BLOCK_N * 4;
    // Largest magnitudes of v, of each warp, where several have a block: a word a pair of slots.
    static constexpr uint32_t LARGEST = LISTS + GROUPS * LIST, LARGEST_WORDS = (EIGHTS + 7) / 8,
                              LARGEST_BYTES = ACTIVATION != BF16 && WARPS > 1 ? LARGEST_WORDS * 128 : 0;
    static constexpr uint32_t TILES = LARGEST + GROUPS * 4 * LARGEST_BYTES;             // Tile [2]
    static constexpr uint32_t FULL_BARRIERS = TILES + 2 * 32, EMPTY_BARRIERS = FULL_BARRIERS + 8 * NUM_STAGES,
                              TILE_FULL_BARRIERS = EMPTY_BARRIERS + 8 * NUM_STAGES;
    static constexpr uint32_t TILE_EMPTY_BARRIERS = TILE_FULL_BARRIERS + 8 * 2, BYTES = TILE_EMPTY_BARRIERS + 8 * 2;
    static_assert(STAGE_BYTES % 1024 == 0 && SMEM_D % 1024 == 0 && D_BYTES % 1024 == 0,
                  "a swizzle repeats every 1024 bytes");
    static_assert(BYTES + 1024 <= 227 * 1024, "with room to align the start");
};
template <int ACTIVATION = BF16>
using Few = Form<ACTIVATION, 2, 48, 8>;
template <int ACTIVATION = BF16>
using Many = Form<ACTIVATION, 1, 128, 7>;

enum { FIRST, SECOND, END };  // which product

struct Product {
    CUtensorMap units;   // [experts][rows][chunks units], in boxes of BOX rows by one unit
    const float *scale, *in_scale;  // [experts]; in_scale: of NVFP4, of the activations
    int rows, chunks;    // of an expert, in units
    int blocks;          // of Form::UNITS rows
};

struct Problem {
    Product product[2];
    const bf16* x;  // gathered, [H / 64] and then like `inner`
    bf16* inner;    // [I / 64][slots in their order][64], permuted, and swizzled from each item's first slot on
    bf16* parts;    // [slots][H]
    Tables tables;
    List list;      // whose items this launch has
    int slots, hidden;
};

struct Tile {
    int product, expert, first, count, block, item, alone;  // first: position in the order; alone: item of its expert
};

// Position in a ring of COUNT stages. With a power of two one number tells all.
template <int COUNT>
struct PipelineState {
    static constexpr bool POWER = (COUNT & (COUNT - 1)) == 0;
    uint32_t turns = 0, rounds = 0;
    __device__ __forceinline__ uint32_t index() const { return POWER ? turns % COUNT : turns; }
    __device__ __forceinline__ uint32_t phase() const { return POWER ? turns / COUNT % 2 : rounds; }
    __device__ __forceinline__ void advance() {
        ++turns;
        if (!POWER && turns == COUNT) turns = 0, rounds ^= 1;
    }
};

// ---- tiles

// Publish the block's next tile, which is the one of that index: items by blocks of rows, of w13, then of w2.
template <class F>
__device__ __forceinline__ Tile publish_tile(const Problem& p, uint32_t smem, PipelineState<2> turn, unsigned index,
                                             unsigned items) {
    int product = FIRST;
    unsigned blocks = p.product[FIRST].blocks;
    if (index >= items * blocks) {
        index -= items * blocks;
        blocks = p.product[SECOND].blocks;
        product = index < items * blocks ? SECOND : END;
    }
    const unsigned item = product == END ? 0 : index / blocks, block = index - item * blocks;
    const int4 of = product == END ? make_int4(0, 0, 0, 0) : __ldcg(p.list.items + item);
    wait(smem + F::TILE_EMPTY_BARRIERS + 8 * turn.index(), turn.phase() ^ 1);
    const uint32_t to = smem + F::TILES + 32 * turn.index();
    store_shared16(to, make_uint4(product, of.x, of.y, of.z));
    store_shared16(to + 16, make_uint4(block, item, of.w == 1, 0));
    arrive(smem + F::TILE_FULL_BARRIERS + 8 * turn.index());
    return Tile{product, of.x, of.y, of.z, int(block), int(item), of.w == 1};
}

// Return the tile once it is published; release_tile: this warp does not read it again.
template <class F>
__device__ __forceinline__ Tile read_tile(uint32_t smem, PipelineState<2> turn) {
    wait(smem + F::TILE_FULL_BARRIERS + 8 * turn.index(), turn.phase());
    const uint32_t from = smem + F::TILES + 32 * turn.index();
    const uint4 a = load_shared16(from), b = load_shared16(from + 16);
    return Tile{int(a.x), int(a.y), int(a.z), int(a.w), int(b.x), int(b.y), int(b.z)};
}
template <class F>
__device__ __forceinline__ void release_tile(uint32_t smem, PipelineState<2>& turn) {
    warp_arrive(smem + F::TILE_EMPTY_BARRIERS + 8 * turn.index());
    turn.advance();
}

// ---- producer: one thread

// Until all of the first product of an item is written.
__device__ __forceinline__ void await_item(const Problem& p, int item) {
    const int wanted = p.product[SECOND].chunks;  // each is what one team leaves
#ifdef KERNEL_DEBUG
    for (int tries = 0; ld_acquire(p.list.ready + item) < wanted; __nanosleep(100))
        if (++tries == 1 << 20) {
            printf("block %d waits in vain for item %d\n", blockIdx.x, item);
            break;
        }
#else
    while (ld_acquire(p.list.ready + item) < wanted) __nanosleep(100);
#endif
    fence_proxy_async();
}

template <class F>
__device__ __forceinline__ void producer(const Problem& p, uint32_t smem) {
    const int items = __ldcg(p.list.head);
    int next = atomicAdd(p.list.head + 1, 1);  // the block's next tile
    PipelineState<2> turn;
    PipelineState<F::NUM_STAGES> stage;
#pragma unroll 1
    while (true) {
        const Tile tile = publish_tile<F>(p, smem, turn, next, items);
        turn.advance();
        if (tile.product == END) return;
        const Product& product = p.product[tile.product];
        const uint64_t policy = tile.alone ? l2_evict_first() : l2_evict_normal();
        if (tile.product == SECOND) await_item(p, tile.item);
        const bf16* rows = (tile.product == SECOND ? p.inner : p.x) + int64_t(tile.first) * 64;
        const int claim = max(product.chunks - CLAIM_BEFORE, 0);
#pragma unroll 1
        for (int chunk = 0; chunk < product.chunks; ++chunk, stage.advance()) {
            const uint32_t to = smem + stage.index() * F::STAGE_BYTES,
                           full = smem + F::FULL_BARRIERS + 8 * stage.index();
            wait(smem + F::EMPTY_BARRIERS + 8 * stage.index(), stage.phase() ^ 1);
            // Rows beyond an expert's last come as zeros, and count.
            arrive_and_expect_tx(full, F::UNITS * units::BYTES + tile.count * 128);
#pragma unroll
            for (int row = 0; row < F::UNITS; row += BOX)
                tma_load_3d(to + F::SMEM_A + row * units::BYTES, &product.units, chunk * WORDS,
                            F::UNITS * tile.block + row, tile.expert, full, policy);
            tma_load_1d(to + F::SMEM_B, rows, tile.count * 128, full, l2_evict_normal());
            rows += int64_t(p.slots) * 64;
            if (chunk == claim) next = atomicAdd(p.list.head + 1, 1);
        }
    }
}

// ---- consumers: warpgroups

// From lane 0, so that the compiler knows it to be the same for all, and keeps it where one instruction serves a warp.
__device__ __forceinline__ uint32_t same(uint32_t v) {
    asm volatile("shfl.sync.idx.b32 %0, %0, 0, 0x1f, 0xffffffff;" : "+r"(v));
    return v;
}

// What a lane has of a unit: a whole block of each of two rows, for each part.
template <int PARTS>
struct Words {
    uint4 part[PARTS];
    uint32_t scales;
};

// words, scales: where this lane's begin, for the parts that its warp has.
template <int PARTS>
__device__ __forceinline__ Words<PARTS> load_unit(uint32_t words, uint32_t scales) {
    if constexpr (PARTS == 2)
        return {{load_shared16(words), load_shared16(words + 512)}, load_shared(scales)};
    else
        return {{load_shared16(words)}, load_shared2(scales)};
}

// a[step][part]: fragments of the unit's four steps of 16 columns.
template <int PARTS>
__device__ __forceinline__ void decode(const Words<PARTS>& words, uint32_t (&a)[4][PARTS][4]) {
#pragma unroll
    for (int q = 0; q < PARTS; ++q) {
        const uint32_t scale[2] = {q ? units::scale<2>(words.scales) : units::scale<0>(words.scales),
                                   q ? units::scale<3>(words.scales) : units::scale<1>(words.scales)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t upper[4], lower[4];
            units::decode(half ? words.part[q].z : words.part[q].x, scale[0], upper);
            units::decode(half ? words.part[q].w : words.part[q].y, scale[1], lower);
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                uint32_t (&to)[4] = a[2 * half + step][q];
                to[0] = upper[2 * step], to[1] = lower[2 * step];
                to[2] = upper[2 * step + 1], to[3] = lower[2 * step + 1];
            }
        }
    }
}

template <int N, int PARTS, int SUMS>
__device__ __forceinline__ void mma_rows(float (&d)[PARTS][SUMS], const uint32_t (&a)[4][PARTS][4],
                                              uint32_t rows) {
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int q = 0; q < PARTS; ++q)
            wgmma<N>(d[q], a[step][q], smem_desc_of(rows + 2 * step));  // 16 columns are 32 bytes
    warpgroup_commit_batch();
}

// For 8 (eights + 1) rows, by the bits of `eights` from SPAN / 2 down. A switch around each loop would be the obvious
// thing; but ptxas wants registers for the fragments of all loops at once, and gives up. A switch here costs a table.
template <int SPAN, int LEAST, int PARTS, int SUMS>
__device__ __forceinline__ void mma_chunk(float (&d)[PARTS][SUMS], const uint32_t (&a)[4][PARTS][4],
                                               uint32_t rows, unsigned eights) {
    if constexpr (SPAN == 1) {
        mma_rows<8 * (LEAST + 1)>(d, a, rows);
    } else if constexpr (8 * LEAST + 4 * SPAN >= 2 * SUMS) {  // there is no upper half
        mma_chunk<SPAN / 2, LEAST>(d, a, rows, eights);
    } else if (eights & SPAN / 2) {
        mma_chunk<SPAN / 2, LEAST + SPAN / 2>(d, a, rows, eights);
    } else {
        mma_chunk<SPAN / 2, LEAST>(d, a, rows, eights);
    }
}

// d[q] += part q of this warp's, times 8 (eights + 1) rows, over all chunks of a tile. words, scales: the lane's of the
// first stage.
template <class F>
__device__ __forceinline__ void mma_tile(float (&d)[F::PARTS][F::SUMS], uint32_t smem,
                                         PipelineState<F::NUM_STAGES>& stage, int chunks, uint32_t words_at,
                                         uint32_t scales_at, unsigned eights) {
    constexpr int SPAN = F::EIGHTS <= 8 ? 8 : 16;
    static_assert(F::EIGHTS <= 16);
    uint32_t a[4][F::PARTS][4];
    const bool frees = threadIdx.x % 32 == 0;
    keep_in_register(words_at), keep_in_register(scales_at);
    const auto full = [&] { return smem + F::FULL_BARRIERS + 8 * stage.index(); };
    const auto load = [&] {
        return load_unit<F::PARTS>(words_at + stage.index() * F::STAGE_BYTES,
                                   scales_at + stage.index() * F::STAGE_BYTES);
    };
    wait(full(), stage.phase());
    Words<F::PARTS> words = load();
#pragma unroll 1
    for (int left = chunks; left > 0; --left) {
        const uint32_t rows = same(smem_desc_low(smem + F::SMEM_B) + stage.index() * (F::STAGE_BYTES / 16));
        const uint32_t empty = smem + F::EMPTY_BARRIERS + 8 * stage.index();
        decode(words, a);
        stage.advance();
        if (left > 1) {  // the next unit's words come while the products are issued
            wait(full(), stage.phase());
            words = load();
        }
        mma_chunk<SPAN, 0>(d, a, rows, eights);
        warpgroup_wait<0>();
#pragma unroll
        for (int i = 0; i < 4 * F::PARTS; ++i) hold(a[i / F::PARTS][i % F::PARTS]);
        __syncwarp();
        if (frees) arrive(empty);
    }
#pragma unroll
    for (int q = 0; q < F::PARTS; ++q) warpgroup_fence_operand(d[q]);
}

// silu(gate) * up, both clamped, times the routing weight.
__device__ __forceinline__ float activate(float gate, float up, float weight) {
    gate = fminf(gate, LIMIT), up = fminf(fmaxf(up, -LIMIT), LIMIT);
    return gate * reciprocal_fast(1.f + exp2_fast(-LOG2E * gate)) * up * weight;
}

// d of the first product -> rows of `inner` in staging. weights: of the item's slots, in shared memory. unit: of the
// team's four, and part of it, which the warp has first. in_scale: of NVFP4. largest: in shared memory; where warps
// share a block they meet by sync(), all of the team.
template <class F, int PARTS, int SUMS, class Sync>
__device__ __forceinline__ void stage_inner(float (&d)[PARTS][SUMS], int count, float factor, uint32_t weights,
                                            uint32_t staging, int unit, int part, float in_scale, uint32_t largest,
                                            Sync sync) {
    constexpr bool QUANTISED = F::ACTIVATION != BF16;
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    // Lanes g and g ^ 1 have neighbouring channels of slots 2 c and 2 c + 1 of each eight: each takes one slot of both.
    const int mine = 2 * c + g % 2;
    const uint32_t both = g % 2 ? 0x3276 : 0x5410;
    // Channel 16 unit + 8 part + g has position 16 (2 part + g / 4) + 8 (g / 2 % 2) + 2 unit + g % 2.
    const uint32_t row = staging + mine * 128 + 4 * unit;
    uint32_t to[PARTS];
#pragma unroll
    for (int q = 0; q < PARTS; ++q) to[q] = row + ((4 * (part + q) + g / 2) ^ mine) * 16;
    const auto leave = [&](int i, int q, uint32_t own) {
        const uint32_t other = __shfl_xor_sync(~0u, own, 4);
        store_shared(to[q] + i * 1024, __byte_perm(own, other, both));
    };
    // Of slots 2 c and 2 c + 1 of the eights g, g + 8, ...: largest magnitudes, and then what all of a block share.
    uint32_t block[F::LARGEST_WORDS] = {};
#pragma unroll
    for (int i = 0; i < SUMS / 4; ++i) {
        if (8 * i >= count) break;
        const float2 weight = load_shared_pair(weights + 4 * (8 * i + 2 * c));
        uint32_t most = 0;
#pragma unroll
        for (int q = 0; q < PARTS; ++q) {
            const float a = activate(d[q][4 * i] * factor, d[q][4 * i + 2] * factor, weight.x);
            const float b = activate(d[q][4 * i + 1] * factor, d[q][4 * i + 3] * factor, weight.y);
            const uint32_t own = pack_bf16x2(a, b);
            if (QUANTISED)
                d[q][4 * i] = __uint_as_float(own), most = decode::larger(most, own);
            else
                leave(i, q, own);
        }
        if (QUANTISED) most = largest_of_eight<4>(most, ~0u);
        if (g == i % 8) block[i / 8] = most;
    }
    if constexpr (QUANTISED) {
        const decode::InputScale by(in_scale);
        const auto scale = [&](uint32_t most) { return decode::block_scale(by.divide<true>(__uint_as_float(most))); };
        const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
        const auto at = [&](int warp, int k) { return largest + warp * F::LARGEST_BYTES + 128 * k + 4 * lane; };
#pragma unroll
        for (int k = 0; k < F::LARGEST_WORDS && F::WARPS > 1; ++k) store_shared(at(warp, k), block[k]);
        if (F::WARPS > 1) sync();
#pragma unroll 1
        for (int w = 0; w < F::WARPS && F::WARPS > 1; ++w)
#pragma unroll
            for (int k = 0; k < F::LARGEST_WORDS; ++k)
                block[k] = decode::larger(block[k], load_shared(at(warp / F::WARPS * F::WARPS + w, k)));
#pragma unroll
        for (int k = 0; k < F::LARGEST_WORDS; ++k)
            block[k] = F::ACTIVATION == FP8 ? __byte_perm(decode::least_normal(block[k]),
                                                          decode::least_normal(block[k] >> 16), 0x5410)
                                            : pack_bf16x2(scale(block[k] << 16 & 0x7FFF0000u),
                                                          scale(block[k] & 0x7FFF0000u));
#pragma unroll
        for (int i = 0; i < SUMS / 4; ++i) {
            if (8 * i >= count) break;
            const uint32_t shared = __shfl_sync(~0u, block[i / 8], i % 8 * 4 + c);
#pragma unroll
            for (int q = 0; q < PARTS; ++q) {
                const uint32_t own = __float_as_uint(d[q][4 * i]);
                leave(i, q, F::ACTIVATION == FP8 ? decode::nearest_e4m3(own, shared)
                                                 : decode::quantise_pair(own, shared, by));
            }
        }
    }
}

// d of the second product, 64 PARTS features -> parts, by way of staging, half of the tokens at a time. slots: of the
// item, in shared memory. features: that exist, of this warpgroup's, from `first` on.
template <int PARTS, int SUMS>
__device__ __forceinline__ void write_parts(const Problem& p, const float (&d)[PARTS][SUMS], int count, float factor,
                                            int first, int features, uint32_t slots, uint32_t staging, int barrier) {
    // At once a warp stores 16 PARTS features of AT_ONCE tokens, and 128 threads read as many tokens' features.
    constexpr int AT_ONCE = 16 / PARTS, HALF = SUMS, ROW = 128 * PARTS;  // tokens, tokens, bytes
    static_assert(HALF % AT_ONCE == 0);
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    // Chunk c, 16 bytes, of row r is at c ^ r % 8.
    const int matrix = PARTS == 2 ? lane / 8 : lane / 8 % 2, below = PARTS == 2 ? 0 : lane / 16 * 8;
    const uint32_t to = staging + (below + lane % 8) * ROW + ((2 * PARTS * warp + matrix) ^ lane % 8) * 16;
    const int chunk = thread % (8 * PARTS), row = thread / (8 * PARTS);
    const uint32_t from = staging + row * ROW + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int before = HALF * half;
        if (before >= count) break;
#pragma unroll
        for (int i = 0; i < HALF / AT_ONCE; ++i) {
            if (before + AT_ONCE * i >= count) break;
            const auto pair = [&](int m) {  // of matrix m of the four
                const int q = PARTS == 2 ? m / 2 : 0, eighth = before / 8 + (PARTS == 2 ? i : 2 * i + m / 2);
                const int at = 4 * eighth + 2 * (m % 2);
                return pack_bf16x2(d[q][at] * factor, d[q][at + 1] * factor);
            };
            stmatrix_x4_trans(to + i * 2048, pair(0), pair(1), pair(2), pair(3));
        }
        named_barrier_sync<128>(barrier);
#pragma unroll
        for (int i = 0; i < HALF / AT_ONCE; ++i) {
            const int token = before + AT_ONCE * i + row;
            if (token >= count || 8 * chunk >= features) break;
            const uint4 v = load_shared16(from + i * 2048);
            const int64_t slot = load_shared(slots + 4 * token);
            *reinterpret_cast<uint4*>(p.parts + slot * p.hidden + first + 8 * chunk) = v;
        }
        named_barrier_sync<128>(barrier);  // staging and slots are read
    }
}

template <class F>
__device__ __forceinline__ void consumer(const Problem& p, uint32_t smem) {
    constexpr int PARTS = F::PARTS, SUMS = F::SUMS;
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = thread % 32;
    const int team = group / F::TEAM, barrier = 1 + F::GROUPS / F::TEAM + group;
    const bool stores = thread == 0 && group % F::TEAM == 0;  // one thread of each team
    const int part = PARTS == 2 ? 0 : thread / 32 % 2;  // of a unit, this warp's first
    const int unit = F::SHARE * group + thread / 32 * PARTS / 2;  // of a tile's
    const uint32_t weights = smem + F::SMEM_A + unit * units::BYTES;
    const uint32_t team_staging = smem + F::SMEM_D + team * (F::TEAM * F::D_BYTES);
    const uint32_t staging = smem + F::SMEM_D + group * F::D_BYTES;
    const uint32_t scale = smem + F::LISTS + group * F::LIST, list = scale + 16;
    const auto team_sync = [&] { named_barrier_sync<128 * F::TEAM * F::TEAMS>(1 + team / F::TEAMS); };
    float d[PARTS][SUMS];
    // Who stores: an item of which a bulk copy may still be on its way, plus one, or none.
    const uint32_t stored = scale + 4;
    if (stores) store_shared(stored, 0);
    const auto finish_store = [&] {
        if (!stores) return;
        const int item = int(load_shared(stored)) - 1;
        if (item < 0) return;
        tma_store_wait();
        fence_proxy_async();
        red_add_release(p.list.ready + item);
        store_shared(stored, 0);
    };
    PipelineState<2> turn;
    PipelineState<F::NUM_STAGES> stage;
#pragma unroll 1
    while (true) {
        {
            const Tile tile = read_tile<F>(smem, turn);
            if (tile.product != FIRST) finish_store();  // this tile may wait for it
            if (tile.product == END) return;
            const bool is_first = tile.product == FIRST;
            // What the epilogue needs comes while the products run, and takes no registers.
            const void* const of = is_first ? static_cast<const void*>(p.tables.weight) : p.tables.slot;
            if (thread < tile.count) cp_async4(list + 4 * thread, static_cast<const int*>(of) + tile.first + thread);
            if (thread == 0) cp_async4(scale, p.product[tile.product].scale + tile.expert);
            if (F::ACTIVATION == NVFP4 && thread < 2)  // of the activations here, and of v
                cp_async4(scale + 8 + 4 * thread, p.product[thread ? SECOND : tile.product].in_scale + tile.expert);
#pragma unroll
            for (int i = 0; i < PARTS * SUMS; ++i) d[i / SUMS][i % SUMS] = 0;
            mma_tile<F>(d, smem, stage, p.product[tile.product].chunks, weights + 512 * part + 16 * lane,
                        weights + units::SCALES + 4 * lane + 2 * part, unsigned(tile.count - 1) / 8);
        }
        // Again, instead of in registers.
        const Tile tile = read_tile<F>(smem, turn);
        release_tile<F>(smem, turn);
        const Product& product = p.product[tile.product];
        finish_store();  // long done: staging is free again
        cp_async_wait_all();
        team_sync();
        float factor = __uint_as_float(load_shared(scale));
        if (F::ACTIVATION == NVFP4) factor *= __uint_as_float(load_shared(scale + 8));
        factor *= units::REST;
        const int begin = F::UNITS * tile.block + F::SHARE * group;  // units of rows, this warpgroup's first
        if (tile.product == FIRST) {
            const int chunk = (F::UNITS * tile.block) / TEAM_UNITS + team;  // of the second product's columns
            const bool exists = TEAM_UNITS * chunk < product.rows;
            if (exists || F::ACTIVATION != BF16) {  // with FP8 two teams meet
                const float in_scale = F::ACTIVATION == NVFP4 ? __uint_as_float(load_shared(scale + 12)) : 0;
                stage_inner<F>(d, tile.count, factor, list, team_staging, unit % TEAM_UNITS, part, in_scale,
                               smem + F::LARGEST, team_sync);
                fence_proxy_async_shared();
                team_sync();
                if (stores && exists) {
                    bf16* const to = p.inner + (int64_t(chunk) * p.slots + tile.first) * 64;
                    tma_store_1d(to, team_staging, tile.count * 128);
                    store_shared(stored, tile.item + 1);
                }
            }
        } else {
            write_parts(p, d, tile.count, factor, begin * units::ROWS, (product.rows - begin) * units::ROWS, list,
                        staging, barrier);
        }
    }
}

// ---- kernels

template <class F>
__global__ void __launch_bounds__(F::NUM_THREADS, 1) experts(const __grid_constant__ Problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // only Hopper has wgmma
    extern __shared__ uint8_t raw[];
    // From lane 0, or else it would be computed again for each use.
    const uint32_t smem = __shfl_sync(~0u, (uint32_t(__cvta_generic_to_shared(raw)) + 1023) / 1024 * 1024, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < F::NUM_STAGES; ++i) {
            barrier_init(smem + F::FULL_BARRIERS + 8 * i, 1);
            barrier_init(smem + F::EMPTY_BARRIERS + 8 * i, 4 * F::GROUPS);  // warps that multiply
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(smem + F::TILE_FULL_BARRIERS + 8 * i, 1);
            barrier_init(smem + F::TILE_EMPTY_BARRIERS + 8 * i, 4 * F::GROUPS);
        }
        barrier_publish();
    }
    programmatic::trigger();
    __syncthreads();
    programmatic::wait();
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<F::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) producer<F>(p, smem);
    } else {
        warpgroup_reg_alloc<F::CONSUMER_REGISTERS>();
        consumer<F>(p, smem);
    }
#endif
}

}  // namespace prefill
