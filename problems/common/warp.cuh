// What the threads of a warp work out together.
#pragma once

namespace warps {

// The sum of `value` over this lane and all before it. All lanes call it, each with its own number.
template <class T>
__device__ __forceinline__ T sum_up_to(T value, int lane) {
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const T before = __shfl_up_sync(~0u, value, apart);
        if (lane >= apart) value += before;
    }
    return value;
}

}  // namespace warps
