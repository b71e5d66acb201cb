// Half of the work is another thread's. Nothing to stop.
// VERDICT = "PASSED"
// VARIANTS = {
//     "parked": {"SPIN_US": 0, "ABOUT": "A thread that waits on a condition variable between calls takes half."},
//     "spins": {"SPIN_US": 1000, "ABOUT": "A thread that spins for a millisecond, and then waits, takes half."},
//     "per_call": {"PER_CALL": 1, "ABOUT": "Starts a thread in each call and joins it."},
// }
#include <condition_variable>
#include <mutex>

#include "attack.h"

#ifdef PER_CALL
extern "C" int rounds(const uint64_t* x, uint64_t* y, int64_t n) {
    const int64_t half = n / 2;
    std::thread other([=] { work(x, y, 0, half); });
    work(x, y, half, n);
    other.join();
    return 0;
}
#else
std::mutex mutex;
std::condition_variable given;
std::atomic<long> posted{0}, finished{0};
const uint64_t* job_x;
uint64_t* job_y;
int64_t job_n;

void serve() {
    for (long seen = 0;;) {
        const double until = now_us() + SPIN_US;
        while (posted.load() == seen && now_us() < until) {}
        std::unique_lock<std::mutex> lock(mutex);
        given.wait(lock, [&] { return posted.load() != seen; });
        lock.unlock();
        seen = posted.load();
        work(job_x, job_y, 0, job_n);
        finished.store(seen);
    }
}

extern "C" int rounds(const uint64_t* x, uint64_t* y, int64_t n) {
    ONCE(std::thread(serve).detach());
    const int64_t half = n / 2;
    {
        std::lock_guard<std::mutex> lock(mutex);
        job_x = x, job_y = y, job_n = half;
        posted.fetch_add(1);
    }
    given.notify_one();
    work(x, y, half, n);
    while (finished.load() != posted.load()) std::this_thread::yield();
    return 0;
}
#endif
