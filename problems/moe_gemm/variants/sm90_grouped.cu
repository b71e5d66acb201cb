// moe_gemm on Hopper: repacking, and the entry points of the kernels for few tokens an expert and for many.
#include <cuda_runtime.h>

#include "sm90_decode.cuh"
#include "sm90_dense.cuh"
#include "sm90_prefill_run.cuh"

// packed (experts, rows, columns / 2), scales (experts, rows, columns / 16) -> units. A thread makes a lane's share of
// one unit. interleaved: rows are gate above up, and go together.
__global__ void repack(const uint8_t* packed, const uint8_t* scales, uint8_t* to, int64_t lanes, int rows, int columns,
                       bool interleaved) {
    const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (i >= lanes) return;
    const int lane = i & 31, unit_columns = columns / units::COLUMNS, unit_rows = rows / units::ROWS;
    const int64_t unit = i >> 5;
    const int column = unit % unit_columns, unit_row = unit / unit_columns % unit_rows;
    const int64_t expert = unit / unit_columns / unit_rows;
    uint8_t* unit_at = to + unit * units::BYTES;
    uint32_t scale_word = 0;
    for (int q = 0; q < 2; ++q) {
        uint32_t words[4];
        for (int half = 0; half < 2; ++half) {
            const int g = lane >> 2;
            const int row = interleaved ? unit_row * 16 + q * 8 + g + half * (rows / 2)
                                        : unit_row * 32 + q * 16 + half * 8 + g;
            const int64_t block = (expert * rows + row) * (columns / 16) + column * 4 + (lane & 3);
            const uint2 codes = *reinterpret_cast<const uint2*>(packed + block * 8);
            const uint32_t scale = scales[block];
            words[half] = scale ? units::encode(codes.x) : 0, words[half + 2] = scale ? units::encode(codes.y) : 0;
            scale_word |= units::scale_byte(scale) << 8 * (2 * q + half);
        }
        *reinterpret_cast<uint4*>(unit_at + 512 * q + 16 * lane) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    *reinterpret_cast<uint32_t*>(unit_at + units::SCALES + 4 * lane) = scale_word;
}

extern "C" {

int repack_units(const uint8_t* packed, const uint8_t* scales, uint8_t* to, int experts, int rows, int columns,
                 int interleaved) {
    const int64_t lanes = static_cast<int64_t>(experts) * (rows / 32) * (columns / 64) * 32;
    repack<<<static_cast<unsigned>((lanes + 255) / 256), 256>>>(packed, scales, to, lanes, rows, columns, interleaved);
    return cudaGetLastError();
}

// int64 that decode_experts wants in `arrived`, zero before the first call and then as it leaves them.
int decode_counters() { return decode::BATCHES * decode::COUNTER_APART; }

int decode_experts(const uint8_t* w13, const float* g13, const float* in13, const uint8_t* w2, const float* g2,
                   const float* in2, const __nv_bfloat16* x, const int* ids, const float* routing, __nv_bfloat16* out,
                   __nv_bfloat16* v, __nv_bfloat16* rows, unsigned long long* arrived, int tokens, int topk, int experts, int hidden,
                   int inner, int quantised, int tiles, int blocks) {
    return decode::run({w13, w2, g13, g2, in13, in2, x, ids, routing, out, v, arrived, tokens, topk, experts, hidden,
                        inner, 0, 0, quantised != 0, false, 0}, tiles, blocks, rows);
}

// x (tokens, columns) by units of (rows, columns) -> out (tokens, rows). room: as large as x, where it is quantised.
int decode_linear(const uint8_t* weight, const float* g, const float* in, const __nv_bfloat16* x, __nv_bfloat16* out,
                  __nv_bfloat16* room, int tokens, int rows, int columns, int quantised, int tiles, int blocks) {
    return decode::run({nullptr, weight, nullptr, g, nullptr, in, x, nullptr, nullptr, out, nullptr, nullptr, tokens, 1,
                        1, rows, columns, 0, 0, quantised != 0, true, 0}, tiles, blocks, room);
}

// Bytes that prefill_experts needs, in KiB.
int prefill_workspace(int tokens, int topk, int experts, int hidden, int inner) {
    return static_cast<int>((prefill::workspace(tokens, topk, experts, hidden, inner) + 1023) / 1024);
}

int prefill_experts(const tma::Tensor* w13, const float* g13, const tma::Tensor* w2, const float* g2,
                    const __nv_bfloat16* x, const int* ids, const float* routing, __nv_bfloat16* out, void* workspace,
                    int tokens, int topk, int experts, int hidden, int inner) {
    return prefill::run(*w13, g13, *w2, g2, x, ids, routing, out, workspace, tokens, topk, experts, hidden, inner);
}

// As above, for one expert, with up to some hundreds of tokens.
int dense_workspace(int tokens, int hidden, int inner) {
    return static_cast<int>((dense::workspace(tokens, hidden, inner) + 1023) / 1024);
}

int dense_experts(const uint8_t* w13, const float* g13, const uint8_t* w2, const float* g2, const __nv_bfloat16* x,
                  const int* ids, const float* routing, __nv_bfloat16* out, void* workspace, int* met, int tokens,
                  int hidden, int inner) {
    return dense::run(w13, g13, w2, g2, x, ids, routing, out, workspace, met, tokens, hidden, inner);
}

}  // extern "C"
