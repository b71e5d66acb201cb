// A layer's rows behind its projections, in one launch: what a token leaves in the cache, its key and the compressed
// entries that it completes; and its queries, normed and rotated, the indexer's too.
//
// The formulas are those of torch_ops/norm.py, rope.py, compressor.py and cache/pages.py. All arithmetic is fp32; T,
// bf16 or fp32, is the dtype of activations, to which values are rounded wherever the torch functions would store them.
// layer_rows.cuh has the kernel for the sizes of the released models; here is one for all others. The launcher returns
// the CUDA error of its launch.
#include <algorithm>

#include "launch.cuh"
#include "rows.cuh"
#include "layer_rows.cuh"

namespace {

using layer_rows::Compressor;
using layer_rows::find;
using layer_rows::Source;
using layer_rows::Step;
using rows::THREADS;

__device__ void store_any_token(const Compressor& c, int token) {
    const int wide = c.halves * c.width;
    const long long position = c.position[token];
    const float* from = c.projected + static_cast<long long>(token) * 2 * wide;
    const float* ape = c.ape + position % c.ratio * wide;
    float* to = c.tail + (c.sequence[token] * c.size + position % c.size) * 2 * wide;
    for (int i = threadIdx.x; i < wide; i += THREADS) {
        to[i] = from[i];
        to[wide + i] = from[wide + i] + ape[i];
    }
}

// One channel of an entry: the softmax over the tokens' gates, times their kv. The window before: the first half.
__device__ float pool(const Compressor& c, const Source* sources, int channel) {
    const int count = c.halves * c.ratio;
    auto gate = [&](int i) {
        const int at = i / c.ratio * c.width + channel;
        return sources[i].ape ? sources[i].gate[at] + sources[i].ape[at] : sources[i].gate[at];
    };
    float largest = -__int_as_float(0x7F800000), total = 0.0f, sum = 0.0f;
    for (int i = 0; i < count; i++)
        if (sources[i].kv) largest = fmaxf(largest, gate(i));
    for (int i = 0; i < count; i++) {
        if (!sources[i].kv) continue;
        const float weight = expf(gate(i) - largest);
        total += weight;
        sum += weight * sources[i].kv[i / c.ratio * c.width + channel];
    }
    return sum / total;
}

template <typename T>
__device__ void rotate(float* row, int width, int half, const float* cosine, const float* sine) {
    for (int i = threadIdx.x; i < half; i += THREADS) rows::rotate_pair<T>(row, width, half, i, cosine[i], sine[i]);
    __syncthreads();
}

template <typename T>
__device__ void any_query(const Step& s, int vector, float* row) {
    const auto& q = s.queries;
    const long long at = static_cast<long long>(vector) * q.width, angle = vector / q.each * s.half;
    rows::load_row(static_cast<const T*>(q.x) + at, row, q.width);
    rows::norm(row, static_cast<const T*>(q.weight), q.width, s.eps);
    rotate<T>(row, q.width, s.half, s.cosine + angle, s.sine + angle);
    rows::store_row(row, static_cast<T*>(q.out) + at, q.width);
}

template <typename T>
__device__ void any_key(const Step& s, int token, float* row) {
    const int width = s.keys.pages.width;
    const long long angle = static_cast<long long>(token) * s.half;
    rows::load_row(static_cast<const T*>(s.keys.x) + static_cast<long long>(token) * width, row, width);
    rows::norm(row, static_cast<const T*>(s.keys.weight), width, s.eps);
    rotate<T>(row, width, s.half, s.cosine + angle, s.sine + angle);
    rows::write(row, s.keys.pages, s.keys.index[token]);
}

// As layer_rows::write_entry: no block waits for another.
template <typename T>
__device__ void any_entry(const layer_rows::Entries& e, int number, float* row, Source* sources) {
    const Compressor& c = e.of;
    const int at = static_cast<int>(c.emit[number]), count = c.halves * c.ratio;
    const long long last = c.position[at], first = last - (c.ratio - 1);
    if ((last + 1) % c.ratio) return;  // the token ends no window: what the pages would get is never read
    for (int i = threadIdx.x; i < count; i += THREADS) sources[i] = find(c, at, last, count - 1 - i);
    __syncthreads();
    for (int i = threadIdx.x; i < c.width; i += THREADS) row[i] = rows::rounded<T>(pool(c, sources, i));
    __syncthreads();
    rows::norm(row, static_cast<const T*>(e.weight), c.width, c.eps);
    for (int i = threadIdx.x; i < c.half; i += THREADS) {
        const float angle = static_cast<float>(first) * c.freqs[i];
        rows::rotate_pair<T>(row, c.width, c.half, i, cosf(angle), sinf(angle));
    }
    __syncthreads();
    if (e.turned) rows::hadamard<T>(row, c.width);
    rows::write(row, e.pages, e.index[number]);
}

template <typename T>
__device__ void any_index_query(const layer_rows::IndexQueries& q, int vector, float* row) {
    const long long at = static_cast<long long>(vector) * q.width, angle = vector / q.each * q.half;
    T* const out = static_cast<T*>(q.out) + at;
    rows::load_row(static_cast<const T*>(q.x) + at, row, q.width);
    rotate<T>(row, q.width, q.half, q.cosine + angle, q.sine + angle);
    if (!q.quantise) {
        rows::store_row(row, out, q.width);
        return;
    }
    rows::hadamard<T>(row, q.width);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int group = warp; group < q.width / rows::KEY_GROUP; group += THREADS / 32) {
        const float value = row[group * rows::KEY_GROUP + lane];
        const uint32_t byte = rows::ue8m0(rows::warp_amax(rows::magnitude(value)), rows::E2M1_MAX, rows::KEY_FLOOR);
        const float scale = rows::ue8m0_value(byte);
        const uint32_t code = rows::e2m1_code(__fdiv_rn(value, scale));
        rows::store(out + group * rows::KEY_GROUP + lane, warp_rows::e2m1(code) * scale);
    }
}

