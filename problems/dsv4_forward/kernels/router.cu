// The router: logits, scores, the choice of experts, their weights. Few tokens: all of it in one launch, by one cluster
// of blocks. Many: what follows the matmul, a warp a token.
//
// The formulas are those of torch_ops/router.py, in fp32. A token's bits do not depend on the others: its sums are of the
// same parts in the same order. Every launcher returns the CUDA error of its launch.
#include <cuda_runtime.h>

#include <cstdint>

#include "few_tokens.cuh"
#include "launch_clusters.cuh"
#include "ptx.cuh"

namespace {

using namespace ptx;

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

constexpr int CLUSTER = 16;               // blocks, which split the experts
constexpr int WARPS = 16, THREADS = LANES * WARPS;  // of a block: its warps split the columns
constexpr int LINES = 8;                  // of few::Product
constexpr int FEW_EXPERTS = 3 * few::TILE * CLUSTER, EACH = FEW_EXPERTS / LANES;

// u (tokens, hidden), weight (experts, hidden). bias, table, ids, factors: as choose_kernel has them.
struct Route {
    const __nv_bfloat16 *u, *weight;
    const float* bias;
    const long long *table, *numbers;
    int* ids;
    float* factors;
    int tokens, experts, hidden, chosen;
    float factor;
};

// Into another block's shared memory, at an address from in_block.
__device__ void store_cluster(uint32_t to, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

// A float as a word that is ordered as the floats are; none is 0.
__device__ uint32_t ordered(float key) {
    const uint32_t bits = __float_as_uint(key);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// By a warp: the experts of a token, whose logits become scores. named: of the table, in lane k, where there is no bias.
__device__ void choose(const Route& r, int token, float* scores, const float* bias, int named) {
    const int lane = threadIdx.x % LANES;
    uint32_t keys[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int e = i * LANES + lane;
        keys[i] = 0;
        if (e >= r.experts) continue;
        scores[e] = score(scores[e]);
        const float key = r.bias ? scores[e] + bias[e] : 0.0f;
        keys[i] = ordered(key == key ? key : INFINITE);
    }
    __syncwarp();
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

// A block has TILES * 8 experts, and OCTETS * 8 tokens are at most in the call. The block of rank b gets all logits of
// tokens b, b + CLUSTER, ... and chooses their experts.
template <int TILES, int OCTETS>
__global__ void __launch_bounds__(THREADS, 1) route_kernel(const Route r) {
    using Product = few::Product<WARPS, TILES, OCTETS, LINES>;
    extern __shared__ float smem_sums[];  // Product::SUMS
    __shared__ float smem_logits[few::MOST_TOKENS / CLUSTER][FEW_EXPERTS], smem_bias[FEW_EXPERTS];
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, rank = cluster_rank();
    Product product = {r.weight, rank * Product::ROWS, r.experts, r.hidden};
    product.begin();  // weights: no kernel writes them
    if (r.bias && threadIdx.x < r.experts) smem_bias[threadIdx.x] = r.bias[threadIdx.x];
    programmatic::wait();
    programmatic::trigger();
    const int token = warp * CLUSTER + rank;  // whose experts this warp chooses
    int named = 0;
    if (!r.bias && token < r.tokens && lane < r.chosen)
        named = static_cast<int>(r.table[r.numbers[token] * r.chosen + lane]);
    product.multiply(r.u, r.tokens);
    product.store(smem_sums);
    cluster_sync();  // all blocks have begun, and this one's sums are there
    for (int i = threadIdx.x; i < r.tokens * Product::ROWS; i += THREADS) {
        const int row = i / Product::ROWS, expert = product.first + i % Product::ROWS;
        if (expert >= r.experts) continue;
        const uint32_t to = smem_address(&smem_logits[row / CLUSTER][expert]);
        store_cluster(in_block(row % CLUSTER, to), Product::total(smem_sums, i));
    }
    cluster_sync();
    if (token < r.tokens) choose(r, token, smem_logits[warp], smem_bias, named);
}

template <int TILES, int OCTETS>
int route(const Route& r) {
    const auto kernel = route_kernel<TILES, OCTETS>;
    const int bytes = few::Product<WARPS, TILES, OCTETS, LINES>::SUMS * sizeof(float);
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1))
        return error;
    return programmatic::launch_clusters(kernel, dim3(CLUSTER), dim3(THREADS), bytes, CLUSTER, true, r);
}

template <int TILES>
int route_tokens(const Route& r) {
    return (r.tokens <= few::TILE ? route<TILES, 1> : r.tokens <= 2 * few::TILE ? route<TILES, 2> : route<TILES, 4>)(r);
}

}  // namespace

// What follows the matmul, for any number of tokens.
extern "C" int launch_choose(const float* logits, const float* bias, const long long* table, const long long* tokens,
                            int* ids, float* weights, int count, int experts, int chosen, float factor) {
    const size_t shared = (2 * experts + chosen) * sizeof(float);
    choose_kernel<<<count, LANES, shared>>>(logits, bias, table, tokens, ids, weights, experts, chosen, factor);
    return cudaGetLastError();
}

// All, for up to few::MOST_TOKENS tokens and FEW_EXPERTS experts. u and weight begin at multiples of 16 bytes, and hidden is a
// multiple of 8.
extern "C" int launch_route(const void* u, const void* weight, const float* bias, const long long* table,
                            const long long* tokens, int* ids, float* weights, int count, int experts, int hidden,
                            int chosen, float factor) {
    const Route r = {static_cast<const __nv_bfloat16*>(u), static_cast<const __nv_bfloat16*>(weight), bias, table,
                     tokens, ids, weights, count, experts, hidden, chosen, factor};
    const int each = few::TILE * CLUSTER, tiles = (experts + each - 1) / each;
    return (tiles == 1 ? route_tokens<1> : tiles == 2 ? route_tokens<2> : route_tokens<3>)(r);
}
