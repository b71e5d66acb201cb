// How blocks of one launch tell each other sums, without a barrier among them: each value lies in global memory with
// the tag of its turn, in one word of 8 bytes, and who needs it reads until the tag is there.
//
// Tags only grow, over launches too, so that nothing has to be cleared: what an earlier turn left has a smaller one. All
// blocks have to be resident, which launch_cooperative.cuh sees to.
#pragma once

#include <cassert>
#include <cstdint>

namespace columns {

constexpr unsigned ALL = 0xffffffffu;
constexpr int MOST_TRIES = 1 << 22;  // of a read, each at least a third of a microsecond: more than a second

// In global memory, zero at first. first_tag: of the next launch, less 1; ended: blocks of this launch that have.
struct State {
    uint32_t first_tag, ended;
};

__device__ __forceinline__ void publish(uint64_t* to, float value, uint32_t tag) {
    const uint64_t word = uint64_t(tag) << 32 | __float_as_uint(value);
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ void publish_pair(uint64_t* to, float first, float second, uint32_t tag) {
    const uint64_t a = uint64_t(tag) << 32 | __float_as_uint(first), b = uint64_t(tag) << 32 | __float_as_uint(second);
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ uint64_t look(const uint64_t* from) {
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}

// Ends the launch if a read was in vain for too long: cudaErrorAssert and this line, in the place of a hung device.
__device__ __forceinline__ void count_try(int& tries) {
    if (++tries < MOST_TRIES) return;
    assert(!"mhc_site: time-out, a block waited for the sums of another that never came");
    __trap();
}

// COUNT words at from, from + apart, ...: those below `real` of them, the others 0. All are asked for at once, and again
// until they have the tag.
template <int COUNT>
__device__ __forceinline__ void receive(const uint64_t* from, int apart, int real, uint32_t tag, float (&to)[COUNT]) {
    uint64_t word[COUNT];
    int tries = 0;
    for (bool all = false; !all; count_try(tries)) {
        all = true;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) word[i] = i < real ? look(from + i * apart) : uint64_t(tag) << 32;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) all &= static_cast<uint32_t>(word[i] >> 32) == tag;
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = __uint_as_float(static_cast<uint32_t>(word[i]));
}

// The last block of the launch that calls this, one thread each, raises the tag for the next launch by `turns`. All
// blocks have read it by then.
__device__ __forceinline__ void end_turns(State* state, uint32_t first_tag, uint32_t turns) {
    if (atomicAdd(&state->ended, 1u) != gridDim.x * gridDim.y - 1) return;
    state->ended = 0;
    state->first_tag = first_tag + turns;
}

}  // namespace columns
