// MXFP4 weights as the FP8 tensor cores of Hopper take them: units of 32 rows by 128 columns, 2176 bytes, as many as the
// weights have. Blocks of 8 units of rows, 256 rows, lie chunk by chunk, so that a tile's chunk is one copy:
// [matrices][blocks][columns / 128][8]. What has no row or column is zero.
//
// A unit holds two groups of 16 rows. Lane l = 4 g + c of a warp owns, in rows g and g + 8 of a group, the columns 32 c ..
// 32 c + 31: a whole block, so it needs one scale a row.
//   bytes 512 (2 q + r) + 16 l .. + 15   group q, row g + 8 r: four words, of eight columns each
//   bytes 2048 + 4 l + 2 q + r           its scale
// A word's codes are columns 0 to 7. Magnitudes are in nibbles, in that order: as they stand, they choose bytes of a table
// of eight. Signs are in the bits between them: of column i < 4 in bit 8 i + 7, of column 4 + i in bit 8 i + 3.
//
// With 2^m the largest scale of the matrix, a weight code * 2^k is kept as e4m3(code * 2^(k - m + 6)), at most 384: for
// k >= m - 14 that is exact, with subnormals. A scale byte is 8 (k - m + 14), where its table of e4m3 begins.
//
// Products of 32 columns a step: in step s of a unit k = 16 h + 4 c + i of the instruction is column 32 c + 8 s + 4 h + i,
// so that a word makes both registers of a step. The other operand has its columns in the same order.
//
// Interleaved as nvfp4_units.cuh has it: group q of unit u has gate rows 16 u + 8 q + 0 .. 7, then the same of up.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "nvfp4_units.cuh"
#include "ptx.cuh"

namespace mxfp4 {

constexpr int ROWS = 32, COLUMNS = 128, BYTES = 2176, SCALES = 2048;  // SCALES: where they begin
constexpr int BLOCK_UNITS = 8, BLOCK_BYTES = BLOCK_UNITS * BYTES;     // of a block of rows: units; bytes of a chunk
constexpr int SPAN = 14, TABLES = (SPAN + 1) * 8;                     // bytes of the tables, by scale byte
static_assert(SCALES == ROWS * COLUMNS / 2 && BYTES == SCALES + ROWS * COLUMNS / 32 && BLOCK_BYTES % 1024 == 0);

__host__ __device__ inline int chunks_of(int columns) { return (columns + COLUMNS - 1) / COLUMNS; }

// Byte `index` of the tables: magnitude index % 8 times 2^(index / 8 - 8) as e4m3.
__device__ __forceinline__ uint32_t table_byte(int index) {
    const int code = index % 8, exponent = code / 2 - 1;
    const float magnitude = code < 2 ? 0.5f * code : ldexpf(1.f + 0.5f * (code % 2), exponent);
    return ptx::pack_e4m3x2(ldexpf(magnitude, index / 8 - 8), 0.f) & 0xFF;
}

// A word and the table of its scale -> columns 0 to 3 and 4 to 7 as e4m3.
__device__ __forceinline__ void decode(uint32_t word, uint2 table, uint32_t& lower, uint32_t& upper) {
    constexpr int AND_OR = 0xEA;  // (a & b) | c
    const uint32_t magnitudes = word & 0x77777777u, signs = 0x80808080u;
    lower = units::lop3<AND_OR>(word, signs, ptx::prmt(table.x, table.y, magnitudes));
    upper = units::lop3<AND_OR>(word << 4, signs, ptx::prmt(table.x, table.y, magnitudes >> 16));
}

// Eight codes, first column in the low nibble, -> as units have them.
__device__ __forceinline__ uint32_t encode(uint32_t codes) {
    uint32_t word = codes & 0x77777777u;
    for (int i = 0; i < 8; ++i) word |= (codes >> (4 * i + 3) & 1) << (8 * (i % 4) + (i < 4 ? 7 : 3));
    return word;
}

// A thread makes a lane's share of one unit.
static __global__ void repack_kernel(const uint8_t* packed, const uint8_t* scales, const uint8_t* largest, uint8_t* to,
                                     int64_t lanes, int rows, int columns, int blocks, bool interleaved) {
    const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (i >= lanes) return;
    const int lane = i & 31, chunks = chunks_of(columns);
    const int64_t unit = i >> 5;
    const int64_t expert = unit / BLOCK_UNITS / chunks / blocks;
    const int unit_row = int(unit / BLOCK_UNITS / chunks % blocks * BLOCK_UNITS + unit % BLOCK_UNITS);
    const int block = int(unit / BLOCK_UNITS % chunks) * 4 + lane % 4;  // of 32 columns
    uint8_t* const unit_at = to + unit * BYTES;
    uint32_t scale_word = 0;
    for (int part = 0; part < 4; ++part) {  // 2 q + r
        const int q = part / 2, r = part % 2, g = lane / 4;
        const int row = interleaved ? unit_row * 16 + q * 8 + g + r * (rows / 2) : unit_row * 32 + q * 16 + r * 8 + g;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (unit_row * ROWS < rows && block * 32 < columns) {
            const int64_t at = (expert * rows + row) * (columns / 32) + block;
            const uint4 codes = *reinterpret_cast<const uint4*>(packed + at * 16);
            words = make_uint4(encode(codes.x), encode(codes.y), encode(codes.z), encode(codes.w));
            scale_word |= uint32_t(8 * max(scales[at] - largest[expert] + SPAN, 0)) << 8 * part;
        }
        *reinterpret_cast<uint4*>(unit_at + 512 * part + 16 * lane) = words;
    }
    *reinterpret_cast<uint32_t*>(unit_at + SCALES + 4 * lane) = scale_word;
}

// packed (matrices, rows, columns / 2), scales (matrices, rows, columns / 32), largest (matrices,) of these -> units; rows
// a multiple of 32, columns of 64. -> a cudaError_t.
inline cudaError_t repack(const uint8_t* packed, const uint8_t* scales, const uint8_t* largest, uint8_t* to, int matrices,
                          int rows, int columns, int interleaved) {
    const int blocks = (rows + BLOCK_UNITS * ROWS - 1) / (BLOCK_UNITS * ROWS);
    const int64_t lanes = int64_t(matrices) * blocks * chunks_of(columns) * BLOCK_UNITS * 32;
    repack_kernel<<<static_cast<unsigned>((lanes + 255) / 256), 256>>>(packed, scales, largest, to, lanes, rows, columns,
                                                                       blocks, interleaved != 0);
    return cudaGetLastError();
}

}  // namespace mxfp4
