// The small steps around the matrix products, a launch each: RMSNorm, rotation, and writing the hc copies.
//
// All arithmetic is fp32; activations are T, bf16 or fp32, and each output is rounded once. The formulas are those of
// torch_ops/norm.py, rope.py and mhc.py. Every launcher returns the CUDA error of its launch.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "launch.cuh"
#include "rows.cuh"

namespace {

using namespace rows;

constexpr int HC_MULT = 4;  // n: copies of the residual

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

// A thread a pair of the last 2 * half values of each of `vectors` vectors of width d, `each` of them a token.
template <typename T>
__global__ void rotate_kernel(T* x, const float* cosine, const float* sine, long long vectors, int each, int d,
                              int half, float sign) {
    programmatic::wait();
    programmatic::trigger();
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= vectors * half) return;
    const long long vector = at / half;
    const int pair = static_cast<int>(at % half);
    const long long angle = vector / each * half + pair;
    const float c = cosine[angle], s = sign * sine[angle];
    T* p = x + vector * d + d - 2 * half + 2 * pair;
    const float a = load(p), b = load(p + 1);
    store(p, a * c - b * s);
    store(p + 1, a * s + b * c);
}

// A thread a value of y: out_k = post_k y + sum_j comb_jk copies_j.
template <typename T>
__global__ void spread_kernel(const T* y, const T* copies, const float* post, const float* comb, T* out, int d) {
    programmatic::wait();
    programmatic::trigger();
    const long long token = blockIdx.y;
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= d) return;
    const T* x = copies + token * HC_MULT * d + i;
    const float value = load(y + token * d + i);
    float copy[HC_MULT];
    for (int j = 0; j < HC_MULT; j++) copy[j] = load(x + static_cast<long long>(j) * d);
    for (int k = 0; k < HC_MULT; k++) {
        float sum = post[token * HC_MULT + k] * value;
        for (int j = 0; j < HC_MULT; j++) sum += comb[token * HC_MULT * HC_MULT + j * HC_MULT + k] * copy[j];
        store(out + token * HC_MULT * d + static_cast<long long>(k) * d + i, sum);
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

template <typename T>
int rotate(void* x, const float* cosine, const float* sine, long long vectors, int each, int d, int half, float sign) {
    const long long blocks = (vectors * half + THREADS - 1) / THREADS;
    return programmatic::launch(rotate_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(THREADS), 0,
                                static_cast<T*>(x), cosine, sine, vectors, each, d, half, sign);
}

template <typename T>
int write_copies(const void* y, const void* copies, const float* post, const float* comb, void* out, int tokens,
                 int d) {
    return programmatic::launch(spread_kernel<T>, dim3((d + THREADS - 1) / THREADS, tokens), dim3(THREADS), 0,
                                static_cast<const T*>(y), static_cast<const T*>(copies), post, comb,
                                static_cast<T*>(out), d);
}

}  // namespace

// bf16 in the launchers: 1 for T = bf16, 0 for T = fp32.
extern "C" int launch_rms_norm(const void* x, const void* weight, void* out, int rows, int d, float eps, int bf16) {
    return (bf16 ? rms_norm<__nv_bfloat16> : rms_norm<float>)(x, weight, out, rows, d, eps);
}

extern "C" int launch_rotate(void* x, const float* cosine, const float* sine, long long vectors, int each, int d,
                             int half, float sign, int bf16) {
    return (bf16 ? rotate<__nv_bfloat16> : rotate<float>)(x, cosine, sine, vectors, each, d, half, sign);
}

extern "C" int launch_write_copies(const void* y, const void* copies, const float* post, const float* comb, void* out,
                                  int tokens, int d, int bf16) {
    return (bf16 ? write_copies<__nv_bfloat16> : write_copies<float>)(y, copies, post, comb, out, tokens, d);
}
