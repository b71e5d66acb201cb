// The router: logits, scores, the choice of experts, their weights. Few tokens: all of it in one launch of small blocks,
// which hand their parts of the logits to the one that chooses. Many: what follows the matmul, a warp a token.
//
// The formulas are those of torch_ops/router.py, in fp32. A token's bits do not depend on the others: its sums are of the
// same parts in the same order. Every launcher returns the CUDA error of its launch.
#include <cuda_runtime.h>

#include <cassert>
#include <cstdint>

#include "few_tokens.cuh"
#include "launch.cuh"

namespace {

constexpr int LANES = 32;
constexpr unsigned ALL = 0xffffffffu;
constexpr float INFINITE = __builtin_huge_valf();
constexpr float LINEAR_FROM = 20.0f;  // from here on softplus(x) is x, as in torch

struct Best {
    float key;
    int id;
};

// The larger key; of equal ones the lower id. No id: -1.
__device__ Best better(Best a, Best b) {
    const bool second = b.id >= 0 && (a.id < 0 || b.key > a.key || (b.key == a.key && b.id < a.id));
    return {second ? b.key : a.key, second ? b.id : a.id};
}

__device__ float score(float logit) { return sqrtf(logit > LINEAR_FROM ? logit : log1pf(expf(logit))); }

// Block t: token t. logits (tokens, experts). bias, and the `chosen` best of score + bias; or null, and those of
// table[tokens[t]]. chosen: at most LANES.
__global__ void choose_kernel(const float* logits, const float* bias, const long long* table, const long long* tokens,
                             int* ids, float* weights, int experts, int chosen, float factor) {
    extern __shared__ float scores[];
    float* keys = scores + experts;
    int* picked = reinterpret_cast<int*>(keys + experts);
    const int token = blockIdx.x, lane = threadIdx.x;
    for (int i = 0; i * LANES < experts; i++) {  // as often in every lane
        const int e = i * LANES + lane;
        if (e >= experts) continue;
        scores[e] = score(logits[static_cast<long long>(token) * experts + e]);
        const float key = bias ? scores[e] + bias[e] : 0.0f;
        keys[e] = key == key ? key : INFINITE;  // NaN first, as torch.topk: its weights say so
    }
    __syncwarp();
    if (!bias) {
        if (lane < chosen) picked[lane] = static_cast<int>(table[tokens[token] * chosen + lane]);
    } else {
        uint32_t taken = 0;  // of this lane's experts, lane + 32 i
        for (int k = 0; k < chosen; k++) {
            Best best = {0.0f, -1};
            for (int i = 0; i * LANES < experts; i++) {
                const int e = i * LANES + lane;
                const bool free = e < experts && !(taken >> i & 1);
                best = better(best, Best{keys[free ? e : 0], free ? e : -1});
            }
            for (int step = LANES / 2; step; step /= 2)
                best = better(best, Best{__shfl_xor_sync(ALL, best.key, step), __shfl_xor_sync(ALL, best.id, step)});
            if (best.id % LANES == lane) taken |= 1u << best.id / LANES;
            if (lane == 0) picked[k] = best.id;
        }
    }
    __syncwarp();
    float total = 0.0f;
    for (int k = 0; k < chosen; k++) total += scores[picked[k]];
    if (lane < chosen) {
        ids[token * chosen + lane] = picked[lane];
        weights[token * chosen + lane] = scores[picked[lane]] / total * factor;
    }
}

// ---------------------------------------------------------------- few tokens, in one launch

constexpr int WARPS = 16, THREADS = LANES * WARPS;  // of a block: its warps split its columns
constexpr int PARTS = 4;                  // blocks that split the columns of 8 experts: 16 KB of weights each
constexpr int LINES = 2;                  // of few::Product: of up to 8192 columns all are under way, with up to 8 tokens
constexpr int FEW_EXPERTS = 384, EACH = FEW_EXPERTS / LANES;

// In global memory, zero at first. tag: of the launch before; ended: blocks of this one that have.
struct State {
    uint32_t tag, ended;
};

// u (tokens, hidden), weight (experts, hidden). bias, table, ids, factors: as choose_kernel has them. words (PARTS,
// tokens, experts): parts of logits, each with its launch's tag, so that who needs it reads until it is there. Tags only
// grow: what another launch left has a smaller one.
struct Route {
    const __nv_bfloat16 *u, *weight;
    const float* bias;
    const long long *table, *numbers;
    int* ids;
    float* factors;
    State* state;
    uint64_t* words;
    int tokens, experts, hidden, chosen;
    float factor;
};

// A float as a word that is ordered as the floats are; none is 0.
__device__ uint32_t ordered(float key) {
    const uint32_t bits = __float_as_uint(key);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// By a warp: the experts of a token. named: of the table, in lane k, where there is no bias.
__device__ void choose(const Route& r, int token, const float* scores, const float* bias, int named) {
    const int lane = threadIdx.x % LANES;
    uint32_t keys[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int e = i * LANES + lane;
        keys[i] = 0;
        if (e >= r.experts) continue;
        const float key = r.bias ? scores[e] + bias[e] : 0.0f;
        keys[i] = ordered(key == key ? key : INFINITE);
    }
    int picked = named;
    for (int k = 0; r.bias && k < r.chosen; k++) {
        uint32_t best = 0;
        int at = FEW_EXPERTS;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (keys[i] > best) best = keys[i], at = i * LANES + lane;
        const uint32_t most = __reduce_max_sync(ALL, best);
        const int id = __reduce_min_sync(ALL, best == most ? at : FEW_EXPERTS);  // of equal ones the lower
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (i * LANES + lane == id) keys[i] = 0;
        if (lane == k) picked = id;
    }
    float total = 0.0f;
    for (int k = 0; k < r.chosen; k++) total += scores[__shfl_sync(ALL, picked, k)];
    if (lane < r.chosen) {
        r.ids[token * r.chosen + lane] = picked;
        r.factors[token * r.chosen + lane] = scores[picked] / total * r.factor;
    }
}

constexpr int MOST_TRIES = 1 << 22;  // of a read, each at least a third of a microsecond: more than a second

__device__ uint32_t load_tag(const State* state) {
    uint32_t tag;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(tag) : "l"(&state->tag) : "memory");
    return tag;
}

__device__ void publish(uint64_t* to, float value, uint32_t tag) {
    const uint64_t word = uint64_t(tag) << 32 | __float_as_uint(value);
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

// The sum of PARTS words at from, from + apart, ..., when all have the tag.
__device__ float receive(const uint64_t* from, int apart, uint32_t tag) {
    uint64_t word[PARTS];
    int tries = 0;
    for (bool all = false; !all;) {
        all = true;
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word[i]) : "l"(from + i * apart) : "memory");
#pragma unroll
        for (int i = 0; i < PARTS; i++) all &= static_cast<uint32_t>(word[i] >> 32) == tag;
        if (++tries == MOST_TRIES) {
            assert(!"route: time-out, a block waited for the logits of another that never came");
            __trap();
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) sum += __uint_as_float(static_cast<uint32_t>(word[i]));
    return sum;
}

// Grid (experts / 8, PARTS). OCTETS * 8 tokens are at most in the call. Blocks are small, so that they find room beside
// those of the kernel ahead, and all weights are under way when that one ends. The last blocks of the grid choose, which
// begin when the others have: so these can wait for those.
template <int OCTETS>
__global__ void __launch_bounds__(THREADS) route_kernel(const Route r) {
    using Product = few::Product<WARPS, 1, OCTETS, LINES, PARTS>;
    __shared__ float smem_sums[Product::SUMS], smem_bias[FEW_EXPERTS], smem_scores[FEW_EXPERTS];
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, all = r.tokens * r.experts;
    const int part = blockIdx.y, blocks = gridDim.x * gridDim.y;
    Product product = {r.weight, static_cast<int>(blockIdx.x) * Product::ROWS, r.experts, r.hidden, part};
    product.begin();  // weights: no kernel writes them
    if (r.bias && threadIdx.x < r.experts) smem_bias[threadIdx.x] = r.bias[threadIdx.x];
    programmatic::wait();
    programmatic::trigger();
    const uint32_t tag = load_tag(r.state) + 1;
    product.multiply(r.u, r.tokens);
    product.store(smem_sums);
    __syncthreads();
    for (int i = threadIdx.x; i < r.tokens * Product::ROWS; i += THREADS) {
        const int token = i / Product::ROWS, expert = product.first + i % Product::ROWS;
        if (expert < r.experts)
            publish(r.words + part * all + token * r.experts + expert, Product::total(smem_sums, i), tag);
    }
    for (int token = blocks - 1 - part * gridDim.x - blockIdx.x; token < r.tokens; token += blocks) {
        int named = 0;
        if (!r.bias && warp == 0 && lane < r.chosen)
            named = static_cast<int>(r.table[r.numbers[token] * r.chosen + lane]);
        if (threadIdx.x < r.experts)
            smem_scores[threadIdx.x] = score(receive(r.words + token * r.experts + threadIdx.x, all, tag));
        __syncthreads();
        if (warp == 0) choose(r, token, smem_scores, smem_bias, named);
        __syncthreads();
    }
    // All blocks have read the tag when the last one raises it.
    if (threadIdx.x == 0 && atomicAdd(&r.state->ended, 1u) == blocks - 1) r.state->ended = 0, r.state->tag = tag;
}

template <int OCTETS>
int route(const Route& r) {
    const dim3 grid((r.experts + few::TILE - 1) / few::TILE, PARTS);
    return programmatic::launch(route_kernel<OCTETS>, grid, dim3(THREADS), 0, r);
}

}  // namespace

