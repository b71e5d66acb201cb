// linear_decode on Hopper: every weight is read once and meets up to 32 tokens in mma.sync, in registers.
//
// A block of 16 warps holds its tokens' input in shared memory. A warp multiplies a tile of 32 rows by a chunk of k,
// its weights coming through its ring with bulk copies, so a warp waits for no other. 16 / chunks tiles are
// under way in a block at once; then the chunks' sums are added in the order of k, whatever the number of tokens, so a
// token's bits do not depend on the others. With many tokens several blocks share a tile's chunks, so that a block
// holds a part of the input only: a cluster of two, which read each other's sums, or more, which are no cluster and
// exchange sums through global memory, since clusters of 4 do not fill the GPU.
//
// Weights lie in units of 32 rows by 64 columns, [rows / 32][k / 64], each a stage of the ring or two. Lane l = 4 g + c
// owns columns 16 c .. 16 c + 15 of rows g, g + 8, g + 16 and g + 24, and step j of a unit takes columns 4 j .. 4 j + 3
// of these: k = 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of the instruction. So inputs lie in their natural order.
//   fp8    2048 bytes: 512 r + 16 l .. + 15 are the lane's 16 codes of row g + 8 r
//   nvfp4  1152 bytes, as nvfp4_units.cuh describes them
//   bf16   4096 bytes: 2048 h + 512 r + 16 l .. + 15 are columns 8 h .. 8 h + 7 of the lane's 16 of row g + 8 r
//
// fp8: codes become fp16, exactly, and so do the input's codes; sums of 64 columns are multiplied by both scales in
// fp32. Where the input is not quantised it is divided by a power of two for each token and block of 128, such that the
// largest is 2^14 to 2^15: fp16 then holds all its bits down to 2^-29 of that, and an error of 2^-40 below.
//
// nvfp4: a quantised input is code * scale, which is exact in bf16; its input scale is in the factor of the sums.
//
// A chain of up to 8 tokens in nvfp4 is one launch: a ring goes on from a link's last tile to the next one's first, so
// that weights come while blocks meet between links. Otherwise it is a launch a link.
//
// Each block brings its input into that form itself, or, with more tokens, quantise_kernel writes the same bits to
// memory once, and blocks copy them. In a chain of nvfp4 the epilogue of the previous link does.
//
// sm90_mma_formats.cuh has tile sizes, what the host fills in, and how work is divided; _quantise and _input bring the
// input to shared memory; _multiply has rings and products, _reduce adds sums and writes outputs, _kernel joins them.
#include "launch_clusters.cuh"
#include "launch_cooperative.cuh"
#include "sm90_mma_kernel.cuh"

namespace linear_mma {

// ---- which configuration

cudaError_t multiprocessors(int* count) { return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, 0); }

// The I-th depth that TILES has for these. Of 0 stages there is none.
template <Format FORMAT, int BLOCK_M, bool CHAIN, int I>
constexpr int DEPTH = I < 3 ? tile_row(FORMAT, BLOCK_M, CHAIN).num_stages[I < 3 ? I : 0] : 0;

template <Format FORMAT, int BLOCK_M, bool CHAIN, int I = 0>
bool has_room(const Link& link) {  // with the shallowest rings
    if constexpr (DEPTH<FORMAT, BLOCK_M, CHAIN, I + 1>) {
        return has_room<FORMAT, BLOCK_M, CHAIN, I + 1>(link);
    } else {
        const int any = link.num_splits;  // multiprocessors, of no meaning here
        const Config<FORMAT, BLOCK_M, DEPTH<FORMAT, BLOCK_M, CHAIN, I>, CHAIN> config;
        return Geometry(config, link, any, false).smem_bytes <= MAX_SMEM;
    }
}

