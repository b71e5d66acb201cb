// What surrounds cuBLAS's products of many tokens with quantised matrices: values in bf16, and sums to activations.
//
// A code times its scale has few significant bits, so bf16 holds matrices and quantised activations exactly: e4m3 times
// 2^s has 4, e2m1 times e4m3 6. Only the scales of a whole matrix, scale_2 and input_scale of NVFP4, are left to the
// sums, which are fp32. The arithmetic is that of problems/common/fp8.py and nvfp4.py. Each launcher returns the CUDA
// error of its launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "nvfp4.cuh"
#include "rows.cuh"

namespace {

using bf16 = __nv_bfloat16;

constexpr int THREADS = 256, BLOCK = 128, LANES = 32;  // BLOCK: fp8's rows and columns that share a scale
constexpr int PART = 16;                               // values of a thread, and of a block of NVFP4

// Of a group (the matrix, or one of several): what the sums of its products are multiplied by; null: 1.
struct Factors {
    const float *scale_2, *input_scale;
    __device__ float of(int group) const {
        return (scale_2 ? scale_2[group] : 1.0f) * (input_scale ? input_scale[group] : 1.0f);
    }
};

__device__ uint32_t pair(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}

__device__ float2 e4m3_pair(uint32_t codes) {
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3)));
}

// codes (rows, columns) e4m3, scales (rows / 128, columns / 128) ue8m0. A thread 16 columns.
__global__ void fp8_matrix(const uint4* codes, const uint8_t* scales, uint4* out, long long parts, int columns) {
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= parts) return;
    const long long row = at * PART / columns;
    const int column = static_cast<int>(at * PART % columns);
    const float scale = rows::ue8m0_value(scales[row / BLOCK * (columns / BLOCK) + column / BLOCK]);
    const uint4 given = codes[at];
    const uint32_t words[4] = {given.x, given.y, given.z, given.w};
    uint32_t made[8];
    for (int i = 0; i < 8; i++) {
        const float2 value = e4m3_pair(words[i / 2] >> 16 * (i % 2) & 0xFFFF);
        made[i] = pair(value.x * scale, value.y * scale);
    }
    out[2 * at] = make_uint4(made[0], made[1], made[2], made[3]);
    out[2 * at + 1] = make_uint4(made[4], made[5], made[6], made[7]);
}

// codes (rows, columns / 2) e2m1, scales (rows, columns / 16) e4m3. A thread a block of 16 columns.
__global__ void nvfp4_matrix(const uint2* codes, const uint8_t* scales, uint4* out, long long parts) {
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= parts) return;
    const float scale = nvfp4::e4m3_to_float(scales[at]);
    const uint2 given = codes[at];
    uint32_t made[8];
    for (int i = 0; i < 8; i++) {
        const uint32_t byte = (i < 4 ? given.x : given.y) >> 8 * (i % 4) & 0xFF;
        made[i] = pair(nvfp4::e2m1_to_float(byte & 15) * scale, nvfp4::e2m1_to_float(byte >> 4) * scale);
    }
    out[2 * at] = make_uint4(made[0], made[1], made[2], made[3]);
    out[2 * at + 1] = make_uint4(made[4], made[5], made[6], made[7]);
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

// x: blocks of 16 values (tokens, groups, blocks), divided by the group's input scale. A thread a block.
__global__ void nvfp4_tokens(const uint4* x, const float* input_scale, uint4* out, long long parts, int groups,
                             int blocks) {
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= parts) return;
    const float by = input_scale[at / blocks % groups];
    const uint4 halves[2] = {x[2 * at], x[2 * at + 1]};
    float value[PART], amax = 0.0f;
