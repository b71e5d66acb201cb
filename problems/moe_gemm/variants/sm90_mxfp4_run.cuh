// The call with MXFP4 weights and FP8 activations: its memory, and the launches of sm90_routing.cuh, sm90_mxfp4.cuh and
// sm90_prefill_run.cuh's last one behind the other.
#pragma once

#include "launch.cuh"
#include "sm90_mxfp4.cuh"
#include "sm90_prefill_run.cuh"

namespace mxfp4 {

// What is kept while a call runs, one after the other in memory.
struct Workspace {
    uint8_t *x, *v;  // codes
    float *x_scales, *v_scales;
    bf16* parts;
    prefill::Tables tables;
    size_t bytes;
    Workspace(void* base, int tokens, int topk, int experts, int hidden, int inner) : bytes(0) {
        const size_t slots = size_t(tokens) * topk, items = prefill::most_items(slots, experts, Many::BLOCK_N);
        const size_t of_x = (hidden + COLUMNS - 1) / COLUMNS, of_v = (inner + COLUMNS - 1) / COLUMNS;
        const size_t scales = scale_slots(int(slots), experts);
        const auto take = [&](size_t size) {
            const size_t at = bytes;
            bytes += (size + 255) / 256 * 256;
            return static_cast<uint8_t*>(base) + at;
        };
        x = take(of_x * slots * COLUMNS), v = take(of_v * slots * COLUMNS);
        x_scales = reinterpret_cast<float*>(take(4 * of_x * scales));
        v_scales = reinterpret_cast<float*>(take(4 * of_v * scales));
        parts = reinterpret_cast<bf16*>(take(2 * slots * hidden));
        tables.slot = reinterpret_cast<int*>(take(4 * slots));
        tables.token = reinterpret_cast<int*>(take(4 * slots));
        tables.weight = reinterpret_cast<float*>(take(4 * slots));
        for (prefill::List* const list : {&tables.few, &tables.many}) {
            list->items = reinterpret_cast<int4*>(take(16 * items));
            list->ready = reinterpret_cast<int*>(take(4 * items));
            list->head = reinterpret_cast<int*>(take(8));
        }
    }
};

template <class F>
inline int launch_experts(Problem& problem, const prefill::List& list, int processors) {
    constexpr int bytes = F::BYTES + 1024;
    if (const cudaError_t error =
            cudaFuncSetAttribute(experts<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    problem.list = list;
    return programmatic::launch(experts<F>, processors, F::NUM_THREADS, bytes, problem);
}

// A product of rows by columns.
inline Product product_of(const uint8_t* units, const float* scale, int rows, int columns, const uint8_t* codes,
                          const float* scales) {
    return {units, scale, rows / ROWS, (columns + COLUMNS - 1) / COLUMNS, (rows + 255) / 256, codes, scales};
}

// T tokens, E experts of k for each; H, I multiples of 64. w13, w2: units; g13, g2 fp32 (E,), 2^(m - 6) with 2^m the
// largest scale of the matrix; x, out bf16 (T, H); ids int32, topk_weights fp32 (T, k). -> a cudaError_t.
inline int run(const uint8_t* w13, const float* g13, const uint8_t* w2, const float* g2, const bf16* x, const int* ids,
               const float* topk_weights, bf16* out, void* workspace, int tokens, int topk, int experts, int hidden,
               int inner) {
    const int64_t slots = int64_t(tokens) * topk, pieces = int64_t(tokens) * hidden / 8;
    if (experts > prefill::ROUTE_EXPERTS || slots >= prefill::ROUTE_SLOTS || pieces >= int64_t(1) << 31)
        return cudaErrorInvalidValue;
    int device, processors;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device))
        return error;
    const Workspace space(workspace, tokens, topk, experts, hidden, inner);
    Problem problem{{product_of(w13, g13, 2 * inner, hidden, space.x, space.x_scales),
                     product_of(w2, g2, hidden, inner, space.v, space.v_scales)},
                    space.parts,
                    space.tables,
                    {},
                    int(slots),
                    scale_slots(int(slots), experts),
                    hidden};

    using namespace prefill;
    const size_t route_bytes = route_shared_bytes(experts);
    if (const cudaError_t error =
            cudaFuncSetAttribute(route, cudaFuncAttributeMaxDynamicSharedMemorySize, int(route_bytes)))
        return error;
    route<<<ROUTE_BLOCKS, ROUTE_THREADS, route_bytes>>>(ids, topk_weights, space.tables, int(slots), topk, experts,
                                                        mxfp4::Few::BLOCK_N, mxfp4::Many::BLOCK_N);
    if (const cudaError_t error = cudaGetLastError()) return error;
    const int chunks = problem.product[FIRST].chunks;
    const dim3 grid(unsigned(most_items(slots, experts, mxfp4::Many::BLOCK_N)),
                    (chunks + mxfp4::GATHER_CHUNKS - 1) / mxfp4::GATHER_CHUNKS);
    if (const cudaError_t error =
            programmatic::launch(mxfp4::gather, grid, mxfp4::GATHER_THREADS, 0, x, space.x, space.x_scales,
                                 space.tables, int(slots), problem.scale_slots, hidden))
        return error;

    // Each launch waits for the whole one ahead, hence for all before. The small items come last: a shorter end.
    if (const int error = mxfp4::launch_experts<mxfp4::Many>(problem, space.tables.many, processors)) return error;
    if (const int error = mxfp4::launch_experts<mxfp4::Few>(problem, space.tables.few, processors)) return error;
    return programmatic::launch(combine, unsigned((pieces + COMBINE_THREADS - 1) / COMBINE_THREADS), COMBINE_THREADS, 0,
                                static_cast<const bf16*>(space.parts), ids, out, pieces, topk, experts, hidden);
}

}  // namespace mxfp4
