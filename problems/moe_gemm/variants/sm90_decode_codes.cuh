// Tokens of sm90_decode where activations are NVFP4: e4m3 codes with scales, times units of nvfp4_wgmma.cuh.
//
// The four warps of a warpgroup have every fourth step, 256 columns, of a unit row, and a place in shared memory for
// the codes of a group's tokens there: of up to 4 tokens, and of 4 more behind. It has room for both this group and the
// next one, or for one large one.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "nvfp4_wgmma.cuh"
#include "sm90_decode_block.cuh"
#include "sm90_decode_tokens.cuh"

namespace decode {

// Rows of codes in global memory: of each slot `width` e4m3 bytes, and behind all codes the scales, fp16, in the order
// that nvfp4_wgmma::scale_offset says, with zeros up to whole steps. Below 2^29 bytes: 65535 slots of 8192 values.
struct Codes {
    uint8_t *codes, *scales;
    int width;
    __device__ __forceinline__ Codes(void* at, int slots, int width)
        : codes(static_cast<uint8_t*>(at)), scales(codes + static_cast<int64_t>(slots) * width), width(width) {}
    __device__ __forceinline__ int steps() const { return (width + nvfp4_wgmma::STEP - 1) / nvfp4_wgmma::STEP; }
    __device__ __forceinline__ uint8_t* row(int slot) const { return codes + uint32_t(slot) * uint32_t(width); }
    __device__ __forceinline__ uint8_t* scales_of(int slot, int step) const {
        return scales + uint32_t(slot * steps() + step) * nvfp4_wgmma::STEP_SCALES;
    }
    __device__ __forceinline__ void put_scale(int slot, int block, __half scale) const {
        *reinterpret_cast<__half*>(scales_of(slot, block / 16) + nvfp4_wgmma::scale_offset(block % 16)) = scale;
    }
};

// 8 values -> codes, and the scale of their block; most: the largest magnitude in it.
__device__ __forceinline__ uint2 codes_of(const uint32_t (&pairs)[4], float most, float input_scale, float& scale) {
    scale = block_scale(most, input_scale);
    uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pairs[i]));
        const uint32_t low = nvfp4_wgmma::code_of(nearest(two.x, input_scale, scale));
        const uint32_t high = nvfp4_wgmma::code_of(nearest(two.y, input_scale, scale));
        words[i / 2] |= (low | high << 8) << 16 * (i % 2);
    }
    return make_uint2(words[0], words[1]);
}
__device__ __forceinline__ float largest_of(const uint32_t (&pairs)[4]) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pairs[i]));
        most = fmaxf(most, fmaxf(fabsf(two.x), fabsf(two.y)));
    }
    return most;
}

// p.x (T, hidden) -> Codes of each slot, as its expert's input scale quantises it; zeros for an id that is no expert.
// A thread makes a block of 16, also those that only fill the last step.
__global__ void quantise_codes(const Problem p, void* to) {
    programmatic::wait();
    programmatic::trigger();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const Codes out(to, p.tokens * p.topk, p.hidden);
    const int blocks = 16 * out.steps(), slot = i / blocks, block = i % blocks;
    if (slot >= p.tokens * p.topk) return;
    if (block >= p.hidden / 16) return out.put_scale(slot, block, __half());
    const int e = expert_of(p, slot);
    uint2 codes[2] = {};
    float scale = 0;
    if (e < p.experts) {
        const uint4* from = reinterpret_cast<const uint4*>(p.x + static_cast<int64_t>(slot / p.topk) * p.hidden);
        const uint4 a = from[2 * block], b = from[2 * block + 1];
        const uint32_t pairs[2][4] = {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
        const float most = fmaxf(largest_of(pairs[0]), largest_of(pairs[1]));
#pragma unroll
        for (int j = 0; j < 2; ++j) codes[j] = codes_of(pairs[j], most, p.in13[e], scale);
    }
    *reinterpret_cast<uint4*>(out.row(slot) + 16 * block) =
        make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y);
    out.put_scale(slot, block, nvfp4_wgmma::scale_of(scale));
}

// Tokens that a group's products are made for at once, by its tokens: 1, 2 or 4.
__device__ __forceinline__ int at_once(int count) { return count <= 2 ? count : 4; }

// A warpgroup's codes of a group's tokens, of up to C steps. Every call is for all its 128 threads.
template <int C>
struct Input {
    static constexpr int PART_BYTES = nvfp4_wgmma::STEP_BYTES + 4 * nvfp4_wgmma::STEP_SCALES;  // of a step
    static_assert(2 * C * PART_BYTES <= CODES_BYTES || C > 4, "room for 8 tokens");
    static_assert(C * PART_BYTES <= CODES_BYTES, "room for 4 tokens");
    uint32_t room;  // this warpgroup's, in shared memory
    int steps, warpgroup, thread;
    int at = 0, next = 0;  // bytes in it at which the group's codes are, and those of the next one

