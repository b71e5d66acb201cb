// Few tokens an expert: each weight is read once, at the rate of memory, and meets 8 or 16 tokens in mma.sync as they
// lie in registers. Both products in one launch of a block of threads a multiprocessor.
//
// A block works on one unit row (32 rows of weights) at a time, its 16 warps on every sixteenth unit of it, so that 16
// neighbouring units, one for each warp, are one bulk copy. Another thread does nothing but copy, as far ahead as the
// ring in shared memory has room: the next unit row, the next expert, the second product's weights while v is still
// being made. Two more warps add the sixteen sums of a unit row and take them on.
//
// First product: unit rows of all groups (up to 8 NT tokens an expert), batch by batch, each shared out evenly; ahead
// of them those of a shared expert, whose weights are asked for before the ids of the others have come.
// Second: a block has 32 rows of out and takes all groups in turn, so the sum over experts stays in shared memory and
// in one order. Groups lie in batches, each with a counter of the blocks that have ended its first product: so a block
// goes on to the second without waiting for all of v. Every block sorts the tokens by itself (sm90_decode_groups.cuh);
// that is quicker than a launch for it.
//
// Activations in FP8 are rounded in registers, x and v alike, when a group's tokens have come: sm90_decode_fp8.cuh. The
// thread that copies is in sm90_decode_produce.cuh, the warps that add are in sm90_decode_adding.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "launch_cooperative.cuh"
#include "sm90_decode_adding.cuh"
#include "sm90_decode_block.cuh"
#include "sm90_decode_groups.cuh"
#include "sm90_decode_multiply.cuh"
#include "sm90_decode_produce.cuh"
#include "sm90_decode_tokens.cuh"
#include "nvfp4_units.cuh"

