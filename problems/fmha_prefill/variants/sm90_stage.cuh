// Staging: entries out of FP8 pages as rows of 512 bf16, each once, and where each token finds its own.
//
// Hundreds of queries see an entry, so decoding it in the attention kernel would repeat what is done here once. Window
// rows lie by sequence, 127 positions ahead of its first token and then its tokens: token t of sequence b sees the 128
// rows from t + 127 b on. Compressed rows lie as their lists do, or, where tokens choose for themselves out of fewer
// entries than their lists have places, as all entries of the pages.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>

#include "launch.cuh"
#include "nvfp4.cuh"
#include "ptx.cuh"

namespace fmha {

constexpr int HEAD_DIM = 512, ROPE = 64, WINDOW = 128;
constexpr int NOPE = 448, PAYLOAD = 576;  // of an entry: dims, and bytes, that come as e4m3; bytes without its scales

struct Cache {
    const uint8_t* pages;
    int64_t stride;  // bytes from page to page
    int shift;       // log2 of the entries of a page
};

// What a token sees. window: the first of its 128 staged rows; index: its place in window_index; list: of compressed
// entries, and `length` of it.
struct alignas(16) Seen {
    int window, index, list, length;
};

struct Lists {
    const int *window, *compressed, *length;  // as task.py has them
    int nw, nc;
    bool each;  // whether each token has a list of compressed entries, else each sequence
};

struct Staging {
    Cache window, compressed;
    Lists lists;
    const int* starts;
    __nv_bfloat16* rows;  // [count], of windows, then [compressed_count]
    Seen* seen;           // [tokens]
    int sequences, count, compressed_count, compressed_entries;
    bool by_list;  // compressed rows are places of lists, else entries of the pages
};

// The sequence of a window row, by all lanes. Sequence b's rows begin at starts[b] + 127 b.
__device__ __forceinline__ int sequence_of(const Staging& s, int row, int lane) {
    int found = 0;
    for (int first = 1; first <= s.sequences; first += 32) {
        const int b = first + lane;
        const int before = __popc(__ballot_sync(~0u, b <= s.sequences && s.starts[b] + (WINDOW - 1) * b <= row));
        found += before;
        if (before < 32) break;
    }
    return found;
}

// The entry that a row is of, -1 for none. What a window row is for a token is left in `seen` on the way.
__device__ __forceinline__ int entry_of_window(const Staging& s, int row, int lane) {
    const int b = sequence_of(s, row, lane), start = s.starts[b], place = row - start - (WINDOW - 1) * b;
    const int token = start + place - (WINDOW - 1);
    if (lane == 0 && place >= WINDOW - 1) {
        const int length = min(max(s.lists.length[token], 0), s.lists.nc);
        s.seen[token] = {row - (WINDOW - 1), b * s.lists.nw + token - start, s.lists.each ? token : b, length};
    }
    return s.lists.window[int64_t(b) * s.lists.nw + place];
}
__device__ __forceinline__ int entry_of_compressed(const Staging& s, int row) {
    if (!s.by_list) return row;
    const int entry = s.lists.compressed[row];
    return entry < s.compressed_entries ? entry : -1;  // what no token sees may be any number
}

// A lane's 16 values: codes, or where it has the last dims bf16 values.
struct Loaded {
    uint4 a, b;
    uint32_t scale;
};
__device__ __forceinline__ Loaded load(const Cache& cache, int entry, int lane) {
    const int slot = entry & ((1 << cache.shift) - 1);
    const uint8_t* const page = cache.pages + (entry >> cache.shift) * cache.stride;
    const uint8_t* const from = page + slot * PAYLOAD;
    const bool codes = lane < NOPE / 16;
    const auto own = reinterpret_cast<const uint4*>(from + (codes ? 16 * lane : NOPE + 32 * (lane - NOPE / 16)));
    Loaded v{__ldg(own), {}, 0};
    if (!codes) v.b = __ldg(own + 1);
    if (codes) v.scale = __ldg(page + (PAYLOAD << cache.shift) + 8 * slot + lane / 4);
    return v;
}

// Four codes times a power of two -> four bf16, exact where that is normal.
__device__ __forceinline__ uint2 decode4(uint32_t codes, float scale) {
    uint32_t pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t halves = nvfp4::e4m3x2_to_half2_bits(codes >> 16 * i & 0xFFFF);
        const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&halves));
        pair[i] = ptx::pack_bf16x2(v.x * scale, v.y * scale);
    }
    return make_uint2(pair[0], pair[1]);
}
__device__ __forceinline__ void store(const Loaded& v, __nv_bfloat16* row, int lane) {
    uint4* const to = reinterpret_cast<uint4*>(row) + 2 * lane;
    if (lane < NOPE / 16) {
        const float scale = __uint_as_float(v.scale << 23);
        const uint2 x = decode4(v.a.x, scale), y = decode4(v.a.y, scale);
        const uint2 z = decode4(v.a.z, scale), w = decode4(v.a.w, scale);
        to[0] = make_uint4(x.x, x.y, y.x, y.y), to[1] = make_uint4(z.x, z.y, w.x, w.y);
    } else {
        to[0] = v.a, to[1] = v.b;
    }
}

// A warp stages ROWS rows, whose loads are under way together.
constexpr int STAGE_THREADS = 256;
template <int ROWS>
__global__ void __launch_bounds__(STAGE_THREADS) stage(const __grid_constant__ Staging s) {
    programmatic::trigger();
    programmatic::wait();
    const int lane = threadIdx.x % 32;
    const int first = (blockIdx.x * (STAGE_THREADS / 32) + threadIdx.x / 32) * ROWS;
    int entry[ROWS];
    Loaded loaded[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = first + i;
        entry[i] = row < s.count                         ? entry_of_window(s, row, lane)
                   : row - s.count < s.compressed_count ? entry_of_compressed(s, row - s.count)
                                                        : -1;
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        if (entry[i] >= 0) loaded[i] = load(first + i < s.count ? s.window : s.compressed, entry[i], lane);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        if (entry[i] >= 0) store(loaded[i], s.rows + int64_t(first + i) * HEAD_DIM, lane);
}

}  // namespace fmha
