// The fast form of cache_rows.cu's launch: bf16, in rows of 512 or 128 values; a warp a query or key, a block an entry.
//
// Before it waits for the kernel ahead a launch reads weights, and what only the first op of a pass writes: angles,
// positions, sequences, which tokens end an entry, and places in the pages. No kernel just ahead may write these.
#pragma once

#include "launch.cuh"
#include "warp_rows.cuh"

namespace layer_rows {

using rows::Pages;
using rows::THREADS;

constexpr int WARPS = THREADS / 32;
constexpr int WIDTH = 512, NARROW = 128;  // of a head, a key and an entry; of an entry of the indexer
constexpr int MOST_POOLED = 128;          // tokens that an entry pools
constexpr int MOST_COMPRESSORS = 2;       // of a layer
constexpr int TOGETHER = 4;               // tokens whose rows a thread has under way
constexpr float INFINITE = __builtin_huge_valf();

// A compressor. projected: (tokens, 2, wide), kv then gate, wide = halves * width; tail: (sequences, size, 2, wide).
struct Compressor {
    const float *projected, *ape, *freqs;
    const long long *position, *sequence, *emit;
    float* tail;
    int tokens, emitted, size, ratio, halves, width, half;
    float eps;
};

// Where a token's row is: in this call's projections, with ape still to be added to its gate, or in the ring.
struct Source {
    const float *kv, *gate, *ape;
};

// x, out: (count, width), `each` of them a token. weight may be null.
struct Queries {
    const void *x, *weight;
    void* out;
    int count, each, width;
};

// Row i of x (count, width of the pages) to row index[i] of the pages.
struct Keys {
    const void *x, *weight;
    Pages pages;
    const long long* index;
    int count;
};

// x, out: (count, width), `each` of them a token; cosine, sine: (tokens, half). quantise: through Hadamard and FP4.
struct IndexQueries {
    const void* x;
    void* out;
    const float *cosine, *sine;
    int count, each, width, half, quantise;
};

// What a compressor completes, to rows index[i] of the pages. turned: through Hadamard. end: the blocks up to its last one.
struct Entries {
    Compressor of;
    const void* weight;
    Pages pages;
    const long long* index;
    int turned, end;
};

// One call, as cache_rows.py lays it out. All that `void` points to is bf16, or all is fp32.
struct Step {
    Queries queries;
    Keys keys;
    const float *cosine, *sine;  // (tokens, half), of queries and keys
    int half;
    float eps;
    Entries entries[MOST_COMPRESSORS];
    int compressors;
    IndexQueries index;
};

// The row of token `last` - back, whose entry ends at token `at` of the call. No kv: it is before token 0.
__device__ inline Source find(const Compressor& c, int at, long long last, int back) {
    const int wide = c.halves * c.width;
    const long long sequence = c.sequence[at], token = last - back, row = at - back;
    const int place = static_cast<int>(max(token, 0LL));
    const bool here = row >= 0 && c.sequence[max(row, 0LL)] == sequence && c.position[max(row, 0LL)] == token;
    const float* from = here ? c.projected + row * 2 * wide : c.tail + (sequence * c.size + place % c.size) * 2 * wide;
    return {token < 0 ? nullptr : from, from + wide, here ? c.ape + place % c.ratio * wide : nullptr};
}

// Four channels of a token's row, and how they add up: sum of exp(gate - largest), and of that times kv.
struct Four {
    float at[4];

    __device__ __forceinline__ void load(const float* from) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        at[0] = four.x, at[1] = four.y, at[2] = four.z, at[3] = four.w;
    }
};

struct Pooled {
    Four largest, total, sum;
};

__device__ __forceinline__ float exp_of(float gate, float largest) {
    return __expf(gate - (largest == -INFINITE ? 0.0f : largest));  // of no token: 0
}

// Channels `channel` to channel + 3 of tokens [from, until) of an entry: the softmax over gates, times kv. The window
// before: the first half of a row.
__device__ inline Pooled pool(const Compressor& c, const Source* sources, int channel, int from, int until) {
    Pooled all;
#pragma unroll
    for (int j = 0; j < 4; j++) all.largest.at[j] = -INFINITE, all.total.at[j] = all.sum.at[j] = 0.0f;
    for (int first = from; first < until; first += TOGETHER) {
        Four gate[TOGETHER], kv[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const int token = first + i;
            const bool there = token < until && sources[token].kv;
#pragma unroll
            for (int j = 0; j < 4; j++) gate[i].at[j] = -INFINITE, kv[i].at[j] = 0.0f;
            if (!there) continue;
            const int at = token / c.ratio * c.width + channel;
            gate[i].load(sources[token].gate + at);
            kv[i].load(sources[token].kv + at);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const int token = first + i;
            if (token >= until || !sources[token].kv || !sources[token].ape) continue;
            Four ape;
            ape.load(sources[token].ape + token / c.ratio * c.width + channel);
#pragma unroll
            for (int j = 0; j < 4; j++) gate[i].at[j] += ape.at[j];
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float largest = all.largest.at[j];
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) largest = fmaxf(largest, gate[i].at[j]);
            const float before = exp_of(all.largest.at[j], largest);
            float total = all.total.at[j] * before, sum = all.sum.at[j] * before;
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                const float weight = exp_of(gate[i].at[j], largest);
                total += weight;
                sum += weight * kv[i].at[j];
            }
            all.largest.at[j] = largest, all.total.at[j] = total, all.sum.at[j] = sum;
        }
    }
    return all;
}

