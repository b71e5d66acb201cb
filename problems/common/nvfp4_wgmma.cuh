// NVFP4 weights times NVFP4 activations by wgmma on e4m3, for up to 4 tokens at once: a layout of weights, and the
// product of a warp's 16 rows by 128 columns. No rings, no launches: registers and descriptors only.
//
// A code s ee m of e2m1, with its sign at bit 7 of a byte and the rest at bits 4:2, is the same value times 2^-6 in
// e4m3. Codes are multiplied without their scales: sums of a block of 16 columns are exact, and take the scales of both
// sides in fp32. So sums of different blocks are kept apart, in different columns of the instruction's other operand:
// of one token, each block lies in a column of its own, zero elsewhere.
//
// A unit is 16 rows by 128 columns, 1152 bytes. Lane l = 4 g + c of a warp owns rows g and g + 8, and of each block
// b = 0 .. 7 columns 4 c .. 4 c + 3:
//   bytes 16 l .. + 15          four words of row g; word j has blocks 2 j and 2 j + 1
//   bytes 512 + 16 l .. + 15    of row g + 8
//   bytes 1024 + 4 l .. + 3     scales, e4m3: of row g, blocks c and c + 4, of row g + 8 the same
// Byte i of a word holds column 4 c + i of both blocks: of block 2 j the sign at bit 7, the other bits at 4:2; of
// block 2 j + 1 the sign at bit 5, the other bits at 6, 1:0.
//
// The four warps of a warpgroup have the rows of one column of units, 32 rows, and of two neighbouring ones: warp w has
// unit w of four, [2 columns][2 rows]. The instruction multiplies all 64 rows by both columns' activations, so half
// of a lane's sums are of no use: the warp takes its own column's.
//
// Units of a matrix lie row by row: [rows / 32][columns / 128, even][2]. Columns beyond the matrix have zeros.
// Interleaved, with gate rows above as many up rows: rows 0 to 7 of unit 2 u + q of a column are gate rows 16 u + 8 q
// on, rows 8 to 15 are the same rows of up.
//
// The other operand, of `TOKENS` = 1, 2 or 4 tokens by 256 columns, is 2048 bytes and all zeros but for the codes,
// e4m3 bytes times 2^-6 as well: see code_offset. Their scales are fp16, times 2^-2, see scale_offset: a product with a
// weight's scale is then exact in fp16, subnormal ones too.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"

namespace nvfp4_wgmma {

constexpr int ROWS = 16, COLUMNS = 128, BYTES = 1152, SCALES = 1024;  // of a unit; SCALES: where they begin
constexpr int STEP = 256, STEP_BYTES = 2048;  // columns of a warpgroup's step, and bytes of up to 4 tokens' codes
constexpr int STEP_SCALES = 32;               // bytes of a token's scales in a step
constexpr float REST = 16384.f;               // a sum is this much too small

// Units of a row of them: 32 rows by `columns`.
__host__ __device__ constexpr int units_of(int columns) { return (columns + STEP - 1) / STEP * 4; }

// Where a token's block, 0 to 15 of a step, has its 16 codes, from the step's first byte.
template <int TOKENS>
__host__ __device__ __forceinline__ int code_offset(int block, int token) {
    const int b = block & 7, half = b & 1;
    const int column = TOKENS == 1 ? 2 * (b & 3) + (b >> 2) : TOKENS == 2 ? 2 * (b & 3) + token : 2 * token + half;
    return (b >> 1) * 512 + (block >> 3) * 256 + half * 128 + column * 16;
}
// Where its scale lies, from the first byte of the token's scales in the step.
__host__ __device__ __forceinline__ int scale_offset(int block) {
    return (block >> 3) * 16 + (block & 3) * 4 + (block >> 2 & 1) * 2;
}

// The low half of the descriptor of a step's operand: 16 bytes on are 1 more. `product` puts the other half to it,
// which is always the same: so only one register changes from one instruction to the next.
__device__ __forceinline__ uint32_t descriptor(uint32_t at) { return uint32_t(128 / 16) << 16 | (at & 0x3FFFF) / 16; }

// What a lane has of a unit.
template <int TOKENS>
struct Unit {
    uint32_t codes[2][4];  // of rows g and g + 8
    uint32_t scales[TOKENS == 4 ? 4 : 1];

    // at: of the unit, in shared memory.
    __device__ __forceinline__ void load(uint32_t at, int lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint4 word = ptx::load_shared16(at + 512 * r + 16 * lane);
            codes[r][0] = word.x, codes[r][1] = word.y, codes[r][2] = word.z, codes[r][3] = word.w;
        }
        if constexpr (TOKENS == 4) {  // a lane has one token and needs the scales of all blocks
            const uint4 all = ptx::load_shared16(at + SCALES + 16 * (lane / 4));
            scales[0] = all.x, scales[1] = all.y, scales[2] = all.z, scales[3] = all.w;
        } else {
            scales[0] = ptx::load_shared(at + SCALES + 4 * lane);
        }
    }
};

