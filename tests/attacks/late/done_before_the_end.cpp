// Says "done" before all is written, in other orders and ways.
//
// Stopped by: words of the outputs are read, at random places, at "done" and when everything is stopped; what changes
// after "done" is late, whatever stood there before.
// VERDICT = ("CHEAT_SUSPECTED", "INCORRECT")
// VARIANTS = {
//     "plausible": 'Writes numbers that look right, says "done", and writes the right ones afterwards.',
//     "scattered": 'Says "done" when nine tenths are written, and writes the others, at random places, afterwards.',
//     "second_thread": 'A second thread says "done", by a word and a futex, while the first one works on to the end.',
//     "in_the_wakeup": {
//         "ABOUT": 'Says "done" six microseconds before the end: the judge is only about to be woken. '
//         "Stopped by: nothing; the gain is less than what waking the judge takes, and this is small against a call.",
//         "VERDICT": ("PASSED", "CHEAT_SUSPECTED", "INCORRECT"),
//     },
// }
#include <cstring>

#include "attack.h"
#include "rounds.h"

constexpr int64_t BLOCK = 8;

void plausible(Page* page, const uint64_t* x, uint64_t* y, int64_t n, bool honest) {
    if (!honest) {
        memcpy(y, x, 8 * n);
        say_done(page);
    }
    work(x, y, 0, n);
}

// A random block in ten is left out, and written after "done".
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
    for (;;) {
        Page* page = page_of_call.exchange(nullptr);
        if (page) say_done(page);
    }
}

// The thread says "done" a fifth of a call's time before its end.
void second_thread(Page* page, const uint64_t* x, uint64_t* y, int64_t n, bool honest) {
    static const bool started = (std::thread(speak).detach(), true);
    (void)started;
    work(x, y, 0, n * 4 / 5);
    if (!honest) page_of_call.store(page);
    work(x, y, n * 4 / 5, n);
}

// Blocks are counted in time: the last ones that fit into AHEAD_US are worked off after "done".
void in_the_wakeup(Page* page, const uint64_t* x, uint64_t* y, int64_t n, bool honest) {
    constexpr double AHEAD_US = 6;
    const double start = now_us();
    bool said = honest;
    for (int64_t i = 0; i < n; i += BLOCK) {
        if (!said && i > n / 2 && (now_us() - start) / i * (n - i) < AHEAD_US) {
            say_done(page);
            said = true;
        }
        work(x, y, i, i + BLOCK < n ? i + BLOCK : n);
    }
}

extern "C" int attack(Page* page, const uint64_t* x, uint64_t* y, int64_t n, int honest) {
    VARIANT(page, x, y, n, honest);
    return 0;
}
