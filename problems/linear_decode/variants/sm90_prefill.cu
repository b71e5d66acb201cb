// linear_decode for many tokens on Hopper: both factors by TMA into shared memory, wgmma on e4m3 or bf16 values.
//
//   quantise   x -> e4m3 codes and a scale for 128 of them; NVFP4's input -> code * scale in bf16, by the decode kernel's
//   multiply   values times weights, of one matrix
//
// FP8 that quantises multiplies codes; all else bf16 values, which hold codes times scales exactly (FP8's and NVFP4's
// weights are decoded once, by prepare). A block of `multiply` takes tile after tile of 128 tokens by 256 or 128 rows of
// weights. One warp asks for stages of 128 bytes of k, two warpgroups multiply half of the tokens each, which they load
// to registers, so that shared memory is read once for 256 rows. Two blocks are a cluster, with the same weights and
// tokens behind each other: each asks for half of the weights, for both, so that L2 is read less. Bits of a token do not
// depend on the others.
//
// sm90_prefill_form.cuh has the tiles, _produce.cuh what asks for data, _multiply.cuh products and the epilogue.
#include "launch_clusters.cuh"
#include "sm90_mma_quantise.cuh"
#include "sm90_prefill_multiply.cuh"
#include "sm90_prefill_produce.cuh"

namespace linear_prefill {

// ---- kernels

// A scale is of BLOCK_LANES lanes, each with two pieces of PIECE values, 64 apart; a lane
// takes part in AT_ONCE scales.
constexpr int QUANTISE_THREADS = 128, PIECE = 8, BLOCK_LANES = 8, AT_ONCE = 2;

__device__ __forceinline__ float value_of(const uint4& v, int i) {
    const uint32_t word = i < 2 ? v.x : i < 4 ? v.y : i < 6 ? v.z : v.w;
    return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
}
// What is not read again: L2 keeps the codes, for the kernel behind.
__device__ __forceinline__ uint4 load_once(const bf16* from, uint64_t policy) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from), "l"(policy)
                 : "memory");
    return v;
}

// x (tokens, groups, k) -> codes of the same shape and scales as Problem has them, as fp8.quantise_groups. blockIdx.y:
// the group.
__global__ void __launch_bounds__(QUANTISE_THREADS)
    quantise(const bf16* x, uint8_t* codes, float* scales, int tokens, int k, int scale_stride) {
    programmatic::trigger();
    programmatic::wait();
    constexpr int APART = QUANTISE_THREADS / BLOCK_LANES;
    const uint64_t policy = l2_evict_first();
    const int blocks = (k + ROW_BYTES - 1) / ROW_BYTES, part = threadIdx.x % BLOCK_LANES;
    uint32_t index = blockIdx.x * AT_ONCE * APART + threadIdx.x / BLOCK_LANES;
    uint4 given[AT_ONCE][2] = {};
    int token[AT_ONCE], column[AT_ONCE];
    int64_t at[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i, index += APART) {
        token[i] = index / blocks, column[i] = (index - token[i] * blocks) * ROW_BYTES;
        at[i] = (int64_t(token[i]) * gridDim.y + blockIdx.y) * k + column[i] + part * PIECE;
        if (token[i] >= tokens) continue;
        given[i][0] = load_once(x + at[i], policy);
        if (column[i] + ROW_BYTES / 2 < k) given[i][1] = load_once(x + at[i] + ROW_BYTES / 2, policy);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        float most = 0;
#pragma unroll
        for (int j = 0; j < 2 * PIECE; ++j) most = fmaxf(most, fabsf(value_of(given[i][j / PIECE], j % PIECE)));
#pragma unroll
        for (int lanes = BLOCK_LANES / 2; lanes; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
        if (token[i] >= tokens) continue;
        const float2 scale = linear_mma::group_scale(most, true);  // and its inverse
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto value = [&](int j) { return value_of(given[i][half], j) * scale.y; };
            const auto four = [&](int j) {
                return pack_e4m3x2(value(j), value(j + 1)) | uint32_t(pack_e4m3x2(value(j + 2), value(j + 3))) << 16;
            };
            if (column[i] + half * ROW_BYTES / 2 < k)
                *reinterpret_cast<uint2*>(codes + at[i] + half * ROW_BYTES / 2) = make_uint2(four(0), four(4));
        }
        if (part == 0)
            scales[(int64_t(blockIdx.y) * blocks + column[i] / ROW_BYTES) * scale_stride + token[i]] = scale.x;
    }
}