namespace decode {

// FP8: x and v are rounded to e4m3, which is all that this changes.
template <int C1, int C2, int NT, bool FP8>
__global__ void __launch_bounds__(NUM_THREADS, 1) experts(const Problem p) {
    // Whether the shared expert comes first, and whether it makes a call's one token NVFP4: else registers lack.
    constexpr bool EARLY = C1 == 4 && NT == 1 && !FP8, LONE = EARLY;
    constexpr int FIRST = EARLY ? 0 : 1;  // of a block's parts
    static_assert(NT == 1 || (NT == 2 && C1 == 4), "registers");
    extern __shared__ __align__(128) uint8_t smem[];
    const Layout at(p, NT);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = p.tokens * p.topk;
    Group* groups = reinterpret_cast<Group*>(smem + at.groups);
    float* total = reinterpret_cast<float*>(smem + at.total);
    float* routing = reinterpret_cast<float*>(smem + at.routing);
    uint16_t* slots = reinterpret_cast<uint16_t*>(smem + at.slots);
    uint32_t* words = reinterpret_cast<uint32_t*>(smem + at.words);
    Part* parts = reinterpret_cast<Part*>(smem + at.parts);

    const uint32_t full_barriers = smem_address(smem + at.barriers), empty_barriers = full_barriers + 8 * p.stages;
    const uint32_t read = empty_barriers + 8 * p.stages, written = read + 24, ready = written + 8 * BATCHES;
    const uint32_t ring_at = smem_address(smem);
    const Ring ring = {ring_at, full_barriers, empty_barriers};
    if (threadIdx.x == CONSUMER_THREADS) {
        for (int i = 0; i < p.stages; ++i)
            barrier_init(full_barriers + 8 * i, 1), barrier_init(empty_barriers + 8 * i, CONSUMER_THREADS);
        barrier_init(read, EPILOGUE_THREADS), barrier_init(read + 8, EPILOGUE_THREADS),
            barrier_init(read + 16, EPILOGUE_THREADS);
        for (int i = 0; i < BATCHES; ++i)
            barrier_init(written + 8 * i, EPILOGUE_THREADS), barrier_init(ready + 8 * i, 1);
        if (EARLY && p.shared) {
            fence_proxy_async_shared();  // copies will arrive at the barriers
            copy_shared<NT>(p, ring, words, n);
        }
    }
    // One warp sorts few slots: the last one, which has nothing else to do then, and for which alone copies wait. It
    // takes a single token's ids to be all different and valid, and shares the work out before they come.
    constexpr int SORTER = EARLY ? SORTING - 1 : 0;
    const bool apart = EARLY && n <= 32, guesses = LONE && p.lone;
    const auto share = [&](int count) {
        share_out<NT, BATCHED<NT>>(groups, parts, count, EARLY ? shared_groups<NT>(p) : 0, p.inner / 16, lane);
    };
    if (guesses && warp == SORTER) share(n);
    const bool multiplies_lone = LONE && p.lone && warp < WARPS;
    float held = 0;  // the input scale that the token in registers is quantised by
    if (multiplies_lone && p.shared) held = p.in13[p.experts - 1];
    programmatic::wait();
    programmatic::trigger();
    uint4 half = {};
    if (multiplies_lone) half = load_half(p.x, p.hidden / units::COLUMNS, warp, lane);
    int found = 0;
    if (n <= 32) {
        if (warp == SORTER) found = sort_few<NT>(p, groups, slots, routing, words, lane);
        __syncwarp();
    } else {
        sort<NT>(p, smem + p.stages * STAGE_BYTES - sorting_bytes(p), groups, slots, routing, words, warp, lane);
    }
    if (warp == SORTER && !(guesses && found == n)) share(words[32]);
    Tokens<C1, NT, FP8> tokens;  // of the first product
    if constexpr (LONE)          // for the shared expert, which comes first, while the others are sorted
        if (multiplies_lone && p.shared) tokens.quantise(half, held, lane);
    if (!apart || warp == WARPS) fence_proxy_async_shared();  // copies will write where sorting has written
    if (apart)
        sorted_sync(warp);
    else
        __syncthreads();
    const int count = words[32];

    const int units1 = p.hidden / units::COLUMNS, units2 = p.inner / units::COLUMNS;  // of a unit row
    const int rows1 = p.inner / 16, rows2 = p.hidden / units::ROWS;                   // unit rows of an expert
    const int batches = batches_of<BATCHED<NT>>(count);
    int stage = 0, parity = 0;

    constexpr int PRODUCER_REGISTERS = 64,
                  CONSUMER_REGISTERS = 104;  // registers: 480 for a lane of each of five warpgroups
    if (warp >= WARPS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (warp > WARPS && warp <= WARPS + EPILOGUE_THREADS / 32)
            epilogue<NT, FIRST>(p, at, smem, warp - WARPS - 1, lane, count);
        if (threadIdx.x == NUM_THREADS - 32) watch(p, written, ready, batches);
        if (threadIdx.x != CONSUMER_THREADS) return;
        producer<NT, EARLY>(p, ring, {units1, units2, rows1, rows2}, groups, parts, words, count, batches);
        return;
    }
    warpgroup_reg_alloc<CONSUMER_REGISTERS>();

    constexpr std::integral_constant<int, NT> ALL_TILES = {};
    constexpr std::integral_constant<int, 1> ONE_TILE = {};
    float sum[2][NT][4];
    // What the lane reads first of the warp's first unit in the ring, and from there to its scales. Where there are
    // registers they are kept: the compiler would begin with the thread's number for each unit.
    uint32_t first_read = ring_at + warp * units::BYTES + 16 * lane, to_scales = units::SCALES - 12 * lane;
    if constexpr (LONE) {
        keep_in_register(first_read), keep_in_register(to_scales);
    }
    // Adds the warp's part of a unit row, of `all` units, to sum; calls then(c) when the tokens of unit c are done
    // with.
    auto mma_row = [&](auto& tokens, const int all, auto tiles, auto most, auto then) {
        uint32_t place = 0;
        const int of_lane = LONE ? 0 : 16 * lane;
#pragma unroll
        for (int c = 0; c < decltype(most)::value; ++c) {
            if (FP8 && c % EACH ? unit_of<FP8>(c, warp) >= all : c * WARPS >= all) break;
            if (c % EACH == 0) wait(full_barriers + 8 * stage, parity);
            if (LONE && c % EACH == 0) place = first_read + stage * STAGE_BYTES;
            if (!LONE) place = ring_at + stage * STAGE_BYTES + unit_of<FP8>(c % EACH, warp) * units::BYTES;
            const uint32_t from = place + (LONE ? c % EACH * WARPS * units::BYTES : 0);
            const uint4 word[2] = {load_shared16(from + of_lane), load_shared16(from + 512 + of_lane)};
            const uint32_t scales = load_shared(from + (LONE ? to_scales : units::SCALES + 4 * lane));
            if (c % EACH == EACH - 1 || (FP8 ? unit_of<FP8>(c + 1, warp) : (c + 1) * WARPS) >= all) {
                // What has been loaded must be here before it may be overwritten. Loads are only known to have ended
                // when their results are used: a copy once overtook loads that were waiting behind loads of global
                // memory. Those of the units before have been used: they are in the sums, or ended in order.
                arrive(empty_barriers + 8 * stage + ((word[0].x ^ word[1].x ^ scales) & p.nothing));
                if (++stage == p.stages) stage = 0, parity ^= 1;
            }
            if (unit_of<FP8>(c, warp) >= all) break;
            multiply_unit<decltype(tiles)::value>(sum, word, scales, tokens, c);
            then(c);
        }
    };
    // Hands the sums to those who add them up.
    int buffer = 0, turn = 1;
    auto hand_over = [&](bool both) {
        float* sums = reinterpret_cast<float*>(smem + at.sums) + buffer * WARPS * NT * 256;
        wait(read + 8 * buffer, turn);
        store_sums(sum, sums, both, warp, lane);
        sums_arrive(buffer);
        turn ^= buffer, buffer ^= 1;
    };

    const int mine1 = units_of_warp<FP8>(units1, warp), mine2 = units_of_warp<FP8>(units2, warp);

    // ---- first product ----
    if (batches) {
        const int divisor = p.quantised ? 1 : p.topk;  // of a slot, for its row of x
        const auto take_all = [&](const Group& g) {
            tokens.aim(p.x, p.hidden, divisor, warp, g, slots, lane);
#pragma unroll
            for (int c = 0; c < C1; ++c)
                if (c < mine1) tokens.take(c, NT > 1 && g.count() > 8);
            if constexpr (FP8) tokens.round(units1, warp, NT > 1 && g.count() > 8);
        };
        const auto multiply_group = [&](bool both, auto then) {
            clear_sums(sum);
            if (both)
                mma_row(tokens, units1, ALL_TILES, std::integral_constant<int, C1>(), then);
            else
                mma_row(tokens, units1, ONE_TILE, std::integral_constant<int, C1>(), then);
            hand_over(both);
        };
        if constexpr (BATCHED<NT>) {
            Walk<FIRST> walk(parts, rows1, batches);
            bool more = walk.find();
            float input_scale = 1;  // lane i: of group i
            if (LONE && p.lone && lane < count) input_scale = p.in13[groups[lane].expert];
            int entered = LONE && p.shared ? count - 1 : -1;  // the group that a lone token was last quantised for
            if (more && !(LONE && p.lone)) take_all(groups[walk.group]);
            while (more) {
                const int group = walk.group;
                if constexpr (LONE)
                    if (p.lone && group != entered) {
                        const float scale = __shfl_sync(~0u, input_scale, group);
                        if (entered < 0 || scale != held) tokens.quantise(half, scale, lane);
                        entered = group, held = scale;
                    }
                walk.next(), more = walk.find();
                // The next group's tokens come as this one's are used. If there is but one row, all groups have it.
                const bool changes = more && walk.group != group;
                const bool takes = changes && !(LONE && p.lone) && (p.tokens > 1 || p.quantised);
                if (takes) tokens.aim(p.x, p.hidden, divisor, warp, groups[walk.group], slots, lane);
                multiply_group(false, [&](int c) {
                    if (takes) tokens.take(c, false);
                });
                if constexpr (FP8)
                    if (takes) tokens.round(units1, warp, false);
            }
        } else {
            static_assert(FIRST == 1);
            int group = parts[1].group, row = parts[1].row;
            const int items = parts[1].items;
            for (int i = 0; i < items; ++i) {
                const Group g = groups[group];
                const bool both = NT > 1 && g.count() > 8;
                if (i == 0 || row == 0) take_all(g);
                multiply_group(both, [](int) {});
                if (++row == rows1) row = 0, ++group;
            }
        }
    }

    // ---- second product ----
    // Where a warp has one unit of a row, tokens come two groups ahead: a row is read in less time than they take.
    constexpr bool SHORT = C2 == 1;
    static_assert(!SHORT || (NT == 1 && !FP8));
    const bool single = EARLY && p.tokens == 1;
    int ended = 0;  // phase in which those who add end a unit row of out
    for (int row = blockIdx.x; row < rows2; row += gridDim.x) {
        // No warp adds to it before all have handed over sums.
        if (!single)
            for (int i = threadIdx.x; i < p.tokens * MARGIN; i += CONSUMER_THREADS) total[i] = 0;
        int batch = 0, due = 0;  // the next batch to wait for, and its first group
        const auto await = [&](int group) {
            if (BATCHED<NT> ? group != due : group) return;
            wait(ready + 8 * batch, 0);
            if (BATCHED<NT>) due = ++batch < batches ? batch_begin(count, batches, batch) : -1;
        };
        if constexpr (SHORT) {
            Tokens<1, NT> ahead[2];
            const auto aim = [&](Tokens<1, NT>& at, int i) {
                await(i);
                at.aim(p.v, p.inner, 1, warp, groups[min(i, count - 1)], slots, lane);
            };
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (j < count) {
                    aim(ahead[j], j);
                    if (mine2) ahead[j].take(0, false);
                }
            for (int i = 0; i < count; i += 2)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (i + j == count) break;
                    aim(ahead[j], i + j + 2);
                    clear_sums(sum);
                    mma_row(ahead[j], units2, ONE_TILE, std::integral_constant<int, 1>(),
                            [&](int) { ahead[j].take(0, false); });
                    hand_over(false);
                }
        } else if (count) {
            Tokens<C2, NT, FP8> tokens;
            await(0);
            const Group first = groups[0];
            tokens.aim(p.v, p.inner, 1, warp, first, slots, lane);
#pragma unroll
            for (int c = 0; c < C2; ++c)
                if (c < mine2) tokens.take(c, NT > 1 && first.count() > 8);
            for (int i = 0; i < count; ++i) {
                const Group g = groups[i], coming = groups[min(i + 1, count - 1)];
                const bool both = NT > 1 && g.count() > 8, coming_both = NT > 1 && coming.count() > 8;
                if constexpr (FP8) tokens.round(units2, warp, both);
                await(i + 1);
                tokens.aim(p.v, p.inner, 1, warp, coming, slots, lane);
                clear_sums(sum);
                const auto then = [&](int c) { tokens.take(c, coming_both); };  // for the last group once too often
                if (both)
                    mma_row(tokens, units2, ALL_TILES, std::integral_constant<int, C2>(), then);
                else
                    mma_row(tokens, units2, ONE_TILE, std::integral_constant<int, C2>(), then);
                hand_over(both);
            }
        }
        if (single) continue;  // who adds writes it
        if (!count)  // those who add wait for nobody then, and may be several phases ahead
            consumer_sync();
        else
            wait(read + 16, ended), ended ^= 1;
        write_out(p, total, row);
        consumer_sync();
    }
}