// A word -> codes of its two blocks as e4m3.
__device__ __forceinline__ void decode(uint32_t word, uint32_t& even, uint32_t& odd) {
    even = word & 0x9C9C9C9Cu;
    odd = (word << 2 & 0x8C8C8C8Cu) | (word >> 2 & 0x10101010u);
}

// d (64, 16) += or = a (64, 32) b (16, 32)^T
__device__ __forceinline__ void product(float (&d)[8], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b,
                                        int adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
        "%12, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(uint64_t(256 / 16) << 32 | b), "r"(adds));
}

// The left operand of a unit's four instructions.
struct Left {
    uint32_t word[4][4];

    template <int TOKENS>
    __device__ __forceinline__ void decode(const Unit<TOKENS>& unit) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int j = 0; j < 4; ++j) nvfp4_wgmma::decode(unit.codes[r][j], word[j][r], word[j][r + 2]);
        // Else the compiler decodes between the instructions, and has to order each of them anew.
#pragma unroll
        for (int j = 0; j < 4; ++j)
            asm volatile("" : "+r"(word[j][0]), "+r"(word[j][1]), "+r"(word[j][2]), "+r"(word[j][3]));
    }
};

// Begins the products of a warpgroup's four units by a step of `TOKENS` tokens, and commits them. step: a descriptor.
// `left` must stay as it is until they have been waited for. sums: of each TOKENS-th part of the instructions.
template <int TOKENS>
__device__ __forceinline__ void multiply(float (&sums)[TOKENS][8], const Left& left, uint32_t step) {
    ptx::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < 4; ++j)
        product(sums[j * TOKENS / 4], left.word[j][0], left.word[j][1], left.word[j][2], left.word[j][3],
                step + 32 * j, j * TOKENS % 4 != 0);
    ptx::warpgroup_commit_batch();
}

// Two e4m3 scales, the low or the high half of four, -> fp16, exact.
template <int HALF>
__device__ __forceinline__ __half2 scales_of(uint32_t four) {
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(four >> 16 * HALF)));
    return *reinterpret_cast<__half2*>(&pair);
}

// A lane's scales of the tokens, and then products of both sides' scales: of rows g and g + 8, in either half of blocks
// b and b + 4. With 4 tokens of its own token, b = 0 .. 3; else of each token, b = c.
template <int TOKENS>
struct Scales {
    __half2 of[TOKENS][2];

    // at: of the step's first token, in shared memory, for the warp's column of units.
    __device__ __forceinline__ void load(uint32_t at, int lane) {
        uint32_t word[TOKENS];
        if constexpr (TOKENS == 4) {
            const uint4 all = ptx::load_shared16(at + STEP_SCALES * (lane & 3));
            word[0] = all.x, word[1] = all.y, word[2] = all.z, word[3] = all.w;
        } else {
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) word[t] = ptx::load_shared(at + STEP_SCALES * t + 4 * (lane & 3));
        }
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) of[i][0] = of[i][1] = reinterpret_cast<const __half2&>(word[i]);
    }
    __device__ __forceinline__ void multiply(const Unit<TOKENS>& unit) {
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const uint32_t four = unit.scales[TOKENS == 4 ? i : 0];
            of[i][0] = __hmul2(scales_of<0>(four), of[i][0]), of[i][1] = __hmul2(scales_of<1>(four), of[i][1]);
        }
    }
};

