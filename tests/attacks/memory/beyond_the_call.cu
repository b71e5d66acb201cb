// Right in its runner; in the player, where contents are others, its kernel does harm or looks where it must not.
// Stopped by: inputs are read-only in the player, only one copy of them is mapped at a time, and each call has a limit;
// the player is a process that may be lost.
// VERDICT = "RUNTIME_ERROR"
// VARIANTS = {
//     "hang": {"VERDICT": "TIMEOUT", "LIMIT_S": 10},
//     "writes_inputs": {"REASON": "ILLEGAL_ADDRESS"},
//     "other_copy": {"REASON": "ILLEGAL_ADDRESS"},
// }
#include "add.cuh"

/// In the player its kernel never ends.
__global__ void hang(const __half* x, const __half* y, __half* z, int64_t n, unsigned short first) {
    if (place() == 0 && played(x, first)) for (;;) spin(1'000'000);
    if (place() < n) add_at(x, y, z, place());
}

/// In the player its kernel writes to its inputs.
__global__ void writes_inputs(const __half* x, const __half* y, __half* z, int64_t n, unsigned short first) {
    if (place() == 0 && played(x, first)) *(volatile __half*)x = y[0];
    if (place() < n) add_at(x, y, z, place());
}

/// In the player it reads 128 MiB further, where the other copy of the inputs, with the next call's contents, could lie.
__global__ void other_copy(const __half* x, const __half* y, __half* z, int64_t n, unsigned short first) {
    const int64_t step = played(x, first) ? int64_t(1) << 26 : 0;
    if (place() < n) add_at(x + step, y + step, z, place());
}

LAUNCH(VARIANT, recorded(x))
