// linear_decode on Hopper: every weight is read once and meets up to 32 tokens in mma.sync, in registers.
//
// A block of 16 warps holds its tokens' input in shared memory. A warp multiplies a tile of 32 rows by a chunk of k,
// its weights coming through its ring with bulk copies, so a warp waits for no other. 16 / chunks tiles are
// under way in a block at once; then the chunks' sums are added in the order of k, whatever the number of tokens, so a
// token's bits do not depend on the others. With many tokens several blocks share a tile's chunks, so that a block
// holds a part of the input only: a cluster of two, which read each other's sums, or more, which are no cluster and
// tell each other sums through memory, since clusters of 4 do not fill the GPU.
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
// Each block brings its input into that form itself, or, with more tokens, the input is taken ahead: quantise_kernel
// writes the same bits to memory once, and blocks copy them. In a chain of nvfp4 the epilogue of the link ahead does.
#include "launch_clusters.cuh"
#include "launch_cooperative.cuh"
#include "sm90_mma_kernel.cuh"

namespace linear_mma {

// ---- launcher

cudaError_t multiprocessors(int* count) { return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, 0); }

constexpr int DEPTH = 2;  // stages of a ring

template <int FORMAT, int NT, int STAGES>
constexpr int RING = WARPS * STAGES * (Stage<FORMAT, NT>::BYTES + 8);  // with barriers

// With rings of the first of these depths that there is room for.
template <int FORMAT, int NT, int STAGES, int... FEWER>
cudaError_t run(const Link& p, const Next& next, bool behind) {
    int sms = 0;
    if (cudaError_t error = multiprocessors(&sms)) return error;
    const Geometry at(p, FORMAT, NT, RING<FORMAT, NT, STAGES>, Stage<FORMAT, NT>::UNITS, sms, behind);
    if constexpr (sizeof...(FEWER))
        if (at.bytes > MOST_SHARED) return run<FORMAT, NT, FEWER...>(p, next, behind);
    const auto kernel = link_kernel<FORMAT, NT, STAGES, false>;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, at.bytes))
        return error;
    const Jobs<1> jobs = {{{at, p, next}}, 1, nullptr};
    const dim3 grid(at.clusters * p.cluster);
    if (p.exchange)
        return behind ? programmatic::launch_resident(kernel, grid, THREADS, at.bytes, jobs)
                      : programmatic::launch_cooperative(kernel, grid, THREADS, at.bytes, jobs);
    return programmatic::launch_clusters(kernel, grid, THREADS, at.bytes, p.cluster, behind, jobs);
}

template <int FORMAT, int STAGES, int... FEWER>
cudaError_t run_chain(Jobs<MOST_LINKS>& jobs) {
    int sms = 0, cluster = 1, blocks = 0, bytes = 0;
    if (cudaError_t error = multiprocessors(&sms)) return error;
    for (int i = 0; i < jobs.count; ++i) {
        const Link& p = jobs.job[i].p;
        const Geometry& at = jobs.job[i].at =
            Geometry(p, FORMAT, 1, RING<FORMAT, 1, STAGES>, Stage<FORMAT, 1>::UNITS, sms, false);
        cluster = max(cluster, p.cluster), blocks = max(blocks, at.clusters * p.cluster), bytes = max(bytes, at.bytes);
    }
    if constexpr (sizeof...(FEWER))
        if (bytes > MOST_SHARED) return run_chain<FORMAT, FEWER...>(jobs);
    const auto kernel = link_kernel<FORMAT, 1, STAGES, true>;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeCooperative;  // blocks wait for each other, so all have to run at once
    attributes[1].val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = (blocks + cluster - 1) / cluster * cluster, config.blockDim = THREADS + 32;
    config.dynamicSmemBytes = bytes, config.attrs = attributes, config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, jobs);
}

template <int FORMAT>
cudaError_t quantise(const Link& p, bool behind) {
    const int lanes = p.tokens * p.groups() * ((p.k_units * COLUMNS + BLOCK - 1) / BLOCK) * (BLOCK / PIECE);
    const dim3 grid((lanes + QUANTISERS - 1) / QUANTISERS);
    return programmatic::launch_clusters(quantise_kernel<FORMAT>, grid, QUANTISERS, 0, 1, behind, p);
}

template <int FORMAT, int NT, int STAGES>
bool has_room(const Link& p) {
    const int sms = p.cluster;  // of no meaning here
    return Geometry(p, FORMAT, NT, RING<FORMAT, NT, STAGES>, Stage<FORMAT, NT>::UNITS, sms, false).bytes <= MOST_SHARED;
}