// True if the kernel supports this link; chain: as part of a chain in one launch. sm90_mma.py sends nothing else, and a
// test holds it to this. What norms its input has one group, and each block has all of it, in registers.
template <Format FORMAT>
bool supports(const Link& link, bool chain) {
    const int k = link.k_units * BLOCK_K;
    const bool converts = FORMAT == FP8 || link.quantise;
    if (link.tokens < 1 || link.tokens > (chain ? 8 : 32)) return false;
    if (converts && link.tokens > (FORMAT == FP8 ? 16 : 8) && !link.quantised) return false;
    const Chunks chunks = {link.k_units, log2_of(link.num_chunks), Config<FORMAT, 8, 2, false>::CHUNK_UNITS};
    if (FORMAT == FP8 && chunks.longest(1) * BLOCK_K > 32 * SCALE_K) return false;  // a lane has a scale of the chunk
    if (link.exchange ? chain || link.num_splits * link.section_chunks != link.num_chunks ||
                            link.num_splits > MAX_SECTIONS || link.section_chunks > MAX_SECTION_CHUNKS
                      : link.num_splits > MAX_CLUSTER)
        return false;
    if (link.norm_weights && (chain || !converts || link.quantised || link.tokens > 8 || link.num_splits > 1 ||
                              link.groups() > 1 || k % (32 * PIECE) ||
                              link.tokens * k > MAX_DIRECT * MATH_THREADS * PIECE))
        return false;
    if constexpr (FORMAT == NVFP4)
        if (chain) return has_room<FORMAT, 8, true>(link);
    if (chain) return false;
    return link.tokens > 16  ? has_room<FORMAT, 32, false>(link)
           : link.tokens > 8 ? has_room<FORMAT, 16, false>(link)
                             : has_room<FORMAT, 8, false>(link);
}

// ---- launcher

// A link by itself, with the deepest rings of TILES, up to max_stages, that there is room for.
template <Format FORMAT, int BLOCK_M, int I = 0>
cudaError_t launch_link(const Link& link, const Next& next, bool early, int max_stages) {
    using C = Config<FORMAT, BLOCK_M, DEPTH<FORMAT, BLOCK_M, false, I>, false>;
    int sms = 0;
    if (cudaError_t error = multiprocessors(&sms)) return error;
    const Geometry geo(C(), link, sms, early);
    if constexpr (DEPTH<FORMAT, BLOCK_M, false, I + 1>)
        if (C::NUM_STAGES > max_stages || geo.smem_bytes > MAX_SMEM)
            return launch_link<FORMAT, BLOCK_M, I + 1>(link, next, early, max_stages);
    const auto kernel = link_kernel<C>;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, geo.smem_bytes))
        return error;
    const Jobs<1> jobs = {{{geo, link, next}}, 1, nullptr};
    const dim3 grid(geo.teams * link.num_splits);
    if (!link.exchange)
        return programmatic::launch_clusters(kernel, grid, C::THREADS, geo.smem_bytes, link.num_splits, early, jobs);
    return early ? programmatic::launch_resident(kernel, grid, C::THREADS, geo.smem_bytes, jobs)
                 : programmatic::launch_cooperative(kernel, grid, C::THREADS, geo.smem_bytes, jobs);
}

// deep: whether the ring is filled while the link waits.
template <Format FORMAT>
cudaError_t launch_link(const Link& link, const Next& next, bool early, bool deep) {
    constexpr int ANY = 1 << 30;
    if (!supports<FORMAT>(link, false)) return cudaErrorInvalidValue;
    if (link.tokens > 16) return launch_link<FORMAT, 32>(link, next, early, ANY);
    if (link.tokens > 8) return launch_link<FORMAT, 16>(link, next, early, ANY);
    return launch_link<FORMAT, 8>(link, next, early, deep ? ANY : SHALLOW);
}

template <Format FORMAT, int I = 0>
cudaError_t launch_chain(Jobs<MAX_LINKS>& jobs) {
    using C = Config<FORMAT, 8, DEPTH<FORMAT, 8, true, I>, true>;
    int sms = 0, cluster = 1, blocks = 0, bytes = 0;
    if (cudaError_t error = multiprocessors(&sms)) return error;
    for (int i = 0; i < jobs.count; ++i) {
        const Link& link = jobs.job[i].link;
        const Geometry& geo = jobs.job[i].geo = Geometry(C(), link, sms, false);
        cluster = max(cluster, link.num_splits), blocks = max(blocks, geo.teams * link.num_splits);
        bytes = max(bytes, geo.smem_bytes);
    }
    if constexpr (DEPTH<FORMAT, 8, true, I + 1>)
        if (bytes > MAX_SMEM) return launch_chain<FORMAT, I + 1>(jobs);
    const auto kernel = link_kernel<C>;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeCooperative;  // blocks wait for each other, so all have to run at once
    attributes[1].val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = (blocks + cluster - 1) / cluster * cluster, config.blockDim = C::THREADS;
    config.dynamicSmemBytes = bytes, config.attrs = attributes, config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, jobs);
}