template <int C1, int C2, int NT, bool FP8>
cudaError_t launch(const Problem& p, int blocks, int bytes, bool early) {
    const auto kernel = experts<C1, C2, NT, FP8>;
    cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code != cudaSuccess) return code;
    const dim3 grid(blocks), block(NUM_THREADS);
    if (early) return programmatic::launch_resident(kernel, grid, block, bytes, p);
    return programmatic::launch_cooperative(kernel, grid, block, bytes, p);
}

// tiles: 8 tokens each, of a group; 1 or 2. rows: room for the slots' rows of x, where they are quantised. fp8: x and v
// are rounded to e4m3; not quantised. early: whether the first kernel may begin before the one ahead has
// ended. -> a cudaError_t; cudaErrorInvalidValue for what does not fit.
inline cudaError_t run(Problem p, int tiles, int blocks, __nv_bfloat16* rows, bool fp8, bool early) {
    const int n = p.tokens * p.topk;
    if (n > 0xFFFF || p.hidden % 64 || p.inner % 64 || tiles < 1 || tiles > 2) return cudaErrorInvalidValue;
    if (fp8 && p.quantised) return cudaErrorInvalidValue;
    const int first = (p.hidden + 64 * WARPS - 1) / (64 * WARPS);
    const int second = (p.inner + 64 * WARPS - 1) / (64 * WARPS);
    const bool short_rows = first <= 4 && second <= 2;
    p.groups = n < p.experts + n / (8 * tiles) ? n : p.experts + n / (8 * tiles);
    p.stages = 0;
    const int room = SHARED - Layout(p, tiles).bytes;
    p.stages = room / (STAGE_BYTES + 16);
    if (p.stages > 6) p.stages = 6;
    if (p.stages < 2 || sorting_bytes(p) > p.stages * STAGE_BYTES) return cudaErrorInvalidValue;
    const int bytes = Layout(p, tiles).bytes;
    p.lone = p.quantised && p.tokens == 1 && p.groups <= 32 && tiles == 1 && short_rows;
    if (p.quantised && !p.lone) {
        const int all = n * (p.hidden / 16);
        if (const cudaError_t code =
                programmatic::launch_early(quantise_rows, (all + 127) / 128, 128, 0, early, p, rows))
            return code;
        p.x = rows;
    }
    if (first > 8 || second > 8 || (tiles > 1 && !short_rows)) return cudaErrorInvalidValue;
    // The table of legal forms: units of a warp in a row of the first product and of the second, tiles of tokens, FP8.
    const auto started = fp8 && short_rows && tiles == 1 ? launch<4, 2, 1, true>
                         : fp8 && short_rows             ? launch<4, 2, 2, true>
                         : fp8 && second <= 4            ? launch<8, 4, 1, true>
                         : fp8                           ? launch<8, 8, 1, true>
                         : short_rows && tiles == 1 && second == 1 ? launch<4, 1, 1, false>
                         : short_rows && tiles == 1      ? launch<4, 2, 1, false>
                         : short_rows                    ? launch<4, 2, 2, false>
                         : second <= 4                   ? launch<8, 4, 1, false>
                                                         : launch<8, 8, 1, false>;
    return started(p, blocks, bytes, early);
}

}  // namespace decode
