// moe_gemm on Hopper: repacking, and the entry points of the kernels for few tokens an expert and for many.
#include <cuda_runtime.h>

#include "sm90_decode.cuh"
#include "sm90_dense.cuh"
#include "sm90_mxfp4_run.cuh"
#include "sm90_prefill_run.cuh"

static int kib(size_t bytes) { return static_cast<int>((bytes + 1023) / 1024); }

extern "C" {

int repack_units(const uint8_t* packed, const uint8_t* scales, uint8_t* to, int experts, int rows, int columns,
                 int interleaved) {
    return units::repack(packed, scales, to, experts, rows, columns, interleaved);
}

// int64 that decode_experts wants in `arrived`, zero before the first call and then as it leaves them.
int decode_counters() { return decode::BATCHES * decode::COUNTER_APART; }

// shared: the last expert has every token, with weight 1; it counts in topk and experts, and is not in ids and routing.
// form: of activations, 0 bf16; 1 NVFP4; 2 FP8.
// early: as decode::run has it.
int decode_experts(const uint8_t* w13, const float* g13, const float* in13, const uint8_t* w2, const float* g2,
                   const float* in2, const __nv_bfloat16* x, const int* ids, const float* routing, __nv_bfloat16* out,
                   __nv_bfloat16* v, __nv_bfloat16* rows, unsigned long long* arrived, int tokens, int topk, int experts, int hidden,
                   int inner, int form, int shared, int tiles, int blocks, int early) {
    return decode::run({w13, w2, g13, g2, in13, in2, x, ids, routing, out, v, arrived, tokens, topk, experts, hidden,
                        inner, 0, 0, form == 1, false, shared != 0, 0}, tiles, blocks, rows, form == 2, early);
}

// Bytes that prefill_experts needs, in KiB.
int prefill_workspace(int tokens, int topk, int experts, int hidden, int inner) {
    return kib(prefill::Workspace(nullptr, tokens, topk, experts, hidden, inner).bytes);
}

// form: as decode_experts.
int prefill_experts(const tma::Tensor* w13, const float* g13, const tma::Tensor* w2, const float* g2,
                    const __nv_bfloat16* x, const int* ids, const float* routing, __nv_bfloat16* out, void* workspace,
                    const float* in13, const float* in2, int tokens, int topk, int experts, int hidden, int inner,
                    int form) {
    const auto run = form == prefill::NVFP4 ? prefill::run<prefill::NVFP4>
                     : form == prefill::FP8 ? prefill::run<prefill::FP8>
                                            : prefill::run<prefill::BF16>;
    return run(*w13, g13, in13, *w2, g2, in2, x, ids, routing, out, workspace, tokens, topk, experts, hidden, inner);
}

// As above, for one expert, with up to some hundreds of tokens.
int dense_workspace(int tokens, int hidden, int inner) {
    return kib(dense::workspace(tokens, hidden, inner));
}

int dense_experts(const uint8_t* w13, const float* g13, const uint8_t* w2, const float* g2, const __nv_bfloat16* x,
                  const int* ids, const float* routing, __nv_bfloat16* out, void* workspace, int* met, int tokens,
                  int hidden, int inner) {
    return dense::run(w13, g13, w2, g2, x, ids, routing, out, workspace, met, tokens, hidden, inner);
}

// Units of MXFP4 weights, of rows by columns in each of `matrices`, whose largest scales are `largest`.
int repack_mxfp4(const uint8_t* packed, const uint8_t* scales, const uint8_t* largest, uint8_t* to, int matrices,
                 int rows, int columns, int interleaved) {
    return mxfp4::repack(packed, scales, largest, to, matrices, rows, columns, interleaved);
}

// As above, for these and FP8 activations, with any number of tokens.
int mxfp4_workspace(int tokens, int topk, int experts, int hidden, int inner) {
    return kib(mxfp4::Workspace(nullptr, tokens, topk, experts, hidden, inner).bytes);
}

int mxfp4_experts(const uint8_t* w13, const float* g13, const uint8_t* w2, const float* g2, const __nv_bfloat16* x,
                  const int* ids, const float* routing, __nv_bfloat16* out, void* workspace, int tokens, int topk,
                  int experts, int hidden, int inner) {
    return mxfp4::run(w13, g13, w2, g2, x, ids, routing, out, workspace, tokens, topk, experts, hidden, inner);
}

}  // extern "C"
