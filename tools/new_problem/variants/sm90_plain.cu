// new_problem, plain: y = W x, one thread a row. Layouts as in task.py.
#include <cstdint>

__global__ void gemv(const float* w, const float* x, float* y, int64_t m, int64_t k) {
    const int64_t row = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (row >= m) return;
    float sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += w[row * k + j] * x[j];
    y[row] = sum;
}

// w (m, k), x (k), y (m) on the device; -> a cudaError_t, 0 if the launch went well.
extern "C" int launch(const float* w, const float* x, float* y, int64_t m, int64_t k) {
    gemv<<<(m + 127) / 128, 128>>>(w, x, y, m, k);
    return cudaGetLastError();
}
