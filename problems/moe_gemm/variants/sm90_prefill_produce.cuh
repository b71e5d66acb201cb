// sm90_prefill's tiles, as a block's warps learn of them, and the thread that asks for their data.
#pragma once

#include "sm90_prefill_form.cuh"

namespace prefill {

// ---- tiles

// Publish the block's next tile, which is the one of that index: items by blocks of rows, of w13, then of w2.
template <class F, class P>
__device__ __forceinline__ Tile publish_tile(const P& p, uint32_t smem, PipelineState<2> turn, unsigned index,
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
    const uint32_t to = smem + F::TILES + TILE_BYTES * turn.index();
    store_shared16(to, make_uint4(product, of.x, of.y, of.z));
    store_shared16(to + 16, make_uint4(block, item, of.w == 1, 0));
    arrive(smem + F::TILE_FULL_BARRIERS + 8 * turn.index());
    return Tile{product, of.x, of.y, of.z, int(block), int(item), of.w == 1};
}

// Return the tile once it is published; release_tile: this warp does not read it again.
template <class F>
__device__ __forceinline__ Tile read_tile(uint32_t smem, PipelineState<2> turn) {
    wait(smem + F::TILE_FULL_BARRIERS + 8 * turn.index(), turn.phase());
    const uint32_t from = smem + F::TILES + TILE_BYTES * turn.index();
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
template <class P>
__device__ __forceinline__ void await_item(const P& p, int item) {
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

// A chunk's units and rows of activations to a stage.
template <class F>
__device__ __forceinline__ void load_chunk(const Product& product, const Tile& tile, int chunk, const bf16* rows,
                                           uint32_t to, uint32_t full, uint64_t policy) {
    // Rows beyond an expert's last come as zeros, and count.
    arrive_and_expect_tx(full, F::UNITS * units::BYTES + tile.count * 128);
#pragma unroll
    for (int row = 0; row < F::UNITS; row += BOX)
        tma_load_3d(to + F::SMEM_A + row * units::BYTES, &product.units, chunk * WORDS, F::UNITS * tile.block + row,
                    tile.expert, full, policy);
    tma_load_1d(to + F::SMEM_B, rows, tile.count * 128, full, l2_evict_normal());
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
            load_chunk<F>(product, tile, chunk, rows, to, full, policy);
            rows += int64_t(p.slots) * 64;
            if (chunk == claim) next = atomicAdd(p.list.head + 1, 1);
        }
    }
}

}  // namespace prefill
