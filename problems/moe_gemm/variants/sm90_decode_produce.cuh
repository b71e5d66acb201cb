// The thread of a block of sm90_decode that does nothing but copy weights, into the ring.
#pragma once

#include "sm90_decode_block.cuh"

namespace decode {

// All that a phase of the barrier brings.
__device__ __forceinline__ void copy(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier,
                                     uint64_t policy) {
    arrive_and_expect_tx(barrier, bytes);
    tma_load_1d(to, from, bytes, barrier, policy);
}
// Where a unit row of an expert begins, which has `rows` of them, of `units` each.
__device__ __forceinline__ const uint8_t* unit_row(const uint8_t* from, int expert, int row, int rows, int units) {
    return from + (static_cast<int64_t>(expert) * rows + row) * units * units::BYTES;
}
__device__ __forceinline__ int stages_of(int units) { return (units + EACH * WARPS - 1) / (EACH * WARPS); }


// Of the two products: units of a unit row, unit rows of an expert.
struct Sizes {
    int units1, units2, rows1, rows2;
};

// A unit row, of `all` units, to the ring's place `stage` and those behind it.
template <int NT>
__device__ __forceinline__ void send(const Problem& p, const Ring& ring, const uint8_t* from, int all, uint64_t policy,
                                     int& stage, int& parity) {
    const int under_way = all > WARPS ? UNDER_WAY : min(2 * UNDER_WAY, p.stages);  // of half a stage
#pragma unroll 1
    for (int i = 0; i < all; i += EACH * WARPS) {
        const int bytes = min(all - i, EACH * WARPS) * units::BYTES;
        wait(ring.empty_barriers + 8 * stage, parity ^ 1);
        if (NT == 1) {  // until the copy so many before has come
            const bool wraps = stage < under_way;
            wait(ring.full_barriers + 8 * (stage - under_way + (wraps ? p.stages : 0)), parity ^ int(wraps));
        }
        copy(ring.at + stage * STAGE_BYTES, from, bytes, ring.full_barriers + 8 * stage, policy);
        from += bytes;
        if (++stage == p.stages) stage = 0, parity ^= 1;
    }
}

// Before the ids are known: as much of the shared expert as the ring has room for, beside what sorting `n` slots needs.
template <int NT>
__device__ __forceinline__ void copy_shared(const Problem& p, const Ring& ring, uint32_t* words, int n) {
    const uint64_t policy = l2_evict_first();
    const int units1 = p.hidden / units::COLUMNS, rows1 = p.inner / 16, stages1 = stages_of(units1);
    const int units2 = p.inner / units::COLUMNS, rows2 = p.hidden / units::ROWS;
    const Part part = shared_part(0, shared_groups<NT>(p), rows1);
    const int room = (p.stages * STAGE_BYTES - (n > 32 ? sorting_bytes(p) : 0)) / STAGE_BYTES;
    int stage = 0, parity = 0, ahead = 0;
    for (; ahead < part.items && (ahead + 1) * stages1 <= room; ++ahead)
        send<NT>(p, ring, unit_row(p.w13, p.experts - 1, (part.row + ahead) % rows1, rows1, units1), units1, policy,
                 stage, parity);
    words[AHEAD] = ahead;
    for (int row = blockIdx.x; row < rows2; row += gridDim.x)
        prefetch_l2(unit_row(p.w2, p.experts - 1, row, rows2, units2), units2 * units::BYTES);
}

// EARLY: behind copy_shared.
template <int NT, bool EARLY>
__device__ __forceinline__ void producer(const Problem& p, const Ring& ring, const Sizes& sizes, const Group* groups,
                                         const Part* parts, const uint32_t* words, int count, int batches) {
    const auto [units1, units2, rows1, rows2] = sizes;
    const uint64_t policy = l2_evict_first();
    const int ahead = EARLY && p.shared ? words[AHEAD] : 0;
    int stage = ahead * stages_of(units1), parity = 0;
    if (stage == p.stages) stage = 0, parity = 1;
    int sent = 0;
    if (batches)
        for (Walk<EARLY ? 0 : 1> walk(parts, rows1, batches); walk.find(); walk.next())
            if (++sent > ahead)
                send<NT>(p, ring, unit_row(p.w13, groups[walk.group].expert, walk.row, rows1, units1), units1, policy,
                         stage, parity);
    for (int row = blockIdx.x; row < rows2; row += gridDim.x)
        for (int i = 0; i < count; ++i)
            send<NT>(p, ring, unit_row(p.w2, groups[i].expert, row, rows2, units2), units2, policy, stage, parity);
}

}  // namespace decode
