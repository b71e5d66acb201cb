// nvfp4_gemv with Blackwell's conversion of two e2m1 codes to a half2; warp_ring.cuh moves the data and says what
// a, b, sfa, sfb and c are.
#include "nvfp4.cuh"
#include "warp_ring.cuh"

// ---- device helpers

__device__ __forceinline__ float2 floats(uint32_t half2_bits) {
    return __half22float2(*reinterpret_cast<const __half2*>(&half2_bits));
}

// Eight codes -> four half2 of neighbouring values, in order. One instruction each.
__device__ __forceinline__ void values(uint32_t word, __half2 (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t const bits = nvfp4::e2m1x2_to_half2_bits(word >> (8 * i) & 0xFF);
        to[i] = *reinterpret_cast<const __half2*>(&bits);
    }
}

// 32 values of x, and their two scales.
struct Halves {
    static constexpr float UNIT = 1.f;
    __half2 value[4][4];
    float scale[2];

    __device__ __forceinline__ Halves(uint4 codes, uint16_t scales, bool inside) {
        uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
        float2 const s = floats(nvfp4::e4m3x2_to_half2_bits(inside ? scales : 0));
#pragma unroll
        for (int i = 0; i < 4; ++i) values(inside ? words[i] : 0u, value[i]);
        scale[0] = s.x, scale[1] = s.y;
    }

    // Exact but for the last two roundings: products are multiples of 1/4 up to 36 and each half of a sum adds eight,
    // so every partial sum is at most 288; fp16 holds all multiples of 1/4 up to 512. The halves meet in fp32, where
    // their sum of at most 2304 quarters (12 bits) times x's scale (4 bits) is exact too.
    __device__ __forceinline__ float row_sum(uint4 codes, uint16_t scales) const {
        uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
        float2 const s = floats(nvfp4::e4m3x2_to_half2_bits(scales));
        float terms[2];
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            __half2 sum = __float2half2_rn(0.f);
#pragma unroll
            for (int i = 2 * block; i < 2 * block + 2; ++i) {
                __half2 w[4];
                values(words[i], w);
#pragma unroll
                for (int j = 0; j < 4; ++j) sum = __hfma2(w[j], value[i][j], sum);
            }
            float2 const halves = __half22float2(sum);
            terms[block] = (halves.x + halves.y) * scale[block];
        }
        return fmaf(terms[1], s.y, terms[0] * s.x);
    }
};

// ---- launcher

// Arrays as in warp_ring.cuh, on the device; -> a cudaError_t.
extern "C" int launch(const uint8_t* a, const uint8_t* b, const uint8_t* sfa, const uint8_t* sfb, __half* c, int m,
                      int k, int l) {
    // Rows a step, steps under way, warps a CTA, CTAs an SM: an H200's choices and a step more, for more bandwidth.
    auto const choice = k > 4096 ? warp_ring::run<Halves, 2, 3, 32, 1> : warp_ring::run<Halves, 2, 2, 32, 1>;
    return choice(a, b, sfa, sfb, c, m, k, l);
}
