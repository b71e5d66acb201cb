// mhc_site in one launch, in three forms by the number of tokens: clusters that have a token or two each
// (sm90_columns_token.cuh), the kernel below, and that of many tokens (sm90_columns_many.cuh).
//
// In the latter two a block owns the same columns of all four copies for every token of its group: post is local to a
// column. A block makes x', keeps it in shared memory, and multiplies it by its columns of fn, which its warps hold in
// registers. The sums over its columns, of fn x' and of the products x'_j x'_k, go to the blocks that need them; from
// these follow pre, post, comb and the norm of u (sm90_columns_mix.cuh).
//
// Below, a group has one tile: every block adds up for itself what u needs, and one of them for each token makes post and
// comb.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "launch_cooperative.cuh"
#include "sm90_columns_many.cuh"
#include "sm90_columns_mix.cuh"
#include "sm90_columns_tile.cuh"
#include "sm90_columns_token.cuh"

namespace columns {

// The tokens of this block's group, and where its sums lie.
struct Group {
    int first, count;
    uint64_t* sums;  // (TILE, slices, SLOTS)
    uint32_t tag;
};

template <class S>
__device__ __forceinline__ Group group_of(const Problem& p, uint32_t first_tag) {
    const int each = (p.tokens + gridDim.y - 1) / gridDim.y;
    Group g;
    g.first = min(p.tokens, each * static_cast<int>(blockIdx.y));
    g.count = min(each, p.tokens - g.first);
    g.sums = p.exchange + int64_t(blockIdx.y) * S::TILE * gridDim.x * SLOTS;
    g.tag = first_tag + 1;
    return g;
}

// The sums of a token over the slices part, part + parts, ..., in that order; all slots, or what u needs only.
template <class S>
__device__ __forceinline__ Sums add_up(const Group& g, int token, int part, int parts, bool all, int lane) {
    const int slices = gridDim.x;
    const uint64_t* from = g.sums + int64_t(token) * slices * SLOTS;
    const bool low = all ? has_slot(lane) : lane < FOR_U;
    Sums sums = {0.0f, 0.0f};
    constexpr int BATCH = 16, BATCH_HIGH = 4;
    for (int s = part; s < slices; s += BATCH * parts) {
        float value[BATCH];
        const int real = low ? (slices - s + parts - 1) / parts : 0;
        receive(from + int64_t(s) * SLOTS + lane, parts * SLOTS, real, g.tag, value);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) sums.low += value[i];
    }
    if (!all) return sums;
    const int step = 8 * parts;  // eight slices at a time, four lanes each
    for (int s = part + lane / 4 * parts; s - lane / 4 * parts < slices; s += BATCH_HIGH * step) {
        float value[BATCH_HIGH];
        const int real = s < slices ? (slices - s + step - 1) / step : 0;
        receive(from + int64_t(s) * SLOTS + 32 + lane % 4, step * SLOTS, real, g.tag, value);
#pragma unroll
        for (int i = 0; i < BATCH_HIGH; ++i) sums.high += value[i];
    }
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) sums.high += __shfl_xor_sync(ALL, sums.high, apart);
    return sums;
}

// The sums that lie in rows first, first + apart, ... of `part`, added up in that order.
__device__ __forceinline__ Sums add_parts(const float (*part)[SLOTS], int first, int apart, int parts, int lane) {
    Sums sums = {0.0f, 0.0f};
    for (int i = 0; i < parts; ++i) {
        sums.low += part[first + i * apart][lane];
        sums.high += part[first + i * apart][32 + lane % 4];
    }
    return sums;
}

