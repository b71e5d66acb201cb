// What a token leaves in the cache: its key, and the compressed entries that it completes; and its queries, normed and
// rotated. One launch each, a block a row.
//
// The formulas are those of torch_ops/norm.py, rope.py, compressor.py and cache/pages.py. All arithmetic is fp32; T,
// bf16 or fp32, is the dtype of activations, to which values are rounded wherever the chain of ops would store them.
// Every launcher returns the CUDA error of its launch.
#include "launch.cuh"
#include "rows.cuh"
#include "layer_rows.cuh"

namespace {

using rows::Pages;
using rows::THREADS;

using layer_rows::Compressor;
using layer_rows::find;
using layer_rows::MOST_POOLED;
using layer_rows::Source;
using layer_rows::Step;

// Block v: vector v of width d, `each` of them a token. weight may be null.
template <typename T>
__global__ void norm_rotate_kernel(const T* x, const T* weight, const float* cosine, const float* sine, T* out,
                                   int each, int d, int half, float eps) {
    extern __shared__ float row[];
    programmatic::wait();
    programmatic::trigger();
    const long long at = static_cast<long long>(blockIdx.x) * d, token = blockIdx.x / each;
    rows::load_row(x + at, row, d);
    rows::norm(row, weight, d, eps);
    for (int i = threadIdx.x; i < half; i += THREADS)
        rows::rotate_pair<T>(row, d, half, i, cosine[token * half + i], sine[token * half + i]);
    __syncthreads();
    rows::store_row(row, out + at, d);
}

// Block r: row r of x, normed and rotated (cosine null: neither), to row index[r] of the pages.
template <typename T>
__global__ void write_kernel(const T* x, const T* weight, const float* cosine, const float* sine, Pages pages,
                             const long long* index, int half, int turned, float eps) {
    extern __shared__ float row[];
    programmatic::wait();
    programmatic::trigger();
    const long long token = blockIdx.x;
    rows::load_row(x + token * pages.width, row, pages.width);
    if (cosine) {
        rows::norm(row, weight, pages.width, eps);
        for (int i = threadIdx.x; i < half; i += THREADS)
            rows::rotate_pair<T>(row, pages.width, half, i, cosine[token * half + i], sine[token * half + i]);
        __syncthreads();
    }
    if (turned) rows::hadamard<T>(row, pages.width);
    rows::write(row, pages, index[token]);
}

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

// Blocks 0 to emitted - 1: an entry each, to row `block` of out, or to row index[block] of the pages where out is null.
// The others: a token each, to the ring. An entry reads this call's tokens from `projected`, so no block waits for
// another; the ring's size keeps the tokens that it does read apart from those that are stored.
template <typename T>
__global__ void compress_kernel(Compressor c, const T* weight, T* out, Pages pages, const long long* index,
                                int turned) {
    extern __shared__ float row[];
    __shared__ Source sources[MOST_POOLED];
    programmatic::wait();
    programmatic::trigger();
    if (blockIdx.x >= c.emitted) {
        store_any_token(c, blockIdx.x - c.emitted);
        return;
    }
    const int at = static_cast<int>(c.emit[blockIdx.x]), count = c.halves * c.ratio;
    const long long last = c.position[at], first = last - (c.ratio - 1);
    if (!out && (last + 1) % c.ratio) return;  // the token ends no window: what the pages would get is never read
    for (int i = threadIdx.x; i < count; i += THREADS) sources[i] = find(c, at, last, count - 1 - i);
    __syncthreads();
    for (int i = threadIdx.x; i < c.width; i += THREADS) row[i] = rows::rounded<T>(pool(c, sources, i));
    __syncthreads();
    rows::norm(row, weight, c.width, c.eps);
    for (int i = threadIdx.x; i < c.half; i += THREADS) {
        const float angle = static_cast<float>(first) * c.freqs[i];
        rows::rotate_pair<T>(row, c.width, c.half, i, cosf(angle), sinf(angle));
    }
    __syncthreads();
    if (out) {
        rows::store_row(row, out + static_cast<long long>(blockIdx.x) * c.width, c.width);
        return;
    }
    if (turned) rows::hadamard<T>(row, c.width);
    rows::write(row, pages, index[blockIdx.x]);
}

// Block v: vector v of width d, `each` of them a token: rotated, and if so through Hadamard and FP4.
template <typename T>
__global__ void query_kernel(const T* x, const float* cosine, const float* sine, T* out, int each, int d, int half,
                             int quantise) {
    extern __shared__ float row[];
    programmatic::wait();
    programmatic::trigger();
    const long long at = static_cast<long long>(blockIdx.x) * d, token = blockIdx.x / each;
    rows::load_row(x + at, row, d);
    for (int i = threadIdx.x; i < half; i += THREADS)
        rows::rotate_pair<T>(row, d, half, i, cosine[token * half + i], sine[token * half + i]);
    __syncthreads();
    if (!quantise) {
        rows::store_row(row, out + at, d);
        return;
    }
    rows::hadamard<T>(row, d);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int group = warp; group < d / rows::KEY_GROUP; group += THREADS / 32) {
        const float value = row[group * rows::KEY_GROUP + lane];
        const uint32_t byte = rows::ue8m0(rows::warp_amax(rows::magnitude(value)), rows::E2M1_MAX, rows::KEY_FLOOR);
        const float scale = rows::ue8m0_value(byte);
        const uint32_t code = rows::e2m1_code(__fdiv_rn(value, scale));
        rows::store(out + at + group * rows::KEY_GROUP + lane, warp_rows::e2m1(code) * scale);
    }
}

