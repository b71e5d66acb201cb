// Does half of the work on a queue that C++ makes by a name that is put together, forked from the default one and
// joined with it: right, and two kernels at a time.
// Stopped by: a recorded call must be in one order.
// VERDICT = "RULE_BROKEN"
// REASON = "work ran on another"
#include "add.cuh"

extern "C" int launch(const __half* x, const __half* y, __half* z, int64_t n) {
    static auto wait = (int (*)(void*, void*, unsigned))driver(std::string("cuStr") + "eamWaitEvent");
    static auto record = (int (*)(void*, void*))driver("cuEventRecord");
    static auto make_event = (int (*)(void**, unsigned))driver("cuEventCreate");
    static void *queue = nullptr, *forked = nullptr, *joined = nullptr, *normal = (void*)2;
    if (!wait || !record || !make_event) return 1;
    if (!queue) {
        if (int code = make_queue(&queue)) return code;
        if (int code = make_event(&forked, 2)) return code;
        if (int code = make_event(&joined, 2)) return code;
    }
    if (int code = record(forked, normal)) return code;
    if (int code = wait(queue, forked, 0)) return code;
    const int64_t half = n / 2;
    add<<<blocks(half + 1), THREADS>>>(x, y, z, half);
    add<<<blocks(n - half), THREADS, 0, Queue{queue}>>>(x + half, y + half, z + half, n - half);
    if (int code = record(joined, queue)) return code;
    if (int code = wait(normal, joined, 0)) return code;
    return cudaGetLastError();
}
