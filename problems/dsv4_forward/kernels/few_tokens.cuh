// The product of a plain bf16 matrix, as it lies in memory, with up to 32 tokens: what a block of warps does of it.
//
// A block has some rows of the matrix, and its warps split the columns. A row meets 8 tokens in mma.sync; sums are in
// fp32, and in an order that depends on the matrix only, so a token's bits do not depend on the others.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"

namespace few {

constexpr int MOST_TOKENS = 32;
constexpr int TILE = 8;   // rows or tokens, as mma.sync takes them
constexpr int LINE = 64;  // columns that a warp takes of a row together: 128 bytes

// 8 values of a row, zeros where there is no such row or column.
__device__ __forceinline__ uint4 load_eight(const __nv_bfloat16* matrix, int row, int rows, int column, int columns) {
    if (row >= rows || column >= columns) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(matrix + static_cast<long long>(row) * columns + column);
}

// A warp's part of TILES * TILE rows times at most OCTETS * TILE tokens. LINES: that a lane has under way with 8 rows and
// 8 tokens. PARTS: blocks that split the columns of the rows. Columns are a multiple of 8, and rows begin at multiples
// of 16 bytes.
template <int WARPS, int TILES, int OCTETS, int LINES, int PARTS = 1>
struct Product {
    static constexpr int ROWS = TILES * TILE, TOKENS = OCTETS * TILE, PAIRS = (OCTETS + 1) / 2;
    static constexpr int DEPTH = LINES / OCTETS < TILES ? 1 : LINES / OCTETS / TILES;
    static constexpr int SUMS = WARPS * TOKENS * ROWS;  // floats in shared memory

    const __nv_bfloat16* matrix;
    int first, rows, columns;  // the block's first row; of the matrix
    int part = 0;              // of PARTS, the block's
    uint4 b[DEPTH][TILES][2];
    float c[PAIRS][TILES][4];

    __device__ __forceinline__ int column(int line, int half) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        return ((line * PARTS + part) * WARPS + warp) * LINE + half * LINE / 2 + lane % 4 * 8;
    }

    // Line `line` of the matrix, into place d.
    __device__ __forceinline__ void load(int line, int d) {
        const int row = first + threadIdx.x % 32 / 4;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                b[d][tile][half] = load_eight(matrix, row + tile * TILE, rows, column(line, half), columns);
    }

    // The first DEPTH lines, which multiply() goes on from.
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) load(d, d);
    }

    // Line `line` of the tokens times what is in place d.
    __device__ __forceinline__ void multiply_line(const __nv_bfloat16* x, int tokens, int line, int d) {
        const int token = threadIdx.x % 32 / 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 values[2 * PAIRS] = {};
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++)
                values[octet] = load_eight(x, octet * TILE + token, tokens, column(line, half), columns);
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                const uint4 low = values[2 * pair], high = values[2 * pair + 1];
                const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const uint4 w = b[d][tile][half];
                    const uint32_t of[2][2] = {{w.x, w.y}, {w.z, w.w}};
                    ptx::mma_bf16(c[pair][tile], a[0], of[0]);
                    ptx::mma_bf16(c[pair][tile], a[1], of[1]);
                }
            }
        }
    }

    // All lines, behind begin(). Where they are more than DEPTH, a place is loaded again when it has been multiplied.
    __device__ __forceinline__ void multiply(const __nv_bfloat16* x, int tokens) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) c[pair][tile][i] = 0.0f;
        constexpr int EACH = LINE * WARPS * PARTS;  // columns of a line of all warps and blocks
        const int lines = (columns + EACH - 1) / EACH;
        if (lines <= DEPTH) {  // without a branch between loads of x
#pragma unroll
            for (int d = 0; d < DEPTH; d++) multiply_line(x, tokens, d, d);
            return;
        }
        for (int line = 0; line < lines; line += DEPTH)
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                multiply_line(x, tokens, line + d, d);
                if (line + DEPTH < lines) load(line + DEPTH + d, d);
            }
    }

    // Into shared memory, (WARPS, TOKENS, ROWS).
    __device__ __forceinline__ void store(float* sums) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int token = pair * 2 * TILE + i / 2 * TILE + lane / 4;
                    if (token < TOKENS)
                        sums[(warp * TOKENS + token) * ROWS + tile * TILE + lane % 4 * 2 + i % 2] = c[pair][tile][i];
                }
    }

    // Of all warps, in their order. i: token * ROWS + row.
    __device__ __forceinline__ static float total(const float* sums, int i) {
        float found = 0.0f;
        for (int w = 0; w < WARPS; w++) found += sums[w * TOKENS * ROWS + i];
        return found;
    }
};

}  // namespace few