// What a block of entries has in shared memory. Groups of WIDE / 4 threads have the channels of some tokens.
struct Shared {
    Source sources[MOST_POOLED];
    float largest[4 * THREADS], total[4 * THREADS], sum[4 * THREADS];
    float row[WIDTH], cosine[WIDTH / 2], sine[WIDTH / 2];
};

// A token's row to the ring, with ape on its gate.
__device__ inline void store_token(const Compressor& c, int token) {
    const int wide = c.halves * c.width, first = 4 * threadIdx.x, position = static_cast<int>(c.position[token]);
    const float *from = c.projected + static_cast<long long>(token) * 2 * wide, *apes = c.ape + position % c.ratio * wide;
    float* const row = c.tail + (c.sequence[token] * c.size + position % c.size) * 2 * wide;
    Four kv, gate, ape;
    if (first < wide) ape.load(apes + first);
    programmatic::wait();
    programmatic::trigger();
    for (int i = first; i < wide; i += 4 * THREADS) {
        kv.load(from + i);
        gate.load(from + wide + i);
        if (i != first) ape.load(apes + i);
        float* const to = row + i;
        *reinterpret_cast<float4*>(to) = make_float4(kv.at[0], kv.at[1], kv.at[2], kv.at[3]);
        *reinterpret_cast<float4*>(to + wide) =
            make_float4(gate.at[0] + ape.at[0], gate.at[1] + ape.at[1], gate.at[2] + ape.at[2], gate.at[3] + ape.at[3]);
    }
}

