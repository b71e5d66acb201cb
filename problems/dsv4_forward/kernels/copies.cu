// The hc copies: they are mixed to the input of a sublayer in two launches, and what it returned is written to them in
// one.
//
// The formulas are those of torch_ops/mhc.py, in fp32; copies are T, bf16 or fp32, and each output is rounded once. The
// mixing matrix is read once for a block of tokens, and its products are taken on the tensor cores: an fp32 value is the
// sum of three bf16 ones, so nothing is lost but what fp32 sums lose. A token's bits do not depend on the others: its
// sums are of the same parts in the same order. Every launcher returns the CUDA error of its launch.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "launch.cuh"
#include "ptx.cuh"

namespace {

constexpr int HC_MULT = 4;                     // n: copies of the residual
constexpr int ROWS = (2 + HC_MULT) * HC_MULT;  // of a mixing matrix: pre, post, combination
constexpr int THREADS = 256;
constexpr unsigned ALL = 0xffffffffu;

__device__ float load(const float* p) { return *p; }
__device__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ void store(float* p, float value) { *p = value; }
__device__ void store(__nv_bfloat16* p, float value) { *p = __float2bfloat16_rn(value); }

template <typename T>
__device__ float rounded(float value);
template <>
__device__ float rounded<float>(float value) { return value; }
template <>
__device__ float rounded<__nv_bfloat16>(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ---------------------------------------------------------------- mixing

constexpr int WARPS = THREADS / 32;
constexpr int STEPS = 4;                         // of 16 columns, that a warp multiplies by
constexpr int PART = WARPS * STEPS * 16;         // columns of the copies that a block sums over
constexpr int BLOCK_M = 16;                      // tokens of a tile
constexpr int MANY_BLOCKS = 264;                 // two a multiprocessor
constexpr int TILES = ROWS / 8;                  // of 8 rows of the matrix
constexpr int TERMS = 3;                         // bf16 values whose sum is an fp32 value

// Sums of a token: ROWS products with the mixing matrix, then that of the squares. In memory (tokens, parts, ROWS + 1).
struct Mix {
    const void* copies;
    const float* fn;
    float* sums;
    int tokens, width, parts;  // width: HC_MULT * d
};

__device__ void load_pair(const float* p, float (&to)[2]) {
    const float2 both = *reinterpret_cast<const float2*>(p);
    to[0] = both.x, to[1] = both.y;
}
__device__ void load_pair(const __nv_bfloat16* p, float (&to)[2]) {
    const float2 both = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p));
    to[0] = both.x, to[1] = both.y;
}

// Two values as sums of `count` pairs of bf16 values, the largest first.
template <int count>
__device__ void split_pair(const float (&pair)[2], uint32_t (&terms)[count]) {
    float rest[2] = {pair[0], pair[1]};
    for (int t = 0; t < count; t++) {
        const __nv_bfloat162 near = __floats2bfloat162_rn(rest[0], rest[1]);
        terms[t] = *reinterpret_cast<const uint32_t*>(&near);
        const float2 taken = __bfloat1622float2(near);
        rest[0] -= taken.x, rest[1] -= taken.y;
    }
}

// This warp's columns of the mixing matrix as operands of mma, in TERMS each: row lane / 4 of a tile of 8 rows.
__device__ void load_matrix(const Mix& mix, int column0, uint32_t (&b)[STEPS][TILES][TERMS][2]) {
    const int lane = threadIdx.x % 32;
    for (int k = 0; k < STEPS; k++)
        for (int n = 0; n < TILES; n++)
            for (int i = 0; i < 2; i++) {
                const int row = 8 * n + lane / 4, column = column0 + 16 * k + 8 * i + lane % 4 * 2;
                float pair[2] = {0.0f, 0.0f};
                if (column < mix.width)
                    load_pair(mix.fn + static_cast<long long>(row) * mix.width + column, pair);
                uint32_t terms[TERMS];
                split_pair<TERMS>(pair, terms);
                for (int t = 0; t < TERMS; t++) b[k][n][t][i] = terms[t];
            }
}