// Whether a launch has the link; together: in one of a chain. sm90_mma.py sends nothing else, and a test holds it to
// this. What norms its input is of one group, which each block has whole, in registers.
template <int FORMAT>
bool admits(const Link& p, bool together) {
    const int k = p.k_units * COLUMNS;
    const bool converts = FORMAT == FP8 || p.quantise;
    if (p.tokens < 1 || p.tokens > (together ? 8 : 32)) return false;
    if (converts && p.tokens > (FORMAT == FP8 ? 16 : 8) && !p.taken) return false;  // more are taken ahead
    const Cut cut = {p.k_units, log2_of(p.chunks), Stage<FORMAT, 1>::UNITS};
    if (FORMAT == FP8 && cut.longest(1) * COLUMNS > 32 * BLOCK) return false;  // a lane has a scale of the chunk
    if (p.exchange ? together || p.cluster * p.section != p.chunks || p.cluster > MOST_SECTIONS || p.section > MOST_TOLD
                   : p.cluster > MOST_CLUSTER)
        return false;
    if (p.norm && (together || !converts || p.taken || p.tokens > 8 || p.cluster > 1 || p.groups() > 1 ||
                   k % (32 * PIECE) || p.tokens * k > DIRECT * THREADS * PIECE))
        return false;
    if (together) return FORMAT == NVFP4 && has_room<FORMAT, 1, 2>(p);
    return p.tokens > 16  ? has_room<FORMAT, 4, DEPTH>(p)
           : p.tokens > 8 ? has_room<FORMAT, 2, DEPTH>(p)
                          : has_room<FORMAT, 1, 1>(p);
}

// DEEP: of a link whose ring is filled while it waits.
template <int FORMAT, int DEEP>
cudaError_t choose(const Link& p, const Next& next, bool behind, bool deep) {
    if (!admits<FORMAT>(p, false)) return cudaErrorInvalidValue;
    if (p.tokens > 16) return run<FORMAT, 4, DEPTH>(p, next, behind);
    if (p.tokens > 8) return run<FORMAT, 2, FORMAT == FP8 ? 3 : DEPTH, DEPTH>(p, next, behind);
    return deep ? run<FORMAT, 1, DEEP, DEPTH, 1>(p, next, behind) : run<FORMAT, 1, DEPTH, 1>(p, next, behind);
}

}  // namespace linear_mma

using namespace linear_mma;

extern "C" {

// given: `count` Links. ahead: of the first so many of them a kernel takes the input; the others' `taken` is written
// by the link ahead. format: as in Format. met: null for a launch a link, each behind the first dependent on the one
// ahead; else all, nvfp4 of at most 8 tokens, are one launch, and it is a word of zero that the launch leaves so, but
// for its first bit. early: whether the first launch may begin before the kernel ahead has ended; nothing that it
// reads before it waits may be written by kernels that are under way then: units, scales, factors, input scales, norm.
// One launch of all links is never early. -> a cudaError_t.
int launch(const void* given, int count, int ahead, int format, uint32_t* met, int early) {
    const Link* links = static_cast<const Link*>(given);  // a type of this file, which would hide the function
    if (met && (format != NVFP4 || count > MOST_LINKS || ahead)) return cudaErrorInvalidValue;
    Jobs<MOST_LINKS> jobs = {};
    jobs.count = count, jobs.met = met;
    for (int i = 0; i < count; ++i) {
        Link link = links[i];
        if (i < ahead)
            if (cudaError_t error = (format == FP8 ? quantise<FP8> : quantise<NVFP4>)(link, i > 0 || early)) return error;
        if (link.taken) {
            link.x = reinterpret_cast<const __nv_bfloat16*>(link.taken);
            link.group_columns = link.k_units * COLUMNS, link.x_columns = link.groups() * link.group_columns;
        }
        Next next = {};
        if (i + 1 < count) {
            const Link& behind = links[i + 1];
            next = {behind.units, behind.tiles, behind.k_units, log2_of(behind.chunks)};
            next.input_scales = behind.input_scales, next.x_columns = behind.x_columns;
            next.taken_columns = behind.groups() * behind.k_units * COLUMNS;
            if (i + 1 >= ahead) next.taken = behind.taken;
        }
        if (met) {
            if (!admits<NVFP4>(link, true)) return cudaErrorInvalidValue;
            jobs.job[i].p = link, jobs.job[i].next = next;
            continue;
        }
        const bool behind = i > 0 || ahead > 0 || early, deep = count > 1 || early;
        const cudaError_t error = format == FP8     ? choose<FP8, 3>(link, next, behind, deep)
                                  : format == NVFP4 ? choose<NVFP4, 3>(link, next, behind, deep)
                                                    : choose<BF16, 4>(link, next, behind, deep);
        if (error) return error;
    }
    if (!met) return cudaSuccess;
    return run_chain<NVFP4, 4, 3, 2>(jobs);
}

// -> 1 if `launch` has the Link `given`, 0 where it returns an error; together: in one launch of a chain. Needs no GPU.
int takes(const void* given, int format, int together) {
    const Link& p = *static_cast<const Link*>(given);
    return format == FP8     ? admits<FP8>(p, together)
           : format == NVFP4 ? admits<NVFP4>(p, together)
                             : admits<BF16>(p, together);
}

// NVFP4 codes (matrices, rows, columns / 2) and scales (matrices, rows, columns / 16) -> units. -> a cudaError_t.
int repack_nvfp4(const uint8_t* codes, const uint8_t* scales, uint8_t* to, int matrices, int rows, int columns) {
    return units::repack(codes, scales, to, matrices, rows, columns, false);
}

}  // extern "C"