    __device__ __forceinline__ Input(uint32_t room, int units, int warp, int lane)
        : room(room + warp / 4 * CODES_BYTES), steps((units - warp / 4 * 4 + WARPS - 1) / WARPS),
          warpgroup(warp / 4), thread(warp % 4 * 32 + lane) {}

    // Where a part of 4 tokens, of `parts`, has its codes of a step, and its scales.
    static __device__ __forceinline__ constexpr uint32_t codes_at(int c, int part, int parts) {
        return (c * parts + part) * nvfp4_wgmma::STEP_BYTES;
    }
    static __device__ __forceinline__ constexpr uint32_t scales_at(int c, int part, int parts) {
        return C * parts * nvfp4_wgmma::STEP_BYTES + (c * parts + part) * 4 * nvfp4_wgmma::STEP_SCALES;
    }
    // Whether codes of such a group may come while another's are used.
    __device__ __forceinline__ bool apart(int count, int coming) const {
        return C * PART_BYTES * (max(count, coming) > 4 ? 2 : 1) * 2 <= CODES_BYTES;
    }
    // The place of the next group's codes. Where it is this one's too, all warps must be done with that.
    __device__ __forceinline__ bool aim(int count, int coming) {
        const bool beside = apart(count, coming);
        next = beside && at == 0 ? CODES_BYTES / 2 : 0;
        return beside;
    }
    // What core matrix `thread` / 8 of a step, a block, has in row `thread` % 8: a token of 4, or none.
    __device__ __forceinline__ int token_here(int together) const {
        const int b = thread / 8 % 8, column = thread % 8;
        if (together == 4) return column % 2 == b % 2 ? column / 2 : -1;
        if (column / 2 != b % 4) return -1;
        return together == 2 ? column % 2 : column % 2 == b / 4 ? 0 : -1;
    }
    __device__ __forceinline__ uint32_t place_here() const {
        const int core = thread / 8, b = core % 8;
        return b / 2 * 512 + core / 8 * 256 + b % 2 * 128 + thread % 8 * 16;
    }

    // Asks for the codes of a group of `rows`, with zeros around them.
    __device__ __forceinline__ void ask(const Codes& rows, const Group& group, const uint16_t* slots) {
        const int count = group.count(), parts = count > 4 ? 2 : 1;
        const int here = token_here(at_once(count));
        const int block = thread / 8, piece = thread % 2, member = thread / 2 % 4;
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
            const int token = 4 * part + here, owner = 4 * part + member;
            const bool some = here >= 0 && token < count;
            const uint8_t* from = rows.row(some ? slots[group.start() + token] : 0);
            const int scaled = owner < count ? slots[group.start() + owner] : 0;
#pragma unroll 1
            for (int c = 0; c < steps; ++c) {
                const int step = c * 4 + warpgroup, column = step * nvfp4_wgmma::STEP + 16 * block;
                const bool really = some && column < rows.width;
                cp_async16(room + next + codes_at(c, part, parts) + place_here(), from + (really ? column : 0), really);
                if (thread / 8 == c)
                    cp_async16(room + next + scales_at(c, part, parts) + 16 * (thread % 8),
                               rows.scales_of(scaled, step) + 16 * piece, owner < count);
            }
        }
    }
    // Puts codes of a call's one token there, as an input scale quantises it. half: what load_own returned.
    __device__ __forceinline__ void quantise(const uint4& half, float input_scale) {
        const int here = token_here(1), own = thread / 2;  // of all the warpgroup's blocks
#pragma unroll
        for (int c = 0; c < C; ++c)
            if (c < steps && here < 0) store_shared16(room + next + codes_at(c, 0, 1) + place_here(), uint4());
        const uint32_t pairs[4] = {half.x, half.y, half.z, half.w};
        const float most = largest_of(pairs);
        float scale;
        const uint2 codes = codes_of(pairs, fmaxf(most, __shfl_xor_sync(~0u, most, 1)), input_scale, scale);
        const int c = own / 16, block = own % 16;
        if (c >= steps) return;
        store_shared8(room + next + codes_at(c, 0, 1) + nvfp4_wgmma::code_offset<1>(block, 0) + thread % 2 * 8, codes);
        if (thread % 2 == 0)
            store_shared2(room + next + scales_at(c, 0, 1) + nvfp4_wgmma::scale_offset(block),
                          __half_as_ushort(nvfp4_wgmma::scale_of(scale)));
    }
    // Waits until all warps have what they asked for, or have put.
    __device__ __forceinline__ void enter() {
        cp_async_wait_all();
        fence_proxy_async_shared();
        meet();
        at = next;
    }
    __device__ __forceinline__ void meet() const {  // numbers that the compiler knows: else it takes all 16
        if (warpgroup == 0) named_barrier_sync<128>(5);
        if (warpgroup == 1) named_barrier_sync<128>(6);
        if (warpgroup == 2) named_barrier_sync<128>(7);
        if (warpgroup == 3) named_barrier_sync<128>(8);
    }
};