// Block (part, group): the sums over columns part * PART and on, of every gridDim.y-th tile of tokens. A warp has STEPS
// times 16 of the columns; its products with a tile are c, rows lane / 4 and lane / 4 + 8 of the tokens.
template <typename T>
__global__ void __launch_bounds__(THREADS, 1) mix_kernel(const Mix mix) {
    constexpr int X_TERMS = sizeof(T) == 4 ? TERMS : 1;
    __shared__ float smem_sums[WARPS][BLOCK_M][8 * TILES + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column0 = blockIdx.x * PART + warp * STEPS * 16;
    uint32_t b[STEPS][TILES][TERMS][2];
    load_matrix(mix, column0, b);  // weights: no kernel writes them
    programmatic::wait();
    programmatic::trigger();
    for (int token0 = blockIdx.y * BLOCK_M; token0 < mix.tokens; token0 += gridDim.y * BLOCK_M) {
        float c[TILES][4] = {}, squares[2] = {};
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            uint32_t a[X_TERMS][4];
            for (int i = 0; i < 4; i++) {
                const int token = token0 + lane / 4 + i % 2 * 8, column = column0 + 16 * k + i / 2 * 8 + lane % 4 * 2;
                float pair[2] = {0.0f, 0.0f};
                if (token < mix.tokens && column < mix.width)
                    load_pair(static_cast<const T*>(mix.copies) + static_cast<long long>(token) * mix.width + column,
                              pair);
                squares[i % 2] += pair[0] * pair[0] + pair[1] * pair[1];
                uint32_t terms[X_TERMS];
                split_pair<X_TERMS>(pair, terms);
                for (int t = 0; t < X_TERMS; t++) a[t][i] = terms[t];
            }
            for (int n = 0; n < TILES; n++)
                for (int x = X_TERMS - 1; x >= 0; x--)  // small products first
                    for (int t = TERMS - 1 - x; t >= 0; t--) ptx::mma_bf16(c[n], a[x], b[k][n][t]);
        }
        for (int i = 0; i < 2; i++)
            for (int step = 1; step < 4; step *= 2) squares[i] += __shfl_xor_sync(ALL, squares[i], step);
        __syncthreads();  // the sums of the tile before were read
        for (int i = 0; i < 4; i++)
            for (int n = 0; n < TILES; n++)
                smem_sums[warp][lane / 4 + i / 2 * 8][8 * n + lane % 4 * 2 + i % 2] = c[n][i];
        if (lane % 4 == 0)
            for (int i = 0; i < 2; i++) smem_sums[warp][lane / 4 + 8 * i][8 * TILES] = squares[i];
        __syncthreads();
        constexpr int count = ROWS + 1;
        for (int base = 0; base < BLOCK_M * count; base += THREADS) {
            const int at = base + threadIdx.x, token = token0 + at / count, row = at % count;
            if (at >= BLOCK_M * count || token >= mix.tokens) continue;
            float total = 0.0f;
            for (int w = 0; w < WARPS; w++)
                total += smem_sums[w][at / count][row == ROWS ? 8 * TILES : row];
            mix.sums[(static_cast<long long>(token) * mix.parts + blockIdx.x) * count + row] = total;
        }
    }
}

// What collapse_kernel writes: out (tokens, d), post (tokens, n), comb (tokens, n, n).
template <typename T>
struct Collapse {
    const T* copies;
    const float *sums, *base, *scale;
    T* out;
    float *post, *comb;
    int parts, d, iterations;
    float norm_eps, eps;
};

// Sinkhorn on 16 threads of a warp, thread 4 j + k holding m_jk of a token: rows are over k, columns over j.
__device__ float sinkhorn(float logit, int iterations, float eps) {
    auto row_of = [](float v, auto join) {
        v = join(v, __shfl_xor_sync(ALL, v, 1));
        return join(v, __shfl_xor_sync(ALL, v, 2));
    };
    auto column_of = [](float v) {
        v += __shfl_xor_sync(ALL, v, 4);
        return v + __shfl_xor_sync(ALL, v, 8);
    };
    auto add = [](float a, float b) { return a + b; };
    auto larger = [](float a, float b) { return fmaxf(a, b); };
    float m = expf(logit - row_of(logit, larger));
    m = m / row_of(m, add) + eps;
    m = m / (column_of(m) + eps);
    for (int i = 1; i < iterations; i++) {
        m = m / (row_of(m, add) + eps);
        m = m / (column_of(m) + eps);
    }
    return m;
}

// Block (token, part): part 0 makes post and comb, which takes longest; the others every (gridDim.y - 1)-th THREADS values
// of u = sum_j pre_j copies_j.
template <typename T>
__global__ void __launch_bounds__(THREADS) collapse_kernel(const Collapse<T> to) {
    __shared__ float partial[WARPS][32], z[32];  // of each sum
    const long long token = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = ROWS + 1, part = static_cast<int>(blockIdx.y) - 1;
    // Weights, no kernel writes them: of pre; of a cell of comb, the warp's upper half repeats the lower; of post.
    const int cell = lane % (HC_MULT * HC_MULT), row = 2 * HC_MULT + cell, one = HC_MULT + lane % HC_MULT;
    float bases[HC_MULT] = {}, scale = to.scale[part < 0 ? 2 : 0], scale_post = 0.0f;
    if (part < 0)
        bases[0] = to.base[row], bases[1] = to.base[one], scale_post = to.scale[1];
    else
        for (int j = 0; j < HC_MULT; j++) bases[j] = to.base[j];
    programmatic::wait();
    programmatic::trigger();
    float sum = 0.0f;
    if (lane < count)
        for (int part = warp; part < to.parts; part += WARPS) sum += to.sums[(token * to.parts + part) * count + lane];
    partial[warp][lane] = sum;
    __syncthreads();
    if (warp == 0) {
        float total = 0.0f;
        for (int w = 0; w < WARPS; w++) total += partial[w][lane];
        z[lane] = total;
    }
    __syncthreads();
    const float inverse = rsqrtf(z[ROWS] / (HC_MULT * to.d) + to.norm_eps);
    if (part < 0) {
        if (warp == 0) {
            const float m = sinkhorn(z[row] * inverse * scale + bases[0], to.iterations, to.eps);
            if (lane < HC_MULT * HC_MULT) to.comb[token * HC_MULT * HC_MULT + cell] = m;
        } else if (warp == 1 && lane < HC_MULT) {
            to.post[token * HC_MULT + lane] = 2.0f * sigmoid(z[one] * inverse * scale_post + bases[1]);
        }
        return;
    }
    float pre[HC_MULT];
    for (int j = 0; j < HC_MULT; j++) pre[j] = sigmoid(z[j] * inverse * scale + bases[j]) + to.eps;
    for (int base = part * THREADS; base < to.d; base += (gridDim.y - 1) * THREADS) {
        const int i = base + threadIdx.x;
        if (i >= to.d) continue;
        const T* x = to.copies + token * HC_MULT * to.d + i;
        float mixed = 0.0f;
        for (int j = 0; j < HC_MULT; j++) mixed += pre[j] * load(x + static_cast<long long>(j) * to.d);
        store(to.out + token * to.d + i, mixed);
    }
}

}  // namespace

