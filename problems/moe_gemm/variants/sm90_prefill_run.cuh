// The call for many tokens: its memory, the launches of sm90_routing.cuh and sm90_prefill.cuh one behind the other, and
// the last of them, which adds up each token's rows.
#pragma once

#include "launch.cuh"
#include "ptx.cuh"
#include "sm90_prefill.cuh"
#include "sm90_routing.cuh"
#include "tma.cuh"

namespace prefill {

// ---- the last kernel

constexpr int COMBINE_THREADS = 256, COMBINE_AT_ONCE = 6;

// out[t] = the sum of parts[t k + j] in the order of j. A thread has 8 columns.
__global__ void __launch_bounds__(COMBINE_THREADS)
    combine(const bf16* parts, const int* ids, bf16* out, int64_t pieces, int topk, int experts, int hidden) {
    programmatic::wait();
    const int64_t piece = int64_t(blockIdx.x) * COMBINE_THREADS + threadIdx.x;
    if (piece >= pieces) return;
    const int64_t token = piece / (hidden / 8);
    const int column = int(piece % (hidden / 8));
    const uint4* const from = reinterpret_cast<const uint4*>(parts) + token * topk * (hidden / 8) + column;
    float sum[8] = {};
#pragma unroll 1
    for (int first = 0; first < topk; first += COMBINE_AT_ONCE) {
        uint4 v[COMBINE_AT_ONCE];
#pragma unroll
        for (int j = 0; j < COMBINE_AT_ONCE; ++j) {
            v[j] = make_uint4(0, 0, 0, 0);
            // What is no expert has left its row as it was.
            if (first + j < topk && unsigned(__ldg(ids + token * topk + first + j)) < unsigned(experts))
                v[j] = __ldcg(from + int64_t(first + j) * (hidden / 8));
        }
#pragma unroll
        for (int j = 0; j < COMBINE_AT_ONCE; ++j) {
            const uint32_t words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[2 * i] += __uint_as_float(words[i] << 16);
                sum[2 * i + 1] += __uint_as_float(words[i] & 0xFFFF0000);
            }
        }
    }
    reinterpret_cast<uint4*>(out)[piece] = make_uint4(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]),
                                                      pack_bf16x2(sum[4], sum[5]), pack_bf16x2(sum[6], sum[7]));
}

// ---- launches

// What is kept while a call runs, one after the other in memory, at a multiple of 256. Its content may be anything.
struct Workspace {
    bf16 *x, *inner, *parts;  // of Problem
    Tables tables;
    size_t bytes;
    uint8_t* base;
    template <class T>
    void take(T*& part, size_t count) {
        part = reinterpret_cast<T*>(base + bytes);
        bytes += (count * sizeof(T) + 255) / 256 * 256;
    }
    Workspace(void* memory, int tokens, int topk, int experts, int hidden, int inner_size, int most = Many<>::BLOCK_N)
        : bytes(0), base(static_cast<uint8_t*>(memory)) {
        const size_t slots = size_t(tokens) * topk;
        const size_t items = most_items(slots, experts, most);
        take(x, slots * hidden), take(inner, slots * inner_size), take(parts, slots * hidden);
        take(tables.slot, slots), take(tables.token, slots), take(tables.weight, slots);
        for (List* const list : {&tables.few, &tables.many})
            take(list->items, items), take(list->ready, items), take(list->head, 2);
    }
};

// What kernels count with.
inline bool within_limits(int tokens, int topk, int experts, int hidden) {
    return experts <= ROUTE_EXPERTS && int64_t(tokens) * topk < ROUTE_SLOTS && int64_t(tokens) * hidden / 8 < 1LL << 31;
}

// A kernel whose first cluster sorts.
template <class... Parameters, class... Arguments>
cudaError_t launch_route(void (*kernel)(Parameters...), int clusters, int experts, Arguments... args) {
    const size_t bytes = route_shared_bytes(experts);
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)))
        return error;
    kernel<<<clusters * ROUTE_BLOCKS, ROUTE_THREADS, bytes>>>(args...);
    return cudaGetLastError();
}

