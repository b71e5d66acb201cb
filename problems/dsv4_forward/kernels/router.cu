// The router: logits, scores, the choice of experts, their weights. Few tokens: all of it in one launch, by one cluster
// of blocks. Many: what follows the matmul, a warp a token.
//
// The formulas are those of torch_ops/router.py, in fp32. A token's bits do not depend on the others: its sums are of the
// same parts in the same order. Every launcher returns the CUDA error of its launch.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

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
constexpr int TILE = 8;                   // experts or tokens, as mma.sync takes them
constexpr int LINE = 64;                  // columns that a warp takes of a row together: 128 bytes
constexpr int LINES = 8;                  // that a lane has under way with 8 experts a block and 8 tokens
constexpr int FEW_TOKENS = 32, FEW_EXPERTS = 3 * TILE * CLUSTER, EACH = FEW_EXPERTS / LANES;

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

__device__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 8 values of a row, zeros where there is no such row or column.
__device__ uint4 load_eight(const __nv_bfloat16* matrix, int row, int rows, int column, int columns) {
    if (row >= rows || column >= columns) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(matrix + static_cast<long long>(row) * columns + column);
}

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

// A block has TILES * TILE experts, and OCTETS * TILE tokens are at most in the call. The block of rank b gets all logits
// of tokens b, b + CLUSTER, ... and chooses their experts.
template <int TILES, int OCTETS>
__global__ void __launch_bounds__(THREADS, 1) route_kernel(const Route r) {
    constexpr int MINE = TILES * TILE, PAIRS = (OCTETS + 1) / 2;
    constexpr int DEPTH = LINES / OCTETS < TILES ? 1 : LINES / OCTETS / TILES;
    extern __shared__ float smem_sums[];  // (WARPS, OCTETS * TILE, MINE)
    __shared__ float smem_logits[FEW_TOKENS / CLUSTER][FEW_EXPERTS], smem_bias[FEW_EXPERTS];
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, rank = cluster_rank();
    const int first = rank * MINE, lines = (r.hidden + LINE * WARPS - 1) / (LINE * WARPS);
    auto column = [&](int line, int half) { return (line * WARPS + warp) * LINE + half * LINE / 2 + lane % 4 * 8; };
    uint4 b[DEPTH][TILES][2];
    auto load_matrix = [&](int line) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    b[d][tile][half] = load_eight(r.weight, first + tile * TILE + lane / 4, r.experts,
                                                  column(line + d, half), r.hidden);
    };
    load_matrix(0);  // weights: no kernel writes them
    if (r.bias && threadIdx.x < r.experts) smem_bias[threadIdx.x] = r.bias[threadIdx.x];
    programmatic::wait();
    programmatic::trigger();
    const int token = warp * CLUSTER + rank;  // whose experts this warp chooses
    int named = 0;
    if (!r.bias && token < r.tokens && lane < r.chosen)
        named = static_cast<int>(r.table[r.numbers[token] * r.chosen + lane]);

    float c[PAIRS][TILES][4] = {};
    for (int line = 0; line < lines; line += DEPTH) {
        if (line) load_matrix(line);
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 x[2 * PAIRS] = {};
#pragma unroll
                for (int octet = 0; octet < OCTETS; octet++)
                    x[octet] = load_eight(r.u, octet * TILE + lane / 4, r.tokens, column(line + d, half), r.hidden);
#pragma unroll
                for (int pair = 0; pair < PAIRS; pair++) {
                    const uint4 low = x[2 * pair], high = x[2 * pair + 1];
                    const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        const uint4 w = b[d][tile][half];
                        const uint32_t columns[2][2] = {{w.x, w.y}, {w.z, w.w}};
                        mma(c[pair][tile], a[0], columns[0]);
                        mma(c[pair][tile], a[1], columns[1]);
                    }
                }
            }
    }
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = pair * 2 * TILE + i / 2 * TILE + lane / 4;
                if (row < OCTETS * TILE)
                    smem_sums[(warp * OCTETS * TILE + row) * MINE + tile * TILE + lane % 4 * 2 + i % 2] =
                        c[pair][tile][i];
            }
    cluster_sync();  // all blocks have begun, and this one's sums are there
    for (int i = threadIdx.x; i < r.tokens * MINE; i += THREADS) {
        const int row = i / MINE, expert = first + i % MINE;
        if (expert >= r.experts) continue;
        float total = 0.0f;
        for (int w = 0; w < WARPS; w++) total += smem_sums[w * OCTETS * TILE * MINE + i];
        const uint32_t to = smem_address(&smem_logits[row / CLUSTER][expert]);
        store_cluster(in_block(row % CLUSTER, to), total);
    }
    cluster_sync();
    if (token < r.tokens) choose(r, token, smem_logits[warp], smem_bias, named);
}

template <int TILES, int OCTETS>
int route(const Route& r) {
    const auto kernel = route_kernel<TILES, OCTETS>;
    const int bytes = WARPS * OCTETS * TILE * TILES * TILE * sizeof(float);
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1))
        return error;
    return programmatic::launch_clusters(kernel, dim3(CLUSTER), dim3(THREADS), bytes, CLUSTER, true, r);
}

template <int TILES>
int route_tokens(const Route& r) {
    return (r.tokens <= TILE ? route<TILES, 1> : r.tokens <= 2 * TILE ? route<TILES, 2> : route<TILES, 4>)(r);
}

}  // namespace

// What follows the matmul, for any number of tokens.
extern "C" int launch_choose(const float* logits, const float* bias, const long long* table, const long long* tokens,
                            int* ids, float* weights, int count, int experts, int chosen, float factor) {
    const size_t shared = (2 * experts + chosen) * sizeof(float);
    choose_kernel<<<count, LANES, shared>>>(logits, bias, table, tokens, ids, weights, experts, chosen, factor);
    return cudaGetLastError();
}

// All, for up to FEW_TOKENS tokens and FEW_EXPERTS experts. u and weight begin at multiples of 16 bytes, and hidden is a
// multiple of 8.
extern "C" int launch_route(const void* u, const void* weight, const float* bias, const long long* table,
                            const long long* tokens, int* ids, float* weights, int count, int experts, int hidden,
                            int chosen, float factor) {
    const Route r = {static_cast<const __nv_bfloat16*>(u), static_cast<const __nv_bfloat16*>(weight), bias, table,
                     tokens, ids, weights, count, experts, hidden, chosen, factor};
    const int tiles = (experts + TILE * CLUSTER - 1) / (TILE * CLUSTER);
    return (tiles == 1 ? route_tokens<1> : tiles == 2 ? route_tokens<2> : route_tokens<3>)(r);
}
