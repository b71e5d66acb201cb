// mhc_site in one launch, by the first row of this table that serves the call:
//
//   tokens     d         form                                                                    kernel
//   up to 4    to 8192   a cluster of 16 blocks a token; sums by st.async into shared memory     token_kernel<P, 1>
//   5 to 8     to 8192   the same, two tokens a cluster: not every GPU runs eight clusters       token_kernel<P, 2>
//   up to 16   any       blocks own columns of all tokens of a group, which is one tile; every   site_kernel<.., 0>
//                        block adds up for itself what u needs
//   more       any       the same, tile by tile; four warps of each block add up and mix some    site_kernel<.., LAG>
//                        of the tokens for all blocks
//
// Why: each cluster reads all of fn (1.6 MB at d = 4096), so only few tokens have one each, but their sums do not cross
// L2: 9.1 and 9.9 us at T = 1 and 8, where blocks took 12.0 and 13.7 (H200, d = 4096). Blocks read fn once for all
// tokens. While a group is one tile, adding up in every block saves the weights of u a second crossing; with more tiles
// each block would read all sums of all tokens. README.md has the steps and their times.
#include <utility>

#include "launch_clusters.cuh"
#include "launch_cooperative.cuh"
#include "sm90_columns_blocks.cuh"
#include "sm90_columns_token.cuh"

namespace columns {

// Columns of a block; units of 2 bytes that the addends of a value take; tiles that out is made behind x'.
struct Form {
    int columns, units, lag;
};
// Narrow columns first: the more blocks, the less each has to do. Wide ones lag by what fits into shared memory: the
// more, the less a block waits for others.
constexpr Form FORMS[] = {
    {32, 4, 0}, {64, 4, 0}, {128, 4, 0},              // up to TILE_TOKENS tokens
    {32, 4, 7}, {64, 4, 7}, {128, 2, 7}, {128, 4, 5}  // more
};
constexpr int NUM_FORMS = sizeof(FORMS) / sizeof(Form);
constexpr int MOST_SHARED = 227 * 1024;  // bytes of a block

inline int slices(int hidden, int columns) { return (hidden + columns - 1) / columns; }

// Groups of tokens so that each block adds up little, then the first form that takes the addends and has all of its
// blocks resident, one a multiprocessor.
inline bool plan(const Problem& p, int multiprocessors, int* form, int* groups) {
    const int wanted = p.tokens <= 4 ? 1 : p.tokens <= TILE_TOKENS ? 2 : 4;
    for (*groups = wanted; *groups; *groups /= 2) {
        for (*form = 0; *form < NUM_FORMS; ++*form) {
            const Form& f = FORMS[*form];
            if (!f.lag == (p.tokens <= TILE_TOKENS) && p.y_bytes + p.second_bytes <= 2 * f.units &&
                slices(p.hidden, f.columns) * *groups <= multiprocessors)
                return true;
        }
    }
    return false;
}

// All blocks at once, since they wait for each other.
template <int FORM>
cudaError_t launch_blocks_as(int groups, Problem p) {
    constexpr Form F = FORMS[FORM];
    constexpr int BYTES = sizeof(typename Shape<F.columns, F.units, F.lag>::Shared);
    constexpr int THREADS = BLOCK_THREADS<F.lag == 0>;
    static_assert(BYTES <= MOST_SHARED, "over 227 KB of shared memory");
    static_assert(TILE_TOKENS <= WARPS, "in one tile each token has a warp that adds up");
    const auto kernel = site_kernel<F.columns, F.units, F.lag>;
    const dim3 grid(slices(p.hidden, F.columns), groups);
    p.group_tiles = ((p.tokens + groups - 1) / groups + TILE_TOKENS - 1) / TILE_TOKENS;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES))
        return error;
    if (p.early) return programmatic::launch_resident(kernel, grid, THREADS, BYTES, p);
    return programmatic::launch_cooperative(kernel, grid, THREADS, BYTES, p);
}

template <int... ALL_FORMS>
cudaError_t launch_blocks(int form, int groups, const Problem& p, std::integer_sequence<int, ALL_FORMS...>) {
    constexpr cudaError_t (*LAUNCHERS[])(int, Problem) = {launch_blocks_as<ALL_FORMS>...};
    return LAUNCHERS[form](groups, p);
}

constexpr int MOST_PASSES = 2;
constexpr int MOST_CLUSTER_TOKENS = 8;   // of a launch
constexpr int MOST_TOKENS_ONE_EACH = 4;  // up to these a cluster has one: not all GPUs run eight clusters at once

inline bool fits_clusters(const Problem& p) {
    return p.tokens <= MOST_CLUSTER_TOKENS && p.hidden <= CLUSTER * QUAD * QUADS * MOST_PASSES;
}

template <int TOKENS>
cudaError_t launch_clusters(const Problem& p) {
    const bool one_pass = p.hidden <= CLUSTER * QUAD * QUADS;
    const auto kernel = one_pass ? token_kernel<1, TOKENS> : token_kernel<MOST_PASSES, TOKENS>;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1))
        return error;
    const dim3 grid(CLUSTER, (p.tokens + TOKENS - 1) / TOKENS);
    return programmatic::launch_clusters(kernel, grid, TOKEN_THREADS, 0, CLUSTER, true, p);
}

}  // namespace columns

extern "C" {

// Words of 8 bytes that a launch of at most `blocks` blocks needs between calls, zero at first.
int exchange_words(int blocks) {
    using namespace columns;
    return STATE_WORDS + RING_TILES * TILE_TOKENS * blocks * (SLOTS + COPIES);
}

// The tensors of task.Data in order, then exchange_words words; y_bytes and second_bytes as Problem has them; blocks:
// multiprocessors of the device. early: whether site_kernel may begin before the preceding kernel has ended, which
// token_kernel always may.
// -> a cudaError_t; cudaErrorCooperativeLaunchTooLarge: hidden is too large for the device.
int launch(void* const* tensors, void* exchange, int tokens, int hidden, int y_bytes, int second_bytes, int blocks,
           int early) {
    using namespace columns;
    const Problem p = problem(tensors, static_cast<uint64_t*>(exchange), tokens, hidden, y_bytes, second_bytes, early);
    if (fits_clusters(p)) return tokens <= MOST_TOKENS_ONE_EACH ? launch_clusters<1>(p) : launch_clusters<2>(p);
    int form, groups;
    if (!plan(p, blocks, &form, &groups)) return cudaErrorCooperativeLaunchTooLarge;
    return launch_blocks(form, groups, p, std::make_integer_sequence<int, NUM_FORMS>());
}
}
