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

inline void pin(int processor) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    sched_setaffinity(0, sizeof set, &set);
}
