// Says "done" before all is written, in other orders and ways.
// Stopped by: words of the outputs are read, at random places, at "done" and when everything is stopped; what changes
// after "done" is late, whatever stood there before.
// VERDICT = ("CHEAT_SUSPECTED", "INCORRECT")
// VARIANTS = {
//     "in_the_wakeup": {"VERDICT": ("PASSED", "CHEAT_SUSPECTED", "INCORRECT")},
//     "second_thread": {"VERDICT": ("CHEAT_SUSPECTED", "INCORRECT", "TIMEOUT")},
// }
#include <cstring>

#include "attack.h"

constexpr int64_t BLOCK = 8;

/// Writes numbers that look right, says "done", and writes the right ones afterwards.
void plausible(Page* page, const uint64_t* x, uint64_t* y, int64_t n, bool honest) {
    if (!honest) {
        memcpy(y, x, 8 * n);
        say_done(page);
    }
    work(x, y, 0, n);
}

/// Says "done" when nine tenths are written, and writes the others, blocks at random places, afterwards.
void scattered(Page* page, const uint64_t* x, uint64_t* y, int64_t n, bool honest) {
    const uint64_t salt = x[0] * 0x9E3779B97F4A7C15u;
    auto late = [&](int64_t i) { return !honest && ((i / BLOCK + 1) * salt >> 40) % 10 == 0; };
    for (int pass = 0; pass < 2; ++pass) {
        for (int64_t i = 0; i < n; i += BLOCK)
            if (late(i) == bool(pass)) work(x, y, i, i + BLOCK < n ? i + BLOCK : n);
        if (!honest && !pass) say_done(page);
    }
}

std::atomic<Page*> page_of_call{nullptr};

void speak() {
    for (;;)
        if (Page* page = page_of_call.exchange(nullptr)) say_done(page);
}

/// A second thread says "done", by a word and a futex, a fifth of the call's time before the first one is at the end.
void second_thread(Page* page, const uint64_t* x, uint64_t* y, int64_t n, bool honest) {
    ONCE(std::thread(speak).detach());
    work(x, y, 0, n * 4 / 5);
    if (!honest) page_of_call.store(page);
    work(x, y, n * 4 / 5, n);
}

/// Says "done" six microseconds before the end, reckoned by blocks: the judge is only about to be woken. Stopped by:
/// nothing; the gain is less than what waking the judge takes, and this is small against a call.
void in_the_wakeup(Page* page, const uint64_t* x, uint64_t* y, int64_t n, bool honest) {
    work_ahead(x, y, n, 6, [&] { return honest || (say_done(page), true); });
}

extern "C" void attack(Page* page, const uint64_t* x, uint64_t* y, int64_t n, int honest) {
    VARIANT(page, x, y, n, honest);
}
