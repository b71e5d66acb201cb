// A thread of the host launches kernels on a queue of its own for as long as its process lives: others get slow.
// Stopped by: its process is gone before any call is timed: gains nothing.
// VERDICT = "PASSED"
// HONEST = "honest_cuda"
#include <thread>

#include "add.cuh"

__global__ void busy() { spin(50'000); }

extern "C" int launch(const __half* x, const __half* y, __half* z, int64_t n) {
    static void* queue = nullptr;
    if (!queue) {
        if (int code = make_queue(&queue)) return code;
        std::thread([] {
            for (;; std::this_thread::sleep_for(std::chrono::microseconds(50))) busy<<<132, 1024, 0, Queue{queue}>>>();
        }).detach();
    }
    add<<<blocks(n), THREADS>>>(x, y, z, n);
    return cudaGetLastError();
}
