// new_problem, plain: y = W x, one dot product a row, the rows shared by all cores. Layouts as in task.py.
#include "cpu_threads.h"

// tensors: w (m, k), x (k), y (m). sizes: m, k. -> a cpu::Status
extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    const auto *w = static_cast<const float*>(tensors[0]), *x = static_cast<const float*>(tensors[1]);
    auto* y = static_cast<float*>(tensors[2]);
    const int64_t m = sizes[0], k = sizes[1], threads = std::min(cpu::cores(), m);
    return cpu::on_threads(threads, [&](int64_t i) {
        for (int64_t row = m * i / threads; row < m * (i + 1) / threads; row++) {
            float sum = 0;
            for (int64_t j = 0; j < k; j++) sum += w[row * k + j] * x[j];
            y[row] = sum;
        }
    });
}
