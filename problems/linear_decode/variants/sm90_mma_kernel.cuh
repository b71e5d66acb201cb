// sm90_mma: the kernel of a link or a chain.
#pragma once

#include "sm90_mma_input.cuh"
#include "sm90_mma_multiply.cuh"
#include "sm90_mma_reduce.cuh"

namespace linear_mma {

// The bytes of the link behind that come after those which its own blocks copy before they wait: of each chunk of a
// tile the first p.ahead lines behind STAGES stages. A warp does it for one of them, which then is read from L2.
template <int FORMAT, int NT, int STAGES>
__device__ __forceinline__ void fetch_ahead(const Next& next, int ahead, int warp, int lane) {
    using Ring = Stage<FORMAT, NT>;
    constexpr int UNIT_BYTES = Ring::PART_BYTES * Ring::OF_UNIT;
    const int chunk = warp & (1 << next.chunk_shift) - 1, tile = warp >> next.chunk_shift;
    const Cut cut = {next.k_units, next.chunk_shift, Ring::UNITS};
    const int begin = cut.begin(chunk), length = (cut.begin(chunk + 1) - begin) * UNIT_BYTES;
    if (tile >= next.tiles) return;
    const uint8_t* from = next.units + (static_cast<int64_t>(tile) * next.k_units + begin) * UNIT_BYTES;
    for (int line = lane; line < ahead; line += 32) {
        const int at = STAGES * Ring::BYTES + 128 * line;
        if (at < length) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    }
}

// NT: tiles of 8 tokens; STAGES: of a warp's ring. Grid: clusters of p.cluster blocks. CHAIN: all links in one launch,
// so that rings are full of the next link's weights when its input is ready. A warp more then asks for inputs, waits
// for the other blocks and releases at the cluster's barrier: a release waits for all copies that the warp has under
// way, and it has none.
template <int FORMAT, int NT, int STAGES, bool CHAIN>
__global__ void __launch_bounds__(THREADS + 32 * CHAIN, 1)
    link_kernel(const __grid_constant__ Jobs<CHAIN ? MOST_LINKS : 1> jobs) {
    extern __shared__ __align__(128) uint8_t smem[];
    using Ring = Stage<FORMAT, NT>;
    constexpr int Q = NT < 4 ? 2 : 1;             // of fp8: halves of a tile's rows at once, since registers are few
    constexpr int TOGETHER = NT == 4 ? 2 : 4;     // sums that are loaded at once: as registers allow
    constexpr int MESSENGER = CHAIN ? WARPS : 0;  // the warp that asks and releases
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    const bool works = !CHAIN || warp < WARPS, asks = threadIdx.x == 32 * MESSENGER;
    // Offsets up to the input are those of all links.
    const uint32_t barrier = ptx::smem_address(smem + jobs.job[0].at.x - BARRIER);
    uint32_t phase = 0;
    uint32_t ring = ptx::smem_address(smem) + warp * STAGES * Ring::BYTES + 16 * lane;  // what the lane reads first
    const uint32_t fulls = ptx::smem_address(smem) + WARPS * STAGES * Ring::BYTES + warp * STAGES * 8;
    if (STAGES != 2) hold(ring);
    if (elected<NT>(lane)) {
        if (works)  // a barrier for each stage of the warp
            for (int i = 0; i < STAGES; ++i) ptx::barrier_init(fulls + 8 * i, 1);
        if (warp == MESSENGER) ptx::barrier_init(barrier, 1), ptx::store_shared(barrier + PARITY, 0);
        ptx::barrier_publish();
    }
    // A warp's barriers are its own, and that of the input is known once it has been asked for. With four tiles of
    // tokens, of fp8, racecheck takes each warp for the one that makes the latter.
    if (CHAIN || NT == 4)
        __syncthreads();
    else
        __syncwarp();
    const auto job_of = [&](int link) -> const Job& { return jobs.job[CHAIN ? link : 0]; };
    const Share first_share(job_of(0).p, job_of(0).at, Ring::UNITS);
    // Up to 8 tokens there are registers to keep it.
    const auto share_of = [&](int link) {
        return CHAIN || NT > 1 ? Share(job_of(link).p, job_of(link).at, Ring::UNITS) : first_share;
    };
    const auto group_of = [](const Geometry& at, int pass) {
        return static_cast<int>(at.group_passes.quotient(pass));
    };
    const auto tile_of = [](const Geometry& at, int place, int pass, int group) {  // of the group
        return (pass - group * static_cast<int>(at.group_passes.by) << at.tile_shift) + place;
    };

    // ---- copies, in the order of use, from one link to the next
    int fill_link = 0, ahead = works ? first_share.first_pass : 1 << 30;  // the link and pass after that which is
    uint32_t left = 0, from = 0;  // being copied; of this, parts that are left, and the next one among the link's
    // A bulk copy may overtake loads of the same place that the warp has issued before: so its address depends on a
    // word that was loaded last, `used`, though by 0 only.
    const uint32_t at_zero = jobs.job[0].at.zero;
    const auto next_tile = [&] {
        while (!left) {
            const Job& job = job_of(fill_link);
            if (ahead >= job.at.passes) {
                if (!CHAIN || !works || fill_link + 1 >= jobs.count) return;
                ahead = blockIdx.x >> job_of(++fill_link).at.cluster_shift;
                continue;
            }
            const Share own = share_of(fill_link);
            const int group = group_of(job.at, ahead), tile = tile_of(job.at, own.place, ahead, group);
            if (tile < job.p.group_tiles) {
                const uint32_t unit = (group * job.p.group_tiles + tile) * job.p.k_units + own.begin;  // of the link
                from = unit * Ring::OF_UNIT;
                left = own.length * Ring::OF_UNIT;
            }
            ahead += job.at.clusters;
        }
    };
    next_tile();
    // Asks for what is left of a tile, in up to `stages` stages from this one on; -> how many it takes.
    const auto fill = [&](uint32_t to, uint32_t full, uint32_t used, int stages) -> int {
        const uint32_t parts = min(left, static_cast<uint32_t>(stages * Ring::PARTS));
        if (!parts) return 0;
        if (elected<NT>(lane)) {
            const uint8_t* units = job_of(fill_link).p.units + static_cast<uint64_t>(from) * Ring::PART_BYTES;
            uint32_t i = 0;
#pragma unroll 1
            do {
                const uint32_t bytes = min(parts - i, static_cast<uint32_t>(Ring::PARTS)) * Ring::PART_BYTES;
                ptx::arrive_and_expect_tx(full, bytes);
                load_weights(to + (used & at_zero), units, bytes, full);
                to += Ring::BYTES, full += 8, units += Ring::BYTES, i += Ring::PARTS;
            } while (stages > 1 && i < parts);
        }
        from += parts, left -= parts;
        next_tile();
        return (parts + Ring::PARTS - 1) / Ring::PARTS;
    };
    uint32_t stage = ring, full = fulls, stage_parity = 0;  // stage, full: of the one to be used next
    const auto fill_first = [&](int i, int end) {  // stages, before any is used
#pragma unroll 1
        while (i < end && left) i += fill(stage + i * Ring::BYTES, full + i * 8, 0, end - i);
    };
#pragma unroll 1
    for (int link = 0; link < (CHAIN ? jobs.count : 1); ++link) {
        const Link& p = job_of(link).p;
        const Next& next = job_of(link).next;
        const Geometry& at = job_of(link).at;
        const Share own = CHAIN ? share_of(link) : first_share;
        const int begin = own.begin, first = own.slice * COLUMNS;
        uint32_t length = own.length;
        hold(length);
        const int local = 1 << at.local_shift;
        const auto ask_for = [&](int group, const Share& own) {
            copy_input(p, at, smem, p.x + group * p.group_columns, own.slice * COLUMNS, own.count);
        };
        // What a warp needs of a tile besides its units. fp8: lane i the scale of the chunk's block i;
        // nvfp4: the factor.
        const auto scale_of = [&](const Share& own, int group, int pass) -> uint32_t {
            const int tile = tile_of(at, own.place, pass, group);
            const uint32_t row = group * p.group_tiles + tile, block = own.begin / 2 + lane;
            if (FORMAT == BF16 || tile >= p.group_tiles || !works) return 0;
            if (FORMAT == NVFP4) return __float_as_uint(p.factors[row]);
            const uint32_t blocks = (p.k_units + 1) / 2;
            return block < blocks ? p.scales[row * blocks + block] : 0;
        };
        const bool converts = CONVERTS<FORMAT, NT> && !p.taken && (FORMAT == FP8 || p.quantise);
        const auto input_scale_of = [&](int group) {
            return FORMAT == NVFP4 && converts ? p.input_scales[group] : 1.f;
        };
        uint32_t mine = 0;  // both are asked for before the input is waited for
        float input_scale = 1;
        const bool has_passes = !CHAIN || own.first_pass < at.passes;
        const int first_group = group_of(at, own.first_pass);
        // A short input that the block converts comes to registers, sooner than by a copy that all wait for.
        const Pieces<FORMAT> pieces(p, own.count);
        const bool direct =
            link == 0 && NT == 1 && converts && has_passes && pieces.whole <= DIRECT * THREADS;
        uint4 norm_weights[DIRECT] = {};
        const auto ask_scales = [&] {
            if (!has_passes) return;
            mine = scale_of(own, first_group, own.first_pass);
            input_scale = input_scale_of(first_group);
            if (!CHAIN && p.norm && direct)
#pragma unroll
                for (int j = 0; j < DIRECT; ++j)
                    if (const auto place = pieces.place(threadIdx.x + j * THREADS); place.inside)
                        norm_weights[j] = reinterpret_cast<const uint4*>(p.norm)[place.piece];  // no kernel writes them
        };
        uint4 raw[DIRECT] = {};
        const auto take_input = [&] {
            if (!direct) {
                if (asks && has_passes) ask_for(first_group, own);
                if (!CHAIN) __syncthreads();  // all know the barrier
                return;
            }
#pragma unroll
            for (int j = 0; j < DIRECT; ++j) {
                const auto place = pieces.place(threadIdx.x + j * THREADS);
                if (works && place.inside)  // the messenger's would be pieces of warp 0
                    raw[j] = load_input(p.x + (place.token * p.x_columns + first_group * p.group_columns + first +
                                               PIECE * place.piece));
            }
        };
        // Memory is idle while a link of a chain waits; of a single link more copies would delay the input.
        const int asked = at.early || direct ? STAGES : Ring::BEFORE;
        if (link == 0) {
            // The input first where no kernel ahead is to be waited for, else the weights.
            if (!at.early) take_input();
            fill_first(0, asked);
            ask_scales();
            programmatic::trigger();  // the next link may begin to copy its weights
            if (at.early) {
                programmatic::wait();  // until the link ahead has written the input
                take_input();
            }
            if (CHAIN && asks) phase = first_bit(jobs.met);
        } else {
            ask_scales();
            if (asks) {
                meet_grid(jobs.met, phase);
                ptx::fence_proxy_async();
                if (has_passes) ask_for(first_group, own);
            }
        }

        float behind_scale = 0;  // lane i has that of group i of the link behind
        if (FORMAT == NVFP4 && next.taken && lane * next.k_units * COLUMNS < next.taken_columns)
            behind_scale = next.input_scales[lane];
        uint32_t input[NT];  // its rows, at the lane's first columns of the next unit
#pragma unroll
        for (int t = 0; t < NT; ++t)  // columns without a token take the last one's
            input[t] = ptx::smem_address(smem + at.x) + min(8 * t + g, p.tokens - 1) * at.row_bytes + 32 * c +
                      (begin - own.slice) * COLUMNS * 2;
        uint32_t x_scales = ptx::smem_address(smem + at.x_scales) + 8 * c + (begin - own.slice) / 2 * NT * 32;
        if (NT == 1) hold(input[0]);
        if (FORMAT == FP8) hold(x_scales);
        uint32_t to_scales = units::SCALES - 12 * lane;  // nvfp4: of a unit, from what the lane reads first
        if (FORMAT == NVFP4) hold(to_scales);

        const Exchange exchange = {p.exchange};
        // A lane has the sums of four rows of a tile of the link, of one token, and their gates'; eight lanes have all
        // rows. All lanes call this.
        const auto put = [&](bool inside, int of_link, int token, const float4& gates, float4 total) {
            if (p.gated) {
                const auto gated = [&](float gate, float v) {
                    gate = fminf(gate, p.limit);
                    return gate / (1 + __expf(-gate)) * fminf(fmaxf(v, -p.limit), p.limit);
                };
                total = make_float4(gated(gates.x, total.x), gated(gates.y, total.y), gated(gates.z, total.z),
                                    gated(gates.w, total.w));
            }
            int part = 0;
#pragma unroll
            for (int i = 1; i < MOST_PARTS; ++i) part += i < p.parts && of_link >= p.part[i].tile;
            const int column = (of_link - p.part[part].tile >> p.gated) * TILE + 4 * (lane & 7);
            const uint2 rounded = {ptx::pack_bf16x2(total.x, total.y), ptx::pack_bf16x2(total.z, total.w)};
            if (inside)
                *reinterpret_cast<uint2*>(p.part[part].out + static_cast<int64_t>(token) * p.part[part].columns +
                                          column) = rounded;
            if (FORMAT == NVFP4 && next.taken)
                write_behind(next, inside && part == 0, token, column, rounded, behind_scale);
        };

        if (!CHAIN && p.exchange && threadIdx.x == 0)
            ptx::store_shared(barrier + TAG, load_relaxed(&exchange.state()->tag) + 1);
        // Behind all that can be worked out while the input is under way.
        if constexpr (CONVERTS<FORMAT, NT>)
            if (direct) {
                if (!CHAIN && p.norm)
                    norm_pieces(p, pieces, reinterpret_cast<float*>(smem + at.sums), raw, norm_weights);
                const float inverse = __frcp_rn(input_scale);
#pragma unroll
                for (int j = 0; j < DIRECT; ++j)
                    if (const int i = threadIdx.x + j * THREADS; works && i < pieces.whole)
                        convert_piece<FORMAT>(p, at, smem, pieces.place(i), raw[j], input_scale, inverse);
            }

#pragma unroll 1
        for (int pass = own.first_pass; pass < at.passes; pass += at.clusters) {
            const int group = group_of(at, pass), tile = tile_of(at, share_of(link).place, pass, group);
            const bool begins = pass < at.clusters;
            // Whether the input in shared memory is not this group's.
            if (begins || pass - at.clusters < group * static_cast<int>(at.group_passes.by)) {
                const Share again = share_of(link);
                uint32_t parity = 1;
                if (!begins) {
                    if (asks) ask_for(group, again);
                    input_scale = input_scale_of(group);
                }
                if (FORMAT == FP8 && p.taken) take_scales<NT>(p, at, smem, group, again);
                if (!direct || !begins) {
                    parity = ptx::load_shared(barrier + PARITY);
                    ptx::wait(barrier, parity);
                    if (link == 0 && begins) fill_first(asked, STAGES);  // not before: the input would come behind them
                }
                if constexpr (CONVERTS<FORMAT, NT>) {
                    if (converts && works && !(direct && begins)) {
                        if constexpr (FORMAT == NVFP4)
                            convert_nvfp4_input(p, at, smem, pieces, input_scale, threadIdx.x);
                        else if (p.quantise)
                            convert_fp8_input<true, NT>(p, at, smem, again.count, threadIdx.x);
                        else
                            convert_fp8_input<false, NT>(p, at, smem, again.count, threadIdx.x);
                    }
                }
                __syncthreads();
                if (asks && !(direct && begins)) ptx::store_shared(barrier + PARITY, parity ^ 1);
            }
            float sum[2][NT][4] = {};
            if (tile < p.group_tiles && works) {
                if (FORMAT != BF16 && !begins) mine = scale_of(share_of(link), group, pass);
#pragma unroll 1
                for (uint32_t unit = 0; unit < length; unit += Ring::PARTS) {  // of the chunk
                    const uint32_t block = unit / 2;
#pragma unroll
                    for (int half = 0; half < Ring::OF_UNIT; ++half) {
                        ptx::wait(full, stage_parity);
                        uint32_t used = 0;
                        if constexpr (FORMAT == FP8) {
                            const float of_weights = __uint_as_float(__shfl_sync(~0u, mine, block) << 23);
                            const uint32_t scales_at = x_scales + block * NT * 32;
                            float both[NT][2];
#pragma unroll
                            for (int t = 0; t < NT; ++t) {
                                const float2 of_input = ptx::load_shared_pair(scales_at + t * 32);
                                both[t][0] = of_weights * of_input.x, both[t][1] = of_weights * of_input.y;
                            }
#pragma unroll
                            for (int part = 0; part < Ring::PARTS; ++part) {
                                if (part && unit + 1 == length) break;
                                uint32_t columns[NT];
#pragma unroll
                                for (int t = 0; t < NT; ++t) columns[t] = input[t] + part * COLUMNS * 2;
#pragma unroll
                                for (int q = 0; q < 2; q += Q) {
                                    float of_unit[Q][NT][4] = {};
                                    used = multiply_fp8(of_unit, stage + part * Ring::PART_BYTES + 1024 * q, columns);
#pragma unroll
                                    for (int t = 0; t < NT; ++t)
#pragma unroll
                                        for (int r = 0; r < Q; ++r)
#pragma unroll
                                            for (int i = 0; i < 4; ++i)
                                                sum[q + r][t][i] =
                                                    fmaf(of_unit[r][t][i], both[t][i & 1], sum[q + r][t][i]);
                                }
                            }
                        }
                        if constexpr (FORMAT == NVFP4) {
                            const Words one(stage, to_scales);
                            if (unit + 1 < length) {  // both loaded before the first is multiplied
                                const Words two(stage + Ring::PART_BYTES, to_scales);
                                uint32_t behind[NT];
#pragma unroll
                                for (int t = 0; t < NT; ++t) behind[t] = input[t] + COLUMNS * 2;
                                multiply_nvfp4(sum, one, input);
                                multiply_nvfp4(sum, two, behind);
                                used = two.last();
                            } else {
                                multiply_nvfp4(sum, one, input);
                                used = one.last();
                            }
                        }
                        if constexpr (FORMAT == BF16) {
                            used = multiply_bf16(sum, stage, input, half);
                        }
                        __syncwarp();  // all lanes have read
                        fill(stage, full, used, 1);
                        // Two barriers lie at a multiple of 16; otherwise the ring's place is kept.
                        const bool last = STAGES == 2 ? full & 8 : stage == ring + (STAGES - 1) * Ring::BYTES;
                        stage += last ? -(STAGES - 1) * Ring::BYTES : Ring::BYTES, full += last ? -8 * (STAGES - 1) : 8;
                        stage_parity ^= last;
                    }
#pragma unroll
                    for (int t = 0; t < NT; ++t) input[t] += Ring::PARTS * COLUMNS * 2;
                }
#pragma unroll
                for (int t = 0; t < NT; ++t)
                    input[t] -= (length + Ring::PARTS - 1) / Ring::PARTS * Ring::PARTS * COLUMNS * 2;
            }

            if (!CHAIN && next.units && pass + at.clusters >= at.passes)
                fetch_ahead<FORMAT, NT, STAGES>(next, p.ahead, block_index() * WARPS + warp, lane);

            // ---- the chunks' sums, in the order of k
            const int held_shift = NT == 1 ? 0 : at.held_shift;
#pragma unroll 1
            for (int t = 0; t < NT; t += 1 << held_shift) {
                const uint32_t sums = ptx::smem_address(smem + at.sums);
                const float factor = FORMAT == NVFP4 ? __uint_as_float(mine) : 1;
#pragma unroll
                for (int u = 0; u < NT; ++u)
                    if (u >> held_shift == t >> held_shift)
#pragma unroll
                        for (int odd = 0; odd < 2; ++odd) {
                            const int token = 2 * c + odd;
                            if (8 * u + token >= p.tokens || !works) continue;
                            const uint32_t to = sums + 4 * (((u - t) * WARPS + warp) * SUMS + token * PAD + g);
#pragma unroll
                            for (int r = 0; r < 4; ++r) {  // row g + 8 r
                                const float v = sum[r / 2][u][odd + r % 2 * 2];
                                ptx::store_shared(to + 32 * r, __float_as_uint(v * factor));
                            }
                        }
                const auto sum_at = [&](int slot, int token) {  // of a chunk of this block; token: of those held
                    return sums + 4 * ((token / 8 * WARPS + slot) * SUMS + token % 8 * PAD + 4 * (lane & 7));
                };
                const int of_round = min(8 << held_shift, p.tokens - 8 * t);  // tokens
                const int rank = share_of(link).rank;
                if (!CHAIN && p.exchange) {
                    __syncthreads();
                    const uint32_t tag = ptx::load_shared(barrier + TAG);
#pragma unroll 1
                    for (int line = 4 * warp + lane / 8; line < of_round << at.tile_shift; line += 4 * WARPS) {
                        const int token = line >> at.tile_shift, place = line & (1 << at.tile_shift) - 1;
                        const uint32_t from = sum_at(place << at.local_shift, token);
                        const float4 total = add_up<TOGETHER, false>(1, local, local, [&](int) { return from; });
                        uint64_t* to = exchange.line(p, at, pass, place, 8 * t + token);
                        tell(to + rank * exchange.apart(p, at) + 4 * (lane & 7), total, tag);
                    }
                    __syncthreads();  // all have read
                    continue;
                }
                const auto meet = [&] {
                    if (p.cluster > 1)
                        cluster_sync<MESSENGER>();
                    else
                        __syncthreads();
                };
                meet();
                const int first_shift = at.tile_shift - p.gated;  // tiles, or pairs of them
                const int lines = works ? of_round << first_shift : 0;
#pragma unroll 1
                for (int four = 4 * (warp * p.cluster + rank); four < lines; four += 4 * p.cluster * WARPS) {
                    const int line = min(four + lane / 8, lines - 1), token = line >> first_shift;
                    const int first = (line & (1 << first_shift) - 1) << p.gated;
                    const int of_group = tile_of(at, first, pass, group);
                    float4 total = {}, gate = {};
#pragma unroll 1
                    for (int which = first; which <= first + p.gated; ++which) {
                        gate = total;
                        const uint32_t here = sum_at(which << at.local_shift, token);
                        if (p.cluster == 1)
                            total = add_up<TOGETHER, false>(1, local, p.section, [&](int) { return here; });
                        else
                            total = add_up<TOGETHER, true>(p.cluster, local, p.section,
                                                           [&](int block) { return ptx::in_block(block, here); });
                    }
                    const bool inside = four + lane / 8 < lines && of_group < p.group_tiles;
                    put(inside, group * p.group_tiles + of_group, 8 * t + token, gate, total);
                }
                // All have read, where they are written again or another block reads.
                if (CHAIN || NT > 1 || p.cluster > 1 || pass + at.clusters < at.passes) meet();
            }
        }

        if (!CHAIN && p.exchange) {  // ---- the sections' sums, in the order of k; of all passes, so blocks wait once
            const uint32_t tag = ptx::load_shared(barrier + TAG);
            if (threadIdx.x == 0) tagged::leave(exchange.state(), tag);
            const int first_shift = at.tile_shift - p.gated;
            const Share own = share_of(link);
#pragma unroll 1
            for (int pass = own.first_pass; pass < at.passes; pass += at.clusters) {
                const int group = group_of(at, pass);
#pragma unroll 1
                for (int four = 4 * (warp * p.cluster + own.rank); four < p.tokens << first_shift;
                     four += 4 * p.cluster * WARPS) {
                    const int lines = p.tokens << first_shift;
                    const int line = min(four + lane / 8, lines - 1), token = line >> first_shift;
                    const int first = (line & (1 << first_shift) - 1) << p.gated;
                    const int of_group = tile_of(at, first, pass, group);
                    float4 total = {}, gate = {};
#pragma unroll 1
                    for (int which = first; which <= first + p.gated; ++which) {
                        const uint64_t* from = exchange.line(p, at, pass, which, token) + 4 * (lane & 7);
                        gate = total, total = hear(from, exchange.apart(p, at), p.cluster, tag);
                    }
                    const bool inside = four + lane / 8 < lines && of_group < p.group_tiles;
                    put(inside, group * p.group_tiles + of_group, token, gate, total);
                }
            }
        }
        if (CHAIN && link == 0 && !has_passes) fill_first(asked, STAGES);
    }
}

}  // namespace linear_mma
