// fmha_prefill with wgmma: entries are staged once as bf16, then persistent blocks take query after query, of 64 heads.
//
//   stage   decodes what tokens may see out of the FP8 pages into rows of 512 bf16 (sm90_stage.cuh)
//   attend  a block of 512 threads has one query and 64 of its heads (rows of wgmma) at a time, tile by tile of 64
//           entries, the first two of which are the window's:
//     warpgroup 0         loads tiles by cp.async, row by row, but for what is there already of the query before
//     warpgroup 1         S = Q K^T, softmax along the list with a running maximum, P as bf16
//     warpgroups 2 and 3  O += P V, dims 0 to 255 and 256 to 511, V being the same tile as K, read by rows
//
// Half of a tile's values are summed beside the scores of the next one, half while P is made of these, so that the
// tensor cores always work. Tiles follow each other without regard to queries: the next one's come while this one's
// last values are summed and written. The running maximum moves only if it grows by more than RESCALE_THRESHOLD, so O
// is hardly ever rescaled. Sums have a fixed order: results repeat bit by bit.
#include "sm90_consumers.cuh"
#include "tma.cuh"

namespace fmha {

template <class F>
__global__ void __launch_bounds__(F::NUM_THREADS, 1) attend(const __grid_constant__ Problem p) {
    extern __shared__ uint8_t dynamic[];
    auto& shared = *reinterpret_cast<SharedStorage<F>*>((reinterpret_cast<uintptr_t>(dynamic) + 1023) / 1024 * 1024);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    const int lane = threadIdx.x % 32, row = 16 * warp + lane / 4;
    if (threadIdx.x == 0) {
        for (int i = 0; i < F::NUM_STAGES; ++i)
            for (int part = 0; part < PARTS; ++part) {
                // Threads that load, and at the last part warps that say which rows count.
                barrier_init(smem_address(&shared.full[i][part]), part == PARTS - 1 ? 128 + 4 : 128);
                barrier_init(smem_address(&shared.empty[i][part]), 8);  // warps that sum values
            }
        for (int part = 0; part < Q_PARTS; ++part) {
            barrier_init(smem_address(&shared.q_full[part]), 1);
            barrier_init(smem_address(&shared.q_empty[part]), 4);
        }
        barrier_init(smem_address(&shared.p_full), 4);  // warps that score
        barrier_init(smem_address(&shared.scored), 4);
        barrier_init(smem_address(&shared.p_empty), 8);
        barrier_publish();
    }
    programmatic::trigger();
    __syncthreads();
    programmatic::wait();
    if (group == 0) {
        warpgroup_reg_dealloc<F::PRODUCER_REGISTERS>();
        Producer<F>{p, shared, warp, lane}.run();
    } else if (group == 1) {
        warpgroup_reg_dealloc<F::SCORE_REGISTERS>();
        Scores<F>{p, shared, warp, lane, row}.run();
    } else {
        warpgroup_reg_alloc<F::VALUE_REGISTERS>();
        Values<F>{p, shared, group - 2, warp, lane, row}.run();
    }
}

// Tokens of a unit: more of them share more tiles, fewer leave blocks more alike. Tokens that choose share the window
// in pairs, and their lists grow, so that many would be uneven.
inline int run_for(const Problem& p, int processors) {
    if (p.lists.each && p.lists.nc > 0) return 2;
    int best = 1;
    float least = INFINITY;
    for (int run = 1; run <= 16; run *= 2) {
        const int units = (p.tokens + run - 1) / run * p.head_tiles;
        const float time = (units + processors - 1) / processors * (run + 0.25f);  // of a first token's loads
        if (time <= least) least = time, best = run;
    }
    return best;
}

inline cudaError_t run_attend(Problem& p) {
    using F = Form<64, 64, 2>;
    constexpr int SHARED = sizeof(SharedStorage<F>) + 1024;  // with room to align the start
    static_assert(SHARED <= 227 * 1024);
    int device, processors;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    const auto count = cudaDevAttrMultiProcessorCount;
    if (const cudaError_t error = cudaDeviceGetAttribute(&processors, count, device)) return error;
    const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (const cudaError_t error = cudaFuncSetAttribute(attend<F>, limit, SHARED)) return error;
    p.run = run_for(p, processors);
    p.units = (p.tokens + p.run - 1) / p.run * p.head_tiles;
    return programmatic::launch(attend<F>, dim3(min(p.units, processors)), F::NUM_THREADS, SHARED, p);
}

}  // namespace fmha

// Sizes and addresses of a call, in the order of sm90_wgmma.py's Call.
struct Call {
    const int *starts, *window_index, *compressed_index, *compressed_length;
    const uint8_t *window, *compressed;
    const float *sink, *cosine, *sine;  // cosine, sine: as Problem has them
    void* out;
    float* lse;
    void *rows, *seen;  // scratch: bf16 (T + 127 B + compressed_count, 512), 16 bytes a token
    int64_t token_stride, head_stride, window_stride, compressed_stride;     // of out; bytes of a page
    int window_shift, compressed_shift, compressed_entries;  // of a page, log2; of all
    int tokens, batch, heads, nw, nc, each, compressed_count, by_list, heads_outer, early;
};

// q_map: of q, boxes of 64 dims by 64 heads of a token. -> a cudaError_t.
extern "C" int launch(const Call* call, const tma::Tensor* q_map) {
    const Call& c = *call;
    fmha::Lists const lists = {c.window_index, c.compressed_index, c.compressed_length, c.nw, c.nc, c.each != 0};
    const auto rows = static_cast<__nv_bfloat16*>(c.rows), out = static_cast<__nv_bfloat16*>(c.out);
    const auto seen = static_cast<fmha::Seen*>(c.seen);
    const int count = c.tokens + (fmha::WINDOW - 1) * c.batch;  // rows of windows
    fmha::Staging const staging = {
        {c.window, c.window_stride, c.window_shift}, {c.compressed, c.compressed_stride, c.compressed_shift},
        lists, c.starts, rows, seen, c.batch, count, c.compressed_count, c.compressed_entries, c.by_list != 0,
    };
    fmha::Problem p = {{}, rows, seen, lists, c.sink, c.cosine, c.sine, out, c.lse, c.token_stride, c.head_stride,
                       count, c.tokens, c.heads, (c.heads + 63) / 64, 0, 0, c.by_list != 0, c.heads_outer != 0};
    tma::Encode encode;
    if (const cudaError_t error = tma::find_encode(&encode)) return error;
    if (!tma::encode_map(encode, *q_map, &p.q)) return cudaErrorInvalidValue;
    constexpr int ROWS = 4, EACH = fmha::STAGE_THREADS / 32 * ROWS;  // of a warp, of a block
    const dim3 blocks(unsigned((int64_t(count) + c.compressed_count + EACH - 1) / EACH));
    const auto staged = programmatic::launch_early(fmha::stage<ROWS>, blocks, fmha::STAGE_THREADS, 0, c.early, staging);
    return staged != cudaSuccess ? staged : fmha::run_attend(p);
}
