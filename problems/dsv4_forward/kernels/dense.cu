// What surrounds cuBLAS's products of many tokens with quantised matrices: activations in their format, and a gate.
//
// A code times its scale has few significant bits, so that bf16 holds it: e4m3 times 2^s has 4, e2m1 times e4m3 6. The
// arithmetic is that of problems/common/fp8.py and nvfp4.py. Each launcher returns the CUDA error of its launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "nvfp4.cuh"
#include "rows.cuh"

namespace {

using bf16 = __nv_bfloat16;

constexpr int THREADS = 256, BLOCK = 128, LANES = 32;  // BLOCK: values of FP8 that share a scale
constexpr int PART = 16;                               // values of a thread, and of a block of NVFP4

__device__ uint32_t pair(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}

__device__ float2 e4m3_pair(uint32_t codes) {
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3)));
}

// x: groups of 128 values, which get a scale of a power of two. A warp a group, 4 values a lane.
__global__ void fp8_tokens(const uint2* x, uint2* out, long long groups) {
    const long long group = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) / LANES;
    if (group >= groups) return;
    const long long at = group * LANES + threadIdx.x % LANES;
    const uint2 given = x[at];
    float value[4];
    uint32_t amax = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t word = i < 2 ? given.x : given.y;
        value[i] = __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
        amax = max(amax, rows::magnitude(value[i]));
    }
    const float scale = rows::ue8m0_value(rows::ue8m0(rows::warp_amax(amax), rows::E4M3_MAX, rows::ENTRY_FLOOR));
    for (float& one : value) {
        const uint8_t code = __nv_cvt_float_to_fp8(__fdiv_rn(one, scale), __NV_SATFINITE, __NV_E4M3);
        one = e4m3_pair(code).x * scale;
    }
    out[at] = make_uint2(pair(value[0], value[1]), pair(value[2], value[3]));
}

// a / b, rounded once. NORMAL: b, its inverse (rounded once) and a / b lie between 2^-60 and 2^60, or a / b is so small
// that nothing depends on its last bit. Then the quotient's error is exact in fp32 (Markstein, IBM J. R&D 34(1), 1990).
template <bool NORMAL>
__device__ float ratio(float a, float b, float inverse) {
    if (!NORMAL) return __fdiv_rn(a, b);
    const float near = a * inverse;
    return fmaf(fmaf(-near, b, a), inverse, near);
}

// The nearest e2m1 value, ties to the even code, saturating; NaN becomes a 6. `size` + `grid` has the step of e2m1 there.
__device__ float e2m1_value(float x) {
    const float size = fminf(fabsf(x), rows::E2M1_MAX);
    const float grid = size < 2.0f ? 0x1.8p22f : size < 4.0f ? 0x1.8p23f : 0x1.8p24f;
    return copysignf(__fsub_rn(__fadd_rn(size, grid), grid), x);
}

// 16 values by `by`, in the format. words: two values each.
template <bool NORMAL>
__device__ void round_block(uint32_t (&words)[PART / 2], float by) {
    float value[PART], amax = 0.0f;
    const float inverse = __fdiv_rn(1.0f, by);
    for (int i = 0; i < PART; i++) {
        value[i] = ratio<NORMAL>(__uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16), by, inverse);
        amax = fmaxf(amax, fabsf(value[i]));
    }
    const float wanted = fminf(__fdiv_rn(amax, rows::E2M1_MAX), rows::E4M3_MAX);
    const float scale = nvfp4::e4m3_to_float(__nv_cvt_float_to_fp8(wanted, __NV_SATFINITE, __NV_E4M3));
    const float divisor = scale > 0.0f ? scale : 1.0f, other = __fdiv_rn(1.0f, divisor);
    for (float& one : value) one = e2m1_value(ratio<NORMAL>(one, divisor, other)) * scale;
    for (int i = 0; i < PART / 2; i++) words[i] = pair(value[2 * i], value[2 * i + 1]);
}

// x: blocks of 16 values (tokens, groups, blocks), divided by the group's input scale. A thread a block.
__global__ void nvfp4_tokens(const uint4* x, const float* input_scale, uint4* out, long long parts, int groups,
                             int blocks) {
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= parts) return;
    const float by = input_scale[at / blocks % groups];
    const uint4 halves[2] = {x[2 * at], x[2 * at + 1]};
    uint32_t words[PART / 2] = {halves[0].x, halves[0].y, halves[0].z, halves[0].w,
                                halves[1].x, halves[1].y, halves[1].z, halves[1].w};
    uint32_t most = 0;
    for (const uint32_t word : words) most = max(most, max(word << 16 & 0x7FFFFFFF, word & 0x7FFF0000));
    const float largest = __fdiv_rn(__uint_as_float(most), by);  // NaN where a value is
    if (by >= 0x1p-60f && by <= 0x1p60f && largest <= 0x1p60f)
        round_block<true>(words, by);
    else
        round_block<false>(words, by);
    out[2 * at] = make_uint4(words[0], words[1], words[2], words[3]);
    out[2 * at + 1] = make_uint4(words[4], words[5], words[6], words[7]);
}

__device__ float gated(float gate, float up, float by, float limit) {
    gate = fminf(gate * by, limit), up = fminf(fmaxf(up * by, -limit), limit);
    return gate / (1.0f + expf(-gate)) * up;
}

// sums (tokens, 2 columns), gate then up, both still to be multiplied by `by` -> out (tokens, columns), silu(min(gate,
// limit)) clip(up). A thread 4 columns.
__global__ void gate_and_up(const float4* sums, uint2* out, long long parts, int columns, float by, float limit) {
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= parts) return;
    const int quarters = columns / 4;
    const long long from = at / quarters * 2 * quarters + at % quarters;
    const float4 gate = sums[from], up = sums[from + quarters];
    out[at] = make_uint2(pair(gated(gate.x, up.x, by, limit), gated(gate.y, up.y, by, limit)),
                         pair(gated(gate.z, up.z, by, limit), gated(gate.w, up.w, by, limit)));
}

unsigned blocks_of(long long threads) { return static_cast<unsigned>((threads + THREADS - 1) / THREADS); }

}  // namespace

// x, out: bf16 (tokens, groups, columns). input_scale: fp32 (groups,); null: FP8.
extern "C" int launch_tokens(const void* x, const float* input_scale, void* out, int tokens, int groups, int columns) {
    const long long vectors = static_cast<long long>(tokens) * groups, parts = vectors * (columns / PART);
    if (input_scale) {
        nvfp4_tokens<<<blocks_of(parts), THREADS>>>(static_cast<const uint4*>(x), input_scale, static_cast<uint4*>(out),
                                                    parts, groups, columns / PART);
    } else {
        const long long scaled = vectors * (columns / BLOCK);
        fp8_tokens<<<blocks_of(scaled * LANES), THREADS>>>(static_cast<const uint2*>(x), static_cast<uint2*>(out), scaled);
    }
    return cudaGetLastError();
}

extern "C" int launch_gate(const float* sums, void* out, int tokens, int columns, float by, float limit) {
    const long long parts = static_cast<long long>(tokens) * (columns / 4);
    gate_and_up<<<blocks_of(parts), THREADS>>>(reinterpret_cast<const float4*>(sums), static_cast<uint2*>(out), parts,
                                               columns, by, limit);
    return cudaGetLastError();
}