// What a lane has of a call's one token for Input::quantise: 8 neighbouring values, zeros beyond the token.
__device__ __forceinline__ uint4 load_own(const __nv_bfloat16* x, int width, int warp, int lane) {
    const int thread = warp % 4 * 32 + lane, own = thread / 2;
    const int column = (own / 16 * 4 + warp / 4) * nvfp4_wgmma::STEP + own % 16 * 16 + thread % 2 * 8;
    return column < width ? load_global(x + column) : make_uint4(0, 0, 0, 0);
}

// The multiplying warps' side of the ring.
struct Ring {
    uint32_t from, full_barriers, empty_barriers;
    int stages, stage = 0, parity = 0;
    uint32_t nothing;  // 0

    __device__ __forceinline__ void await() const { wait(full_barriers + 8 * stage, parity); }
    __device__ __forceinline__ uint32_t unit(int c, int warp) const {
        return from + stage * STAGE_BYTES + (c % EACH * WARPS + warp) * units::BYTES;
    }
    // loaded: of what has been loaded from the stage. It must be here before it may be overwritten.
    __device__ __forceinline__ void free(uint32_t loaded) {
        arrive(empty_barriers + 8 * stage + (loaded & nothing));
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// Multiplies a unit row of `all` units by a group's tokens and stores the warp's sums at `to`, as Sums::store says,
// when there is room: ready(). FULL: all warps have C units of it.
template <int TOKENS, int PARTS, bool FULL, int C, typename Ready>
__device__ __forceinline__ void multiply_row(Ring& ring, const Input<C>& input, int all, uint32_t to, int row_bytes,
                                             int warp, int lane, Ready ready) {
    nvfp4_wgmma::Sums<TOKENS> sums[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) sums[part].clear();
    const bool second = warp & 2;
    const uint32_t scales = input.room + input.at + (second ? 16 : 0);
    // By a reduction, whose result is in a register that the warp shares: descriptors must be in such.
    const uint32_t codes = nvfp4_wgmma::descriptor(__reduce_max_sync(~0u, input.room + input.at));
#pragma unroll(FULL ? C : EACH)
    for (int c = 0; c < C; ++c) {
        if (!FULL && c * WARPS >= all) break;
        if (c % EACH == 0) ring.await();
        nvfp4_wgmma::Unit<TOKENS> unit;
        unit.load(ring.unit(c, warp), lane);
        if (c % EACH == EACH - 1 || (!FULL && (c + 1) * WARPS >= all))
            ring.free(unit.codes[0][0] ^ unit.codes[1][0] ^ unit.scales[0]);
        if (!FULL && c >= input.steps) break;
        nvfp4_wgmma::Left left;
        left.decode(unit);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            float made[TOKENS][8];
            nvfp4_wgmma::Scales<TOKENS> factors;
            factors.load(scales + Input<C>::scales_at(c, part, PARTS), lane);
            nvfp4_wgmma::multiply(made, left, codes + Input<C>::codes_at(c, part, PARTS) / 16);
            factors.multiply(unit);
            warpgroup_wait<0>();
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) warpgroup_fence_operand(made[i]);
            sums[part].add(made, factors, second);
        }
    }
    ready();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) sums[part].store(to + 32 * part, row_bytes, lane);
}

// LONE: count is 1. SHORT: with code of their own for rows of C units a warp; else registers are too few.
template <bool LONE, bool SHORT, int C, typename Ready>
__device__ __forceinline__ void multiply_group(Ring& ring, const Input<C>& input, int count, int all, uint32_t to,
                                               int row_bytes, int warp, int lane, Ready ready) {
    const bool full = SHORT && all == C * WARPS;
    if ((LONE || count == 1) && full)
        multiply_row<1, 1, SHORT>(ring, input, all, to, row_bytes, warp, lane, ready);
    else if (LONE || count == 1)
        multiply_row<1, 1, false>(ring, input, all, to, row_bytes, warp, lane, ready);
    else if (count == 2 && full)
        multiply_row<2, 1, SHORT>(ring, input, all, to, row_bytes, warp, lane, ready);
    else if (count == 2)
        multiply_row<2, 1, false>(ring, input, all, to, row_bytes, warp, lane, ready);
    else if (C > 4 || count <= 4)
        multiply_row<4, 1, false>(ring, input, all, to, row_bytes, warp, lane, ready);
    else
        multiply_row<4, 2, false>(ring, input, all, to, row_bytes, warp, lane, ready);
}

