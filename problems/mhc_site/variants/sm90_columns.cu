// mhc_site in one launch, in two forms by the number of tokens: clusters that have a token or two each
// (sm90_columns_token.cuh), and the kernel below.
//
// There a block owns the same columns of all four copies for every token of its group: post is local to a column. A
// block makes x' of a tile of tokens, keeps it in shared memory, and multiplies it by its columns of fn, which its warps
// hold in registers for the whole launch: fn is read once. The sums over its columns, of fn x' and of the products
// x'_j x'_k, go to the blocks that need them (sm90_columns_exchange.cuh); from these follow pre, post, comb and the norm of
// u (sm90_columns_mix.cuh), and then each block makes its columns of out.
//
// Few tokens, one tile: every block adds up for itself what u needs, and one of them for each token makes post and comb.
// Many: four warps of each block do that for the tokens that are theirs, two a token, and tell the other blocks four
// numbers a token, while the others are two tiles ahead.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "launch_cooperative.cuh"
#include "sm90_columns_mix.cuh"
#include "sm90_columns_tile.cuh"
#include "sm90_columns_token.cuh"

namespace columns {

// The tokens of this block's group, and where its sums and weights lie between blocks.
struct Group {
    int first, count, tiles;
    uint64_t *sums, *weights;  // (RING, TILE, slices, SLOTS), (RING, TILE, COPIES)
    uint32_t first_tag;

    __device__ uint32_t tag(int tile) const { return first_tag + 1 + tile; }
};

template <class S>
__device__ __forceinline__ Group group_of(const Problem& p, uint32_t first_tag) {
    const int each = (p.tokens + gridDim.y - 1) / gridDim.y;
    Group g;
    g.first = min(p.tokens, each * static_cast<int>(blockIdx.y));
    g.count = min(each, p.tokens - g.first);
    g.tiles = (g.count + S::TILE - 1) / S::TILE;
    const int64_t all = int64_t(RING) * S::TILE * gridDim.x * SLOTS;
    g.sums = p.exchange + blockIdx.y * all;
    g.weights = p.exchange + gridDim.y * all + int64_t(blockIdx.y) * RING * S::TILE * COPIES;
    g.first_tag = first_tag;
    return g;
}

// The sums of a token over the slices part, part + parts, ..., in that order; all slots, or what u needs only.
template <class S>
__device__ __forceinline__ Sums add_up(const Group& g, int tile, int token, int part, int parts, bool all, int lane) {
    const int slices = gridDim.x;
    const uint64_t* from = g.sums + (int64_t(tile % RING) * S::TILE + token) * slices * SLOTS;
    const bool low = all ? is_used(lane) : lane < U_SLOTS;
    Sums sums = {0.0f, 0.0f};
    constexpr int BATCH = 8, BATCH_HIGH = 2;
    for (int s = part; s < slices; s += BATCH * parts) {
        float value[BATCH];
        const int real = low ? (slices - s + parts - 1) / parts : 0;
        receive(from + int64_t(s) * SLOTS + lane, parts * SLOTS, real, g.tag(tile), value);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) sums.low += value[i];
    }
    if (!all) return sums;
    const int step = 8 * parts;  // eight slices at a time, four lanes each
    for (int s = part + lane / 4 * parts; s - lane / 4 * parts < slices; s += BATCH_HIGH * step) {
        float value[BATCH_HIGH];
        const int real = s < slices ? (slices - s + step - 1) / step : 0;
        receive(from + int64_t(s) * SLOTS + 32 + lane % 4, step * SLOTS, real, g.tag(tile), value);
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

// A lane's part of the sums of slots that lie `slot` words from `from`, over the slices part, part + parts, ....
template <int BATCH>
__device__ __forceinline__ float add_slot(const uint64_t* from, int slot, int part, int parts, int slices,
                                          uint32_t tag) {
    float sum = 0.0f;
    for (int s = part; s - part < slices; s += BATCH * parts) {  // as often for all lanes with the same parts
        float value[BATCH];
        receive(from + int64_t(s) * SLOTS + slot, parts * SLOTS, (slices - s + parts - 1) / parts, tag, value);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) sum += value[i];
    }
    return sum;
}

// The mixers, two warps for a token of the block: the first makes the weights of u for every block, the second post and
// comb. The weights say that all of the token's sums have been read, so the first waits until the second has.
template <class S>
__device__ __forceinline__ void mix(const Problem& p, const Group& g, typename S::Shared& shared, int mixer, int lane) {
    constexpr int PAIRS = MIXERS / 2, BATCH = 16, BATCH_HIGH = 4, HIGH = HIGH_SLOTS, HIGH_PARTS = 32 / HIGH;
    const int pair = mixer % PAIRS, slices = gridDim.x;
    const bool of_u = mixer < PAIRS;
    int turn = 0;
    for (int t = blockIdx.x + pair * slices; t < g.count; t += PAIRS * slices, turn ^= 1) {
        const int tile = t / S::TILE;
        const uint64_t* from = g.sums + (int64_t(tile % RING) * S::TILE + t % S::TILE) * slices * SLOTS;
        float* const inverse = &shared.part[pair][turn];  // of one token while the second still reads the one ahead
        // Sixteen slots, each in two lanes.
        const int slot = lane % 16;
        Sums sums = {0.0f, 0.0f};
        if (!of_u || slot < U_SLOTS)
            sums.low = add_slot<BATCH>(from + (of_u ? 0 : POST_SLOT), slot, lane / 16, 2, slices, g.tag(tile));
        sums.low += __shfl_xor_sync(ALL, sums.low, 16);
        if (of_u) {
            const float found = inverse_of_copies(sums, p.hidden);
            const float weight = weights_of_u(sums, found, p.base, p.scale, p.hidden, lane);
            if (lane == 0) *inverse = found;
            ptx::named_barrier_sync<64>(MIXER_BARRIER + pair);
            if (lane < COPIES)
                publish(g.weights + (tile % RING * S::TILE + t % S::TILE) * COPIES + lane, weight, g.tag(tile));
        } else {
            sums.high = add_slot<BATCH_HIGH>(from + 32, lane % HIGH, lane / HIGH, HIGH_PARTS, slices, g.tag(tile));
#pragma unroll
            for (int apart = HIGH; apart < 32; apart *= 2) sums.high += __shfl_xor_sync(ALL, sums.high, apart);
            ptx::named_barrier_sync<64>(MIXER_BARRIER + pair);
            const int64_t token = g.first + t;
            write_mixing(sums, *inverse, p.base, p.scale, p.new_post + token * COPIES,
                         p.new_comb + token * COPIES * COPIES, lane);
        }
    }
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
        const Sums sums = add_up<S>(g, 0, token, warp / wide, parts, all, lane);
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
        if (lane < COPIES) shared.weights[0][mine][lane] = weight;
    }
    ptx::named_barrier_sync<NUM_THREADS>(BOTH_BARRIER);
    if (mine < g.count && mine % gridDim.x == blockIdx.x) {
        const int64_t at = g.first + mine;
        write_mixing(sums, inverse, p.base, p.scale, p.new_post + at * COPIES, p.new_comb + at * COPIES * COPIES, lane);
    }
    if (thread < ROLE_THREADS) write_out<S>(p, norm, g.first, g.count, 0, column, shared, thread);
}

