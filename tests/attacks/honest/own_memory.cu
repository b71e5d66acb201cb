// Right, with scratch memory that it allocated itself.
// Nothing to stop: the player has not that memory, and the user reads where to take it from.
// VERDICT = "RUNTIME_ERROR"
// REASON = "scratch memory must come from torch"
#include "add.cuh"

extern "C" int launch(const __half* x, const __half* y, __half* z, int64_t n) {
    static __half* scratch = nullptr;
    static int64_t room = 0;
    if (n > room) {
        if (cudaError_t code = cudaMalloc(&scratch, 2 * n)) return code;
        room = n;
    }
    add<<<blocks(n), THREADS>>>(x, y, scratch, n);
    add<<<blocks(n), THREADS>>>(x, y, z, n);
    return cudaGetLastError();
}
