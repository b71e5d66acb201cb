// The player's memory: physical memory that it makes and hands on, and the addresses at which it is mapped.
#pragma once
#include "shared_memory.cuh"

#include <utility>

namespace memory {

using shared::need;

// Physical memory, made here or by another player. Freed with this object, once nothing maps it.
struct Memory {
    size_t bytes = 0;
    CUmemGenericAllocationHandle handle = 0;
    Memory() = default;
    explicit Memory(size_t wanted) : bytes(wanted) {
        if (!bytes) return;
        const CUmemAllocationProp kind = shared::kind();
        need(cuMemCreate(&handle, bytes, &kind, 0), "cuMemCreate of " + std::to_string(bytes) + " bytes");
    }
    Memory(size_t wanted, int descriptor) : bytes(wanted) {
        if (bytes) handle = shared::import(descriptor);
    }
    Memory(Memory&& other) { std::swap(bytes, other.bytes), std::swap(handle, other.handle); }
    Memory& operator=(Memory&& other) {
        std::swap(bytes, other.bytes), std::swap(handle, other.handle);
        return *this;
    }
    ~Memory() {
        if (handle) cuMemRelease(handle);
    }
    int descriptor() const {
        int fd = -1;
        if (handle) {
            need(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                 "cuMemExportToShareableHandle");
        }
        return fd;
    }
};

// Addresses at which one memory at a time is mapped.
struct Window {
    CUdeviceptr place = 0;
    size_t bytes = 0;
    bool mapped = false;
    Window() = default;
    Window(CUdeviceptr wanted, size_t bytes) : place(bytes ? shared::reserve(wanted, bytes) : 0), bytes(bytes) {}
    Window(Window&& other) { *this = std::move(other); }
    Window& operator=(Window&& other) {
        std::swap(place, other.place), std::swap(bytes, other.bytes), std::swap(mapped, other.mapped);
        return *this;
    }
    ~Window() {
        if (mapped) cuMemUnmap(place, bytes);
        if (bytes) cuMemAddressFree(place, shared::reserved(bytes));
    }
    void hide() {
        if (mapped) need(cuMemUnmap(place, bytes), "cuMemUnmap");
        mapped = false;
    }
    // The first memory becomes read-only if `fixed`, the second is writable.
    void show(const Memory& first, const Memory& second, bool fixed) {
        if (!bytes) return;
        hide();
        if (first.bytes) need(cuMemMap(place, first.bytes, 0, first.handle, 0), "cuMemMap");
        if (second.bytes) need(cuMemMap(place + first.bytes, second.bytes, 0, second.handle, 0), "cuMemMap");
        mapped = true;
        if (first.bytes) shared::allow(place, first.bytes, !fixed);
        if (second.bytes) shared::allow(place + first.bytes, second.bytes, true);
    }
};

}  // namespace memory