// What the multiplying warps do, both products. half: what load_own returned, of a call's one token.
template <int C1, int C2>
__device__ __forceinline__ void consume_codes(const Problem& p, const Layout& at, uint8_t* smem, Ring ring,
                                              const uint4& half, int count, int batches, int warp, int lane) {
    const Group* groups = reinterpret_cast<const Group*>(smem + at.groups);
    const uint16_t* slots = reinterpret_cast<const uint16_t*>(smem + at.slots);
    float* total = reinterpret_cast<float*>(smem + at.total);
    const uint32_t room = smem_address(smem + at.codes), sums = smem_address(smem + at.sums);
    const uint32_t read = smem_address(smem + at.barriers) + 16 * p.stages, ready = read + 24 + 8 * BATCHES;
    const int n = p.tokens * p.topk, units1 = nvfp4_wgmma::units_of(p.hidden), units2 = nvfp4_wgmma::units_of(p.inner);
    const int rows1 = p.inner / 16, rows2 = p.hidden / units::ROWS;
    int buffer = 0, turn = 1;
    const auto multiply = [&](auto lone, const auto& input, int tokens, int all) {
        const uint32_t to = sums + (buffer * WARPS + warp) * p.most * 64;
        multiply_group<decltype(lone)::value, C1 <= 4>(ring, input, tokens, all, to, p.most * 8, warp, lane,
                                                       [&] { wait(read + 8 * buffer, turn); });
        sums_arrive(buffer);
        turn ^= buffer, buffer ^= 1;
    };

    // lone: as p.lone. Only then is `half` kept.
    const auto first_product = [&](auto lone) {
        constexpr bool LONE = decltype(lone)::value;
        Input<C1> input(room, units1, warp, lane);
        const Codes rows(const_cast<__nv_bfloat16*>(p.x), n, p.hidden);
        float input_scale = 1;  // lane i: of group i
        if (LONE && lane < count) input_scale = p.in13[groups[lane].expert];
        const auto ask = [&](int group) {
            if constexpr (LONE)
                input.quantise(half, __shfl_sync(~0u, input_scale, group));
            else
                input.ask(rows, groups[group], slots);
        };
        Walk walk(reinterpret_cast<const Part*>(smem + at.parts), rows1, batches);
        bool more = walk.find();
        if (more) ask(walk.group), input.enter();
        while (more) {
            const int group = walk.group, tokens = groups[group].count();
            walk.next(), more = walk.find();
            const bool changes = more && walk.group != group;
            const bool beside = changes && input.aim(tokens, groups[walk.group].count());
            if (beside) ask(walk.group);
            multiply(lone, input, tokens, units1);
            if (!changes) continue;
            if (!beside) input.meet(), ask(walk.group);
            input.enter();
        }
    };
    if (batches && C1 == 4 && p.lone)
        first_product(std::bool_constant<C1 == 4>());
    else if (batches)
        first_product(std::false_type());

    const Codes rows(p.v, n, p.inner);
    int ended = 0;  // phase in which those who add end a unit row of out
    for (int row = blockIdx.x; row < rows2; row += gridDim.x) {
        clear_total(p, total);  // nobody adds to it before all have handed over sums
        Input<C2> input(room, units2, warp, lane);
        int batch = 0, due = 0;  // the next batch to wait for, and its first group
        const auto ask = [&](int group) {
            if (group == due) {
                wait(ready + 8 * batch, 0);
                due = ++batch < batches ? batch_begin(count, batches, batch) : -1;
            }
            input.ask(rows, groups[group], slots);
        };
        input.meet();  // what was there before has been used
        if (count) ask(0), input.enter();
        for (int i = 0; i < count; ++i) {
            const int tokens = groups[i].count();
            const bool more = i + 1 < count, beside = more && input.aim(tokens, groups[i + 1].count());
            if (beside) ask(i + 1);
            multiply(std::false_type(), input, tokens, units2);
            if (!more) continue;
            if (!beside) input.meet(), ask(i + 1);
            input.enter();
        }
        if (!count) consumer_sync();
        wait(read + 16, ended), ended ^= 1;
        write_row(p, total, row);
        consumer_sync();
    }
}

}  // namespace decode
