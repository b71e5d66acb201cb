// What the CPU variants share: the problem's pointers, and the sharing of its rows among all cores.
//
// Threads are started in the call and joined before it returns: nothing parks, spins or works outside a call. A start
// and join took 14 us on two cores; a thread is started only for 512 KiB of codes or more.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu_threads.h"

namespace gemv {

// The tensors of task.Data as bytes; L batches lie one behind the other.
struct Problem {
    const uint8_t* a;    // (l, m, k / 2) e2m1 pairs, low nibble first
    const uint8_t* b;    // (l, 128, k / 2), only row 0 of each batch counts
    const uint8_t* sfa;  // (l, m, k / 16) e4m3, bytes 0x00 to 0x7E
    const uint8_t* sfb;  // (l, 128, k / 16)
    uint16_t* c;         // (l, m) fp16
    int64_t m, k, l;

    Problem(void* const* t, const int64_t* sizes)
        : a(bytes(t[0])), b(bytes(t[1])), sfa(bytes(t[2])), sfb(bytes(t[3])), c(static_cast<uint16_t*>(t[4])),
          m(sizes[0]), k(sizes[1]), l(sizes[2]) {}

    const uint8_t* vector(int64_t batch) const { return b + batch * 64 * k; }
    const uint8_t* vector_scales(int64_t batch) const { return sfb + batch * 8 * k; }

  private:
    static const uint8_t* bytes(void* p) { return static_cast<const uint8_t*>(p); }
};

// Rows [first, last) of one batch; codes and scales are at row `first`, c at its element.
struct Rows {
    const uint8_t* codes;
    const uint8_t* scales;
    uint16_t* c;
    int64_t count, k;
};

// 10 us of one core's bandwidth, so that the cores finish together.
constexpr int64_t kTaskBytes = 128 << 10;  // codes in one grab of rows
// At 12 GB/s a core 44 us, three times what starting a thread costs.
constexpr int64_t kThreadBytes = 512 << 10;  // codes that pay for one more thread

// Multiply all rows. Worker(problem) is made once in each thread; worker.batch(i) comes before rows of batch i, then
// worker.rows(Rows). Batches come to a worker in increasing order.
template <class Worker>
int on_all_cores(const Problem& p) noexcept {
    const int64_t row_bytes = p.k / 2;
    const int64_t rows = std::max<int64_t>(1, kTaskBytes / row_bytes / 8 * 8);
    const int64_t tasks_per_batch = (p.m + rows - 1) / rows, tasks = tasks_per_batch * p.l;
    std::atomic<int64_t> next{0};
    const int64_t useful = std::max<int64_t>(1, p.l * p.m * row_bytes / kThreadBytes);
    return cpu::on_threads(std::min({useful, tasks, cpu::cores()}), [&](int64_t) {
        Worker worker(p);
        int64_t current = -1;
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
            const int64_t batch = task / tasks_per_batch, first = task % tasks_per_batch * rows;
            if (batch != current) worker.batch(current = batch);
            const int64_t row = batch * p.m + first;
            worker.rows({p.a + row * row_bytes, p.sfa + row * (p.k / 16), p.c + row, std::min(rows, p.m - first), p.k});
        }
    });
}

}  // namespace gemv
