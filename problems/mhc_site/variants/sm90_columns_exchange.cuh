// How a block reads the sums that others of its launch publish, see tagged_words.cuh.
#pragma once

#include <cassert>
#include <cstdint>

#include "ptx.cuh"
#include "tagged_words.cuh"

namespace columns {

using ptx::load_relaxed;
using tagged::publish;
using tagged::publish_pair;

constexpr unsigned ALL = 0xffffffffu;

// Ends the launch if a read was in vain for too long: cudaErrorAssert and this line, in the place of a hung device.
__device__ __forceinline__ void count_try(int& tries) {
    if (++tries < tagged::MOST_TRIES) return;
    assert(!"mhc_site: time-out, a block waited for the sums of another that never came");
    __trap();
}

// COUNT words, of which ask(i, absent) loads one, or returns `absent`, a 0. All are asked for at once, and again until
// they have the tag.
template <int COUNT, class Ask>
__device__ __forceinline__ void receive(uint32_t tag, float (&to)[COUNT], Ask ask) {
    uint64_t word[COUNT];
    int tries = 0;
    for (bool arrived = false; !arrived; count_try(tries)) {
        arrived = true;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) word[i] = ask(i, uint64_t(tag) << 32);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) arrived &= static_cast<uint32_t>(word[i] >> 32) == tag;
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = __uint_as_float(static_cast<uint32_t>(word[i]));
}

}  // namespace columns
