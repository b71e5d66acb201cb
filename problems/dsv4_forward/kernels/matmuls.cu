// Plain bf16 matrices times the same few tokens, up to MOST_MATRICES of them in one launch.
//
// Sums are in fp32 and rounded once, where the output is bf16. The launcher returns the CUDA error of its launch.
#include "few_tokens.cuh"
#include "launch.cuh"

namespace {

constexpr int MOST_MATRICES = 4;
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int LINES = 8;            // of few::Product: with up to 8 tokens a block has 4096 columns of 8 rows under way
constexpr int RESIDENT = 2;         // blocks that a multiprocessor has room for
constexpr int FEWEST_BLOCKS = 128;  // about one a multiprocessor

// matrix: (rows, columns); out: (tokens, rows), bf16 or fp32; end: the blocks up to its last one.
struct Matrix {
    const __nv_bfloat16* matrix;
    void* out;
    int rows, bf16, end;
};

struct Matrices {
    Matrix each[MOST_MATRICES];
    const __nv_bfloat16* x;
    int count, tokens, columns;
};

template <int TILES, int OCTETS>
__global__ void __launch_bounds__(THREADS, RESIDENT) matmuls_kernel(const Matrices of) {
    using Product = few::Product<WARPS, TILES, OCTETS, LINES>;
    __shared__ float smem_sums[Product::SUMS];
    Matrix mine = of.each[0];
    int before = 0;
#pragma unroll
    for (int i = 1; i < MOST_MATRICES; i++)
        if (i < of.count && blockIdx.x >= of.each[i - 1].end) mine = of.each[i], before = of.each[i - 1].end;
    Product product = {mine.matrix, (static_cast<int>(blockIdx.x) - before) * Product::ROWS, mine.rows, of.columns};
    product.begin();  // weights: no kernel writes them
    programmatic::wait();
    programmatic::trigger();
    product.multiply(of.x, of.tokens);
    product.store(smem_sums);
    __syncthreads();
    for (int i = threadIdx.x; i < of.tokens * Product::ROWS; i += THREADS) {
        const int token = i / Product::ROWS, row = product.first + i % Product::ROWS;
        if (row >= mine.rows) continue;
        const float total = Product::total(smem_sums, i);
        const long long at = static_cast<long long>(token) * mine.rows + row;
        if (mine.bf16)
            static_cast<__nv_bfloat16*>(mine.out)[at] = __float2bfloat16_rn(total);
        else
            static_cast<float*>(mine.out)[at] = total;
    }
}

// Blocks of TILES * few::TILE rows each.
int blocks_of(Matrices& of, int tiles) {
    int blocks = 0;
    for (int i = 0; i < of.count; i++) {
        blocks += (of.each[i].rows + tiles * few::TILE - 1) / (tiles * few::TILE);
        of.each[i].end = blocks;
    }
    return blocks;
}

template <int TILES, int OCTETS>
int multiply(Matrices& of) {
    const int blocks = blocks_of(of, TILES);
    if constexpr (TILES > 1)
        if (blocks < FEWEST_BLOCKS) return multiply<TILES / 2, OCTETS>(of);
    return programmatic::launch(matmuls_kernel<TILES, OCTETS>, dim3(blocks), dim3(THREADS), 0, of);
}

}  // namespace

// matrices, outs, rows, bf16: of `count` matrices, at most MOST_MATRICES. tokens: at most few::MOST_TOKENS.
extern "C" int launch_matmuls(const void* x, const void* const* matrices, void* const* outs, const int* rows,
                               const int* bf16, int count, int tokens, int columns) {
    Matrices of = {};
    of.x = static_cast<const __nv_bfloat16*>(x), of.count = count, of.tokens = tokens, of.columns = columns;
    for (int i = 0; i < count; i++)
        of.each[i] = {static_cast<const __nv_bfloat16*>(matrices[i]), outs[i], rows[i], bf16[i], 0};
    // With more tokens a block reads more of them, so it has more rows if there are enough. Bits do not depend on that.
    if (tokens <= 2) return multiply<1, 1>(of);
    if (tokens <= few::TILE) return multiply<2, 1>(of);
    return tokens <= 2 * few::TILE ? multiply<2, 2>(of) : multiply<4, 4>(of);
}
