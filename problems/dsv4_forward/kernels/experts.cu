// The routed experts with plain bf16 weights, for few tokens, in two launches: the products with w13 and SwiGLU between
// them, then those with w2 and the sum over a token's experts.
//
// Pairs of a token and one of its experts are grouped by expert in each block, so that a block reads an expert's rows
// once for up to SLOTS pairs. A block has ROWS rows of every expert that it multiplies by, and its warps split the
// columns; the weights of the next expert are asked for while those of the last one are multiplied. Sums are in fp32, in
// an order that depends on the sizes only, so a token's bits do not depend on the others. An expert that does not exist
// is skipped, as if its output were 0. The launcher returns the CUDA error of its launches.
#include "few_tokens.cuh"
#include "launch.cuh"

namespace {

constexpr unsigned ALL = 0xffffffffu;
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int MOST_PAIRS = THREADS;       // one a thread when they are grouped
constexpr int ROWS = few::TILE;           // of a matrix, a block's; of w13 as many gate rows and up rows
constexpr int SLOTS = 2 * few::TILE;      // pairs of one expert that are multiplied together
constexpr int DEPTH = 4;                  // lines that a lane has under way: 32 bytes each a tile, 32 KB a tile and block
constexpr int RESIDENT = 2;               // blocks that a multiprocessor has room for
constexpr int PLACES = 132 * RESIDENT;    // blocks that run at once, about
constexpr int MOST_PARTS = 4;             // blocks that share the experts of the same rows

struct Call {
    const __nv_bfloat16 *x, *weight;  // rows of what is multiplied (below); (experts, TILES * rows, columns)
    const int* ids;                   // (tokens, chosen)
    const float* gates;               // the same: routing weights
    void* out;
    int tokens, chosen, experts, rows, columns, bf16;
    float limit;
};

// Pairs in the order of their experts. A group: up to SLOTS pairs of one expert.
struct Groups {
    int expert[MOST_PAIRS];  // of a pair; `experts` where it is none
    int sorted[MOST_PAIRS];  // pairs
    int counts[MOST_PAIRS];  // pairs of the group that begins there in `sorted`, 0 where none does
    int first[MOST_PAIRS];   // of a group: its begin in `sorted`
    int starts[WARPS];       // groups that begin at a warp's pairs
};

// Fill `groups`, by all threads. -> how many groups there are.
__device__ int group(Groups& groups, const Call& c) {
    const int mine = threadIdx.x, warp = mine / 32, lane = mine % 32, pairs = c.tokens * c.chosen;
    int expert = mine < pairs ? c.ids[mine] : c.experts;
    if (expert < 0 || expert > c.experts) expert = c.experts;
    groups.expert[mine] = expert, groups.counts[mine] = 0;
    __syncthreads();
    int lower = 0, before = 0, same = 0;
    for (int i = 0; i < pairs; i++) {
        const int other = groups.expert[i];
        lower += other < expert;
        before += other == expert && i < mine;
        same += other == expert;
    }
    if (expert < c.experts) {
        groups.sorted[lower + before] = mine;
        if (before % SLOTS == 0) groups.counts[lower + before] = min(SLOTS, same - before);
    }
    __syncthreads();
    const bool starts = groups.counts[mine] > 0;
    const unsigned all = __ballot_sync(ALL, starts);
    if (lane == 0) groups.starts[warp] = __popc(all);
    __syncthreads();
    int at = __popc(all & ((1u << lane) - 1)), total = 0;
    for (int w = 0; w < WARPS; w++) {
        at += w < warp ? groups.starts[w] : 0;
        total += groups.starts[w];
    }
    if (starts) groups.first[at] = mine;
    __syncthreads();
    return total;
}

// ROWS rows of TILES parts of each expert's matrix times the rows of x of its pairs: a part of an expert begins `rows`
// rows behind the one before. begin() asks for the first weights; groups `at`, at + step, ... of `count`.
template <int TILES>
struct Products {
    static constexpr int WIDE = TILES * ROWS, SUMS = WARPS * SLOTS * WIDE;

    const Call& c;
    const Groups& groups;
    int first, at, step, count;
    uint4 b[DEPTH][TILES][2];

    __device__ __forceinline__ const __nv_bfloat16* matrix(int group) const {
        const int expert = groups.expert[groups.sorted[groups.first[group]]];
        return c.weight + static_cast<long long>(expert) * TILES * c.rows * c.columns;
    }

