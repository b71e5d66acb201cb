// Tensor maps of the bulk tensor copy engine, encoded by the driver from what the host has checked.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace tma {

// A tensor as the host checked it (problems/common/tma.py, Fields): innermost first, strides in bytes, the rest 0.
struct Tensor {
    uint64_t address, dims[5], strides[4];
    uint32_t box[5], dtype, rank, swizzle, l2_promotion;
};
static_assert(sizeof(Tensor) == 120, "must match problems/common/tma.py");

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, looked up once. -> a cudaError_t.
inline cudaError_t find_encode(Encode* encode) {
    static void* entry = nullptr;
    if (!entry) {
        cudaDriverEntryPointQueryResult found;
        void* there = nullptr;
        if (const cudaError_t error =
                cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &there, 12000, cudaEnableDefault, &found))
            return error;
        if (found != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
        entry = there;
    }
    *encode = reinterpret_cast<Encode>(entry);
    return cudaSuccess;
}

inline bool encode_map(Encode encode, const Tensor& t, CUtensorMap* map) {
    constexpr uint32_t STEPS[] = {1, 1, 1, 1, 1};
    return encode(map, static_cast<CUtensorMapDataType>(t.dtype), t.rank, reinterpret_cast<void*>(t.address), t.dims,
                  t.strides, t.box, STEPS, CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(t.swizzle),
                  static_cast<CUtensorMapL2promotion>(t.l2_promotion),
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace tma