// Of the group's one tile: all warps add up, each a part of the slices of one token; then one warp a token makes its
// weights, and where the token is this block's, post and comb, while the others go on to out.
template <class S>
__device__ __forceinline__ void mix_here(const Problem& p, const Group& g, typename S::Shared& shared, int column,
                                         int thread) {
    const int warp = thread / 32, lane = thread % 32;
    const uint4 norm = norm_of<S>(p, column, thread);
    int wide = 1;
    while (wide < g.count) wide *= 2;
    const int token = warp % wide, parts = WARPS / wide;
    if (token < g.count) {
        const bool all = token % gridDim.x == blockIdx.x;
        const Sums sums = add_up<S>(g, token, warp / wide, parts, all, lane);
        shared.part[warp][lane] = sums.low;
        if (lane < SLOTS - 32) shared.part[warp][32 + lane] = sums.high;
    }
    ptx::named_barrier_sync<NUM_THREADS>(BOTH_BARRIER);
    const int mine = WARPS - 1 - warp;  // spreaders, the first warps, make out
    Sums sums = {0.0f, 0.0f};
    float inverse = 0.0f;
    if (mine < g.count) {
        sums = add_parts(shared.part, mine, wide, parts, lane);
        inverse = inverse_of_copies(sums, p.hidden);
        const float weight = weights_of_u(sums, inverse, p.base, p.scale, p.hidden, lane);
        if (lane < COPIES) shared.weights[mine][lane] = weight;
    }
    ptx::named_barrier_sync<NUM_THREADS>(BOTH_BARRIER);
    if (mine < g.count && mine % gridDim.x == blockIdx.x) {
        const int64_t at = g.first + mine;
        write_mixing(sums, inverse, p.base, p.scale, p.new_post + at * COPIES, p.new_comb + at * COPIES * COPIES, lane);
    }
    if (thread < ROLE_THREADS) write_out<S>(p, norm, g.first, g.count, column, shared, thread);
}

// The block's sums, for whoever adds them up. Four rows of a token, or a product, a thread.
template <class S>
__device__ __forceinline__ void publish_sums(const Group& g, const typename S::Shared& shared, int thread) {
    const int apart = gridDim.x * SLOTS;
    uint64_t* to = g.sums + blockIdx.x * SLOTS;
    for (int i = thread; i < g.count * (ROWS / 4); i += ROLE_THREADS) {
        const int token = i / (ROWS / 4), quad = i % (ROWS / 4);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int warp = 0; warp < ROLE_WARPS; ++warp) {
            const float4 part = shared.dots[warp][token][quad];
            sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
        }
        uint64_t* const at = to + token * apart + slot_of_row(4 * quad);
        publish_pair(at, sum.x, sum.y, g.tag);
        publish_pair(at + 2, sum.z, sum.w, g.tag);
    }
    for (int i = thread; i < g.count * PRODUCTS; i += ROLE_THREADS) {
        const int token = i / PRODUCTS, product = i % PRODUCTS;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < S::PARTS; ++part) sum += shared.products[part][token][product];
        publish(to + token * apart + COPIES + product, sum, g.tag);
    }
}

template <int COLUMNS, int TILE, int UNITS>
__global__ void __launch_bounds__(NUM_THREADS, 1) site_kernel(const __grid_constant__ Problem p) {
    using S = Shape<COLUMNS, TILE, UNITS>;
    extern __shared__ __align__(128) uint8_t memory[];
    typename S::Shared& shared = *reinterpret_cast<typename S::Shared*>(memory);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int column = blockIdx.x * COLUMNS;

    if (thread == 32 * ROLE_WARPS) prefetch_line(p.base), prefetch_line(p.scale);  // read when all wait for them
    const Group early = group_of<S>(p, 0);
    if (warp < ROLE_WARPS) {
        begin(p, shared.first_tag, thread);
        load_tile<S>(p, early.first, early.count, 0, column, shared, thread);
        cp_async_wait<0>();
        ptx::named_barrier_sync<NUM_THREADS>(BLOCK_BARRIER);
        spread<S>(p, early.first, early.count, 0, column, shared, thread);
        ptx::named_barrier_arrive<NUM_THREADS>(READY_BARRIER);
    } else {
        Weights<S> fn;
        fn.load(p.fn, p.hidden, column, warp - ROLE_WARPS, lane);
        begin(p, shared.first_tag, thread);
        ptx::named_barrier_sync<NUM_THREADS>(BLOCK_BARRIER);
        const Group g = group_of<S>(p, shared.first_tag);
        ptx::named_barrier_sync<NUM_THREADS>(READY_BARRIER);
        multiply_copies<S>(0, shared, warp - ROLE_WARPS, lane);
        multiply<S>(fn, g.count, 0, shared, warp - ROLE_WARPS, lane);
        ptx::named_barrier_sync<ROLE_THREADS>(MULTIPLY_BARRIER);
        publish_sums<S>(g, shared, thread - ROLE_THREADS);
    }
    if (early.count) mix_here<S>(p, group_of<S>(p, shared.first_tag), shared, column, thread);
    if (thread == 0) end_turns(p.state, shared.first_tag, p.turns);
}

// ---------------------------------------------------------------- launch

// How tokens and columns are cut for a call.
struct Plan {
    int columns, groups;
    bool few;  // one tile a group, of which every block adds up for itself
};

constexpr int WIDTHS[] = {32, 64, 128};
constexpr int MOST_SHARED = 227 * 1024;  // bytes of a block