// What follows the matmul, for any number of tokens.
extern "C" int launch_choose(const float* logits, const float* bias, const long long* table, const long long* tokens,
                            int* ids, float* weights, int count, int experts, int chosen, float factor) {
    const size_t shared = (2 * experts + chosen) * sizeof(float);
    choose_kernel<<<count, LANES, shared>>>(logits, bias, table, tokens, ids, weights, experts, chosen, factor);
    return cudaGetLastError();
}

// Words of 8 bytes that launch_route needs between calls, zero at first.
extern "C" int route_words() { return sizeof(State) / 8 + PARTS * few::MOST_TOKENS * FEW_EXPERTS; }

// All, for up to few::MOST_TOKENS tokens and FEW_EXPERTS experts. u and weight begin at multiples of 16 bytes, and hidden is a
// multiple of 8. exchange: route_words words, of one launch at a time.
extern "C" int launch_route(const void* u, const void* weight, const float* bias, const long long* table,
                            const long long* tokens, int* ids, float* weights, void* exchange, int count, int experts,
                            int hidden, int chosen, float factor) {
    const Route r = {static_cast<const __nv_bfloat16*>(u), static_cast<const __nv_bfloat16*>(weight), bias, table,
                     tokens, ids, weights, static_cast<State*>(exchange),
                     static_cast<uint64_t*>(exchange) + sizeof(State) / 8, count, experts, hidden, chosen, factor};
    return (count <= few::TILE ? route<1> : count <= 2 * few::TILE ? route<2> : route<4>)(r);
}
