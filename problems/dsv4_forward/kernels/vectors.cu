// What surrounds an NVFP4 product of codes with codes: activations to codes and scales, fp16 products to activations.
//
// The arithmetic is that of problems/common/nvfp4.py's encode, bit for bit; x is bf16 or fp32. Every launcher returns
// the CUDA error of its launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "nvfp4.cuh"

namespace {

constexpr int ENCODE_THREADS = 64;  // few, so that a vector of 4096 values keeps four multiprocessors busy
constexpr int SCALE_THREADS = 256;
constexpr float E2M1_MAX = 6.0f, E4M3_MAX = 448.0f;
constexpr int PERMUTED_STEP = 512;  // bytes of the permuted layout from four scales of a row to the next four

struct Block {
    float value[nvfp4::kBlock];
};

__device__ Block load_block(const float* x) {
    Block block;
    for (int i = 0; i < nvfp4::kBlock / 4; i++) {
        const float4 part = reinterpret_cast<const float4*>(x)[i];
        block.value[4 * i] = part.x, block.value[4 * i + 1] = part.y;
        block.value[4 * i + 2] = part.z, block.value[4 * i + 3] = part.w;
    }
    return block;
}

__device__ Block load_block(const __nv_bfloat16* x) {
    Block block;
    for (int i = 0; i < nvfp4::kBlock / 8; i++) {
        const uint4 part = reinterpret_cast<const uint4*>(x)[i];
        const uint32_t words[4] = {part.x, part.y, part.z, part.w};
        for (int j = 0; j < 4; j++) {
            block.value[8 * i + 2 * j] = __uint_as_float(words[j] << 16);
            block.value[8 * i + 2 * j + 1] = __uint_as_float(words[j] & 0xFFFF0000u);
        }
    }
    return block;
}

__device__ void store(float* p, float value) { *p = value; }
__device__ void store(__nv_bfloat16* p, float value) { *p = __float2bfloat16_rn(value); }

// The nearest e2m1 code, ties to the even code, saturating.
__device__ uint32_t e2m1_code(float x) {
    const float size = fabsf(x);
    const uint32_t code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                          (size >= 3.5f) + (size > 5.0f);
    return code | __float_as_uint(x) >> 28 & 8;
}

// Rows of one of the three outputs: bytes from a token to the next, and from a group to the next.
struct Spacing {
    long long token, group;
};

struct Rows {
    uint8_t *codes, *scales, *permuted;
    Spacing codes_at, scales_at, permuted_at;
};

// A thread a block of 16 values of x (tokens, groups, 16 * blocks); input_scale, low, high: by group.
template <typename T>
__global__ void encode_kernel(const T* x, const float* input_scale, const float* low, const float* high, Rows rows,
                              int tokens, int groups, int blocks) {
    const long long at = static_cast<long long>(blockIdx.x) * ENCODE_THREADS + threadIdx.x;
    if (at >= static_cast<long long>(tokens) * groups * blocks) return;
    const int block = static_cast<int>(at % blocks), group = static_cast<int>(at / blocks % groups);
    const long long token = at / blocks / groups;
    Block values = load_block(x + at * nvfp4::kBlock);
    const float by = input_scale[group], least = low[group], most = high[group];
    float amax = 0.0f;
    for (float& value : values.value) {
        value = __fdiv_rn(fminf(fmaxf(value, least), most), by);
        amax = fmaxf(amax, fabsf(value));
    }
    const float wanted = fminf(__fdiv_rn(amax, E2M1_MAX), E4M3_MAX);
    const uint8_t scale = __nv_cvt_float_to_fp8(wanted, __NV_SATFINITE, __NV_E4M3);
    const float divisor = scale ? nvfp4::e4m3_to_float(scale) : __int_as_float(0x7F800000);  // 0: codes of 0 with signs
    uint32_t codes[2] = {0, 0};
    for (int i = 0; i < nvfp4::kBlock; i++)
        codes[i / 8] |= e2m1_code(__fdiv_rn(values.value[i], divisor)) << 4 * (i % 8);
    uint8_t* to = rows.codes + token * rows.codes_at.token + group * rows.codes_at.group + block * 8;
    *reinterpret_cast<uint2*>(to) = make_uint2(codes[0], codes[1]);
    rows.scales[token * rows.scales_at.token + group * rows.scales_at.group + block] = scale;
    rows.permuted[token * rows.permuted_at.token + group * rows.permuted_at.group + block / 4 * PERMUTED_STEP +
                  block % 4] = scale;
}

// A thread a value of products (tokens, groups, m): out = product * factor of the group, rounded once.
template <typename T>
__global__ void scale_kernel(const __half* products, const float* factor, T* out, long long count, int groups, int m) {
    const long long at = static_cast<long long>(blockIdx.x) * SCALE_THREADS + threadIdx.x;
    if (at < count) store(out + at, __half2float(products[at]) * factor[at / m % groups]);
}

template <typename T>
int encode(const void* x, const float* input_scale, const float* low, const float* high, const Rows& rows, int tokens,
           int groups, int blocks) {
    const long long count = static_cast<long long>(tokens) * groups * blocks;
    const unsigned grid = static_cast<unsigned>((count + ENCODE_THREADS - 1) / ENCODE_THREADS);
    encode_kernel<<<grid, ENCODE_THREADS>>>(static_cast<const T*>(x), input_scale, low, high, rows, tokens, groups,
                                            blocks);
    return cudaGetLastError();
}

template <typename T>
int scale(const __half* products, const float* factor, void* out, int tokens, int groups, int m) {
    const long long count = static_cast<long long>(tokens) * groups * m;
    const unsigned grid = static_cast<unsigned>((count + SCALE_THREADS - 1) / SCALE_THREADS);
    scale_kernel<<<grid, SCALE_THREADS>>>(products, factor, static_cast<T*>(out), count, groups, m);
    return cudaGetLastError();
}

}  // namespace

// bf16 in the launchers: 1 for activations of bf16, 0 for fp32. *_token, *_group: bytes between rows of the outputs.
extern "C" int launch_encode(const void* x, const float* input_scale, const float* low, const float* high,
                             uint8_t* codes, long long codes_token, long long codes_group, uint8_t* scales,
                             long long scales_token, long long scales_group, uint8_t* permuted,
                             long long permuted_token, long long permuted_group, int tokens, int groups, int blocks,
                             int bf16) {
    const Rows rows = {codes, scales, permuted, {codes_token, codes_group}, {scales_token, scales_group},
                       {permuted_token, permuted_group}};
    return (bf16 ? encode<__nv_bfloat16> : encode<float>)(x, input_scale, low, high, rows, tokens, groups, blocks);
}

extern "C" int launch_scale(const __half* products, const float* factor, void* out, int tokens, int groups, int m,
                            int bf16) {
    return (bf16 ? scale<__nv_bfloat16> : scale<float>)(products, factor, out, tokens, groups, m);
}
