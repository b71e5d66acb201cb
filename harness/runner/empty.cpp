// What the judge's empty call on a CPU calls, as a submission calls its own code: it works for a known time.
#include <cstdint>
#include <ctime>

namespace {

double now_us() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

}  // namespace

extern "C" int spin(const void*, const void*, int64_t, double us) {
    for (const double end = now_us() + us; now_us() < end;) {
    }
    return 0;
}
