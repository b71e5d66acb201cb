// sm90_mma's kernel: a link, or a chain of them. sm90_mma.cu says how.
#pragma once

#include "sm90_mma_input.cuh"
#include "sm90_mma_multiply.cuh"
#include "sm90_mma_reduce.cuh"

namespace linear_mma {

// To L2, the bytes of the next link that come after those which its own blocks copy before they wait: of each chunk of
// a tile the first `lines` lines behind a ring's stages. A warp does it for one of them.
template <class C>
__device__ __forceinline__ void prefetch_next(const Next& next, int lines, int warp, int lane) {
    constexpr int UNIT_BYTES = C::PART_BYTES * C::UNIT_PARTS;
    const int chunk = warp & (1 << next.chunk_shift) - 1, tile = warp >> next.chunk_shift;
    const Chunks chunks = {next.k_units, next.chunk_shift, C::CHUNK_UNITS};
    const int begin = chunks.begin(chunk), bytes = (chunks.begin(chunk + 1) - begin) * UNIT_BYTES;
    if (tile >= next.tiles) return;
    const uint8_t* from = next.units + (static_cast<int64_t>(tile) * next.k_units + begin) * UNIT_BYTES;
    for (int line = lane; line < lines; line += 32) {
        const int offset = C::NUM_STAGES * C::STAGE_BYTES + 128 * line;
        if (offset < bytes) ptx::prefetch_l2(from + offset);
    }
}

// What a warp needs of a tile besides its units. fp8: lane i the scale of the chunk's block i; nvfp4: the bits of the
// factor.
template <class C>
__device__ __forceinline__ uint32_t load_tile_scale(const Link& link, const Geometry& geo, const WarpWork& work,
                                                    int group, int pass, int lane, bool is_math_warp) {
    const int tile = geo.tile_of(work.slot, pass, group);
    const uint32_t row = group * link.group_tiles + tile, block = work.chunk_begin / 2 + lane;
    if (C::FORMAT == BF16 || tile >= link.group_tiles || !is_math_warp) return 0;
    if (C::FORMAT == NVFP4) return __float_as_uint(link.factors[row]);
    const uint32_t blocks = (link.k_units + 1) / 2;
    return block < blocks ? link.scales[row * blocks + block] : 0;
}

// Grid: teams of link.num_splits blocks. CHAIN: all links in one launch, so that rings are full of the next link's
// weights when its input is ready.
template <class C>
__global__ void __launch_bounds__(C::THREADS, 1) link_kernel(const __grid_constant__ JobsOf<C> jobs) {
    extern __shared__ __align__(128) uint8_t smem[];
    constexpr Format FORMAT = C::FORMAT;
    constexpr bool CHAIN = C::CHAIN;
    constexpr int BLOCK_M = C::BLOCK_M, TOKEN_TILES = C::TOKEN_TILES, NUM_STAGES = C::NUM_STAGES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    const bool is_math_warp = !CHAIN || warp < WARPS, is_control_thread = threadIdx.x == 32 * C::CONTROL_WARP;
    const uint32_t state = input_state(smem, jobs.job[0].geo);  // all links have it in the same place
    uint32_t grid_phase = 0;
    uint32_t ring = ptx::smem_address(smem) + warp * NUM_STAGES * C::STAGE_BYTES + 16 * lane;
    const uint32_t full_barriers =
        ptx::smem_address(smem) + static_cast<int>(offsetof(SharedMemory<C>, full_barriers)) + warp * NUM_STAGES * 8;
    if (NUM_STAGES != 2) ptx::keep_in_register(ring);
    if (elected<BLOCK_M>(lane)) {
        if (is_math_warp)  // a barrier for each stage of the warp
            for (int i = 0; i < NUM_STAGES; ++i) ptx::barrier_init(full_barriers + 8 * i, 1);
        if (warp == C::CONTROL_WARP) ptx::barrier_init(state, 1), ptx::store_shared(state + PARITY, 0);
        ptx::barrier_publish();
    }
    // A warp's barriers are its own, and that of the input is known once it has been asked for. With four tiles of
    // tokens, of fp8, racecheck takes each warp for the one that makes the latter.
    if (CHAIN || BLOCK_M == 32)
        __syncthreads();
    else
        __syncwarp();
    const WorkOf<C> work_of(jobs);
    WeightCopies<C> copies(work_of, lane, is_math_warp);
    copies.next_tile();
    uint32_t stage = ring, full_barrier = full_barriers, parity = 0;  // of the stage to be used next
#pragma unroll 1
    for (int link_index = 0; link_index < (CHAIN ? jobs.count : 1); ++link_index) {
        // By a function each time: one reference to the job changes the order of instructions.
        const Link& link = work_of.job(link_index).link;
        const Next& next = work_of.job(link_index).next;
        const Geometry& geo = work_of.job(link_index).geo;
        const WarpWork work = CHAIN ? work_of(link_index) : work_of.first;
        const int begin = work.chunk_begin, first_column = work.block_begin * BLOCK_K;
        uint32_t chunk_units = work.chunk_units;
        ptx::keep_in_register(chunk_units);
        const int block_chunks = 1 << geo.block_chunk_shift;
        const bool converts = C::CONVERTS && !link.quantised && (FORMAT == FP8 || link.quantise);
        const auto load_input_scale = [&](int group) {
            return FORMAT == NVFP4 && converts ? link.input_scales[group] : 1.f;
        };
        uint32_t tile_scale = 0;  // both are asked for before the input is waited for
        float input_scale = 1;
        const bool has_passes = !CHAIN || work.first_pass < geo.passes;
        const int first_group = geo.group_of(work.first_pass);
        // A short input that the block converts comes to registers, sooner than by a copy that all wait for.
        const Pieces<FORMAT> pieces(link, work.block_columns);
        const bool direct =
            link_index == 0 && BLOCK_M == 8 && converts && has_passes && pieces.whole <= MAX_DIRECT * MATH_THREADS;
        uint4 norm_weights[MAX_DIRECT] = {};
        const auto load_scales = [&] {
            if (!has_passes) return;
            tile_scale = load_tile_scale<C>(link, geo, work, first_group, work.first_pass, lane, is_math_warp);
            input_scale = load_input_scale(first_group);
            if (!CHAIN && link.norm_weights && direct) load_norm_weights(link, pieces, norm_weights);
        };
        uint4 raw[MAX_DIRECT] = {};
        const auto start_input = [&] {
            if (direct) return load_direct(link, pieces, first_group, first_column, is_math_warp, raw);
            if (is_control_thread && has_passes) copy_input(link, geo, smem, first_group, work);
            if (!CHAIN) __syncthreads();  // all know the barrier
        };
        // Memory is idle while a link of a chain waits; of a single link more copies would delay the input.
        const int first_stages = geo.early || direct ? NUM_STAGES : C::STAGES_BEFORE_INPUT;
        if (link_index == 0) {
            // The input first where no previous kernel is to be waited for, else the weights.
            if (!geo.early) start_input();
            copies.fill_first(stage, full_barrier, 0, first_stages);
            load_scales();
            programmatic::trigger();  // the next link may begin to copy its weights
            if (geo.early) {
                programmatic::wait();  // until the previous link has written the input
                start_input();
            }
            if (CHAIN && is_control_thread) grid_phase = first_bit(jobs.grid_counter);
        } else {
            load_scales();
            if (is_control_thread) {
                grid_sync(jobs.grid_counter, grid_phase);
                ptx::fence_proxy_async();
                if (has_passes) copy_input(link, geo, smem, first_group, work);
            }
        }

        float next_scale = 0;  // lane i has that of group i of the next link
        if (FORMAT == NVFP4 && next.quantised && lane * next.k_units * BLOCK_K < next.quantised_stride)
            next_scale = next.input_scales[lane];
        uint32_t input[TOKEN_TILES];  // its rows, at the lane's first columns of the next unit
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t)  // columns without a token take the last one's
            input[t] = ptx::smem_address(smem + geo.smem_input) +
                       min(MMA_M * t + g, link.tokens - 1) * geo.input_row_bytes + 32 * c +
                       (begin - work.block_begin) * BLOCK_K * 2;
        uint32_t input_scales =  // fp8: of the lane's first tokens, at the chunk's first block of SCALE_K
            ptx::smem_address(smem + geo.smem_input_scales) + 8 * c + (begin - work.block_begin) / 2 * BLOCK_M * 4;
        if (BLOCK_M == 8) ptx::keep_in_register(input[0]);
        if (FORMAT == FP8) ptx::keep_in_register(input_scales);
        uint32_t to_scales = units::SCALES - 12 * lane;  // nvfp4: of a unit, from what the lane reads first
        if (FORMAT == NVFP4) ptx::keep_in_register(to_scales);

        const Exchange exchange = {link.exchange};
        const Epilogue<C> epilogue = {link, geo, next, next_scale, warp, lane, is_math_warp};
        if (!CHAIN && link.exchange && threadIdx.x == 0)
            ptx::store_shared(state + TAG, ptx::load_relaxed(&exchange.state()->tag) + 1);
        // Behind all that can be worked out while the input is under way.
        if constexpr (C::CONVERTS)
            if (direct) {
                if (!CHAIN && link.norm_weights)
                    norm_pieces(link, pieces, reinterpret_cast<float*>(smem + geo.smem_sums), raw, norm_weights);
                const float inverse = __frcp_rn(input_scale);
#pragma unroll
                for (int j = 0; j < MAX_DIRECT; ++j)
                    if (const int i = threadIdx.x + j * MATH_THREADS; is_math_warp && i < pieces.whole)
                        convert_piece<FORMAT>(link, geo, smem, pieces.place(i), raw[j], input_scale, inverse);
            }

#pragma unroll 1
        for (int pass = work.first_pass; pass < geo.passes; pass += geo.teams) {
            const int group = geo.group_of(pass), tile = geo.tile_of(work_of(link_index).slot, pass, group);
            const bool is_first = pass < geo.teams;

            // ---- the group's input, where shared memory has another one's
            if (is_first || pass - geo.teams < group * static_cast<int>(geo.group_passes.by)) {
                const WarpWork work = work_of(link_index);
                uint32_t input_parity = 1;
                if (!is_first) {
                    if (is_control_thread) copy_input(link, geo, smem, group, work);
                    input_scale = load_input_scale(group);
                }
                if (FORMAT == FP8 && link.quantised) copy_input_scales<BLOCK_M>(link, geo, smem, group, work);
                if (!direct || !is_first) {
                    input_parity = ptx::load_shared(state + PARITY);
                    ptx::wait(state, input_parity);
                    if (link_index == 0 && is_first)  // not before: the input would come behind them
                        copies.fill_first(stage, full_barrier, first_stages, NUM_STAGES);
                }
                if constexpr (C::CONVERTS) {
                    if (converts && is_math_warp && !(direct && is_first)) {
                        if constexpr (FORMAT == NVFP4)
                            convert_nvfp4_input(link, geo, smem, pieces, input_scale, threadIdx.x);
                        else if (link.quantise)
                            convert_fp8_input<true, BLOCK_M>(link, geo, smem, work.block_columns, threadIdx.x);
                        else
                            convert_fp8_input<false, BLOCK_M>(link, geo, smem, work.block_columns, threadIdx.x);
                    }
                }
                __syncthreads();
                if (is_control_thread && !(direct && is_first)) ptx::store_shared(state + PARITY, input_parity ^ 1);
            }

            // ---- products: each stage is asked for again, for what comes behind, once it has been read
            float sum[2][TOKEN_TILES][4] = {};
            if (tile < link.group_tiles && is_math_warp) {
                if (FORMAT != BF16 && !is_first)
                    tile_scale =
                        load_tile_scale<C>(link, geo, work_of(link_index), group, pass, lane, is_math_warp);
#pragma unroll 1
                for (uint32_t unit = 0; unit < chunk_units; unit += C::STAGE_PARTS) {  // of the chunk
                    const uint32_t block = unit / 2;
#pragma unroll
                    for (int half = 0; half < C::UNIT_PARTS; ++half) {
                        ptx::wait(full_barrier, parity);
                        uint32_t last_word = 0;
                        if constexpr (FORMAT == FP8) {
                            const float weight_scale = __uint_as_float(__shfl_sync(~0u, tile_scale, block) << 23);
                            const uint32_t scales_at = input_scales + block * TOKEN_TILES * 32;
                            last_word =
                                multiply_fp8_stage<C>(sum, stage, input, weight_scale, scales_at, unit, chunk_units);
                        }
                        if constexpr (FORMAT == NVFP4)
                            last_word = multiply_nvfp4_stage<C>(sum, stage, input, to_scales, unit, chunk_units);
                        if constexpr (FORMAT == BF16) last_word = multiply_bf16(sum, stage, input, half);
                        __syncwarp();  // all lanes have read
                        copies.fill(stage, full_barrier, last_word, 1);
                        constexpr int LAST = NUM_STAGES - 1;
                        // Two barriers lie at a multiple of 16; otherwise the ring's place is kept.
                        const bool last = NUM_STAGES == 2 ? full_barrier & 8 : stage == ring + LAST * C::STAGE_BYTES;
                        stage += last ? -LAST * C::STAGE_BYTES : C::STAGE_BYTES, full_barrier += last ? -8 * LAST : 8;
                        parity ^= last;
                    }
#pragma unroll
                    for (int t = 0; t < TOKEN_TILES; ++t) input[t] += C::STAGE_PARTS * BLOCK_K * 2;
                }
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t)
                    input[t] -= (chunk_units + C::STAGE_PARTS - 1) / C::STAGE_PARTS * C::STAGE_PARTS * BLOCK_K * 2;
            }

            if (!CHAIN && next.units && pass + geo.teams >= geo.passes)
                prefetch_next<C>(next, link.prefetch_lines, ptx::block_index() * WARPS + warp, lane);

            // ---- the chunks' sums, in the order of k
            const int shift = BLOCK_M == 8 ? 0 : geo.token_tile_shift;
#pragma unroll 1
            for (int t = 0; t < TOKEN_TILES; t += 1 << shift) {
                const uint32_t smem_sums = ptx::smem_address(smem + geo.smem_sums);
                const float factor = FORMAT == NVFP4 ? __uint_as_float(tile_scale) : 1;
                store_sums<C>(link, smem_sums, sum, factor, t, shift, warp, g, c, is_math_warp);
                const int first_token = MMA_M * t, tokens = min(MMA_M << shift, link.tokens - first_token);
                const int rank = work_of(link_index).rank;
                if (!CHAIN && link.exchange) {
                    __syncthreads();
                    const uint32_t tag = ptx::load_shared(state + TAG);
                    publish_pass<C>(link, geo, exchange, smem_sums, block_chunks, tag, pass, rank, first_token, tokens,
                                    warp, lane);
                    __syncthreads();  // all have read
                    continue;
                }
                const auto sync_team = [&] {
                    if (link.num_splits > 1)
                        cluster_sync<C::CONTROL_WARP>();
                    else
                        __syncthreads();
                };
                sync_team();
                const int tile_shift = geo.tile_shift - link.gated;  // tiles, or pairs of them
                const int lines = is_math_warp ? tokens << tile_shift : 0;
#pragma unroll 1
                for (int four = 4 * (warp * link.num_splits + rank); four < lines;
                     four += 4 * link.num_splits * WARPS) {
                    const int line = min(four + lane / 8, lines - 1), token = line >> tile_shift;
                    const int first = (line & (1 << tile_shift) - 1) << link.gated;
                    const int tile = geo.tile_of(first, pass, group);
                    float4 total = {}, gates = {};
#pragma unroll 1
                    for (int slot = first; slot <= first + link.gated; ++slot) {
                        gates = total;
                        const uint32_t here = sums_of(smem_sums, slot << geo.block_chunk_shift, token, lane);
                        if (link.num_splits == 1)
                            total = add_chunks<C::SUMS_AT_ONCE, false>(1, block_chunks, link.section_chunks,
                                                                       [&](int) { return here; });
                        else
                            total = add_chunks<C::SUMS_AT_ONCE, true>(
                                link.num_splits, block_chunks, link.section_chunks,
                                [&](int block) { return ptx::in_block(block, here); });
                    }
                    const bool inside = four + lane / 8 < lines && tile < link.group_tiles;
                    epilogue.write_rows(inside, group * link.group_tiles + tile, first_token + token, gates, total);
                }
                // All have read, where they are written again or another block reads.
                if (CHAIN || BLOCK_M > 8 || link.num_splits > 1 || pass + geo.teams < geo.passes) sync_team();
            }
        }

