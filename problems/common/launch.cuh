// Launches on the default queue whose kernel may start before the kernel ahead of it has ended.
//
// The queue is the one that <<<>>> takes: cudaLaunchKernelEx with a zero-initialised queue follows the compiler's
// -default-stream as well (cuda_runtime_api.h redirects both in the same way), so build.CUDA_FLAGS holds here too.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace programmatic {

// kernel<<<grid, block, shared_bytes>>>(args...) that may begin once every block of the kernel ahead of it has called
// trigger() or ended. It must call wait() before it touches what that kernel reads or writes. -> a cudaError_t.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, Arguments&&... args) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
    config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(args)...);
}

// The same where `early`, else behind all that is ahead.
template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, bool early,
                         Arguments&&... args) {
    if (early) return launch(kernel, grid, block, shared_bytes, std::forward<Arguments>(args)...);
    kernel<<<grid, block, shared_bytes>>>(std::forward<Arguments>(args)...);
    return cudaGetLastError();
}

// In the kernel ahead: this block no longer holds back the start of the next kernel. Its results may still be to come.
__device__ __forceinline__ void trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// In the kernel behind: returns when the kernel ahead has ended and what it wrote can be read.
__device__ __forceinline__ void wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace programmatic
