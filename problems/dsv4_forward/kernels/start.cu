// The beginning of a pass in one launch: index lists, embeddings in all hc copies, angles.
//
// The formulas are those of cache/plan.py and torch_ops/start.py. T is the dtype of the copies, E that of the embedding,
// bf16 or fp32. The launcher returns the CUDA error of its launch.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "launch.cuh"

namespace pass {  // not nameless, since the launcher's parameters are of these types

constexpr int THREADS = 256;
constexpr int VALUES = 4;               // of a row that a thread copies
constexpr int PART = THREADS * VALUES;  // values of a row that a block copies
constexpr int BLOCK_TOKENS = 128;      // that a block of the caches has (weights/config.py)
constexpr int WINDOW = 128;            // tokens that a query sees
constexpr int RATIOS = 2;

__device__ float load(const float* p) { return *p; }
__device__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ void store(float* p, float value) { *p = value; }
__device__ void store(__nv_bfloat16* p, float value) { *p = __float2bfloat16_rn(value); }

// Of one ratio: `emitted` tokens that may end an entry; index (tokens, entries), or null where none is wanted.
struct Entries {
    const long long* emit;
    long long* target;
    int *visible, *index;
    int ratio, emitted, entries;
};

// cache/plan.py's Plan and Lists. window_index null: no lists are written, and position is given.
struct Plan {
    const long long *length, *given, *sequence, *sequence_ids;
    const int* table;
    long long *position, *window_target;
    int *window_index, *rows;
    int tokens, sequences, blocks, width, ring, unread;  // blocks: of a row of `rows`; width: of the table
    Entries of[RATIOS];
};

// copies (tokens, n, d); cosine, sine (kinds, tokens, half).
struct Embedding {
    const long long* tokens;
    const void* weight;
    const float* freqs;
    void* copies;
    float *cosine, *sine;
    int vocab, n, d, kinds, half;
};

__device__ int position_of(const Plan& plan, int token) {
    return static_cast<int>(plan.given ? plan.given[token] : plan.length[plan.sequence[token]]);
}

// The page of the `block`-th block of a sequence; one behind the table: the page that is never read.
__device__ long long page_of(const Plan& plan, long long sequence, int block) {
    return block < plan.width ? plan.table[sequence * plan.width + block] : plan.unread;
}

__device__ void write_window(const Plan& plan, int token, int position) {
    const int base = static_cast<int>(plan.sequence[token]) * plan.ring;
    for (int i = threadIdx.x; i < WINDOW; i += THREADS) {
        const int before = position - (WINDOW - 1) + i;
        plan.window_index[token * WINDOW + i] = before < 0 ? -1 : base + before % plan.ring;
    }
    if (threadIdx.x == 0) {
        plan.position[token] = position;
        plan.window_target[token] = base + position % plan.ring;
    }
}

// What token `token` sees.
__device__ void write_index(const Plan& plan, const Entries& of, int token, int position) {
    const int per_page = BLOCK_TOKENS / of.ratio, visible = (position + 1) / of.ratio;
    const long long sequence = plan.sequence[token];
    for (int i = threadIdx.x; i < of.entries; i += THREADS)
        of.index[static_cast<long long>(token) * of.entries + i] =
            i < visible ? static_cast<int>(page_of(plan, sequence, i / per_page)) * per_page + i % per_page : -1;
}

// A thread: how many entries the token sees, and where the entry goes that the token-th of the tokens that may end one
// ends.
__device__ void write_target(const Plan& plan, const Entries& of, int token, int position) {
    if (token < of.emitted) {  // there are at most as many as tokens
        const int per_page = BLOCK_TOKENS / of.ratio, last = static_cast<int>(of.emit[token]);
        const int at = position_of(plan, last);
        const bool ends = (at + 1) % of.ratio == 0 && at / BLOCK_TOKENS < plan.width;
        of.target[token] = ends ? page_of(plan, plan.sequence[last], at / BLOCK_TOKENS) * per_page +
                                      at / of.ratio % per_page
                                : static_cast<long long>(plan.unread) * per_page;
    }
    of.visible[token] = (position + 1) / of.ratio;
}

// The row of the block table of the row-th sequence of the batch.
__device__ void write_row(const Plan& plan, int row) {
    const int* from = plan.table + plan.sequence_ids[row] * plan.width;
    for (int i = threadIdx.x; i < plan.blocks; i += THREADS)
        plan.rows[static_cast<long long>(row) * plan.blocks + i] = from[i];
}

__device__ void write_angles(const Embedding& to, int tokens, int token, int position) {
    for (int i = threadIdx.x; i < to.kinds * to.half; i += THREADS) {
        const int kind = i / to.half, pair = i % to.half;
        const float angle = static_cast<float>(position) * to.freqs[i];
        const long long at = (static_cast<long long>(kind) * tokens + token) * to.half + pair;
        to.cosine[at] = cosf(angle);
        to.sine[at] = sinf(angle);
    }
}

// Values part * PART and on of the token's embedding, to all copies. NaN where the vocabulary has no such token.
template <typename E, typename T>
__device__ void write_copies(const Embedding& to, int token, int part) {
    const long long id = to.tokens[token];
    const bool known = id >= 0 && id < to.vocab;
    const E* from = static_cast<const E*>(to.weight) + (known ? id : 0) * to.d;
    T* copies = static_cast<T*>(to.copies) + static_cast<long long>(token) * to.n * to.d;
    float values[VALUES];
    for (int v = 0; v < VALUES; v++) {
        const int i = part * PART + v * THREADS + threadIdx.x;
        values[v] = known && i < to.d ? load(from + i) : __int_as_float(0x7FC00000);
    }
    for (int k = 0; k < to.n; k++)
        for (int v = 0; v < VALUES; v++) {
            const int i = part * PART + v * THREADS + threadIdx.x;
            if (i < to.d) store(copies + static_cast<long long>(k) * to.d + i, values[v]);
        }
}

// Parts of a token besides its copies. Each reads what it needs one load behind the other, so none waits for another.
constexpr int SEEN = 0, TARGETS = 1, ANGLES = 2, INDEX = 3, LISTS = INDEX + RATIOS;

// Block (token, part): part LISTS + p writes the values p * PART and on.
template <typename E, typename T>
__global__ void start_kernel(const Plan plan, const Embedding to, int parts) {
    programmatic::wait();
    programmatic::trigger();
    const int token = blockIdx.x / parts, part = blockIdx.x % parts;
    if (part >= LISTS) {
        write_copies<E, T>(to, token, part - LISTS);
        return;
    }
    const int position = position_of(plan, token);
    if (part == ANGLES) write_angles(to, plan.tokens, token, position);
    if (!plan.window_index) return;
    if (part == SEEN) {
        write_window(plan, token, position);
        if (token < plan.sequences) write_row(plan, token);  // each sequence has a token
    }
#pragma unroll
    for (int i = 0; i < RATIOS; i++) {
        if (!plan.of[i].visible) continue;
        if (part == TARGETS && threadIdx.x == 32 * i) write_target(plan, plan.of[i], token, position);
        if (part == INDEX + i && plan.of[i].index) write_index(plan, plan.of[i], token, position);
    }
}

template <typename E, typename T>
int start(const Plan& plan, const Embedding& to) {
    const int parts = LISTS + (to.d + PART - 1) / PART;
    return programmatic::launch(start_kernel<E, T>, dim3(plan.tokens * parts), dim3(THREADS), 0, plan, to, parts);
}

}  // namespace pass

// embedding_bf16, copies_bf16: 1 for bf16, 0 for fp32. Of ratios that the model has not all is null or 0.
extern "C" int launch_start(const pass::Plan* plan, const pass::Embedding* to, int embedding_bf16, int copies_bf16) {
    using B = __nv_bfloat16;
    if (embedding_bf16) return (copies_bf16 ? pass::start<B, B> : pass::start<B, float>)(*plan, *to);
    return (copies_bf16 ? pass::start<float, B> : pass::start<float, float>)(*plan, *to);
}