// A block a row: of each compressor the entries, then the tokens for the ring; then keys, queries, the indexer's queries.
template <typename T>
__global__ void any_rows_kernel(const __grid_constant__ Step s) {
    extern __shared__ float row[];
    __shared__ Source sources[layer_rows::MOST_POOLED];
    programmatic::wait();
    programmatic::trigger();
    int number = blockIdx.x;
    for (int i = 0; i < s.compressors; i++) {
        const Compressor& c = s.entries[i].of;
        if (number < c.emitted) {
            any_entry<T>(s.entries[i], number, row, sources);
            return;
        }
        if ((number -= c.emitted) < c.tokens) {
            store_any_token(c, number);
            return;
        }
        number -= c.tokens;
    }
    const int keys = s.keys.count, others = keys + s.queries.count;
    if (number < keys)
        any_key<T>(s, number, row);
    else if (number < others)
        any_query<T>(s, number - keys, row);
    else
        any_index_query<T>(s.index, number - others, row);
}

}  // namespace

// bf16: 1 for T = bf16, 0 for T = fp32.
extern "C" int launch_layer_rows(const Step* given, int bf16) {
    Step s = *given;
    int blocks = 0, width = std::max({s.queries.width, s.keys.pages.width, s.index.width});
    for (int i = 0; i < s.compressors; i++) {
        s.entries[i].end = blocks += s.entries[i].of.emitted + s.entries[i].of.tokens;
        width = std::max(width, s.entries[i].of.width);
    }
    const int vectors = s.keys.count + s.queries.count + s.index.count;
    if (!blocks && !vectors) return 0;
    if (bf16 && layer_rows::fits(s)) {
        blocks += (vectors + layer_rows::WARPS - 1) / layer_rows::WARPS;
        const auto kernel = s.compressors ? layer_rows::layer_rows_kernel<true> : layer_rows::layer_rows_kernel<false>;
        return programmatic::launch(kernel, dim3(blocks), dim3(THREADS), 0, s);
    }
    const auto kernel = bf16 ? any_rows_kernel<__nv_bfloat16> : any_rows_kernel<float>;
    return programmatic::launch(kernel, dim3(blocks + vectors), dim3(THREADS), width * sizeof(float), s);
}
