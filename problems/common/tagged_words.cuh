// How blocks of one launch tell each other values, without a barrier among them: each lies in global memory with the tag of
// its turn, in one word of 8 bytes, and who needs it reads until the tag is there.
//
// Tags only grow, over launches too, so that nothing has to be cleared: what an earlier turn left has a smaller one. All
// blocks have to be resident, which launch_cooperative.cuh sees to.
#pragma once

#include <cstdint>

namespace tagged {

constexpr int MOST_TRIES = 1 << 22;  // of a read, each at least a third of a microsecond: more than a second

// In global memory, zero at first. tag: the last one of the launches before; ended: blocks of this launch that have.
struct State {
    uint32_t tag, ended;
};

__device__ __forceinline__ void publish(uint64_t* to, float value, uint32_t tag) {
    const uint64_t word = uint64_t(tag) << 32 | __float_as_uint(value);
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ void publish_pair(uint64_t* to, float first, float second, uint32_t tag) {
    const uint64_t a = uint64_t(tag) << 32 | __float_as_uint(first), b = uint64_t(tag) << 32 | __float_as_uint(second);
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}

// The last block of the launch that calls this, one thread each, leaves the tag. All blocks have read the one before by
// then.
__device__ __forceinline__ void leave(State* state, uint32_t tag) {
    if (atomicAdd(&state->ended, 1u) != gridDim.x * gridDim.y - 1) return;
    state->ended = 0;
    state->tag = tag;
}

}  // namespace tagged
