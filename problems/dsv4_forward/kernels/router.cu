// What follows the router's matmul: scores, the choice of experts, their weights. One launch, a warp a token.
//
// The formulas are those of torch_ops/router.py, in fp32. The launcher returns the CUDA error of its launch.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int LANES = 32;
constexpr unsigned ALL = 0xffffffffu;
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
__global__ void route_kernel(const float* logits, const float* bias, const long long* table, const long long* tokens,
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
        keys[e] = key == key ? key : __int_as_float(0x7F800000);  // NaN first, as torch.topk: its weights say so
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

}  // namespace

extern "C" int launch_route(const float* logits, const float* bias, const long long* table, const long long* tokens,
                            int* ids, float* weights, int count, int experts, int chosen, float factor) {
    const size_t shared = (2 * experts + chosen) * sizeof(float);
    route_kernel<<<count, LANES, shared>>>(logits, bias, table, tokens, ids, weights, experts, chosen, factor);
    return cudaGetLastError();
}