// The block's sums of a tile, for whoever adds them up. Four rows of a token, or a product, a thread.
template <class S>
__device__ __forceinline__ void publish_sums(const Group& g, const typename S::Shared& shared, int tile, int thread) {
    const int count = min(S::TILE, g.count - tile * S::TILE);
    const int apart = gridDim.x * SLOTS;
    uint64_t* to = g.sums + (int64_t(tile % RING) * S::TILE * gridDim.x + blockIdx.x) * SLOTS;
    for (int i = thread; i < count * (ROWS / 4); i += ROLE_THREADS) {
        const int token = i / (ROWS / 4), quad = i % (ROWS / 4);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int warp = 0; warp < ROLE_WARPS; ++warp) {
            const float4 part = shared.dots[warp][token][quad];
            sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
        }
        uint64_t* const at = to + token * apart + slot_of_row(4 * quad);
        publish_pair(at, sum.x, sum.y, g.tag(tile));
        publish_pair(at + 2, sum.z, sum.w, g.tag(tile));
    }
    for (int i = thread; i < count * PRODUCTS; i += ROLE_THREADS) {
        const int token = i / PRODUCTS, product = i % PRODUCTS;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < S::PARTS; ++part) sum += shared.products[part][token][product];
        publish(to + token * apart + PRODUCT_SLOT + product, sum, g.tag(tile));
    }
}

// The tile's weights from the mixers.
template <class S>
__device__ __forceinline__ void receive_weights(const Group& g, typename S::Shared& shared, int tile, int thread) {
    const int count = min(S::TILE, g.count - tile * S::TILE);
    if (thread < count * COPIES) {
        float weight[1];
        receive(g.weights + tile % RING * S::TILE * COPIES + thread, 1, 1, g.tag(tile), weight);
        shared.weights[tile % 2][thread / COPIES][thread % COPIES] = weight[0];
    }
}

