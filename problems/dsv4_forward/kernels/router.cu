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
#include "tagged_words.cuh"

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

// The table's row for a token. An id that the vocabulary has not, whose embedding start.cu makes NaN, takes the nearest
// row, so that nothing is read beside the table.
__device__ long long row_of(long long token, int vocab) { return max(0ll, min(token, vocab - 1ll)); }

__device__ float score(float logit) { return sqrtf(logit > LINEAR_FROM ? logit : log1pf(expf(logit))); }

// Block t: token t. logits (tokens, experts). bias, and the `chosen` best of score + bias; or null, and those of
// table[tokens[t]], of `vocab` rows. chosen: at most LANES.
__global__ void choose_kernel(const float* logits, const float* bias, const long long* table, const long long* tokens,
                             int* ids, float* weights, int vocab, int experts, int chosen, float factor) {
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
        if (lane < chosen) picked[lane] = static_cast<int>(table[row_of(tokens[token], vocab) * chosen + lane]);
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
constexpr int FEW_EXPERTS = 384;

using tagged::State;

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
    int vocab, tokens, experts, hidden, chosen;
    float factor;
};

// A float as a word that is ordered as the floats are; none is 0.
__device__ uint32_t ordered(float key) {
    const uint32_t bits = __float_as_uint(key);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// By a warp: the experts of a token. keys: ordered, of all experts, where there is a bias; else named, in lane k, of the
// table. EACH * LANES: experts at most.
template <int EACH>
__device__ void choose(const Route& r, int token, const float* scores, const uint32_t* keys, int named) {
    const int lane = threadIdx.x % LANES;
    int picked = named;
    float mine = 0.0f, total = 0.0f;
    if (r.bias) {
        uint32_t left[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) left[i] = i * LANES + lane < r.experts ? keys[i * LANES + lane] : 0;
        float found = 0.0f;  // added a turn later, when it has come
        for (int k = 0; k < r.chosen; k++) {
            uint32_t best = left[0];
#pragma unroll
            for (int i = 1; i < EACH; i++) best = max(best, left[i]);
            best = __reduce_max_sync(ALL, best);
            total += found;
            int at = FEW_EXPERTS;
#pragma unroll
            for (int i = EACH - 1; i >= 0; i--) at = left[i] == best ? i * LANES + lane : at;
            const int id = __reduce_min_sync(ALL, at);  // of equal ones the lower
            found = scores[id];
#pragma unroll
            for (int i = 0; i < EACH; i++) left[i] = i * LANES + lane == id ? 0 : left[i];
            if (lane == k) picked = id, mine = found;
        }
        total += found;
    } else {
        mine = lane < r.chosen ? scores[named] : 0.0f;
        for (int k = 0; k < r.chosen; k++) total += __shfl_sync(ALL, mine, k);
    }
    if (lane < r.chosen) {
        r.ids[token * r.chosen + lane] = picked;
        r.factors[token * r.chosen + lane] = mine / total * r.factor;
    }
}

// The sum of PARTS words at from, from + apart, ..., when all have the tag.
__device__ float receive(const uint64_t* from, int apart, uint32_t tag) {
    uint64_t word[PARTS];
    int tries = 0;
    for (bool all = false; !all;) {
        all = true;
#pragma unroll
        for (int i = 0; i < PARTS; i++) word[i] = ptx::load_relaxed(from + i * apart);
#pragma unroll
        for (int i = 0; i < PARTS; i++) all &= static_cast<uint32_t>(word[i] >> 32) == tag;
        if (++tries == tagged::MOST_TRIES) {
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
    static_assert(Product::TOKENS * Product::ROWS <= THREADS && FEW_EXPERTS <= THREADS - LANES);
    __shared__ float smem_sums[Product::SUMS], smem_scores[FEW_EXPERTS];
    __shared__ uint32_t smem_keys[FEW_EXPERTS], smem_tag;
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, all = r.tokens * r.experts;
    const int part = blockIdx.y, blocks = gridDim.x * gridDim.y;
    Product product = {r.weight, static_cast<int>(blockIdx.x) * Product::ROWS, r.experts, r.hidden, part};
    product.begin();  // weights: no kernel writes them
    const int first = blocks - 1 - part * gridDim.x - blockIdx.x;  // token that this block chooses for
    const bool of_expert = threadIdx.x < r.experts;
    const float bias = r.bias && of_expert && first < r.tokens ? r.bias[threadIdx.x] : 0.0f;
    programmatic::wait();
    programmatic::trigger();
    uint32_t tag = 0;
    if (threadIdx.x == 0) tag = ptx::load_relaxed(&r.state->tag) + 1;
    product.multiply(r.u, r.tokens);
    product.store(smem_sums);
    if (threadIdx.x == 0) smem_tag = tag;
    __syncthreads();
    tag = smem_tag;
    if (const int i = threadIdx.x; i < r.tokens * Product::ROWS) {
        const int token = i / Product::ROWS, expert = product.first + i % Product::ROWS;
        if (expert < r.experts)
            tagged::publish(r.words + part * all + token * r.experts + expert, Product::total(smem_sums, i), tag);
    }
    // All blocks have read the tag when the last one raises it. By a warp that others do not wait for, and here, since it
    // waits for an answer.
    if (threadIdx.x == THREADS - LANES) tagged::leave(r.state, tag);
    for (int token = first; token < r.tokens; token += blocks) {
        int named = 0;
        if (!r.bias && warp == 0 && lane < r.chosen)
            named = static_cast<int>(r.table[row_of(r.numbers[token], r.vocab) * r.chosen + lane]);
        if (of_expert) {
            const float found = score(receive(r.words + token * r.experts + threadIdx.x, all, tag)), key = found + bias;
            smem_scores[threadIdx.x] = found;
            smem_keys[threadIdx.x] = ordered(key == key ? key : INFINITE);
        }
        __syncthreads();
        if (warp == 0) {
            if (r.experts <= 8 * LANES)
                choose<8>(r, token, smem_scores, smem_keys, named);
            else
                choose<FEW_EXPERTS / LANES>(r, token, smem_scores, smem_keys, named);
        }
        __syncthreads();
    }
}

template <int OCTETS>
int route(const Route& r) {
    const dim3 grid((r.experts + few::TILE - 1) / few::TILE, PARTS);
    return programmatic::launch(route_kernel<OCTETS>, grid, dim3(THREADS), 0, r);
}

}  // namespace

// As in router.py. vocab: rows of the table. launch_choose uses no u, weight, exchange, launch_route no logits.
struct Call {
    const __nv_bfloat16 *u, *weight;
    const float *logits, *bias;
    const long long *table, *tokens;
    int* ids;
    float* weights;
    void* exchange;
    int vocab, count, experts, hidden, chosen;
    float factor;
};

// What follows the matmul, for any number of tokens.
extern "C" int launch_choose(const Call* c) {
    const size_t shared = (2 * c->experts + c->chosen) * sizeof(float);
    choose_kernel<<<c->count, LANES, shared>>>(c->logits, c->bias, c->table, c->tokens, c->ids, c->weights, c->vocab,
                                               c->experts, c->chosen, c->factor);
    return cudaGetLastError();
}

// Words of 8 bytes that launch_route needs between calls, zero at first.
extern "C" int route_words() { return sizeof(State) / 8 + PARTS * few::MOST_TOKENS * FEW_EXPERTS; }

// All, for up to few::MOST_TOKENS tokens and FEW_EXPERTS experts. u and weight begin at multiples of 16 bytes, and hidden is a
// multiple of 8. exchange: route_words words, of one launch at a time.
extern "C" int launch_route(const Call* c) {
    uint64_t* words = static_cast<uint64_t*>(c->exchange);
    const Route r = {c->u, c->weight, c->bias, c->table, c->tokens, c->ids, c->weights, reinterpret_cast<State*>(words),
                     words + sizeof(State) / 8, c->vocab, c->count, c->experts, c->hidden, c->chosen, c->factor};
    return (c->count <= few::TILE ? route<1> : c->count <= 2 * few::TILE ? route<2> : route<4>)(r);
}
