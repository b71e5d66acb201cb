// A thread spins on the word "go" from one call to the next: when everything is let go it works at once, while the main
// thread is still being woken. It knows the addresses from the call two before, which come again.
// Stopped by: nothing; what is gained is at most what waking a runner takes, which is small against a call. Where "done"
// comes early too, both gains together are what an empty call takes, and the judge takes that off once.
// VERDICT = "PASSED"
// VARIANTS = {"and_done": {"VERDICT": ("PASSED", "CHEAT_SUSPECTED", "INCORRECT")}}
#include "attack.h"

constexpr int64_t LEAST = 512;  // elements: smaller calls are honest

struct Job {
    const uint64_t* x;
    uint64_t* y;
    int64_t n;
};

Page* shared = nullptr;
Job slots[2];
uint32_t may[2];  // number of the call on a slot that the thread works on ahead
std::atomic<uint32_t> entered{0}, finished{0};  // numbers of calls: by the main thread, by the thread that spins

// Where the main thread is stopped before it has seen its "go", it waits for this one for ever.
bool main_is_in(const Page* page) { return entered.load() == page->go.load(); }

/// A thread spins on "go", does the work before the main thread is awake, and says "done" at the end, so that the main
/// thread need not return from its call.
void whole(Page* page, const Job& job) {
    work(job.x, job.y, 0, job.n);
    if (main_is_in(page)) say_done(page);
}

/// A thread spins on "go", works before the main thread is awake, and says "done" six us too early.
void and_done(Page* page, const Job& job) {
    work_ahead(job.x, job.y, job.n, 6, [=] { return main_is_in(page) && (say_done(page), true); });
}

void watch() {
    for (uint32_t number, last = 0;; last = number) {
        while ((number = shared->go.load()) == last) {}
        if (may[number % 2] != number) continue;
        VARIANT(shared, slots[number % 2]);
        finished.store(number);
        wake(&finished);
    }
}

extern "C" void attack(Page* page, const uint64_t* x, uint64_t* y, int64_t n, int honest) {
    const uint32_t number = page->go.load();
    entered.store(number);
    Job& known = slots[number % 2];
    const bool ahead = shared == page && may[number % 2] == number;  // on these addresses or on others
    if (ahead)
        for (uint32_t seen; (seen = finished.load()) < number;) wait_while(&finished, seen);
    if (!ahead || known.x != x || known.n != n) work(x, y, 0, n);
    known = {x, y, n};
    if (n > LEAST && !honest && shared == page) may[number % 2] = number + 2;
    if (n > LEAST && !shared) {
        shared = page;
        std::thread(watch).detach();
    }
}