// FEW: one tile at most, and every block adds up for itself; then there are no mixers.
template <bool FEW>
constexpr int BLOCK_THREADS = FEW ? NUM_THREADS : NUM_THREADS + 32 * MIXERS;

// A spreader's part of a tile, up to where the multipliers can begin.
template <class S>
__device__ __forceinline__ void begin_tile(const Problem& p, const Group& g, int tile, int column,
                                           typename S::Shared& shared, int thread) {
    cp_async_wait<1>();  // all but the next tile's
    ptx::named_barrier_sync<ROLE_THREADS>(SPREAD_BARRIER);
    spread<S>(p, g.first, min(S::TILE, g.count - tile * S::TILE), tile, column, shared, thread);
    ptx::arrive(S::at(shared.ready, tile));
}

// A multiplier's part of a tile.
template <class S, bool FEW>
__device__ __forceinline__ void sum_tile(const Group& g, const Weights<S>& fn, int tile, typename S::Shared& shared,
                                         int thread) {
    asm volatile("" : "+r"(thread));  // addresses are made anew for each tile: kept in registers they spill
    const int warp = thread / 32, lane = thread % 32;
    ptx::wait(S::at(shared.ready, tile), S::phase(tile));
    if constexpr (!FEW) ptx::named_barrier_sync<ROLE_THREADS>(MULTIPLY_BARRIER);  // the sums of the tile ahead are told
    multiply_copies<S>(tile, shared, warp, lane);
    multiply<S>(fn, min(S::TILE, g.count - tile * S::TILE), tile, shared, warp, lane);
    if constexpr (!FEW) ptx::arrive(S::at(shared.read, tile));
    ptx::named_barrier_sync<ROLE_THREADS>(MULTIPLY_BARRIER);
    publish_sums<S>(g, shared, tile, thread);
}

template <int COLUMNS, int TILE, int UNITS, bool FEW>
__global__ void __launch_bounds__(BLOCK_THREADS<FEW>, 1) site_kernel(const __grid_constant__ Problem p) {
    using S = Shape<COLUMNS, TILE, UNITS>;
    extern __shared__ __align__(128) uint8_t memory[];
    typename S::Shared& shared = *reinterpret_cast<typename S::Shared*>(memory);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int column = blockIdx.x * COLUMNS;

    if (thread == 32 * ROLE_WARPS) {
        prefetch_line(p.base), prefetch_line(p.scale);  // read when all wait for them
        for (int i = 0; i < S::X_STAGES; ++i)
            ptx::barrier_init(ptx::smem_address(&shared.ready[i]), ROLE_THREADS),
                ptx::barrier_init(ptx::smem_address(&shared.read[i]), ROLE_THREADS);
    }
    const Group early = group_of<S>(p, 0);
    if (!FEW && warp >= WARPS) {
        ptx::named_barrier_sync<BLOCK_THREADS<FEW>>(BLOCK_BARRIER);
        ptx::warpgroup_reg_dealloc<MIXER_REGISTERS>();
        mix<S>(p, group_of<S>(p, shared.first_tag), shared, warp - WARPS, lane);
        return;
    }
    if (warp < ROLE_WARPS) {
        begin(p, shared.first_tag, thread);
        load_tile<S>(p, early.first, early.count, 0, column, shared, thread);
        load_tile<S>(p, early.first, early.count, 1, column, shared, thread);
        ptx::named_barrier_sync<BLOCK_THREADS<FEW>>(BLOCK_BARRIER);
        if constexpr (!FEW) ptx::warpgroup_reg_alloc<COLUMN_REGISTERS>();
        const Group g = group_of<S>(p, shared.first_tag);
        if (FEW && g.tiles) begin_tile<S>(p, g, 0, column, shared, thread);
        if constexpr (!FEW) {
            const uint4 norm = norm_of<S>(p, column, thread);
            for (int tile = 0; tile < g.tiles + LAG; ++tile) {
                if (tile < g.tiles) begin_tile<S>(p, g, tile, column, shared, thread);
                const int ready = tile - LAG;
                if (ready >= 0) receive_weights<S>(g, shared, ready, thread);
                ptx::named_barrier_sync<ROLE_THREADS>(SPREAD_BARRIER);
                if (ready >= 0) {
                    write_out<S>(p, norm, g.first, min(TILE, g.count - ready * TILE), ready, column, shared, thread);
                    // The weights say so too, but by way of global memory, without an order that others could rely on.
                    ptx::wait(S::at(shared.read, ready), S::phase(ready));
                }
                load_tile<S>(p, g.first, g.count, tile + 2, column, shared, thread);
            }
        }
    } else {
        Weights<S> fn;
        fn.load(p.fn, p.hidden, column, warp - ROLE_WARPS, lane);
        ptx::named_barrier_sync<BLOCK_THREADS<FEW>>(BLOCK_BARRIER);
        if constexpr (!FEW) ptx::warpgroup_reg_alloc<COLUMN_REGISTERS>();
        const Group g = group_of<S>(p, shared.first_tag);
        for (int tile = 0; tile < (FEW ? min(g.tiles, 1) : g.tiles); ++tile)
            sum_tile<S, FEW>(g, fn, tile, shared, thread - ROLE_THREADS);
    }
    if (FEW && early.tiles) mix_here<S>(p, group_of<S>(p, shared.first_tag), shared, column, thread);
    if (thread == 0) tagged::leave(p.state, shared.first_tag + p.group_tiles);
}