template <typename T>
int norm_rotate(const void* x, const void* weight, const float* cosine, const float* sine, void* out, int vectors,
                int each, int d, int half, float eps, Step* into) {
    if constexpr (sizeof(T) == 2) {
        const layer_rows::Queries queries = {static_cast<const T*>(x), static_cast<const T*>(weight),
                                             static_cast<T*>(out), vectors, each};
        const int code = layer_rows::add(into, queries, d, cosine, sine, half, eps);
        if (code >= 0) return code;
    }
    return programmatic::launch(norm_rotate_kernel<T>, dim3(vectors), dim3(THREADS), d * sizeof(float),
                                static_cast<const T*>(x), static_cast<const T*>(weight), cosine, sine,
                                static_cast<T*>(out), each, d, half, eps);
}

template <typename T>
int write(const void* x, const void* weight, const float* cosine, const float* sine, const Pages& pages,
          const long long* index, int count, int half, int turned, float eps, Step* into) {
    if constexpr (sizeof(T) == 2) {
        const layer_rows::Keys keys = {static_cast<const T*>(x), static_cast<const T*>(weight), pages, index, count};
        const int code = cosine && !turned ? layer_rows::add(into, keys, cosine, sine, half, eps) : -1;
        if (code >= 0) return code;
    }
    return programmatic::launch(write_kernel<T>, dim3(count), dim3(THREADS), pages.width * sizeof(float),
                                static_cast<const T*>(x), static_cast<const T*>(weight), cosine, sine, pages, index,
                                half, turned, eps);
}

template <typename T>
int compress(const Compressor& c, const void* weight, void* out, const Pages& pages, const long long* index,
             int turned, Step* into) {
    if constexpr (sizeof(T) == 2) {
        const int code = out ? -1 : layer_rows::add(into, {c, static_cast<const T*>(weight), pages, index, turned});
        if (code >= 0) return code;
    }
    return programmatic::launch(compress_kernel<T>, dim3(c.emitted + c.tokens), dim3(THREADS),
                                c.width * sizeof(float), c, static_cast<const T*>(weight), static_cast<T*>(out), pages,
                                index, turned);
}

template <typename T>
int index_query(const void* x, const float* cosine, const float* sine, void* out, int vectors, int each, int d,
                int half, int quantise, Step* into) {
    if constexpr (sizeof(T) == 2) {
        const layer_rows::IndexQueries queries = {static_cast<const T*>(x), static_cast<T*>(out), cosine, sine,
                                                  vectors, each, half, quantise};
        const int code = layer_rows::add(into, queries, d);
        if (code >= 0) return code;
    }
    return programmatic::launch(query_kernel<T>, dim3(vectors), dim3(THREADS), d * sizeof(float),
                                static_cast<const T*>(x), cosine, sine, static_cast<T*>(out), each, d, half, quantise);
}

}  // namespace

// bf16 in the launchers: 1 for T = bf16, 0 for T = fp32. kind: of the pages, as rows::Kind. turned: through Hadamard.
// into: null, or where rows are added that launch_layer_rows is to launch; those that it does not take are launched.
extern "C" int launch_norm_rotate(const void* x, const void* weight, const float* cosine, const float* sine, void* out,
                                  int vectors, int each, int d, int half, float eps, int bf16,
                                  Step* into) {
    return (bf16 ? norm_rotate<__nv_bfloat16> : norm_rotate<float>)(x, weight, cosine, sine, out, vectors, each, d,
                                                                    half, eps, into);
}

extern "C" int launch_write(const void* x, const void* weight, const float* cosine, const float* sine, uint8_t* data,
                            long long page_bytes, int kind, int per_page, int width, int rope, const long long* index,
                            int count, int half, int turned, float eps, int bf16, Step* into) {
    const Pages pages = {data, page_bytes, kind, per_page, width, rope};
    return (bf16 ? write<__nv_bfloat16> : write<float>)(x, weight, cosine, sine, pages, index, count, half, turned,
                                                        eps, into);
}

extern "C" int launch_compress(const float* projected, const float* ape, const float* freqs, const long long* position,
                               const long long* sequence, const long long* emit, float* tail, int tokens, int emitted,
                               int size, int ratio, int halves, int width, int half, float eps, const void* weight,
                               void* out, uint8_t* data, long long page_bytes, int kind, int per_page, int rope,
                               const long long* index, int turned, int bf16, Step* into) {
    const Compressor c = {projected, ape,     freqs, position, sequence, emit,  tail, tokens,
                          emitted,   size,    ratio, halves,   width,    half,  eps};
    const Pages pages = {data, page_bytes, kind, per_page, width, rope};
    return (bf16 ? compress<__nv_bfloat16> : compress<float>)(c, weight, out, pages, index, turned, into);
}

extern "C" int launch_index_query(const void* x, const float* cosine, const float* sine, void* out, int vectors,
                                  int each, int d, int half, int quantise, int bf16, Step* into) {
    return (bf16 ? index_query<__nv_bfloat16> : index_query<float>)(x, cosine, sine, out, vectors, each, d, half,
                                                                    quantise, into);
}

// What the others have added to `step`, zeros before them.
extern "C" int launch_layer_rows(Step* step) { return layer_rows::launch(*step); }