        // ---- the sections' sums, in the order of k; of all passes, so blocks wait once
        if (!CHAIN && link.exchange) {
            const uint32_t tag = ptx::load_shared(state + TAG);
            if (threadIdx.x == 0) tagged::leave(exchange.state(), tag);
            const int tile_shift = geo.tile_shift - link.gated;
            const WarpWork work = work_of(link_index);
#pragma unroll 1
            for (int pass = work.first_pass; pass < geo.passes; pass += geo.teams) {
                const int group = geo.group_of(pass);
#pragma unroll 1
                for (int four = 4 * (warp * link.num_splits + work.rank); four < link.tokens << tile_shift;
                     four += 4 * link.num_splits * WARPS) {
                    const int lines = link.tokens << tile_shift;
                    const int line = min(four + lane / 8, lines - 1), token = line >> tile_shift;
                    const int first = (line & (1 << tile_shift) - 1) << link.gated;
                    const int tile = geo.tile_of(first, pass, group);
                    float4 total = {}, gates = {};
#pragma unroll 1
                    for (int slot = first; slot <= first + link.gated; ++slot) {
                        const uint64_t* from = exchange.line(link, geo, pass, slot, token) + 4 * (lane & 7);
                        gates = total;
                        total = add_published(from, exchange.block_stride(link, geo), link.num_splits, tag);
                    }
                    const bool inside = four + lane / 8 < lines && tile < link.group_tiles;
                    epilogue.write_rows(inside, group * link.group_tiles + tile, token, gates, total);
                }
            }
        }
        if (CHAIN && link_index == 0 && !has_passes)
            copies.fill_first(stage, full_barrier, first_stages, NUM_STAGES);
    }
}

}  // namespace linear_mma