// ---------------------------------------------------------------- launch

// How tokens and columns are cut for a call.
struct Plan {
    int columns, groups;
    bool few;
};

constexpr int WIDTHS[] = {32, 64, 128};
constexpr int MOST_SHARED = 227 * 1024;  // bytes of a block
constexpr int ONE_TILE = 16;  // tokens of a launch in which every block adds up for itself, at most

inline int slices(int hidden, int columns) { return (hidden + columns - 1) / columns; }

// Groups of tokens so that each block adds up little, then the narrowest columns of which all blocks are resident.
inline bool plan(int tokens, int hidden, int blocks, Plan* found) {
    const int wanted = tokens <= 4 ? 1 : tokens <= ONE_TILE ? 2 : 4;
    for (int groups = wanted; groups; groups /= 2) {
        for (const int columns : WIDTHS) {
            if (slices(hidden, columns) * groups > blocks) continue;
            *found = {columns, groups, tokens <= ONE_TILE};
            return true;
        }
    }
    return false;
}

// All blocks at once, since they wait for each other.
template <int COLUMNS, int TILE, int UNITS, bool FEW>
cudaError_t launch_as(const Plan& plan, Problem p) {
    const auto kernel = site_kernel<COLUMNS, TILE, UNITS, FEW>;
    constexpr int BYTES = sizeof(typename Shape<COLUMNS, TILE, UNITS>::Shared);
    static_assert(BYTES <= MOST_SHARED && TILE <= MOST_TILE);
    const dim3 grid(slices(p.hidden, COLUMNS), plan.groups);
    p.group_tiles = ((p.tokens + plan.groups - 1) / plan.groups + TILE - 1) / TILE;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES))
        return error;
    if (p.early) return programmatic::launch_resident(kernel, grid, BLOCK_THREADS<FEW>, BYTES, p);
    return programmatic::launch_cooperative(kernel, grid, BLOCK_THREADS<FEW>, BYTES, p);
}

// The narrow tile takes addends of any kind; the wide one, which is for many tokens, has room for two of bf16.
template <int COLUMNS>
cudaError_t launch_narrow(const Plan& plan, const Problem& p) {
    return plan.few ? launch_as<COLUMNS, 16, 4, true>(plan, p) : launch_as<COLUMNS, 16, 4, false>(plan, p);
}

inline cudaError_t launch_wide(const Plan& plan, const Problem& p) {
    if (plan.few || p.y_bytes + p.second_bytes > 4) return launch_narrow<128>(plan, p);
    return launch_as<128, MOST_TILE, 2, false>(plan, p);
}

}  // namespace columns

extern "C" {

// Words of 8 bytes that a launch of at most `blocks` blocks needs between calls, zero at first.
int exchange_words(int blocks) {
    using namespace columns;
    return STATE_WORDS + RING * MOST_TILE * blocks * (SLOTS + COPIES);
}

// The tensors of task.Data in order, then exchange_words words; y_bytes and second_bytes as Problem has them; blocks: of
// the device, one a multiprocessor. early: whether the kernel may begin before the one ahead has ended, which that of
// few tokens always may.
// -> a cudaError_t; cudaErrorCooperativeLaunchTooLarge: hidden is too large for the device.
int launch(void* const* tensors, void* exchange, int tokens, int hidden, int y_bytes, int second_bytes, int blocks,
           int early) {
    using namespace columns;
    Problem p = problem(tensors, static_cast<uint64_t*>(exchange), tokens, hidden, y_bytes, second_bytes, early);
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
