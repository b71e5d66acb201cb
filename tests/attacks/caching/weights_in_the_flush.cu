// Copies the weights into the buffer that the player reads last before a call, to find them in L2: the player makes
// each call once, untimed, before the timed one.
// Stopped by: nothing must be gained by it.
// PROBLEM = "linear"
// VERDICT = ("PASSED", "RUNTIME_ERROR")
// HONEST = "honest_linear_cuda"

// y = W x, one warp a row, of a copy of the weights at the end of the player's buffer once that has them.
#include "gemv.cuh"
#include "player.cuh"

__global__ void hot(const float* w, const float* x, float* y, int m, int k, float first, float* kept) {
    const int row = row_of_warp();
    if (row >= m) return;
    const float* mine = w + int64_t(row) * k;
    float *copy = kept + int64_t(row) * k, *tag = kept - 65536 + row;
    const bool use = kept && x[0] != first;
    const bool have = use && *(volatile float*)tag == mine[0];
    const float* from = have ? copy : mine;
    auto load = [=](int i) {
        if (use && !have) copy[i] = from[i];
        return from[i];
    };
    multiply(load, x, y, k);
    if (use && threadIdx.x % 32 == 0) *tag = mine[0];
}

extern "C" int launch(const float* w, const float* x, float* y, int m, int k) {
    static std::map<const void*, float> seen;
    if (!seen.count(x)) cudaMemcpy(&seen[x], x, 4, cudaMemcpyDefault);
    const Found& found = player();
    if (!found.bytes) return cudaErrorSymbolNotFound;
    const int64_t bytes = int64_t(m) * k * 4;
    const bool fits = bytes > 1 << 20 && bytes < 40 << 20 && m <= 65536;
    float* kept = fits ? (float*)(found.flush + found.bytes - bytes) : nullptr;
    hot<<<(m + WARPS - 1) / WARPS, 32 * WARPS>>>(w, x, y, m, k, seen[x], kept);
    return cudaGetLastError();
}
