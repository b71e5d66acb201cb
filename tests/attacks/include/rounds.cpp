// y = x after its rounds, on one thread.  x, y: int64 (n,), as bits.
#include "rounds.h"

extern "C" int rounds(const uint64_t* x, uint64_t* y, int64_t n) {
    work(x, y, 0, n);
    return 0;
}
