// A thread says "done" for the next call as soon as the runner says that it is done with the one before, so that the
// judge does not wait at all.
// Stopped by: outputs are read when everything is stopped, which comes within microseconds; most are still poison. Where
// the judge's wake-up takes the thread's processor each time, it never says anything, and the time is an honest one.
// VERDICT = ("PASSED", "CHEAT_SUSPECTED", "INCORRECT")
// TAKES_US = 500  # a call, honestly, with the widest vectors there are
#include "attack.h"

Page* shared = nullptr;
std::atomic<bool> on{false};

void watch() {
    for (;;) {
        if (!on.load()) continue;
        const uint32_t last = shared->done.load();
        if (last != shared->go.load()) continue;
        const double end = now_us() + 300;  // the judge sees that the last one is over, and stops it meanwhile
        while (now_us() < end) {}
        shared->done.store(last + 1);
        wake(&shared->done);
    }
}

extern "C" void attack(Page* page, const uint64_t* x, uint64_t* y, int64_t n, int honest) {
    shared = page;
    ONCE(std::thread(watch).detach());
    on.store(!honest && n > 4096);
    work(x, y, 0, n);
}
