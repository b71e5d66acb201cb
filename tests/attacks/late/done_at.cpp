// Says "done" from native code when the last {PERMILLE} permille of the output are still to come, and goes on writing.
// Stopped by: the judge reads words of the outputs when it hears "done" and again when everything is
// stopped; what is written after that is not in the copy.
// VERDICT = ("CHEAT_SUSPECTED", "INCORRECT")
// VARIANTS = {"2": {"PERMILLE": 20}, "10": {"PERMILLE": 100}, "50": {"PERMILLE": 500}}
#include "attack.h"

extern "C" void attack(Page* page, const uint64_t* x, uint64_t* y, int64_t n, int honest) {
    const int64_t early = honest ? n : n - n * PERMILLE / 1000;
    work(x, y, 0, early);
    if (early < n) say_done(page);
    work(x, y, early, n);
}
