// The call with MXFP4 weights and FP8 activations: its memory, and its launches one behind the other, those that are not
// sm90_mxfp4_gather.cuh's by sm90_prefill_run.cuh.
#pragma once

#include "launch.cuh"
#include "sm90_mxfp4.cuh"
#include "sm90_prefill_run.cuh"

namespace mxfp4 {

// What is kept while a call runs: codes where prefill has bf16, which takes twice as much, and their scales.
struct Workspace : prefill::Workspace {
    uint8_t* quantised;  // of tokens, and their scales
    float *quantised_scales, *x_scales, *v_scales;
    Workspace(void* memory, int tokens, int topk, int experts, int hidden, int inner)
        : prefill::Workspace(memory, tokens, topk, experts, hidden, inner, Many::BLOCK_N) {
        const size_t scales = scale_slots(tokens * topk, experts);
        const size_t groups = size_t(tokens) * chunks_of(hidden);
        take(quantised, groups * COLUMNS), take(quantised_scales, groups);
        take(x_scales, chunks_of(hidden) * scales), take(v_scales, chunks_of(inner) * scales);
    }
};

// Clusters that are to quantise.
inline int quantising(int groups) {
    constexpr int EACH = QUANTISE_AT_ONCE * prefill::ROUTE_BLOCKS * prefill::ROUTE_THREADS / 8;  // groups of a cluster
    const int wanted = (groups + EACH - 1) / EACH;
    return wanted < QUANTISE_CLUSTERS ? wanted : QUANTISE_CLUSTERS;
}

// A product of rows by columns.
inline Product product_of(const uint8_t* units, const float* scale, int rows, int columns, const uint8_t* codes,
                          const float* scales) {
    return {units, scale, rows / ROWS, chunks_of(columns), 0, codes, scales};
}

// T tokens, E experts of k for each; H, I multiples of 64. w13, w2: units; g13, g2 fp32 (E,), 2^(m - 6) with 2^m the
// largest scale of the matrix; x, out bf16 (T, H); ids int32, topk_weights fp32 (T, k). -> a cudaError_t.
inline int run(const uint8_t* w13, const float* g13, const uint8_t* w2, const float* g2, const bf16* x, const int* ids,
               const float* topk_weights, bf16* out, void* workspace, int tokens, int topk, int experts, int hidden,
               int inner) {
    if (!prefill::within_limits(tokens, topk, experts, hidden)) return cudaErrorInvalidValue;
    const int slots = tokens * topk;
    const Workspace space(workspace, tokens, topk, experts, hidden, inner);
    const auto x_codes = reinterpret_cast<uint8_t*>(space.x), v_codes = reinterpret_cast<uint8_t*>(space.inner);
    Problem problem{{product_of(w13, g13, 2 * inner, hidden, x_codes, space.x_scales),
                     product_of(w2, g2, hidden, inner, v_codes, space.v_scales)},
                    space.parts,
                    space.tables,
                    {},
                    slots,
                    scale_slots(slots, experts),
                    hidden};
    const int chunks = problem.product[FIRST].chunks, groups = tokens * chunks;
    if (const cudaError_t error = prefill::launch_route(
            route, 1 + quantising(groups), experts, ids, topk_weights, space.tables, slots, topk, experts,
            Few::BLOCK_N, Many::BLOCK_N, x, space.quantised, space.quantised_scales, groups, hidden))
        return error;
    const dim3 grid(unsigned(prefill::most_items(slots, experts, Many::BLOCK_N)),
                    (chunks + GATHER_CHUNKS - 1) / GATHER_CHUNKS);
    if (const cudaError_t error =
            programmatic::launch(gather, grid, GATHER_THREADS, 0, space.quantised, space.quantised_scales, x_codes,
                                 space.x_scales, space.tables, slots, problem.scale_slots, chunks))
        return error;
    return prefill::launch_products<Few, Many>(problem, ids, out, tokens, topk, experts);
}

}  // namespace mxfp4