template <class F>
__global__ void __launch_bounds__(F::NUM_THREADS, 1) multiply(const __grid_constant__ Problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // only Hopper has wgmma
    extern __shared__ uint8_t dynamic[];
    auto& shared = *reinterpret_cast<SharedStorage<F>*>((reinterpret_cast<uintptr_t>(dynamic) + 1023) / 1024 * 1024);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    const int rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int i = 0; i < F::NUM_STAGES; ++i) {
            barrier_init(smem_address(&shared.full[i]), 1);
            barrier_init(smem_address(&shared.empty[i]), 4 * GROUPS * CLUSTER);  // warps that multiply
        }
        barrier_publish();
    }
    programmatic::trigger();
    cluster_sync();
    if (group == 0) {
        warpgroup_reg_dealloc<F::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) producer<F>(p, shared, rank);
    } else {
        warpgroup_reg_alloc<F::CONSUMER_REGISTERS>();
        Consumer<F>(p, shared, group - 1, warp).run();
    }
#endif
}

// ---- launches

// x (tokens, groups k); weights (groups, n, k), e4m3, or where they are decoded bf16. quantised: room for x as it is
// multiplied, or where that is already; null: x itself. quantise: whether a launch writes it. input_scales: of NVFP4 that
// quantises. early: whether the kernel ahead is one that calls programmatic::trigger. The rest as Problem.
struct Product {
    const bf16* x;
    const void* weights;
    void* quantised;
    float* token_scales;
    const uint8_t* weight_scales;
    const float *factors, *input_scales;
    bf16* out;
    int tokens, groups, n, k, scale_stride, decoded, quantise, early;
};

inline tma::Tensor tensor_of(const void* at, int bytes, uint64_t inner, uint64_t middle, uint64_t outer, int box_middle,
                             int box_outer) {
    tma::Tensor t = {};
    t.address = reinterpret_cast<uint64_t>(at), t.rank = 3;
    t.dims[0] = inner, t.dims[1] = middle, t.dims[2] = outer;
    t.strides[0] = inner * bytes, t.strides[1] = inner * middle * bytes;
    t.box[0] = ROW_BYTES / bytes, t.box[1] = box_middle, t.box[2] = box_outer;
    t.dtype = bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    t.swizzle = CU_TENSOR_MAP_SWIZZLE_128B, t.l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    return t;
}

inline int rounded_up(int a, int b) { return (a + b - 1) / b; }

template <class F>
int tiles_of(const Product& g) {
    return rounded_up(g.tokens, CLUSTER * BLOCK_M) * g.groups * rounded_up(g.n, F::BLOCK_N);
}

// Clusters' turns times the rows of a tile, and what a turn costs besides.
template <class F>
float time_of(const Product& g, int clusters) {
    return rounded_up(tiles_of<F>(g), clusters) * (F::BLOCK_N + 16.f);
}

