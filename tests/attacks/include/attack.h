// What attacks on the judge's clock on a CPU have in common: the page by which a call is handed over (harness/runner/gate.cpp),
// seen from inside the runner, and threads that are ready before a call.
#pragma once
#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

#include "rounds.h"

struct Page {
    alignas(64) std::atomic<uint32_t> ready;
    alignas(64) std::atomic<uint32_t> go;
    alignas(64) std::atomic<uint32_t> done;
    alignas(64) std::atomic<uint32_t> which;
    alignas(64) std::atomic<uint32_t> raised;
    alignas(64) std::atomic<uint64_t> count;
    struct { std::atomic<uint64_t> address, bytes; } returned[64];
};

inline void wake(std::atomic<uint32_t>* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
inline void wait_while(std::atomic<uint32_t>* word, uint32_t seen) {
    while (word->load() == seen) syscall(SYS_futex, word, FUTEX_WAIT, seen, nullptr, nullptr, 0);
}
// In the first call alone.
#define ONCE(...) static const bool once = (__VA_ARGS__, true); (void)once

// The call that runs is over, says this, whether it is or not.
inline void say_done(Page* page) {
    page->done.store(page->go.load());
    wake(&page->done);
}

inline double now_us() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

// Work by blocks; `say` once where only the last ones, of so many us together, are still to come, until it says true.
template <class Say> void work_ahead(const uint64_t* x, uint64_t* y, int64_t n, double ahead_us, Say say) {
    constexpr int64_t BLOCK = 8;
    const double start = now_us();
    bool said = false;
    for (int64_t i = 0; i < n; i += BLOCK) {
        if (!said && i > n / 2 && (now_us() - start) / i * (n - i) < ahead_us) said = say();
        work(x, y, i, i + BLOCK < n ? i + BLOCK : n);
    }
}

inline void pin(int processor, int pid = 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    sched_setaffinity(pid, sizeof set, &set);
}
