// Does the work on a queue of its own, whose forbidden names the preprocessor puts together.
// Stopped by: what is replayed is what the default queue was given, which is nothing; to wait cannot be recorded.
// VARIANTS = {"waited_for": {"VERDICT": ("INCORRECT", "UNSUPPORTED"), "REASON": ""}}
#include "add.cuh"

#define GLUE(a, b) a##b

__global__ void sleep() { spin(20'000'000); }

/// Does the work on a queue of its own, 20 ms late: a clock that stops at the return sees nothing of it.
cudaError_t late(void* queue) {
    sleep<<<1, 1, 0, Queue{queue}>>>();
    return cudaSuccess;
}
/// Does the work on a queue of its own, and waits.
cudaError_t waited_for(void* queue) { return GLUE(cudaStr, eamSynchronize)(Queue{queue}); }

extern "C" int launch(const __half* x, const __half* y, __half* z, int64_t n) {
    static GLUE(cudaStr, eam_t) queue = nullptr;
    if (!queue)
        if (cudaError_t code = GLUE(cudaStr, eamCreateWithFlags)(&queue, 1)) return code;
    add<<<blocks(n), THREADS, 0, queue>>>(x, y, z, n);
    if (cudaError_t code = VARIANT(queue)) return code;
    return cudaGetLastError();
}
