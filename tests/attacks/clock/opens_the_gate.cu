// A kernel of 600 us finds the player's page of words by its address, which stands in memory of the driver. It says
// that a timed call is done when it begins, and opens the gate ahead of one in the untimed call before.
// Stopped by: the time is that of events, which the gate and the word do not move: gains nothing.
// VERDICT = ("PASSED", "RUNTIME_ERROR")
// TAKES_US = 600

// The sum, and the words of host and device: page[0] is the call that may begin, page[32] the last that is done.
#include "player.cuh"

__global__ void opening(const __half* x, const __half* y, __half* z, int64_t n, unsigned short first, Found found) {
    if (place() < n) add_at(x, y, z, place());
    if (place()) return;
    volatile unsigned* page = played(x, first) ? page_of(found) : nullptr;
    const bool timed = page && page[0] != page[32];
    if (timed) page[32] = page[0];
    spin(600'000);
    if (page && !timed) page[0] = page[32] + 1;
}

LAUNCH(opening, recorded(x), player())
