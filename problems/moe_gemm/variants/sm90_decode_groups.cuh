// What sm90_decode works on: the slots t k + j of all tokens, sorted by expert into groups of up to 8 NT, and a block's
// part of the work. Each block finds that for itself, in its shared memory. An expert's slots stay in their own order,
// so that results repeat. Slots whose id is no expert are left out. Where there is a shared expert, the last one, the
// last slot of each token is its, with weight 1, and ids and routing have one column less.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ptx.cuh"
#include "warp.cuh"

namespace decode {

constexpr int WARPS = 16, CONSUMER_THREADS = 32 * WARPS;  // that multiply
constexpr int SORTING = WARPS + 4;               // all warps
constexpr int ONCE = 4, TWICE = 5;               // what a unit row costs, by tiles of the group
constexpr int BATCHES = 3;                       // most that the groups are worked on in
constexpr int COUNTER_APART = 16;                // counters of batches, so that each has a separate line
constexpr int TURN = 17;                         // blocks by which a batch is shared out otherwise than the one before

constexpr int AHEAD = 33;  // of the words: unit rows of the shared expert that were asked for before the ids are known

struct Problem {
    const uint8_t *w13, *w2;  // units
    const float *g13, *g2, *in13, *in2;
    const __nv_bfloat16* x;   // (T, H); of quantised, unless lone: (T k, H), each slot's as its expert has it
    const int* ids;           // (T, k), of shared: (T, k - 1)
    const float* routing;     // as ids
    __nv_bfloat16 *out, *v;   // (T, H), (T k, I)
    // [BATCHES][COUNTER_APART]: of each batch, how many blocks have ended its first product, in all launches.
    unsigned long long* arrived;
    int tokens, topk, experts, hidden, inner;
    int stages, groups;       // of the ring; room for groups
    bool quantised;
    bool lone;                // one token, x as it came: each block quantises it for the groups that it works on
    bool shared;              // the last expert has all tokens
    uint32_t nothing;         // 0, which the compiler does not know
};

struct Group {
    int expert;
    uint32_t tokens;  // where they start in the sorted slots, and 16 bits higher how many
    __device__ int start() const { return tokens & 0xFFFF; }
    __device__ int count() const { return tokens >> 16; }
};

// ---- sorting: groups, slots and routing; words[32]: how many groups

__device__ __forceinline__ void put_groups(Group* groups, int e, int start, int tokens, int parts) {
    for (int i = 0; i < parts; ++i) {  // as even as may be
        const int from = tokens * i / parts, to = tokens * (i + 1) / parts;
        groups[i] = {e, static_cast<uint32_t>(start + from | to - from << 16)};
    }
}

// The last groups, with the shared expert's tokens: every token, so they are known before any id is.
template <int NT>
__device__ __forceinline__ int shared_groups(const Problem& p) {
    return p.shared ? (p.tokens + 8 * NT - 1) / (8 * NT) : 0;
}
__device__ __forceinline__ bool is_shared(const Problem& p, int slot) { return p.shared && (slot + 1) % p.topk == 0; }
__device__ __forceinline__ int routed_place(const Problem& p, int slot) {  // of a slot in ids and routing
    return p.shared ? slot - slot / p.topk : slot;
}

__device__ __forceinline__ int expert_of(const Problem& p, int slot) {  // or one that sorts last and is none
    if (is_shared(p, slot)) return p.experts - 1;
    const int e = p.ids[routed_place(p, slot)];
    return e < 0 || e >= p.experts - int(p.shared) ? 0x7FFFFFFF : e;
}
__device__ __forceinline__ float routing_of(const Problem& p, int slot) {
    return is_shared(p, slot) ? 1.f : p.routing[routed_place(p, slot)];
}

// Up to 32 slots: one warp, a slot a lane. -> how many groups
template <int NT>
__device__ __forceinline__ int sort_few(const Problem& p, Group* groups, uint16_t* slots, float* routing,
                                        uint32_t* words, int lane) {
    const int n = p.tokens * p.topk;
    const int token = p.tokens > 1 ? lane / p.topk : 0;
    const bool shared = p.shared && lane - token * p.topk == p.topk - 1, routed = lane < n && !shared;
    const int place_in_ids = p.shared ? lane - token : lane, none = p.experts - int(p.shared);
    int e = shared && lane < n ? none : 0x7FFFFFFF;
    float mine = 1;
    if (routed) e = p.ids[place_in_ids], mine = p.routing[place_in_ids];  // asked for together
    if (routed && (e < 0 || e >= none)) e = 0x7FFFFFFF;
    const unsigned same = __match_any_sync(~0u, e);
    const bool leads = e != 0x7FFFFFFF && lane == __ffs(same) - 1;
    const int tokens = __popc(same), parts = leads ? (tokens + 8 * NT - 1) / (8 * NT) : 0;
    int place = 0, group = 0;
    for (int base = 0; base < n; base += 8)  // lanes from n on sort last
#pragma unroll
        for (int i = base; i < base + 8; ++i) {
            const int other = __shfl_sync(~0u, e, i), others = __shfl_sync(~0u, parts, i);
            place += other < e || (other == e && i < lane);
            group += other < e ? others : 0;
        }
    if (e != 0x7FFFFFFF) slots[place] = lane, routing[place] = mine;
    if (NT == 1 && leads && parts == 1)  // without divisions
        groups[group] = {e, static_cast<uint32_t>(place | tokens << 16)};
    else if (leads)
        put_groups(groups + group, e, place, tokens, parts);
    const int all = __reduce_add_sync(~0u, parts);
    if (lane == 0) words[32] = all;
    return all;
}

// Any number, by all threads: each warp counts a part of the slots. scratch: what SORTING times p.experts counts and n
// ranks take.
template <int NT>
__device__ __forceinline__ void sort(const Problem& p, uint8_t* scratch, Group* groups, uint16_t* slots, float* routing,
                                     uint32_t* words, int warp, int lane) {
    constexpr int ALL = 32 * SORTING;
    const int n = p.tokens * p.topk, part = (n + ALL - 1) / ALL * 32;
    uint16_t* seen = reinterpret_cast<uint16_t*>(scratch);  // [SORTING][experts], then where they start
    uint16_t* rank = seen + SORTING * p.experts;            // [n], among its expert's in the same warp's part
    for (int i = threadIdx.x; i < SORTING * p.experts; i += ALL) seen[i] = 0;
    __syncthreads();
    for (int base = warp * part; base < min(n, (warp + 1) * part); base += 32) {
        const int slot = base + lane, e = slot < n ? expert_of(p, slot) : 0x7FFFFFFF;
        const unsigned same = __match_any_sync(~0u, e);
        const bool some = e != 0x7FFFFFFF;
        const int before = some ? seen[warp * p.experts + e] : 0;
        __syncwarp();
        if (slot < n) rank[slot] = before + __popc(same & (1u << lane) - 1);
        if (some && lane == __ffs(same) - 1) seen[warp * p.experts + e] = before + __popc(same);
        __syncwarp();
    }
    __syncthreads();
    uint32_t carry = 0;  // tokens, and 16 bits higher groups, of the experts before
    for (int base = 0; base < p.experts; base += ALL) {
        const int e = base + threadIdx.x;
        int tokens = 0;
        if (e < p.experts)
            for (int w = 0; w < SORTING; ++w) {
                const int more = seen[w * p.experts + e];
                seen[w * p.experts + e] = tokens, tokens += more;
            }
        const int parts = (tokens + 8 * NT - 1) / (8 * NT);
        const uint32_t mine = tokens | parts << 16;
        const uint32_t sum = warps::sum_up_to(mine, lane);
        if (lane == 31) words[warp] = sum;
        __syncthreads();
        uint32_t before = carry;
        for (int w = 0; w < SORTING; ++w) {
            if (w < warp) before += words[w];
            carry += words[w];
        }
        before += sum - mine;
        __syncthreads();
        if (e < p.experts) {
            const int start = before & 0xFFFF;
            for (int w = 0; w < SORTING; ++w) seen[w * p.experts + e] += start;
            if (parts) put_groups(groups + (before >> 16), e, start, tokens, parts);
        }
    }
    if (threadIdx.x == 0) words[32] = carry >> 16;
    __syncthreads();
    for (int base = warp * part; base < min(n, (warp + 1) * part); base += 32) {
        const int slot = base + lane, e = slot < n ? expert_of(p, slot) : 0x7FFFFFFF;
        if (e != 0x7FFFFFFF) {
            const int to = seen[warp * p.experts + e] + rank[slot];
            slots[to] = slot;
            routing[to] = routing_of(p, slot);
        }
    }
}

// ---- batches: the groups in BATCHES parts, or in one for each where there are fewer. The second product of a batch
// begins when all blocks have ended the first of it, while they work on the first of those behind. In some forms the first
// product of the shared expert comes ahead of all batches, since its weights can be asked for before the ids are known.

// Else there is one batch: two tiles take the registers that more would.
template <int NT>
constexpr bool BATCHED = NT == 1;

template <bool SEVERAL>
__device__ __forceinline__ int batches_of(int count) {
    return min(count, SEVERAL ? BATCHES : 1);
}
__device__ __forceinline__ int batch_begin(int count, int batches, int batch) { return count * batch / batches; }

// What a block has of the first product of the shared expert or of a batch: unit rows of the groups, one group's after
// another's.
struct Part {
    int group, row, items;  // where it begins, and how many
};

// The block's part of the shared expert, whose groups begin with number `first`.
__device__ __forceinline__ Part shared_part(int first, int groups, int rows) {
    const uint32_t work = groups * rows, from = work * blockIdx.x / gridDim.x, to = work * (blockIdx.x + 1) / gridDim.x;
    return {first + static_cast<int>(from / rows), static_cast<int>(from % rows), static_cast<int>(to - from)};
}

// Finds the block's parts: of the shared expert, then of each batch, of which the last `shared` of the count groups
// are left out. A group of two tiles takes TWICE / ONCE as long as one of one. One warp.
template <int NT, bool SEVERAL>
__device__ __forceinline__ void share_out(const Group* groups, Part* parts, int count, int shared, int rows, int lane) {
    const int batches = batches_of<SEVERAL>(count);
    // Lane b knows of batch b; lane `batches`, where the last one ends.
    const int begin = lane <= batches && count ? min(batch_begin(count, batches, lane), count - shared) : 0;
    const uint32_t place = (blockIdx.x + TURN * lane) % gridDim.x;
    uint32_t from, to;  // in unit rows, all groups' one after another
    if constexpr (NT == 1) {
        const uint32_t work = (__shfl_down_sync(~0u, begin, 1) - begin) * rows;
        from = begin * rows + work * place / gridDim.x, to = begin * rows + work * (place + 1) / gridDim.x;
    } else {
        const auto weight = [&](int g) { return g >= count ? 0 : groups[g].count() > 8 ? TWICE : ONCE; };
        // The weight of the groups before `base + lane`, and all up to there in `before`.
        const auto ahead = [&](uint32_t mine, uint32_t& before) {
            const uint32_t sum = warps::sum_up_to(mine, lane);
            const uint32_t result = before + sum - mine;
            before += __shfl_sync(~0u, sum, 31);
            return result;
        };
        uint32_t before = 0, low = 0;
        for (int base = 0; base < count; base += 32) {
            const uint32_t found = __shfl_sync(~0u, ahead(weight(base + lane), before), (begin - base) & 31);
            if (begin / 32 == base / 32) low = found;
        }
        if (begin == count) low = before;
        const uint64_t work = static_cast<uint64_t>(__shfl_down_sync(~0u, low, 1) - low) * rows;
        const uint32_t first = low * rows + work * place / gridDim.x;  // as from and to, weighted
        const uint32_t last = low * rows + work * (place + 1) / gridDim.x;
        from = to = count * rows;
        before = 0;
        for (int base = 0; base < count; base += 32) {
            const uint32_t mine = weight(base + lane), its = ahead(mine, before) * rows;
            for (int i = 0; i < 32 && base + i < count; ++i) {
                const uint32_t each = __shfl_sync(~0u, mine, i), start = __shfl_sync(~0u, its, i);
                if (start <= first && first < start + each * rows) from = (base + i) * rows + (first - start) / each;
                if (start <= last && last < start + each * rows) to = (base + i) * rows + (last - start) / each;
            }
        }
    }
    if (lane == 0) parts[0] = shared_part(count - shared, shared, rows);
    if (lane < batches)
        parts[1 + lane] = {static_cast<int>(from / rows), static_cast<int>(from % rows), static_cast<int>(to - from)};
}

// Goes over a block's unit rows of the first product. FIRST: 1 where no part is the shared expert's.
template <int FIRST>
struct Walk {
    const Part* parts;
    int rows, batches;  // unit rows of an expert; batches there are
    int at = FIRST, group, row, left;
    __device__ __forceinline__ Walk(const Part* parts, int rows, int batches)
        : parts(parts), rows(rows), batches(batches) {
        enter();
    }
    __device__ __forceinline__ void enter() {
        const Part part = parts[at];
        group = part.group, row = part.row, left = part.items;
    }
    __device__ __forceinline__ void next() {
        --left;
        if (++row == rows) row = 0, ++group;
    }
    // Over parts of which the block has nothing. -> whether there is more
    __device__ __forceinline__ bool find() {
        while (!left) {
            if (++at > batches) return false;
            enter();
        }
        return true;
    }
};

}  // namespace decode
