// A kernel rewrites the time stamp of the player's start event, which lies in memory of the driver.
// Stopped by: the host's clock in the player says longer than its events, in all groups of calls.
// VARIANTS = {
//     "forged": {"VERDICT": ("CHEAT_SUSPECTED", "RUNTIME_ERROR")},
//     "shaved": {
//         "VERDICT": ("PASSED", "CHEAT_SUSPECTED", "INVALID_MEASUREMENT", "RUNTIME_ERROR"),
//         "HONEST": "honest_cuda",
//     },
// }
#include "player.cuh"

/// A kernel of 600 us adds 500 us to the time stamp of the player's start event.
__global__ void forged(const __half* x, const __half* y, __half* z, int64_t n, unsigned short first, unsigned long long before) {
    if (place() < n) add_at(x, y, z, place());
    if (place()) return;
    spin(600'000);
    if (played(x, first)) *(volatile unsigned long long*)before += 500'000;
}

/// A kernel adds 0.9 us to the start event's time stamp: less than the two clocks may be apart. Stopped by: nothing must
/// be gained by it.
__global__ void shaved(const __half* x, const __half* y, __half* z, int64_t n, unsigned short first, unsigned long long before) {
    if (place() == 0 && played(x, first)) *(volatile unsigned long long*)before += 900;
    if (place() < n) add_at(x, y, z, place());
}

LAUNCH(VARIANT, recorded(x), player().before)