// Entry `number` of a compressor of WIDE channels. An entry reads this call's tokens from `projected`, so no block waits
// for another; the ring's size keeps the tokens that it does read apart from those that are stored.
template <int WIDE>
__device__ void write_entry(const Entries& e, int number, Shared& shared) {
    using Row = warp_rows::Row<WIDE>;
    constexpr int QUADS = WIDE / 4, GROUPS = THREADS / QUADS;
    const Compressor& c = e.of;
    typename Row::Words weights;
    if (threadIdx.x < 32) weights.load(static_cast<const __nv_bfloat16*>(e.weight));  // no kernel writes them
    const int at = static_cast<int>(c.emit[number]), count = c.halves * c.ratio;
    const long long last = c.position[at], to = e.index[number];
    const int first = static_cast<int>(last) - (c.ratio - 1);
    const bool ends = static_cast<unsigned>(last + 1) % c.ratio == 0;  // a window; else the pages' row is never read
    if (ends && threadIdx.x < count) shared.sources[threadIdx.x] = find(c, at, last, count - 1 - threadIdx.x);
    for (int i = threadIdx.x; ends && i < c.half; i += THREADS) {
        const float angle = static_cast<float>(first) * c.freqs[i];
        shared.cosine[i] = cosf(angle), shared.sine[i] = sinf(angle);
    }
    programmatic::wait();  // also where nothing is left to do: no kernel may end before the one ahead
    programmatic::trigger();
    if (!ends) return;
    __syncthreads();
    const int group = threadIdx.x / QUADS, channel = threadIdx.x % QUADS * 4, share = (count + GROUPS - 1) / GROUPS;
    const Pooled mine = pool(c, shared.sources, channel, group * share, min(count, (group + 1) * share));
#pragma unroll
    for (int j = 0; j < 4; j++) {
        shared.largest[group * WIDE + channel + j] = mine.largest.at[j];
        shared.total[group * WIDE + channel + j] = mine.total.at[j];
        shared.sum[group * WIDE + channel + j] = mine.sum.at[j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < WIDE; i += THREADS) {
        float largest = -INFINITE, total = 0.0f, sum = 0.0f;
        for (int g = 0; g < GROUPS; g++) largest = fmaxf(largest, shared.largest[g * WIDE + i]);
        for (int g = 0; g < GROUPS; g++) {
            const float factor = exp_of(shared.largest[g * WIDE + i], largest);
            total += shared.total[g * WIDE + i] * factor;
            sum += shared.sum[g * WIDE + i] * factor;
        }
        shared.row[i] = rows::rounded<__nv_bfloat16>(sum / total);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    Row row;
    typename Row::Turn turn;
    row.take(shared.row);
    turn.load(shared.cosine, shared.sine, c.half);
    row.norm(weights, true, c.eps);
    row.rotate(turn, c.half);
    if constexpr (Row::CHUNKS == 1)
        if (e.turned) row.hadamard();
    row.write(e.pages, to);
}

// Blocks 0 to emitted - 1 of a compressor: an entry each; its others: a token each, to the ring.
__device__ inline void compress(const Entries& e, int block, Shared& shared) {
    if (block >= e.of.emitted)
        store_token(e.of, block - e.of.emitted);
    else if (e.of.width == WIDTH)
        write_entry<WIDTH>(e, block, shared);
    else
        write_entry<NARROW>(e, block, shared);
}

// The warp's query or key.
__device__ inline void norm_rotate(const Step& s, int number) {
    using Row = warp_rows::Row<WIDTH>;
    const bool key = number < s.keys.count;
    const int vector = key ? number : number - s.keys.count, token = key ? vector : vector / s.queries.each;
    const auto weight = static_cast<const __nv_bfloat16*>(key ? s.keys.weight : s.queries.weight);
    const auto x = static_cast<const __nv_bfloat16*>(key ? s.keys.x : s.queries.x);
    typename Row::Words weights, words;
    if (weight) weights.load(weight);  // no kernel writes them
    typename Row::Turn turn;
    turn.load(s.cosine + token * s.half, s.sine + token * s.half, s.half);
    const long long to = key ? s.keys.index[vector] : 0;
    programmatic::wait();
    programmatic::trigger();
    words.load(x + static_cast<long long>(vector) * WIDTH);
    Row row;
    row.take(words);
    row.norm(weights, weight != nullptr, s.eps);
    row.rotate(turn, s.half);
    if (key)
        row.write(s.keys.pages, to);
    else
        row.store(static_cast<__nv_bfloat16*>(s.queries.out) + static_cast<long long>(vector) * WIDTH);
}

// The warp's query of the indexer.
__device__ inline void index_query(const IndexQueries& q, int vector) {
    using Row = warp_rows::Row<NARROW>;
    const bool real = vector < q.count;
    const int token = real ? vector / q.each : 0;
    const long long at = static_cast<long long>(vector) * NARROW;
    typename Row::Words words;
    typename Row::Turn turn;
    if (real) turn.load(q.cosine + token * q.half, q.sine + token * q.half, q.half);
    programmatic::wait();
    programmatic::trigger();
    if (!real) return;
    words.load(static_cast<const __nv_bfloat16*>(q.x) + at);
    Row row;
    row.take(words);
    row.rotate(turn, q.half);
    if (q.quantise) {
        row.hadamard();
        row.quantise_key();
    }
    row.store(static_cast<__nv_bfloat16*>(q.out) + at);
}

// POOLS: there are compressors; their shared memory and registers are not for the others.
template <bool POOLS>
__global__ void __launch_bounds__(THREADS, POOLS ? 2 : 4) layer_rows_kernel(const __grid_constant__ Step s) {
    int before = 0;
    if constexpr (POOLS) {
        __shared__ Shared shared;
        for (int i = 0; i < s.compressors; i++) {
            if (blockIdx.x < s.entries[i].end) {
                compress(s.entries[i], blockIdx.x - before, shared);
                return;
            }
            before = s.entries[i].end;
        }
    }
    const int number = (blockIdx.x - before) * WARPS + threadIdx.x / 32, others = s.keys.count + s.queries.count;
    if (number < others)
        norm_rotate(s, number);
    else
        index_query(s.index, number - others);
}

inline bool at_16_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

inline bool fits(const Entries& e) {
    const Compressor& c = e.of;
    const bool narrow = c.width == NARROW && c.half <= NARROW / 2, wide = c.width == WIDTH && c.half <= WIDTH / 2;
    const bool pages = e.pages.kind == rows::INDEX ? narrow : narrow || wide;
    return pages && !(e.turned && !narrow) && warp_rows::aligned(e.pages) && at_16_bytes(c.projected) &&
           at_16_bytes(c.ape) && at_16_bytes(c.tail) && at_16_bytes(e.weight);
}

// Whether the kernel takes a call in bf16.
inline bool fits(const Step& s) {
    const Queries& q = s.queries;
    const Keys& k = s.keys;
    const IndexQueries& i = s.index;
    bool all = q.width == WIDTH && at_16_bytes(q.x) && at_16_bytes(q.out) && at_16_bytes(q.weight);
    all = all && k.pages.width == WIDTH && k.pages.kind != rows::INDEX && warp_rows::aligned(k.pages) &&
          at_16_bytes(k.x) && at_16_bytes(k.weight);
    all = all && (!i.count || (i.width == NARROW && at_16_bytes(i.x) && at_16_bytes(i.out)));
    for (int c = 0; c < s.compressors; c++) all = all && fits(s.entries[c]);
    return all;
}

}  // namespace layer_rows
