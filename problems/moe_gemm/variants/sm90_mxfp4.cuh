// moe_gemm with MXFP4 weights and FP8 activations: as sm90_prefill.cuh, with products of e4m3, for any number of tokens.
//
//   route    as there; meanwhile x to FP8, with scales (sm90_mxfp4_gather.cuh)
//   gather   x's rows, in the order of the slots
//   experts  weights (units, sm90_mxfp4_units.cuh) times an item's slots, of w13 and then of w2; once for each list
//   combine  as there (sm90_mxfp4_run.cuh, as the launches)
//
// The kernel is prefill::experts, which calls this file's init_tables, producer and consumer.
//
// A chunk is 128 columns: of weights four blocks of 32, whose scales go into their e4m3 exactly, and of activations one
// group, so that a chunk's sums are multiplied with its slots' scales and added in fp32. All warps of a block have a tile
// of 256 rows together: after the first product that is a whole group of 128 channels of v.
//
// Registers are the limit: with 112 slots, a thread has 112 sums, 56 of a chunk's products of one of its two parts, and 32
// with the chunk's weights. Two warps a scheduler would not hide their latency, so that each has products under way while
// it decodes (sm90_mxfp4_multiply.cuh).
#pragma once

#include "sm90_mxfp4_epilogue.cuh"
#include "sm90_mxfp4_multiply.cuh"
#include "sm90_prefill.cuh"