template <class F>
cudaError_t launch_multiply(const Product& g, int clusters) {
    const int bytes = F::VALUES == E4M3 ? 1 : 2;
    const void* const values = g.quantised ? g.quantised : g.x;
    Problem p = {};
    tma::Encode encode;
    if (const cudaError_t error = tma::find_encode(&encode)) return error;
    const tma::Tensor tokens = tensor_of(values, bytes, g.k, g.groups, g.tokens, 1, BLOCK_M);
    const tma::Tensor weights = tensor_of(g.weights, bytes, g.k, g.n, g.groups, F::BLOCK_N / CLUSTER, 1);
    if (!tma::encode_map(encode, tokens, &p.tokens) || !tma::encode_map(encode, weights, &p.weights))
        return cudaErrorInvalidValue;
    p.token_scales = g.token_scales, p.weight_scales = g.weight_scales;
    p.factors = g.factors, p.input_scales = g.input_scales, p.out = g.out;
    p.num_tokens = g.tokens, p.groups = g.groups, p.n = g.n, p.scale_stride = g.scale_stride;
    p.k_blocks = rounded_up(g.k, F::BLOCK_K), p.token_tiles = rounded_up(g.tokens, CLUSTER * BLOCK_M);
    p.row_tiles = rounded_up(g.n, F::BLOCK_N), p.num_tiles = tiles_of<F>(g);
    constexpr int SHARED = sizeof(SharedStorage<F>) + 1024;  // with room to align the start
    static_assert(SHARED <= 227 * 1024);
    const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (const cudaError_t error = cudaFuncSetAttribute(multiply<F>, limit, SHARED)) return error;
    const dim3 grid(CLUSTER * min(p.num_tiles, clusters));
    return programmatic::launch_clusters(multiply<F>, grid, F::NUM_THREADS, SHARED, CLUSTER, g.quantise || g.early, p);
}

cudaError_t launch_quantise(const Product& g) {
    if (!g.decoded) {
        const int scales = g.tokens * rounded_up(g.k, ROW_BYTES);  // of a group
        const dim3 grid(rounded_up(scales * BLOCK_LANES, AT_ONCE * QUANTISE_THREADS), g.groups);
        return programmatic::launch_early(quantise, grid, QUANTISE_THREADS, 0, g.early, g.x,
                                          static_cast<uint8_t*>(g.quantised), g.token_scales, g.tokens, g.k,
                                          g.scale_stride);
    }
    linear_mma::Link link = {};
    link.x = g.x, link.quantised = static_cast<decltype(link.quantised)>(g.quantised);
    link.input_scales = g.input_scales, link.tokens = g.tokens, link.quantise = 1;
    link.k_units = g.k / linear_mma::BLOCK_K, link.tiles = g.groups, link.group_tiles = 1;
    link.x_stride = g.groups * g.k, link.group_stride = g.groups > 1 ? g.k : 0;
    const int64_t lanes = int64_t(g.tokens) * g.groups * rounded_up(g.k, ROW_BYTES) * (ROW_BYTES / linear_mma::PIECE);
    const dim3 grid(unsigned((lanes + linear_mma::QUANTISE_THREADS - 1) / linear_mma::QUANTISE_THREADS));
    return programmatic::launch_early(linear_mma::quantise_kernel<linear_mma::NVFP4>, grid,
                                      linear_mma::QUANTISE_THREADS, 0, g.early, link);
}

template <Values VALUES>
cudaError_t launch(const Product& g) {
    int device, processors;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device))
        return error;
    if (g.quantise)
        if (const cudaError_t error = launch_quantise(g)) return error;
    const int clusters = processors / CLUSTER;
    return time_of<Large<VALUES>>(g, clusters) <= time_of<Small<VALUES>>(g, clusters)
               ? launch_multiply<Large<VALUES>>(g, clusters)
               : launch_multiply<Small<VALUES>>(g, clusters);
}

}  // namespace linear_prefill

// -> a cudaError_t.
extern "C" int prefill(const __nv_bfloat16* x, const void* weights, void* quantised, float* token_scales,
                       const uint8_t* weight_scales, const float* factors, const float* input_scales,
                       __nv_bfloat16* out, int tokens, int groups, int n, int k, int scale_stride, int decoded,
                       int quantise, int early) {
    using namespace linear_prefill;
    const Product product{x,   weights, quantised, token_scales, weight_scales, factors,  input_scales, out, tokens,
                          groups, n,    k,         scale_stride, decoded,       quantise, early};
    return decoded ? launch<BF16_VALUES>(product) : launch<E4M3>(product);
}
