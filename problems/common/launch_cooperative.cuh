// launch.cuh for kernels whose blocks wait for each other.
#pragma once

#include <cstdint>

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

// The same, but it may begin before the kernel ahead has ended, as launch() has it. All blocks come to run at once if
// nothing but this queue uses the device: kernels ahead end by themselves, and a kernel behind begins only when every
// block has called trigger() or ended (PTX: griddepcontrol), so it takes no room that a block of this one waits for.
// -> a cudaError_t; cudaErrorCooperativeLaunchTooLarge: they do not fit.
template <class... Parameters, class... Arguments>
cudaError_t launch_resident(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                            Arguments&&... args) {
    int device = 0, count = 0, each = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    if (const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device)) return error;
    const int threads = block.x * block.y * block.z;
    if (const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared_bytes))
        return error;
    if (int64_t(grid.x) * grid.y * grid.z > int64_t(each) * count) return cudaErrorCooperativeLaunchTooLarge;
    return launch(kernel, grid, block, shared_bytes, std::forward<Arguments>(args)...);
}

}  // namespace programmatic