namespace mxfp4 {

// ---- producer: one thread

// Where a chunk of a tile lies.
struct Sources {
    const uint8_t *units, *codes;
    const float* scales;
    __device__ __forceinline__ Sources(const Problem& p, const Tile& tile) {
        const Product& product = p.product[tile.product];
        const int64_t block = int64_t(tile.expert) * product.blocks + tile.block;
        units = product.units + block * product.chunks * BLOCK_BYTES;
        codes = product.codes + int64_t(tile.first) * 128;
        scales = product.scales + scale_slot(tile.expert, tile.first);
    }
    __device__ __forceinline__ void advance(const Problem& p) {
        units += BLOCK_BYTES, codes += int64_t(p.slots) * 128, scales += p.scale_slots;
    }
};

// A chunk's units, rows of activations, and their scales to a stage.
template <class F>
__device__ __forceinline__ void load_chunk(const Sources& from, int count, uint32_t to, uint32_t full,
                                           uint64_t policy) {
    const uint32_t scale_bytes = scales_of(count) * 4;
    arrive_and_expect_tx(full, BLOCK_BYTES + count * 128 + scale_bytes);
    tma_load_1d(to + F::SMEM_A, from.units, BLOCK_BYTES, full, policy);
    tma_load_1d(to + F::SMEM_B, from.codes, count * 128, full, l2_evict_normal());
    tma_load_1d(to + F::SMEM_S, from.scales, scale_bytes, full, l2_evict_normal());
}

template <class F>
__device__ __forceinline__ void producer(const Problem& p, uint32_t smem) {
    const int items = __ldcg(p.list.head);
    int next = atomicAdd(p.list.head + 1, 1);  // the block's next tile
    PipelineState<2> turn;
    PipelineState<F::NUM_STAGES> stage;
#pragma unroll 1
    while (true) {
        const Tile tile = prefill::publish_tile<F>(p, smem, turn, next, items);
        turn.advance();
        if (tile.product == END) return;
        const uint64_t policy = tile.alone ? l2_evict_first() : l2_evict_normal();
        if (tile.product == SECOND) prefill::await_item(p, tile.item);
        Sources from(p, tile);
        const int claim = min(p.product[tile.product].chunks, prefill::CLAIM_BEFORE + 1);
#pragma unroll 1
        for (int left = p.product[tile.product].chunks; left > 0; --left, stage.advance()) {
            wait(smem + F::EMPTY_BARRIERS + 8 * stage.index(), stage.phase() ^ 1);
            load_chunk<F>(from, tile.count, smem + stage.index() * F::STAGE_BYTES,
                          smem + F::FULL_BARRIERS + 8 * stage.index(), policy);
            from.advance(p);
            if (left == claim) next = atomicAdd(p.list.head + 1, 1);
        }
    }
}

// ---- consumers: warpgroups

// v of a tile from staging to memory. One thread.
template <class F>
__device__ __forceinline__ void store_v(const Problem& p, const Tile& tile, uint32_t smem) {
    const Product& product = p.product[SECOND];
    const auto codes = const_cast<uint8_t*>(product.codes);
    const auto scales = const_cast<float*>(product.scales);
    tma_store_1d(codes + (int64_t(tile.block) * p.slots + tile.first) * 128, smem + F::SMEM_D, tile.count * 128);
    tma_store_1d(scales + int64_t(tile.block) * p.scale_slots + scale_slot(tile.expert, tile.first), smem + F::SMEM_V,
                 scales_of(tile.count) * 4);
}

// What a warp has of a tile. Worked out anew where it is needed: what lives longer than the products costs them registers.
template <class F>
struct Share {
    uint32_t smem;
    int group, lane, unit, part;  // unit: of the tile's, this warp's first, and part of it
    __device__ __forceinline__ explicit Share(uint32_t base) : smem(base) {
        keep_in_register(smem);
        const int thread = thread_index(), warp = thread / 32 - 4;
        group = thread / 128 - 1, lane = thread % 32;
        unit = warp * F::PARTS / 2, part = F::PARTS == 2 ? 0 : warp % 2;
    }
    __device__ __forceinline__ uint32_t scale() const { return smem + F::LISTS + group * F::LIST; }
    __device__ __forceinline__ uint32_t list() const { return scale() + sizeof(prefill::Scales); }
    __device__ __forceinline__ uint32_t stored() const { return scale() + prefill::STORED; }
    __device__ __forceinline__ bool stores() const { return group == 0 && thread_index() == 128; }
};

// The products of a tile.
template <class F>
__device__ __forceinline__ void multiply(const Problem& p, float (&d)[F::PARTS][F::SUMS], uint32_t base,
                                         PipelineState<2> turn, PipelineState<F::NUM_STAGES>& stage) {
    const Share<F> mine(base);
    const Tile tile = prefill::read_tile<F>(mine.smem, turn);
    if (tile.product != FIRST && mine.stores()) prefill::finish_store(p, mine.stored());  // this tile may wait for it
    prefill::load_list<F>(p, tile, mine.scale(), mine.list());
#pragma unroll
    for (int i = 0; i < F::PARTS * F::SUMS; ++i) d[i / F::SUMS][i % F::SUMS] = 0;
    const uint32_t units = mine.smem + F::SMEM_A + mine.unit * BYTES;
    const Chunk first{units + 1024 * mine.part + 16 * mine.lane, units + SCALES + 4 * mine.lane + 2 * mine.part,
                      mine.smem + F::TABLE, mine.smem + F::SMEM_S + mine.lane % 4 * 16, 0};
    mma_tile<F>(d, mine.smem, stage, p.product[tile.product].chunks, first, tile.count);
}

// What becomes of its sums. apart: this warpgroup needs no other one, and may be some chunks ahead of it.
template <class F>
__device__ __forceinline__ void leave(const Problem& p, float (&d)[F::PARTS][F::SUMS], uint32_t base,
                                      PipelineState<2>& turn, bool apart) {
    const Share<F> mine(base);
    const uint32_t smem = mine.smem;
    const auto sync = [] { named_barrier_sync<F::CONSUMERS>(1); };
    const Tile tile = prefill::read_tile<F>(smem, turn);  // again, instead of in registers
    prefill::release_tile<F>(smem, turn);
    if (mine.stores()) prefill::finish_store(p, mine.stored());  // long done: staging is free again
    cp_async_wait_all();
    apart ? named_barrier_sync<128>(2 + mine.group) : sync();
    const float factor = __uint_as_float(load_shared(mine.scale()));
    if (tile.product == FIRST) {
        stage_v<F>(d, tile.count, factor, mine.list(), smem + F::SMEM_D, smem + F::SMEM_V, smem + F::LARGEST, mine.unit,
                   mine.part, sync);
        fence_proxy_async_shared();
        sync();
        if (mine.stores()) {
            store_v<F>(p, tile, smem);
            store_shared(mine.stored(), tile.item + 1);
        }
    } else {
        const int begin = BLOCK_UNITS * tile.block + 2 * F::PARTS * mine.group;  // units of rows, this warpgroup's first
        prefill::write_parts(p, d, tile.count, factor, begin * ROWS, (p.product[SECOND].rows - begin) * ROWS,
                             mine.list(), smem + F::SMEM_D + mine.group * F::D_BYTES, 2 + mine.group);
    }
}

template <class F>
__device__ __forceinline__ void consumer(const Problem& p, uint32_t smem) {
    const Share<F> mine(smem);
    if (mine.stores()) store_shared(mine.stored(), 0);
    float d[F::PARTS][F::SUMS];
    PipelineState<2> turn;
    PipelineState<F::NUM_STAGES> stage;
    int product = prefill::read_tile<F>(smem, turn).product;
    bool apart = false;  // v of the last tile of the first product may be in staging
#pragma unroll 1
    while (product != END) {
        multiply<F>(p, d, smem, turn, stage);
        leave<F>(p, d, smem, turn, apart);
        apart = product == SECOND;
        product = prefill::read_tile<F>(smem, turn).product;
    }
    const Share<F> last(smem);
    if (last.stores()) prefill::finish_store(p, last.stored());
}

// ---- the start of a block

// The tables of e4m3 that scales choose from.
template <class F>
__device__ __forceinline__ void init_tables(const Problem&, uint32_t smem) {
    if (threadIdx.x < TABLES) store_shared1(smem + F::TABLE + threadIdx.x, table_byte(threadIdx.x));
}

}  // namespace mxfp4
