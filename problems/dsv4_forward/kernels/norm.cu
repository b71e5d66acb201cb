// RMSNorm, as torch_ops/norm.py.
//
// All arithmetic is fp32; activations are T, bf16 or fp32, and each output is rounded once. The launcher returns the CUDA
// error of its launch.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "launch.cuh"
#include "rows.cuh"

namespace {

using namespace rows;

// A block a row of d values. weight may be null.
template <typename T>
__global__ void rms_norm_kernel(const T* x, const T* weight, T* out, int d, float eps) {
    programmatic::wait();
    programmatic::trigger();
    const long long row = static_cast<long long>(blockIdx.x) * d;
    float square = 0.0f;
    for (int i = threadIdx.x; i < d; i += THREADS) {
        const float value = load(x + row + i);
        square += value * value;
    }
    const float inverse = rsqrtf(block_sum(square) / d + eps);
    for (int i = threadIdx.x; i < d; i += THREADS) {
        const float scaled = load(x + row + i) * inverse;
        store(out + row + i, weight ? scaled * load(weight + i) : scaled);
    }
}

constexpr int EIGHTS = 4;  // of a row, in the registers of a thread: rows of up to 8192 values

// The same for rows of whole 16 bytes: each is read once, weights while the sum is made.
__global__ void rms_norm_eights_kernel(const uint4* x, const uint4* weight, uint4* out, int d, float eps) {
    const int eights = d / 8;
    const long long row = static_cast<long long>(blockIdx.x) * eights;
    uint4 values[EIGHTS], weights[EIGHTS];
    float square = 0.0f;
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) {
        const int i = threadIdx.x + k * THREADS;
        if (weight && i < eights) weights[k] = weight[i];  // no kernel writes it
    }
    programmatic::wait();
    programmatic::trigger();
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) {
        const int i = threadIdx.x + k * THREADS;
        if (i < eights) values[k] = x[row + i];
    }
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) {
        if (threadIdx.x + k * THREADS >= eights) continue;
        const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(values + k);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 two = __bfloat1622float2(pairs[j]);
            square += two.x * two.x + two.y * two.y;
        }
    }
    const float inverse = rsqrtf(block_sum(square) / d + eps);
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) {
        const int i = threadIdx.x + k * THREADS;
        if (i >= eights) continue;
        __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(values + k);
        const __nv_bfloat162* factors = reinterpret_cast<const __nv_bfloat162*>(weights + k);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 two = __bfloat1622float2(pairs[j]);
            const float2 factor = weight ? __bfloat1622float2(factors[j]) : make_float2(1.0f, 1.0f);
            two.x *= inverse, two.y *= inverse;
            pairs[j] = __floats2bfloat162_rn(two.x * factor.x, two.y * factor.y);
        }
        out[row + i] = values[k];
    }
}

template <typename T>
int rms_norm(const void* x, const void* weight, void* out, int rows, int d, float eps) {
    const auto places = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(weight) |
                        reinterpret_cast<uintptr_t>(out);
    if (sizeof(T) == 2 && d % 8 == 0 && d <= 8 * EIGHTS * THREADS && places % 16 == 0)
        return programmatic::launch(rms_norm_eights_kernel, dim3(rows), dim3(THREADS), 0, static_cast<const uint4*>(x),
                                    static_cast<const uint4*>(weight), static_cast<uint4*>(out), d, eps);
    return programmatic::launch(rms_norm_kernel<T>, dim3(rows), dim3(THREADS), 0, static_cast<const T*>(x),
                                static_cast<const T*>(weight), static_cast<T*>(out), d, eps);
}

}  // namespace

// bf16: 1 for T = bf16, 0 for T = fp32.
extern "C" int launch_rms_norm(const void* x, const void* weight, void* out, int rows, int d, float eps, int bf16) {
    return (bf16 ? rms_norm<__nv_bfloat16> : rms_norm<float>)(x, weight, out, rows, d, eps);
}
