// fmha_decode for few heads, such as tensor parallelism leaves: mma.sync with 16 heads as rows, nothing padded to 64.
//
// A block of WARPS warps has a query, 16 of its heads and a share of its entries; a cluster of blocks has all of them.
// A tile has 8 entries a warp. Each warp
//   asks     for its own entries by cp.async, NUM_STAGES tiles ahead; a lane for just the bytes that it decodes itself
//   decodes  them to bf16 in registers, where they are at once the B fragments of S = Q K^T (dims are permuted, and so
//            are those of Q, all of which a warp keeps in registers), and stores them to shared memory as values
//   scores   its 8 entries for all heads, and leaves them there in fp32
//   waits    for the block: the one barrier of a tile, since values and scores have two places
//   sums     O += P V of its 512 / WARPS dims. Every warp makes P out of the scores itself, so that none waits for
//            another one's maximum; all of them get the same bits.
// The running maximum moves only if it grows by more than RESCALE_THRESHOLD. In the end each block of the cluster gets
// the sums of all others for a part of the outputs, as fp16 with a scale, and joins them. Sums have a fixed order, so
// results repeat bit by bit.
//
// sm90_few_heads_block.cuh has the tile and what lies in shared memory, _score.cuh what is loaded, decoded and
// scored, _sum.cuh the softmax and the values, _join.cuh the end.
//
// q, out  bf16 (B, S, H, 512)      lse  fp32 (B, S, H)      sink  fp32 (H,)
// caches  uint8 (pages, stride), lists  int32 (B, S, n), lengths  int32 (B,), as task.py describes them
#pragma once

#include "launch_clusters.cuh"
#include "sm90_few_heads_join.cuh"
#include "sm90_few_heads_score.cuh"

namespace fmha::few {

// ---- kernel

// Grid (B S tiles of heads, times blocks of a cluster).
__global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_MULTIPROCESSOR) attend(const __grid_constant__ Problem p) {
    extern __shared__ uint8_t dynamic[];
    uint32_t const smem = (smem_address(dynamic) + 127) & ~127u;
    Item const item(p);
    Lists const lists = {p.window, p.compressed, p.window_index + int64_t(item.query) * p.nw,
                         p.compressed_index + int64_t(item.query) * p.nc};
    programmatic::wait();

    // Lists are nearly always full: their first indices are asked for together with the lengths, not after them.
    int const window = min(max(__ldg(p.window_length + item.batch), 0), p.nw);
    int const compressed = min(max(__ldg(p.compressed_length + item.batch), 0), p.nc);
    uint32_t const staging = smem + SMEM_STAGING + threadIdx.x / 32 * STAGED_GROUP;
    Gather gather = {lists, Share(p.nw, p.nc, item.rank, p.blocks), staging};
    int first[NUM_STAGES + 1];
#pragma unroll
    for (int i = 0; i <= NUM_STAGES; ++i) first[i] = gather.index(i);
    if (window != p.nw || compressed != p.nc) {
        gather.share = Share(window, compressed, item.rank, p.blocks);
#pragma unroll
        for (int i = 0; i <= NUM_STAGES; ++i) first[i] = gather.index(i);
    }
    gather.begin(first);
    Queries queries;  // behind the entries, which take longer
    queries.load(p, item, smem + SMEM_QUERIES);
    Pieces const pieces(p.blocks);
    if (threadIdx.x == NUM_THREADS - 32) {  // publishing takes long, but entries take longer
        barrier_init(smem + RECEIVED_BARRIER, 1);
        barrier_init(smem + FREE_BARRIER, p.blocks.by);
        barrier_publish();
        if (p.blocks.by > 1) arrive_and_expect_tx(smem + RECEIVED_BARRIER, pieces.bytes(item.rank));
    }
    __syncthreads();
    cluster_arrive_relaxed();
    auto const tell_free = [&] {  // behind the block's barrier: others may write to the first place of values
        cluster_wait();           // all blocks have their barriers; this was long ago
        if (threadIdx.x < p.blocks.by) arrive_at(in_block(threadIdx.x, smem + FREE_BARRIER));
    };
    if (gather.share.count == 0) tell_free();

    float o[DIMS / 8][4] = {};
    Softmax softmax;
#pragma unroll 1
    for (int tile = 0; tile < gather.share.count; ++tile) {
        bool const last = tile + 1 == gather.share.count;
        uint32_t const place = (gather.share.count - tile) % 2;  // 1 of the last tile
        uint32_t const values = smem + SMEM_VALUES + place * VALUES;
        uint32_t const scores = smem + SMEM_SCORES + tile % 2 * SCORES;
        cp_async_wait<NUM_STAGES - 1>();
        score(queries, gather.staged(tile), gather.live[0], values, scores);
        gather.advance(tile);
        __syncthreads();
        if (last) tell_free();
        sum_tile(softmax, o, scores, values);
    }
    cp_async_wait<0>();  // none may land after the block has ended
    __syncthreads();     // and the last values are read
    Left const left = leave_sums(softmax, o, smem);
    __syncthreads();
    wait(smem + FREE_BARRIER, 0);
    send_sums(left, pieces, item.rank, smem);
    if (p.blocks.by == 1)
        __syncthreads();
    else
        wait(smem + RECEIVED_BARRIER, 0);
    weigh(p, item, smem);
    __syncthreads();
    join(p, item, pieces, smem);
}

// ---- launcher

inline cudaError_t prepare(int blocks) {
    auto const error = cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (error != cudaSuccess || blocks <= 8) return error;
    return cudaFuncSetAttribute(attend, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

}  // namespace fmha::few

// Clusters of `blocks` blocks, 1 to 16, that this GPU has room for at once, into *fit. -> a cudaError_t.
extern "C" int clusters(int blocks, int* fit) {
    auto const error = fmha::few::prepare(blocks);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = blocks, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks), config.blockDim = dim3(fmha::few::NUM_THREADS);
    config.dynamicSmemBytes = fmha::few::SHARED, config.attrs = &attribute, config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(fit, fmha::few::attend, &config);
}

// Device pointers; page_*: log2 of the entries of a page, stride_*: its bytes; blocks: of a cluster, which has a query
// and 16 heads, 1 to 16; cosine, sine: as Turn has them; early: as launch has it. -> a cudaError_t.
extern "C" int launch_few_heads(const void* q, const uint8_t* window, const int* window_index, const int* window_length,
                      const uint8_t* compressed, const int* compressed_index, const int* compressed_length,
                      const float* sink, void* out, float* lse, const float* cosine, const float* sine, int batch,
                      int queries, int heads, int nw, int nc,
                      int page_window, int stride_window, int page_compressed, int stride_compressed, int blocks,
                      int early) {
    int const tiles = (heads + fmha::few::BLOCK_M - 1) / fmha::few::BLOCK_M;
    fmha::few::Problem const p = {
        static_cast<const __nv_bfloat16*>(q),
        {window, uint32_t(stride_window), uint32_t(page_window)},
        {compressed, uint32_t(stride_compressed), uint32_t(page_compressed)},
        window_index, window_length, compressed_index, compressed_length, sink, {cosine, sine},
        static_cast<__nv_bfloat16*>(out), lse, heads, nw, nc,
        fmha::Divisor(queries), fmha::Divisor(tiles), fmha::Divisor(blocks),
    };
    auto const error = fmha::few::prepare(blocks);
    if (error != cudaSuccess) return error;
    return programmatic::launch_clusters(fmha::few::attend, dim3(batch * queries * tiles * blocks),
                                         dim3(fmha::few::NUM_THREADS), fmha::few::SHARED, blocks, early, p);
}