template <Format FORMAT>
cudaError_t launch_quantise(const Link& link, bool early) {
    const int lanes =
        link.tokens * link.groups() * ((link.k_units * BLOCK_K + SCALE_K - 1) / SCALE_K) * (SCALE_K / PIECE);
    const dim3 grid((lanes + QUANTISE_THREADS - 1) / QUANTISE_THREADS);
    return programmatic::launch_clusters(quantise_kernel<FORMAT>, grid, QUANTISE_THREADS, 0, 1, early, link);
}

}  // namespace linear_mma

using namespace linear_mma;

extern "C" {

// given: `count` Links. num_prequantised: separate kernels quantise the inputs of the first so many; the others'
// `quantised` is written by the previous link. format: as in Format. grid_counter: null for a launch a link, each but
// the first dependent on the one before; else all, nvfp4 of at most 8 tokens, are one launch, and it is a word of zero
// that the launch leaves so, but for its first bit. early: whether the first launch may begin before the previous
// kernel has ended; nothing that it reads before it waits may be written by kernels that are under way then: units,
// scales, factors, input scales, norm weights. One launch of all links is never early. -> a cudaError_t.
int launch(const void* given, int count, int num_prequantised, int format, uint32_t* grid_counter, int early) {
    const Link* links = static_cast<const Link*>(given);
    if (grid_counter && (format != NVFP4 || count > MAX_LINKS || num_prequantised)) return cudaErrorInvalidValue;
    Jobs<MAX_LINKS> jobs = {};
    jobs.count = count, jobs.grid_counter = grid_counter;
    for (int i = 0; i < count; ++i) {
        Link link = links[i];
        if (i < num_prequantised) {
            const auto quantise = format == FP8 ? launch_quantise<FP8> : launch_quantise<NVFP4>;
            if (cudaError_t error = quantise(link, i > 0 || early)) return error;
        }
        if (link.quantised) {
            link.x = reinterpret_cast<const __nv_bfloat16*>(link.quantised);
            link.group_stride = link.k_units * BLOCK_K, link.x_stride = link.groups() * link.group_stride;
        }
        Next next = {};
        if (i + 1 < count) {
            const Link& after = links[i + 1];
            next = {after.units, after.tiles, after.k_units, log2_of(after.num_chunks)};
            next.input_scales = after.input_scales, next.x_stride = after.x_stride;
            next.quantised_stride = after.groups() * after.k_units * BLOCK_K;
            if (i + 1 >= num_prequantised) next.quantised = after.quantised;
        }
        if (grid_counter) {
            if (!supports<NVFP4>(link, true)) return cudaErrorInvalidValue;
            jobs.job[i].link = link, jobs.job[i].next = next;
            continue;
        }
        const bool link_early = i > 0 || num_prequantised > 0 || early, deep = count > 1 || early;
        const auto launch_one = format == FP8     ? launch_link<FP8>
                                : format == NVFP4 ? launch_link<NVFP4>
                                                  : launch_link<BF16>;
        if (cudaError_t error = launch_one(link, next, link_early, deep)) return error;
    }
    return grid_counter ? launch_chain<NVFP4>(jobs) : cudaSuccess;
}

// -> 1 if `launch` supports the Link `given`, 0 where it returns an error; chain: in one launch. Needs no GPU.
int takes(const void* given, int format, int chain) {
    const Link& link = *static_cast<const Link*>(given);
    return format == FP8     ? supports<FP8>(link, chain)
           : format == NVFP4 ? supports<NVFP4>(link, chain)
                             : supports<BF16>(link, chain);
}

// NVFP4 codes (matrices, rows, columns / 2) and scales (matrices, rows, columns / 16) -> units. -> a cudaError_t.
int repack_nvfp4(const uint8_t* codes, const uint8_t* scales, uint8_t* to, int matrices, int rows, int columns) {
    return units::repack(codes, scales, to, matrices, rows, columns, false);
}

}  // extern "C"