    __device__ __forceinline__ static int column(int line, int half) {
        return (line * WARPS + threadIdx.x / 32) * few::LINE + half * few::LINE / 2 + threadIdx.x % 4 * 8;
    }

    __device__ __forceinline__ void load(const __nv_bfloat16* from, int line, int d) {
        const int row = first + threadIdx.x % 32 / 4;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                b[d][tile][half] = few::load_eight(from + static_cast<long long>(tile) * c.rows * c.columns, row,
                                                   c.rows, column(line, half), c.columns);
    }

    __device__ __forceinline__ void begin() {
        if (at >= count) return;
        const __nv_bfloat16* from = matrix(at);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) load(from, d, d);
    }

    // sums: 2 * SUMS floats in shared memory. share: pairs that have a row of x together. finish(first, pairs, sums) gets
    // (WARPS, SLOTS, WIDE) parts of a group's sums, by all threads, behind a barrier.
    template <class Finish>
    __device__ __forceinline__ void multiply(int share, float* sums, Finish finish) {
        constexpr int TURN = few::LINE * WARPS * DEPTH;
        const int lines = (c.columns + TURN - 1) / TURN * DEPTH;  // behind the columns they are zeros
        const int lane = threadIdx.x % 32, slot = lane / 4;
        for (int turn = 0; at < count; at += step, turn ^= 1) {
            const int begin = groups.first[at], pairs = groups.counts[begin];
            const bool next = at + step < count;
            const __nv_bfloat16 *here = matrix(at), *after = next ? matrix(at + step) : here;
            const int low = slot < pairs ? groups.sorted[begin + slot] / share : c.tokens * c.chosen;
            const int high = slot + few::TILE < pairs ? groups.sorted[begin + slot + few::TILE] / share
                                                      : c.tokens * c.chosen;
            float sum[TILES][4] = {};
            for (int line = 0; line < lines; line += DEPTH)
#pragma unroll
                for (int d = 0; d < DEPTH; d++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int mine = column(line + d, half), all = c.tokens * c.chosen;
                        const uint4 upper = few::load_eight(c.x, low, all, mine, c.columns);
                        const uint4 lower = few::load_eight(c.x, high, all, mine, c.columns);
                        const uint32_t a[2][4] = {{upper.x, lower.x, upper.y, lower.y},
                                                  {upper.z, lower.z, upper.w, lower.w}};
#pragma unroll
                        for (int tile = 0; tile < TILES; tile++) {
                            const uint4 w = b[d][tile][half];
                            const uint32_t of[2][2] = {{w.x, w.y}, {w.z, w.w}};
                            ptx::mma_bf16(sum[tile], a[0], of[0]);
                            ptx::mma_bf16(sum[tile], a[1], of[1]);
                        }
                    }
                    if (line + DEPTH < lines)
                        load(here, line + DEPTH + d, d);
                    else if (next)
                        load(after, d, d);
                }
            float* mine = sums + turn * SUMS;  // what the group before left in the other half may still be read
            store(sum, mine);
            __syncthreads();
            finish(begin, pairs, mine);
        }
    }

    __device__ __forceinline__ static void store(const float (&sum)[TILES][4], float* sums) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int slot = i / 2 * few::TILE + lane / 4;
                sums[(warp * SLOTS + slot) * WIDE + tile * few::TILE + lane % 4 * 2 + i % 2] = sum[tile][i];
            }
    }

    // Of all warps, in their order.
    __device__ __forceinline__ static float total(const float* sums, int slot, int row) {
        float found = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) found += sums[(w * SLOTS + slot) * WIDE + row];
        return found;
    }
};

// Grid (parts of `rows`, parts of the groups). x (tokens, columns), weight w13, rows of a half of it. out: bf16 (tokens *
// chosen, rows), gate * silu(min(a, limit)) * clip(b, -limit, limit).
__global__ void __launch_bounds__(THREADS, RESIDENT) gated_kernel(const Call c) {
    using Both = Products<2>;
    __shared__ Groups groups;
    __shared__ float smem_sums[2 * Both::SUMS];
    programmatic::wait();
    programmatic::trigger();
    const int count = group(groups, c);
    Both products = {c, groups, static_cast<int>(blockIdx.x) * ROWS, static_cast<int>(blockIdx.y),
                     static_cast<int>(gridDim.y), count};
    products.begin();
    products.multiply(c.chosen, smem_sums, [&](int begin, int pairs, const float* sums) {
        const int slot = threadIdx.x / ROWS, i = threadIdx.x % ROWS, row = products.first + i;
        if (slot >= pairs || row >= c.rows) return;
        const int pair = groups.sorted[begin + slot];
        float a = Both::total(sums, slot, i), b = Both::total(sums, slot, ROWS + i);
        a = a > c.limit ? c.limit : a;  // NaN stays, as in torch
        b = b > c.limit ? c.limit : b < -c.limit ? -c.limit : b;
        const float value = a / (1.0f + expf(-a)) * b * c.gates[pair];
        static_cast<__nv_bfloat16*>(c.out)[static_cast<long long>(pair) * c.rows + row] = __float2bfloat16_rn(value);
    });
}