inline int slices(int hidden, int columns) { return (hidden + columns - 1) / columns; }

// Groups of tokens so that each block adds up little, then the narrowest columns of which all blocks are resident.
inline bool plan(int tokens, int hidden, int blocks, Plan* found) {
    const int wanted = tokens <= 4 ? 1 : tokens <= NARROW_TILE ? 2 : 4;
    for (int groups = wanted; groups; groups /= 2) {
        for (const int columns : WIDTHS) {
            if (slices(hidden, columns) * groups > blocks) continue;
            *found = {columns, groups, (tokens + groups - 1) / groups <= NARROW_TILE};
            return true;
        }
    }
    return false;
}

// kernel<<<dim3(slices, groups), threads, bytes>>>(p), all blocks at once. tile: tokens.
inline cudaError_t launch_at_once(void (*kernel)(Problem), int threads, int bytes, int columns, int tile, int groups,
                                  Problem p) {
    const dim3 grid(slices(p.hidden, columns), groups);
    p.turns = ((p.tokens + groups - 1) / groups + tile - 1) / tile;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    if (p.early) return programmatic::launch_resident(kernel, grid, threads, bytes, p);
    return programmatic::launch_cooperative(kernel, grid, threads, bytes, p);
}

template <int COLUMNS, int TILE, int UNITS>
cudaError_t launch_few(const Plan& plan, const Problem& p) {
    constexpr int BYTES = sizeof(typename Shape<COLUMNS, TILE, UNITS>::Shared);
    static_assert(BYTES <= MOST_SHARED && TILE <= MOST_TILE);
    return launch_at_once(site_kernel<COLUMNS, TILE, UNITS>, NUM_THREADS, BYTES, COLUMNS, TILE, plan.groups, p);
}
template <int COLUMNS, int TILE, int UNITS>
cudaError_t launch_many(const Plan& plan, const Problem& p) {
    constexpr int BYTES = sizeof(ManyShared<Shape<COLUMNS, TILE, UNITS>>);
    static_assert(BYTES <= MOST_SHARED && TILE <= MOST_TILE);
    return launch_at_once(many_kernel<COLUMNS, TILE, UNITS>, MANY_THREADS, BYTES, COLUMNS, TILE, plan.groups, p);
}

// The narrow tile takes addends of any kind; the wide one, which is for many tokens, has room for two of bf16.
template <int COLUMNS>
cudaError_t launch_narrow(const Plan& plan, const Problem& p) {
    return plan.few ? launch_few<COLUMNS, NARROW_TILE, 4>(plan, p) : launch_many<COLUMNS, NARROW_TILE, 4>(plan, p);
}

inline cudaError_t launch_wide(const Plan& plan, const Problem& p) {
    if (plan.few || p.y_bytes + p.second_bytes > 4) return launch_narrow<128>(plan, p);
    return launch_many<128, MOST_TILE, 2>(plan, p);
}

}  // namespace columns

extern "C" {

// Words of 8 bytes that a launch of at most `blocks` blocks needs between calls, zero at first.
int exchange_words(int blocks) {
    using namespace columns;
    return STATE_WORDS + FEW_WORDS * blocks + SUM_RING * blocks / 2 + SUM_RING * MOST_TILE * blocks * SUM_ROW / 2;
}

// The tensors of task.Data in order, then exchange_words words; y_bytes and second_bytes as Problem has them; blocks: of
// the device, one a multiprocessor. early: whether the kernel may begin before the one ahead has ended, which that of
// few tokens always may.
// -> a cudaError_t; cudaErrorCooperativeLaunchTooLarge: hidden is too large for the device.
int launch(void* const* tensors, void* exchange, int tokens, int hidden, int y_bytes, int second_bytes, int blocks,
           int early) {
    using namespace columns;
    Problem p = problem(tensors, static_cast<uint64_t*>(exchange), tokens, hidden, y_bytes, second_bytes);
    p.early = early;
    p.flags = reinterpret_cast<uint32_t*>(p.exchange + FEW_WORDS * blocks);
    p.sums = reinterpret_cast<float*>(p.flags + SUM_RING * blocks);
    if (in_clusters(p)) return launch_tokens(p);
    Plan found;
    if (!plan(tokens, hidden, blocks, &found)) return cudaErrorCooperativeLaunchTooLarge;
    switch (found.columns) {
        case 32: return launch_narrow<32>(found, p);
        case 64: return launch_narrow<64>(found, p);
        default: return launch_wide(found, p);
    }
}
}