// As in copies.py; pointers that a launcher does not use are null. bf16, *_bf16: 1 for bf16, 0 for fp32.
struct Call {
    const void *copies, *first, *second;
    const float *fn, *base, *scale;
    float *sums, *post, *comb;
    void* out;
    int tokens, d, bf16, first_bf16, second_bf16, iterations;
    float norm_eps, eps;
};

namespace {

template <typename T>
int read_copies(const Call& c) {
    const int width = HC_MULT * c.d, parts = (width + PART - 1) / PART;
    const Mix mix = {c.copies, c.fn, c.sums, c.tokens, width, parts};
    const int tiles = (c.tokens + BLOCK_M - 1) / BLOCK_M, groups = max(1, min(tiles, MANY_BLOCKS / parts));
    const int failed = programmatic::launch(mix_kernel<T>, dim3(parts, groups), dim3(THREADS), 0, mix);
    if (failed) return failed;
    const Collapse<T> to = {static_cast<const T*>(c.copies), c.sums, c.base, c.scale, static_cast<T*>(c.out), c.post,
                            c.comb, parts, c.d, c.iterations, c.norm_eps, c.eps};
    const int columns = (c.d + THREADS - 1) / THREADS, each = max(1, MANY_BLOCKS / c.tokens);
    return programmatic::launch(collapse_kernel<T>, dim3(c.tokens, 1 + min(columns, each)), dim3(THREADS), 0, to);
}

// ---------------------------------------------------------------- writing

// fp32 or bf16 values.
struct Addend {
    const void* data;
    int bf16;
};

__device__ float load(const Addend& from, long long i) {
    if (from.bf16) return load(static_cast<const __nv_bfloat16*>(from.data) + i);
    return load(static_cast<const float*>(from.data) + i);
}

// Block (token, part), a thread a value: out_k = post_k y + sum_j comb_jk copies_j, where y is `first`, or where `second`
// has data, the sum of both, rounded to T.
template <typename T>
__global__ void spread_kernel(const Addend first, const Addend second, const T* copies, const float* post,
                                  const float* comb, T* out, int d) {
    programmatic::wait();
    programmatic::trigger();
    const long long token = blockIdx.x;
    const int i = blockIdx.y * THREADS + threadIdx.x;
    if (i >= d) return;
    const T* x = copies + token * HC_MULT * d + i;
    float value = load(first, token * d + i);
    if (second.data) value = rounded<T>(value + load(second, token * d + i));
    float copy[HC_MULT];
    for (int j = 0; j < HC_MULT; j++) copy[j] = load(x + static_cast<long long>(j) * d);
    for (int k = 0; k < HC_MULT; k++) {
        float sum = post[token * HC_MULT + k] * value;
        for (int j = 0; j < HC_MULT; j++) sum += comb[token * HC_MULT * HC_MULT + j * HC_MULT + k] * copy[j];
        store(out + token * HC_MULT * d + static_cast<long long>(k) * d + i, sum);
    }
}

template <typename T>
int spread(const Call& c) {
    const Addend first = {c.first, c.first_bf16}, second = {c.second, c.second_bf16};
    return programmatic::launch(spread_kernel<T>, dim3(c.tokens, (c.d + THREADS - 1) / THREADS), dim3(THREADS), 0, first,
                                second, static_cast<const T*>(c.copies), static_cast<const float*>(c.post),
                                static_cast<const float*>(c.comb), static_cast<T*>(c.out), c.d);
}

}  // namespace

// sums: fp32 (tokens, parts, ROWS + 1), parts = ceil(4 d / PART).
extern "C" int launch_mix_copies(const Call* c) { return (c->bf16 ? read_copies<__nv_bfloat16> : read_copies<float>)(*c); }

// post and comb are read; second may be null.
extern "C" int launch_spread(const Call* c) { return (c->bf16 ? spread<__nv_bfloat16> : spread<float>)(*c); }
