// launch.cuh for kernels whose blocks wait for each other.
#pragma once

#include "launch.cuh"

namespace programmatic {

// kernel<<<grid, block, shared_bytes>>>(args...), behind all that is ahead. All of its blocks run at once, or it is
// refused. -> a cudaError_t.
template <class... Parameters, class... Arguments>
cudaError_t launch_cooperative(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                               Arguments&&... args) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
    config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(args)...);
}

}  // namespace programmatic
