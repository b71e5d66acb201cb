// Device memory that several processes map: made by the player, handed on as file descriptors.
#pragma once
#include <cuda.h>

#include <stdexcept>
#include <string>

namespace shared {

struct Failed : std::runtime_error {
    CUresult code;
    Failed(const std::string& what, CUresult code = CUDA_ERROR_UNKNOWN) : std::runtime_error(what), code(code) {}
};

inline void need(CUresult code, const std::string& what) {
    if (!code) return;
    const char *name = nullptr, *text = nullptr;
    cuGetErrorName(code, &name);
    cuGetErrorString(code, &text);
    throw Failed(what + ": " + (name ? name : "unknown") + (text ? std::string(" (") + text + ")" : ""), code);
}

inline CUmemAllocationProp kind() {
    CUmemAllocationProp kind = {};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    kind.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return kind;
}

inline void allow(CUdeviceptr place, size_t bytes, bool writable) {
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    need(cuMemSetAccess(place, bytes, &access, 1), "cuMemSetAccess");
}

// So many addresses are reserved for memory of `bytes` bytes: the driver puts few of them elsewhere than is wished.
inline size_t reserved(size_t bytes) {
    constexpr size_t STEP = 1 << 30;
    return (bytes + STEP - 1) / STEP * STEP;
}

// Reserve addresses: at `wanted` exactly, or anywhere where that is 0.
inline CUdeviceptr reserve(CUdeviceptr wanted, size_t bytes) {
    CUdeviceptr place = 0;
    bytes = reserved(bytes);
    need(cuMemAddressReserve(&place, bytes, 0, wanted, 0), "cuMemAddressReserve");
    if (wanted && place != wanted) {
        cuMemAddressFree(place, bytes);
        throw Failed("the addresses of the shared memory are taken: wanted " + std::to_string(wanted) + ", got " + std::to_string(place));
    }
    return place;
}

// Take memory by its descriptor, which stays open.
inline CUmemGenericAllocationHandle import(int descriptor) {
    CUmemGenericAllocationHandle memory;
    need(cuMemImportFromShareableHandle(&memory, (void*)(uintptr_t)descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
         "cuMemImportFromShareableHandle");
    return memory;
}

// Map such memory at reserved addresses. The mapping keeps it.
inline void map(CUdeviceptr place, size_t bytes, int descriptor) {
    const CUmemGenericAllocationHandle memory = import(descriptor);
    need(cuMemMap(place, bytes, 0, memory, 0), "cuMemMap");
    need(cuMemRelease(memory), "cuMemRelease");
    allow(place, bytes, true);
}

inline void unmap(CUdeviceptr place, size_t bytes) {
    need(cuMemUnmap(place, bytes), "cuMemUnmap");
    need(cuMemAddressFree(place, reserved(bytes)), "cuMemAddressFree");
}

}  // namespace shared