// Grid (parts of `rows`). x (tokens * chosen, columns), weight w2. out: (tokens, rows), bf16 or fp32. ids are read before
// the wait: the kernel ahead, gated_kernel, triggers behind its own, so what wrote them has ended.
__global__ void __launch_bounds__(THREADS, RESIDENT) summed_kernel(const Call c) {
    using One = Products<1>;
    __shared__ Groups groups;
    __shared__ float smem_sums[2 * One::SUMS], smem_parts[MOST_PAIRS * ROWS];
    for (int i = threadIdx.x; i < MOST_PAIRS * ROWS; i += THREADS) smem_parts[i] = 0.0f;
    const int count = group(groups, c);
    One products = {c, groups, static_cast<int>(blockIdx.x) * ROWS, 0, 1, count};
    products.begin();  // weights: no kernel writes them
    programmatic::wait();
    programmatic::trigger();
    products.multiply(1, smem_sums, [&](int begin, int pairs, const float* sums) {
        const int slot = threadIdx.x / ROWS, i = threadIdx.x % ROWS;
        if (slot < pairs) smem_parts[groups.sorted[begin + slot] * ROWS + i] = One::total(sums, slot, i);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < c.tokens * ROWS; i += THREADS) {
        const int token = i / ROWS, row = products.first + i % ROWS;
        if (row >= c.rows) continue;
        const float* parts = smem_parts + token * c.chosen * ROWS + i % ROWS;
        float total = parts[0];
        for (int k = 1; k < c.chosen; k++) total += parts[k * ROWS];
        const long long at = static_cast<long long>(token) * c.rows + row;
        if (c.bf16)
            static_cast<__nv_bfloat16*>(c.out)[at] = __float2bfloat16_rn(total);
        else
            static_cast<float*>(c.out)[at] = total;
    }
}

// In how many parts to split the experts of `blocks` blocks, so that the last round of blocks is nearly full. Bits do not
// depend on it.
int parts_of(int blocks, int pairs) {
    int best = 1;
    float full = 0.0f;
    for (int parts = 1; parts <= MOST_PARTS && parts <= pairs; parts++) {
        const int all = blocks * parts, rounds = (all + PLACES - 1) / PLACES;
        const float found = static_cast<float>(all) / (rounds * PLACES);
        if (found > full + 0.05f) best = parts, full = found;
    }
    return best;
}

}  // namespace

// x: bf16 (tokens, hidden); w13: bf16 (experts, 2 inner, hidden); w2: bf16 (experts, hidden, inner); ids, gates: (tokens,
// chosen), at most MOST_PAIRS; between: bf16 (tokens * chosen, inner); out: (tokens, hidden). hidden and inner are
// multiples of 8, and x, w13, w2 and between begin at multiples of 16 bytes.
struct Experts {  // as in experts.py
    const __nv_bfloat16* x;
    const int* ids;
    const float* gates;
    const __nv_bfloat16 *w13, *w2;
    void *between, *out;
    int tokens, chosen, experts, hidden, inner, bf16;
    float limit;
};

extern "C" int launch_experts(const Experts* e) {
    const Call gated = {e->x, e->w13, e->ids, e->gates, e->between, e->tokens, e->chosen, e->experts, e->inner,
                        e->hidden, 1, e->limit};
    const Call summed = {static_cast<const __nv_bfloat16*>(e->between), e->w2, e->ids, nullptr, e->out, e->tokens,
                         e->chosen, e->experts, e->hidden, e->inner, e->bf16, e->limit};
    const int blocks = (e->inner + ROWS - 1) / ROWS;
    const dim3 grid(blocks, parts_of(blocks, e->tokens * e->chosen));
    if (const int code = programmatic::launch(gated_kernel, grid, dim3(THREADS), 0, gated)) return code;
    return programmatic::launch(summed_kernel, dim3((e->hidden + ROWS - 1) / ROWS), dim3(THREADS), 0, summed);
}
