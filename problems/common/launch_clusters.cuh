// launch.cuh for kernels in clusters of blocks.
#pragma once

#include "launch.cuh"

namespace programmatic {

// kernel<<<grid, block, shared_bytes>>>(args...) in clusters of `cluster` blocks along x; grid.x is a multiple of it.
// early: whether it may begin before the kernel ahead has ended, as programmatic::launch has it. -> a cudaError_t.
template <class... Parameters, class... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, unsigned cluster,
                            bool early, Arguments&&... args) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
    config.attrs = attributes, config.numAttrs = early ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(args)...);
}

}  // namespace programmatic
