// The lightning indexer: scores of all entries in one launch, the best of them and their places in another.
//
// The formulas are those of torch_ops/indexer.py. Scores are fp32 sums; queries and keys are multiplied on
// the tensor cores where both are exact in bf16. The launcher returns the CUDA error of its launches.
#include "launch.cuh"
#include "rows.cuh"
#include "warp_rows.cuh"

namespace {

using rows::Pages;

constexpr unsigned ALL = 0xffffffffu;

using warp_rows::e2m1;

// ---------------------------------------------------------------- scores

// q (sequences * tokens, heads, width); weights the same without width, fp32 or bf16, times `scale`; out (sequences *
// tokens, entries); table (sequences, blocks).
struct Scores {
    const void *q, *weights;
    const int* table;
    float* out;
    Pages keys;
    float scale;
    int tokens, heads, blocks, entries, weights_bf16;  // tokens: of a sequence
};

__device__ float weight_of(const Scores& s, long long row, int head) {
    const long long at = row * s.heads + head;
    const float weight = s.weights_bf16 ? rows::load(static_cast<const __nv_bfloat16*>(s.weights) + at)
                                        : rows::load(static_cast<const float*>(s.weights) + at);
    return weight * s.scale;
}

__device__ float relu(float x) { return x < 0.0f ? 0.0f : x; }  // NaN stays

__device__ const uint8_t* page_of(const Scores& s, long long row, int entry) {
    return s.keys.data + s.table[row / s.tokens * s.blocks + entry / s.keys.per_page] * s.keys.page_bytes;
}

__device__ float scale_of(uint32_t byte) {
    return __uint_as_float(byte == 0 ? 0x00400000 : byte == 255 ? 0x7FC00000 : byte << 23);
}

// Value i of row `slot` of a page.
__device__ float key_value(const Pages& keys, const uint8_t* page, int slot, int i) {
    const int at = slot * keys.width + i;
    if (keys.kind == rows::PLAIN_FP32) return reinterpret_cast<const float*>(page)[at];
    if (keys.kind == rows::PLAIN_BF16) return rows::load(reinterpret_cast<const __nv_bfloat16*>(page) + at);
    const uint8_t* scales = page + keys.per_page * keys.width / 2;
    return e2m1(page[at / 2] >> 4 * (i % 2)) * scale_of(scales[at / rows::KEY_GROUP]);
}

// A warp an entry, whose key its lanes hold: any dtypes, width a multiple of 32, at most LANE_VALUES * 32.
constexpr int LANE_VALUES = 8, PLAIN_WARPS = 8;

template <typename T>
__global__ void plain_scores_kernel(const Scores s) {
    programmatic::wait();
    programmatic::trigger();
    const long long row = blockIdx.x;
    const int lane = threadIdx.x % 32, entry = blockIdx.y * PLAIN_WARPS + threadIdx.x / 32, width = s.keys.width;
    if (entry >= s.entries) return;
    const uint8_t* page = page_of(s, row, entry);
    float key[LANE_VALUES];
    for (int i = 0; i < LANE_VALUES; i++)
        key[i] = 32 * i < width ? key_value(s.keys, page, entry % s.keys.per_page, 32 * i + lane) : 0.0f;
    float total = 0.0f;
    for (int head = 0; head < s.heads; head++) {
        const T* q = static_cast<const T*>(s.q) + (row * s.heads + head) * width;
        float sum = 0.0f;
        for (int i = 0; i < LANE_VALUES; i++)
            if (32 * i < width) sum += rows::load(q + 32 * i + lane) * key[i];
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
        total += weight_of(s, row, head) * relu(sum);
    }
    if (lane == 0) s.out[row * s.entries + entry] = total;
}

constexpr int WIDTH = 128;                     // of a key, on the tensor cores
constexpr int BLOCK_N = 64;                    // entries of a tile
constexpr int WARPS = 4;                       // each takes every fourth 16 heads
constexpr int SCORE_THREADS = 32 * WARPS;
constexpr int THREADS_AN_ENTRY = SCORE_THREADS / BLOCK_N;
constexpr int STRIDE = WIDTH + 8;              // values between keys in shared memory: rows fall on different banks
constexpr int STEPS = WIDTH / 16, TILES = BLOCK_N / 8;
constexpr int MANY_BLOCKS = 264;               // two a multiprocessor

__device__ uint32_t two_bf16(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}

// Keys entry0 and on to shared memory, in bf16; zeros behind the last one. Two threads an entry.
__device__ void load_keys(const Scores& s, long long row, int entry0, __nv_bfloat16* smem_keys) {
    const int local = threadIdx.x / THREADS_AN_ENTRY, part = threadIdx.x % THREADS_AN_ENTRY, entry = entry0 + local;
    constexpr int VALUES = WIDTH / THREADS_AN_ENTRY;
    uint4* to = reinterpret_cast<uint4*>(smem_keys + local * STRIDE + part * VALUES);
    const bool there = entry < s.entries;
    const uint8_t* page = page_of(s, row, there ? entry : 0);
    const int slot = there ? entry % s.keys.per_page : 0;
    if (s.keys.kind == rows::PLAIN_BF16) {
        const uint4* from = reinterpret_cast<const uint4*>(page + (slot * WIDTH + part * VALUES) * 2);
        for (int i = 0; i < VALUES / 8; i++) to[i] = there ? from[i] : make_uint4(0, 0, 0, 0);
        return;
    }
    const uint4* from = reinterpret_cast<const uint4*>(page + (slot * WIDTH + part * VALUES) / 2);
    const uint8_t* scales = page + s.keys.per_page * WIDTH / 2 + (slot * WIDTH + part * VALUES) / rows::KEY_GROUP;
    for (int i = 0; i < VALUES / 32; i++) {  // 32 values, of one scale
        const uint4 codes = there ? from[i] : make_uint4(0, 0, 0, 0);
        const float scale = there ? scale_of(scales[i]) : 0.0f;
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        for (int w = 0; w < 4; w++) {
            uint32_t pairs[4];
            for (int j = 0; j < 4; j++)
                pairs[j] = two_bf16(e2m1(words[w] >> 8 * j) * scale, e2m1(words[w] >> (8 * j + 4)) * scale);
            to[4 * i + w] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}

__device__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 16 heads' queries as operands of mma: rows lane / 4 and lane / 4 + 8.
__device__ void load_queries(const Scores& s, long long row, int head0, uint32_t (&a)[STEPS][4]) {
    const int lane = threadIdx.x % 32;
    const __nv_bfloat16* q = static_cast<const __nv_bfloat16*>(s.q) + (row * s.heads + head0 + lane / 4) * WIDTH +
                             lane % 4 * 2;
    for (int k = 0; k < STEPS; k++)
        for (int i = 0; i < 4; i++)
            a[k][i] = *reinterpret_cast<const uint32_t*>(q + i % 2 * 8 * WIDTH + k * 16 + i / 2 * 8);
}

// Block (row, part): every gridDim.y-th tile of entries of a row. q bf16, heads a multiple of 16, keys bf16 or FP4.
__global__ void __launch_bounds__(SCORE_THREADS) scores_kernel(const Scores s) {
    __shared__ __align__(16) __nv_bfloat16 smem_keys[BLOCK_N * STRIDE];
    __shared__ float sums[WARPS][BLOCK_N];
    programmatic::wait();
    programmatic::trigger();
    const long long row = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head_tiles = s.heads / 16;
    uint32_t a[STEPS][4];
    int held = -1;  // the 16 heads whose queries `a` holds
    for (int entry0 = blockIdx.y * BLOCK_N; entry0 < s.entries; entry0 += gridDim.y * BLOCK_N) {
        load_keys(s, row, entry0, smem_keys);
        __syncthreads();
        float part[TILES][2] = {};
        for (int tile = warp; tile < head_tiles; tile += WARPS) {
            if (held != tile) load_queries(s, row, 16 * tile, a);
            held = tile;
            float acc[TILES][4] = {};
            for (int n = 0; n < TILES; n++) {
                const __nv_bfloat16* key = smem_keys + (8 * n + lane / 4) * STRIDE + lane % 4 * 2;
#pragma unroll
                for (int k = 0; k < STEPS; k++) {
                    const uint32_t b[2] = {*reinterpret_cast<const uint32_t*>(key + 16 * k),
                                           *reinterpret_cast<const uint32_t*>(key + 16 * k + 8)};
                    mma(acc[n], a[k], b);
                }
            }
            const int head = 16 * tile + lane / 4;
            const float upper = weight_of(s, row, head), lower = weight_of(s, row, head + 8);
            for (int n = 0; n < TILES; n++)
                for (int i = 0; i < 2; i++) part[n][i] += upper * relu(acc[n][i]) + lower * relu(acc[n][i + 2]);
        }
        for (int n = 0; n < TILES; n++)
            for (int i = 0; i < 2; i++) {
                for (int step = 4; step < 32; step *= 2) part[n][i] += __shfl_xor_sync(ALL, part[n][i], step);
                if (lane < 4) sums[warp][8 * n + 2 * lane + i] = part[n][i];
            }
        __syncthreads();
        const int entry = entry0 + threadIdx.x;
        if (threadIdx.x < BLOCK_N && entry < s.entries) {
            float total = 0.0f;
            for (int w = 0; w < WARPS; w++) total += sums[w][threadIdx.x];
            s.out[row * s.entries + entry] = total;
        }
        // The next tile's keys are written behind the barrier above, its sums behind the next one.
    }
}

// ---------------------------------------------------------------- selection

constexpr int SELECT_THREADS = 1024;
constexpr int MOST_CHOSEN = 2048;
constexpr int ID_BITS = 22;  // of an entry's number
constexpr int BINS = 2 * SELECT_THREADS;
// Digits of a rank, from the top: 32 bits of the score, then ID_BITS.
constexpr int DIGITS = 5;
__constant__ const int SHIFTS[DIGITS] = {43, 32, 22, 11, 0};
__constant__ const int SIZES[DIGITS] = {11, 11, 10, 11, 11};

// What is to be selected from: row r of scores (rows, entries), the first visible[r]. out gets their places, by the row
// of table (sequences, blocks), `tokens` rows of scores a sequence.
struct Selection {
    const float* scores;
    const int* visible;
    const int* table;
    int* out;
    int entries, chosen, tokens, blocks, per_page;
};

// Larger is better: by score, 0 and -0 being equal, then by falling id. All are different.
__device__ unsigned long long rank_of(float score, int id) {
    const uint32_t bits = __float_as_uint(score + 0.0f);  // makes -0 a +0
    const uint32_t key = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<unsigned long long>(key) << ID_BITS | ((1 << ID_BITS) - 1 - id);
}

__device__ int id_of(unsigned long long rank) {
    return (1 << ID_BITS) - 1 - static_cast<int>(rank & ((1 << ID_BITS) - 1));
}

// Where the `wanted`-th best is, when counts[bin] ranks are in each bin, larger bins first.
struct Found {
    int bin, before, count;  // before: how many are in larger bins
};

__device__ void find_bin(const int* counts, int wanted, int* warp_sums, Found* found) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, top = BINS - 1 - 2 * threadIdx.x;
    const int first = counts[top], second = counts[top - 1];
    int sum = first + second;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int before = sum - first - second;
    for (int w = 0; w < SELECT_THREADS / 32; w++)
        if (w < warp) before += warp_sums[w];
    if (before < wanted && wanted <= before + first) *found = {top, before, first};
    if (before + first < wanted && wanted <= before + first + second) *found = {top - 1, before + first, second};
    __syncthreads();
}

// Sort the first `size` values, a power of two, so that the largest comes first.
__device__ void sort(unsigned long long* values, int size) {
    for (int span = 2; span <= size; span *= 2)
        for (int apart = span / 2; apart; apart /= 2) {
            __syncthreads();
            for (int base = 0; base < size / 2; base += SELECT_THREADS) {
                const int pair = base + threadIdx.x;
                if (pair >= size / 2) continue;
                const int i = pair / apart * 2 * apart + pair % apart, j = i + apart;
                const unsigned long long a = values[i], b = values[j];
                if ((a < b) == !(i & span)) values[i] = b, values[j] = a;
            }
        }
    __syncthreads();
}

// Block r: row r. A radix selection finds the rank of the worst chosen one; those that are no worse are then sorted.
__global__ void __launch_bounds__(SELECT_THREADS) select_kernel(const Selection s) {
    __shared__ unsigned long long best[MOST_CHOSEN];
    __shared__ int counts[BINS];
    __shared__ int warp_sums[SELECT_THREADS / 32], filled;
    __shared__ Found found;
    programmatic::wait();
    programmatic::trigger();
    const long long row = blockIdx.x;
    const float* scores = s.scores + row * s.entries;
    const int visible = max(0, min(s.visible[row], s.entries));
    int size = 2;
    while (size < s.chosen) size *= 2;
    for (int i = threadIdx.x; i < MOST_CHOSEN; i += SELECT_THREADS) best[i] = 0;
    if (threadIdx.x == 0) filled = 0;
    unsigned long long prefix = 0;  // of the worst chosen rank: its bits above `shift`
    int shift = 0, wanted = min(s.chosen, visible);
    for (int digit = 0; visible > s.chosen && digit < DIGITS; digit++) {
        shift = SHIFTS[digit];
        const int bits = SIZES[digit];
        for (int i = threadIdx.x; i < BINS; i += SELECT_THREADS) counts[i] = 0;
        __syncthreads();
        for (int base = 0; base < visible; base += SELECT_THREADS) {
            const int i = base + threadIdx.x;
            if (i >= visible) continue;
            const unsigned long long rank = rank_of(scores[i], i);
            if (rank >> shift >> bits == prefix) atomicAdd(&counts[rank >> shift & ((1 << bits) - 1)], 1);
        }
        __syncthreads();
        find_bin(counts, wanted, warp_sums, &found);
        prefix = prefix << bits | found.bin;
        wanted -= found.before;
        if (found.count == wanted) break;  // all of the bin are chosen
    }
    __syncthreads();
    for (int base = 0; base < visible; base += SELECT_THREADS) {
        const int i = base + threadIdx.x;
        if (i >= visible) continue;
        const unsigned long long rank = rank_of(scores[i], i);
        if (rank >> shift >= prefix) best[atomicAdd(&filled, 1)] = rank;
    }
    sort(best, size);
    const int count = min(s.chosen, visible);
    for (int base = 0; base < s.chosen; base += SELECT_THREADS) {
        const int i = base + threadIdx.x;
        if (i >= s.chosen) continue;
        const int id = i < count ? id_of(best[i]) : -1;
        const int* table = s.table + row / s.tokens * s.blocks;
        s.out[row * s.chosen + i] = id < 0 ? -1 : table[id / s.per_page] * s.per_page + id % s.per_page;
    }
}

// The tensor cores' kernel takes them: exact in bf16, and pages whose rows begin at multiples of 16 bytes.
bool fits(const Scores& s, int q_bf16) {
    const bool exact = s.keys.kind == rows::PLAIN_BF16 || s.keys.kind == rows::INDEX;
    return q_bf16 && exact && s.keys.width == WIDTH && s.heads % 16 == 0 && s.keys.page_bytes % 16 == 0;
}

int score(const Scores& s, int rows, int q_bf16) {
    if (!fits(s, q_bf16))
        return programmatic::launch(q_bf16 ? plain_scores_kernel<__nv_bfloat16> : plain_scores_kernel<float>,
                                    dim3(rows, (s.entries + PLAIN_WARPS - 1) / PLAIN_WARPS), dim3(32 * PLAIN_WARPS), 0,
                                    s);
    const int tiles = (s.entries + BLOCK_N - 1) / BLOCK_N, most = max(1, MANY_BLOCKS / rows);
    return programmatic::launch(scores_kernel, dim3(rows, min(tiles, most)), dim3(SCORE_THREADS), 0, s);
}

}  // namespace

namespace indexer {  // not nameless, since the launcher's parameter is of this type

// q (rows, heads, width), `tokens` rows a sequence; scores fp32 (rows, entries); the others as Scores and Selection say.
// *_bf16: 1 for bf16, 0 for fp32.
struct Call {
    const void *q, *weights;
    const int *table, *visible;
    float* scores;
    int* out;
    Pages keys;
    float scale;
    int rows, tokens, heads, blocks, entries, chosen, q_bf16, weights_bf16;
};

}  // namespace indexer

extern "C" int launch_choose(const indexer::Call* of) {
    const indexer::Call& c = *of;
    const Scores s = {c.q, c.weights, c.table, c.scores, c.keys, c.scale, c.tokens, c.heads, c.blocks, c.entries,
                      c.weights_bf16};
    if (c.entries)
        if (const int code = score(s, c.rows, c.q_bf16)) return code;
    const Selection from = {c.scores, c.visible, c.table, c.out, c.entries, c.chosen, c.tokens, c.blocks,
                            c.keys.per_page};
    return programmatic::launch(select_kernel, dim3(c.rows), dim3(SELECT_THREADS), 0, from);
}
