// Measures itself, and has the stop take too long after a call that was slower than its best.
// Stopped by: of late calls two of a process are made again; more are INVALID_MEASUREMENT.
// VERDICT = ("PASSED", "INVALID_MEASUREMENT")

// Threads that sleep make the stop slow; they are started in slow calls, and end in the next.
#include <vector>

#include "attack.h"

constexpr int SLEEPERS = 400;
constexpr double MUCH = 1.02;  // times the best call

std::vector<std::thread> sleepers;
std::atomic<bool> leave{false};

extern "C" void attack(Page*, const uint64_t* x, uint64_t* y, int64_t n, int honest) {
    static double best_us = 1e9;
    const double before = now_us();
    work(x, y, 0, n);
    const double took = now_us() - before;
    if (n <= 4096) return;
    if (took < best_us) best_us = took;
    leave.store(true);
    for (auto& thread : sleepers) thread.join();
    sleepers.clear();
    leave.store(false);
    if (!honest && took > MUCH * best_us)
        for (int i = 0; i < SLEEPERS; ++i)
            sleepers.emplace_back([] { while (!leave.load()) usleep(1000); });
}