template <class F, class P>
cudaError_t launch_experts(P& problem, const List& list, int processors) {
    constexpr int bytes = F::BYTES + 1024;
    const auto kernel = experts<F, P>;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    problem.list = list;
    for (auto& product : problem.product) product.blocks = (product.rows + F::UNITS - 1) / F::UNITS;
    return programmatic::launch(kernel, processors, F::NUM_THREADS, bytes, problem);
}

// Both products of both lists, and the sums. Each launch waits for the whole one ahead, hence for all before. The small
// items come last: a shorter end.
template <class Few, class Many, class P>
cudaError_t launch_products(P& problem, const int* ids, bf16* out, int tokens, int topk, int experts) {
    const int64_t pieces = int64_t(tokens) * problem.hidden / 8;
    int device, processors;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device))
        return error;
    if (const cudaError_t error = launch_experts<Many>(problem, problem.tables.many, processors)) return error;
    if (const cudaError_t error = launch_experts<Few>(problem, problem.tables.few, processors)) return error;
    return programmatic::launch(combine, unsigned((pieces + COMBINE_THREADS - 1) / COMBINE_THREADS), COMBINE_THREADS, 0,
                                problem.parts, ids, out, pieces, topk, experts, problem.hidden);
}

// T tokens, E experts of k for each; H, I multiples of 64. w13: units (E, 2 I / 32, H / 64), w2: (E, H / 32, I / 64),
// as tensors of 8 bytes an element in boxes of BOX unit rows by one; g13, g2, in13, in2 fp32 (E,); x, out bf16 (T, H);
// ids int32, topk_weights fp32 (T, k). -> a cudaError_t.
template <int ACTIVATION>
int run(const tma::Tensor& w13, const float* g13, const float* in13, const tma::Tensor& w2, const float* g2,
        const float* in2, const bf16* x, const int* ids, const float* topk_weights, bf16* out, void* workspace,
        int tokens, int topk, int experts, int hidden, int inner_size) {
    using Few = Few<ACTIVATION>;
    using Many = Many<ACTIVATION>;
    if (!within_limits(tokens, topk, experts, hidden)) return cudaErrorInvalidValue;
    const int slots = tokens * topk;
    // What a stage's barrier waits for is that many bytes.
    for (const tma::Tensor& w : {w13, w2})
        if (w.rank != 3 || w.box[0] != WORDS || w.box[1] != BOX || w.box[2] != 1) return cudaErrorInvalidValue;
    const Workspace space(workspace, tokens, topk, experts, hidden, inner_size);

    Problem problem{{{{}, g13, in13, 2 * inner_size / units::ROWS, hidden / units::COLUMNS, 0},
                     {{}, g2, in2, hidden / units::ROWS, inner_size / units::COLUMNS, 0}},
                    space.x,
                    space.inner,
                    space.parts,
                    space.tables,
                    {},
                    slots,
                    hidden};
    tma::Encode encode;
    if (const cudaError_t error = tma::find_encode(&encode)) return error;
    if (!tma::encode_map(encode, w13, &problem.product[FIRST].units) ||
        !tma::encode_map(encode, w2, &problem.product[SECOND].units))
        return cudaErrorInvalidValue;

    if (const cudaError_t error = launch_route(route, 1, experts, ids, topk_weights, space.tables, slots, topk,
                                               experts, Few::BLOCK_N, Many::BLOCK_N))
        return error;
    const auto items = unsigned(most_items(slots, experts, Many::BLOCK_N));
    const dim3 grid(items, (hidden / 64 + GATHER_CHUNKS - 1) / GATHER_CHUNKS);
    if (const cudaError_t error =
            programmatic::launch(gather<ACTIVATION>, grid, GATHER_THREADS, 0, x, in13, space.x, space.tables, slots,
                                 hidden))
        return error;
    return launch_products<Few, Many>(problem, ids, out, tokens, topk, experts);
}

}  // namespace prefill