// Sums over many units, in fp32. Of a row and a token they are in four parts, c = 0 .. 3: of blocks c and c + 4 of each
// unit, in the order of the columns. So they do not depend on TOKENS. Lane 4 g + c has in rows g and g + 8: of one or
// two tokens part c; of four tokens all parts of token c.
template <int TOKENS>
struct Sums {
    float part[TOKENS][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) part[i][0] = part[i][1] = 0;
    }
    // Adds what `multiply` made, which must have been waited for. second: the warp has the second column of units.
    __device__ __forceinline__ void add(const float (&sums)[TOKENS][8], const Scales<TOKENS>& scales, bool second) {
        const auto sum = [&](int i, int j) { return second ? sums[i][4 + j] : sums[i][j]; };
#pragma unroll
        for (int i = 0; i < TOKENS; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float even = TOKENS == 4 ? sum(i / 2, 2 * r + i % 2) : sum(0, 2 * r + i);
                const float odd = TOKENS == 4   ? sum(2 + i / 2, 2 * r + i % 2)
                                  : TOKENS == 2 ? sum(TOKENS - 1, 2 * r + i)
                                                : sum(0, 2 * r + 1);
                const __half2 factors = scales.of[i][r];
                part[i][r] = fmaf(odd, __high2float(factors), fmaf(even, __low2float(factors), part[i][r]));
            }
    }
    // Adds up the four parts, in the same order for any TOKENS, and stores them: row r of token t, 0 to TOKENS - 1, at
    // to + r % 8 * row_bytes + t / 2 * 16 + t % 2 * 4 + r / 8 * 8.
    __device__ __forceinline__ void store(uint32_t to, int row_bytes, int lane) const {
        const int c = lane & 3;
        to += lane / 4 * row_bytes;
        const bool odd = c & 1, high = c & 2;
        if constexpr (TOKENS == 4) {
            const uint32_t mine = to + c / 2 * 16 + c % 2 * 4;
#pragma unroll
            for (int r = 0; r < 2; ++r)
                ptx::store_shared(mine + 8 * r,
                                  __float_as_uint((part[0][r] + part[1][r]) + (part[2][r] + part[3][r])));
        } else {
            float pair[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; ++t)
                pair[t] = (odd ? part[t][1] : part[t][0]) + __shfl_xor_sync(~0u, odd ? part[t][0] : part[t][1], 1);
            if constexpr (TOKENS == 1) {
                const float all = pair[0] + __shfl_xor_sync(~0u, pair[0], 2);
                if (c < 2) ptx::store_shared(to + 8 * c, __float_as_uint(all));
            } else {
                const float all = (high ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, high ? pair[0] : pair[1], 2);
                ptx::store_shared(to + 4 * (c / 2) + 8 * (c % 2), __float_as_uint(all));
            }
        }
    }
};

// A value of e2m1 -> its code in the other operand; a scale of e4m3 -> what scale_offset speaks of.
__device__ __forceinline__ uint32_t code_of(float value) {
    return __nv_cvt_float_to_fp8(value * 0x1p-6f, __NV_SATFINITE, __NV_E4M3);
}
__device__ __forceinline__ __half scale_of(float scale) { return __float2half_rn(scale * 0.25f); }

// A word of two blocks' four codes each, first column in the low nibble, -> as units have it.
__device__ __forceinline__ uint32_t encode(uint32_t even, uint32_t odd) {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t a = even >> 4 * i & 15, b = odd >> 4 * i & 15;
        word |= (a >> 3 << 7 | (a & 7) << 2 | b >> 3 << 5 | (b >> 2 & 1) << 6 | (b & 3)) << 8 * i;
    }
    return word;
}

// A thread makes a lane's share of one unit.
static __global__ void repack_kernel(const uint8_t* packed, const uint8_t* scales, uint8_t* to, int64_t lanes, int rows,
                                     int columns, bool interleaved) {
    const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (i >= lanes) return;
    const int lane = i & 31, g = lane >> 2, c = lane & 3, unit_rows = rows / (2 * ROWS), in_row = units_of(columns);
    const int64_t unit = i >> 5;
    const int q = unit & 1, first = unit % in_row / 2 * (COLUMNS / 16), row32 = unit / in_row % unit_rows;
    const int64_t expert = unit / in_row / unit_rows;
    uint8_t* unit_at = to + unit * BYTES;
    uint32_t scale_word = 0;
    for (int r = 0; r < 2; ++r) {
        const int row = interleaved ? row32 * 16 + q * 8 + g + r * (rows / 2) : row32 * 32 + q * 16 + r * 8 + g;
        const int64_t blocks = (expert * rows + row) * (columns / 16);
        const auto codes = [&](int b) -> uint32_t {
            return b < columns / 16 ? reinterpret_cast<const uint16_t*>(packed)[(blocks + b) * 4 + c] : 0;
        };
        const auto scale = [&](int b) -> uint32_t { return b < columns / 16 ? scales[blocks + b] : 0; };
        uint32_t words[4];
        for (int j = 0; j < 4; ++j) words[j] = encode(codes(first + 2 * j), codes(first + 2 * j + 1));
        scale_word |= (scale(first + c) | scale(first + c + 4) << 8) << 16 * r;
        *reinterpret_cast<uint4*>(unit_at + 512 * r + 16 * lane) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    *reinterpret_cast<uint32_t*>(unit_at + SCALES + 4 * lane) = scale_word;
}

// packed (matrices, rows, columns / 2), scales (matrices, rows, columns / 16) -> units. -> a cudaError_t.
inline cudaError_t repack(const uint8_t* packed, const uint8_t* scales, uint8_t* to, int matrices, int rows,
                          int columns, bool interleaved) {
    const int64_t lanes = static_cast<int64_t>(matrices) * (rows / (2 * ROWS)) * units_of(columns) * 32;
    repack_kernel<<<static_cast<unsigned>((lanes + 255) / 256), 256>>>(packed, scales, to, lanes, rows, columns,
                                                                       interleaved);
    return cudaGetLastError();
}

}  // namespace nvfp4_wgmma
