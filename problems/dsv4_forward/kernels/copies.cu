// The hc copies: what a sublayer returned is written to them. One launch.
//
// The formulas are those of torch_ops/mhc.py, in fp32; copies are T, bf16 or fp32, and each output is rounded once. Every
// launcher returns the CUDA error of its launch.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "launch.cuh"

namespace {

constexpr int HC_MULT = 4;  // n: copies of the residual
constexpr int THREADS = 256;

__device__ float load(const float* p) { return *p; }
__device__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ void store(float* p, float value) { *p = value; }
__device__ void store(__nv_bfloat16* p, float value) { *p = __float2bfloat16_rn(value); }

template <typename T>
__device__ float rounded(float value);
template <>
__device__ float rounded<float>(float value) { return value; }
template <>
__device__ float rounded<__nv_bfloat16>(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// fp32 or bf16 values.
struct Addend {
    const void* data;
    int bf16;
};

__device__ float load(const Addend& from, long long i) {
    if (from.bf16) return load(static_cast<const __nv_bfloat16*>(from.data) + i);
    return load(static_cast<const float*>(from.data) + i);
}

// Block (token, part), a thread a value: y = first + second, rounded to T; out_k = post_k y + sum_j comb_jk copies_j.
template <typename T>
__global__ void spread_sum_kernel(const Addend first, const Addend second, const T* copies, const float* post,
                                  const float* comb, T* out, int d) {
    programmatic::wait();
    programmatic::trigger();
    const long long token = blockIdx.x;
    const int i = blockIdx.y * THREADS + threadIdx.x;
    if (i >= d) return;
    const T* x = copies + token * HC_MULT * d + i;
    const float value = rounded<T>(load(first, token * d + i) + load(second, token * d + i));
    float copy[HC_MULT];
    for (int j = 0; j < HC_MULT; j++) copy[j] = load(x + static_cast<long long>(j) * d);
    for (int k = 0; k < HC_MULT; k++) {
        float sum = post[token * HC_MULT + k] * value;
        for (int j = 0; j < HC_MULT; j++) sum += comb[token * HC_MULT * HC_MULT + j * HC_MULT + k] * copy[j];
        store(out + token * HC_MULT * d + static_cast<long long>(k) * d + i, sum);
    }
}

template <typename T>
int spread_sum(const Addend& first, const Addend& second, const void* copies, const float* post, const float* comb,
               void* out, int tokens, int d) {
    return programmatic::launch(spread_sum_kernel<T>, dim3(tokens, (d + THREADS - 1) / THREADS), dim3(THREADS), 0, first,
                                second, static_cast<const T*>(copies), post, comb, static_cast<T*>(out), d);
}

}  // namespace

// *_bf16: 1 for bf16, 0 for fp32.
extern "C" int launch_spread_sum(const void* first, const void* second, const void* copies, const float* post,
                                 const float* comb, void* out, int tokens, int d, int first_bf16, int second_bf16,
                                 int copies_bf16) {
    return (copies_bf16 ? spread_sum<__nv_bfloat16> : spread_sum<float>)(
        Addend{first, first_bf16}, Addend{second, second_bf16}, copies, post, comb, out, tokens, d);
}