#pragma unroll
    for (int i = 0; i < PART; i++) {
        const uint4& half = halves[i / 8];
        const uint32_t words[4] = {half.x, half.y, half.z, half.w}, word = words[i / 2 % 4];
        value[i] = __fdiv_rn(__uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16), by);
        amax = fmaxf(amax, fabsf(value[i]));
    }
    const float wanted = fminf(__fdiv_rn(amax, rows::E2M1_MAX), rows::E4M3_MAX);
    const float scale = nvfp4::e4m3_to_float(__nv_cvt_float_to_fp8(wanted, __NV_SATFINITE, __NV_E4M3));
    const float divisor = scale > 0.0f ? scale : __int_as_float(0x7F800000);  // 0: codes of 0 with signs
    for (float& one : value) one = nvfp4::e2m1_to_float(rows::e2m1_code(__fdiv_rn(one, divisor))) * scale;
    uint32_t made[8];
    for (int i = 0; i < 8; i++) made[i] = pair(value[2 * i], value[2 * i + 1]);
    out[2 * at] = make_uint4(made[0], made[1], made[2], made[3]);
    out[2 * at + 1] = make_uint4(made[4], made[5], made[6], made[7]);
}

// sums (groups, tokens, columns) -> out (tokens, groups, columns), times the group's factor. A thread 4 columns.
__global__ void to_tokens(const float4* sums, Factors factors, uint2* out, long long parts, int tokens, int groups,
                          int columns) {
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= parts) return;
    const int quarter = static_cast<int>(at % (columns / 4)), token = static_cast<int>(at / (columns / 4) % tokens);
    const int group = static_cast<int>(at / (columns / 4) / tokens);
    const float4 sum = sums[at];
    const float by = factors.of(group);
    out[(static_cast<long long>(token) * groups + group) * (columns / 4) + quarter] =
        make_uint2(pair(sum.x * by, sum.y * by), pair(sum.z * by, sum.w * by));
}

__device__ float gated(float gate, float up, float by, float limit) {
    gate = fminf(gate * by, limit), up = fminf(fmaxf(up * by, -limit), limit);
    return gate / (1.0f + expf(-gate)) * up;
}

// sums (tokens, 2 columns), gate then up -> out (tokens, columns), silu(min(gate, limit)) clip(up). A thread 4 columns.
__global__ void gate_and_up(const float4* sums, Factors factors, uint2* out, long long parts, int columns, float limit) {
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= parts) return;
    const int quarters = columns / 4;
    const long long from = at / quarters * 2 * quarters + at % quarters;
    const float4 gate = sums[from], up = sums[from + quarters];
    const float by = factors.of(0);
    out[at] = make_uint2(pair(gated(gate.x, up.x, by, limit), gated(gate.y, up.y, by, limit)),
                         pair(gated(gate.z, up.z, by, limit), gated(gate.w, up.w, by, limit)));
}

unsigned blocks_of(long long threads) { return static_cast<unsigned>((threads + THREADS - 1) / THREADS); }

}  // namespace

// rows: of all groups. scales: e4m3 of NVFP4, ue8m0 of FP8. out: bf16 (rows, columns).
extern "C" int launch_matrix(const void* codes, const uint8_t* scales, void* out, long long rows, int columns, int fp8) {
    const long long parts = rows * columns / PART;
    uint4* to = static_cast<uint4*>(out);
    if (fp8)
        fp8_matrix<<<blocks_of(parts), THREADS>>>(static_cast<const uint4*>(codes), scales, to, parts, columns);
    else
        nvfp4_matrix<<<blocks_of(parts), THREADS>>>(static_cast<const uint2*>(codes), scales, to, parts);
    return cudaGetLastError();
}

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

extern "C" int launch_sums(const float* sums, const float* scale_2, const float* input_scale, void* out, int tokens,
                           int groups, int columns) {
    const long long parts = static_cast<long long>(tokens) * groups * (columns / 4);
    to_tokens<<<blocks_of(parts), THREADS>>>(reinterpret_cast<const float4*>(sums), {scale_2, input_scale},
                                             static_cast<uint2*>(out), parts, tokens, groups, columns);
    return cudaGetLastError();
}

extern "C" int launch_gate(const float* sums, const float* scale_2, const float* input_scale, void* out, int tokens,
                           int columns, float limit) {
    const long long parts = static_cast<long long>(tokens) * (columns / 4);
    gate_and_up<<<blocks_of(parts), THREADS>>>(reinterpret_cast<const float4*>(sums), {scale_2, input_scale},
                                               static_cast<uint2*>(out), parts, columns, limit);
    return cudaGetLastError();
}
