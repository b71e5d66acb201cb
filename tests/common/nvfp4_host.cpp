// Everything that problems/common/nvfp4.cuh computes, as tables, from one function that the CPU and a GPU both run.
#include "nvfp4.cuh"

struct Tables {  // tests/common/test_nvfp4.py reads its fields
    float e2m1[16], e4m3[256];
    uint32_t e2m1x2_half2[256], e4m3x2_half2[65536], byte_perm[65536];
    uint32_t placed8[65536][4];  // of the codes i in the low 16 bits, those of 0x9E37 * i above
    uint16_t e2m1_half[16];
    uint8_t low_code[256], high_code[256];
    int8_t e2m1_doubled[16];
};

NVFP4_FN void fill(Tables& t, uint32_t i) {  // i < 65536
    const uint32_t codes = i | 0x9E37u * i << 16;
    const nvfp4::Half2x4 placed = nvfp4::placed8(codes);
    for (int j = 0; j < 4; j++) t.placed8[i][j] = placed.pair[j];
    t.e4m3x2_half2[i] = nvfp4::e4m3x2_to_half2_bits(i);
    t.byte_perm[i] = nvfp4::byte_perm(0x33221100, 0x77665544, i);
    if (i < 256) {
        t.e4m3[i] = nvfp4::e4m3_to_float(i);
        t.e2m1x2_half2[i] = nvfp4::e2m1x2_to_half2_bits(i);
        t.low_code[i] = static_cast<uint8_t>(nvfp4::low_code(i));
        t.high_code[i] = static_cast<uint8_t>(nvfp4::high_code(i));
    }
    if (i < 16) {
        t.e2m1[i] = nvfp4::e2m1_to_float(i);
        t.e2m1_half[i] = nvfp4::e2m1_to_half_bits(i);
        t.e2m1_doubled[i] = static_cast<int8_t>(nvfp4::e2m1_doubled(i));
    }
}

#ifdef __CUDACC__

__global__ void fill_kernel(Tables* t) { fill(*t, blockIdx.x * blockDim.x + threadIdx.x); }

__global__ void half_kernel(const float* values, uint16_t* halves, int64_t n) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) halves[i] = nvfp4::float_to_half_bits(values[i]);
}

extern "C" int fill_tables(Tables* t) {
    fill_kernel<<<256, 256>>>(t);
    return cudaGetLastError();
}

extern "C" int to_half(const float* values, uint16_t* halves, int64_t n) {
    half_kernel<<<static_cast<unsigned>((n + 255) / 256), 256>>>(values, halves, n);
    return cudaGetLastError();
}

#else

extern "C" int fill_tables(Tables* t) {
    for (uint32_t i = 0; i < 65536; i++) fill(*t, i);
    return 0;
}

extern "C" int to_half(const float* values, uint16_t* halves, int64_t n) {
    for (int64_t i = 0; i < n; i++) halves[i] = nvfp4::float_to_half_bits(values[i]);
    return 0;
}

#endif

extern "C" int scale_offsets(int64_t* offsets, int64_t rows, int64_t blocks) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < blocks; j++)
            offsets[i * blocks + j] = nvfp4::permuted_scale_offset(i, j, (blocks + 3) / 4);
    return 0;
}
