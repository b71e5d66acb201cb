// What the host side of a kernel calls of the CUDA runtime and driver, for a machine that has neither: launches, kernel
// names, tensor maps and attributes are handed to the model, which is Python; memory is the host's.
//
// The functions have the names of the CUDA runtime, and again with a leading underscore, as CuTe DSL's host code calls
// them. What is not here is missing at load time, so nothing is silently accepted.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    unsigned x, y, z;
} Dim;
typedef struct {
    Dim grid, block;
    size_t shared_bytes;
    void *order;
    void *attributes;  // 72 bytes each: a 32-bit id, padding to 8, 64 bytes of value
    unsigned count;
} Config;

// What the model answers. Every function returns an error code of the runtime, 0 for none.
typedef struct {
    int (*register_kernel)(const void *handle, const char *name);
    int (*launch)(const void *kernel, const Dim *grid, const Dim *block, size_t shared_bytes, void **arguments,
                  const void *attributes, unsigned count);
    int (*attribute)(const void *kernel, int attribute, int value);
    int (*load_library)(const void *code, const void *library);
    int (*find_kernel)(const void *library, const char *name, const void *kernel);
    int (*device)(int attribute, int *value);
    int (*tensor_map)(void *map, int type, unsigned rank, const void *address, const uint64_t *dims,
                      const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides, int interleave,
                      int swizzle, int l2, int fill);
    int (*clusters)(int *count, const void *kernel, const Config *config);
    int (*register_variable)(const void *host, const char *name);
    int (*variable)(void **address, size_t *size, const void *host);
    int (*occupancy)(int *blocks, const void *kernel, int threads, size_t shared_bytes);
} Model;

static Model model;
static int last_error;

void ptx_model_install(const Model *callbacks) { model = *callbacks; }

static int said(int error) { return error ? (last_error = error) : 0; }

// ---- the CUDA runtime's part of a compiled CUDA source

static Dim pushed_grid, pushed_block;
static size_t pushed_shared;
static void *pushed_order;

void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) { free(handle); }
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *thread,
                            void *block, void *block_dim, void *grid_dim, int *warp) {
    model.register_kernel(host, name);
}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                       int constant, int global) {
    model.register_variable(host, name);
}
unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared, void *order) {
    pushed_grid = grid, pushed_block = block, pushed_shared = shared, pushed_order = order;
    return 0;
}
int __cudaPopCallConfiguration(Dim *grid, Dim *block, size_t *shared, void *order) {
    *grid = pushed_grid, *block = pushed_block, *shared = pushed_shared, *(void **)order = pushed_order;
    return 0;
}
int __cudaGetKernel(const void **kernel, const void *host) { return *kernel = host, 0; }
int cudaLaunchKernel(const void *kernel, Dim grid, Dim block, void **arguments, size_t shared, void *order) {
    return said(model.launch(kernel, &grid, &block, shared, arguments, NULL, 0));
}
int __cudaLaunchKernel(const void *kernel, Dim grid, Dim block, void **arguments, size_t shared, void *order) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, order);
}
int cudaLaunchCooperativeKernel(const void *kernel, Dim grid, Dim block, void **arguments, size_t shared, void *order) {
    uint64_t cooperative[9] = {2, 1};  // a launch attribute: its id, its value
    return said(model.launch(kernel, &grid, &block, shared, arguments, cooperative, 1));
}
int cudaLaunchKernelExC(const Config *config, const void *kernel, void **arguments) {
    return said(model.launch(kernel, &config->grid, &config->block, config->shared_bytes, arguments,
                             config->attributes, config->count));
}
int cudaFuncSetAttribute(const void *kernel, int attribute, int value) {
    return said(model.attribute(kernel, attribute, value));
}
int cudaGetLastError(void) {
    int error = last_error;
    return last_error = 0, error;
}
int cudaPeekAtLastError(void) { return last_error; }
int cudaGetDevice(int *device) { return *device = 0; }
int cudaSetDevice(int device) { return said(device ? 101 : 0); }
int cudaGetDeviceCount(int *count) { return *count = 1, 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { return said(model.device(attribute, value)); }
int cudaDeviceSynchronize(void) { return 0; }
int cudaMemsetAsync(void *to, int value, size_t size, void *order) { return memset(to, value, size), 0; }
int cudaMemset(void *to, int value, size_t size) { return memset(to, value, size), 0; }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { return memmove(to, from, size), 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *order) {
    return memmove(to, from, size), 0;
}
static int copy_variable(const void *host, void *other, size_t size, size_t offset, int to_variable) {
    void *address;
    size_t whole;
    int error = model.variable(&address, &whole, host);
    if (error || offset > whole || size > whole - offset) return said(error ? error : 1);
    char *at = (char *)address + offset;
    return memmove(to_variable ? at : other, to_variable ? other : at, size), 0;
}
int cudaMemcpyToSymbol(const void *host, const void *from, size_t size, size_t offset, int kind) {
    return copy_variable(host, (void *)from, size, offset, 1);
}
int cudaMemcpyToSymbolAsync(const void *host, const void *from, size_t size, size_t offset, int kind, void *order) {
    return copy_variable(host, (void *)from, size, offset, 1);
}
int cudaMemcpyFromSymbol(void *to, const void *host, size_t size, size_t offset, int kind) {
    return copy_variable(host, to, size, offset, 0);
}
int cudaGetSymbolAddress(void **address, const void *host) {
    size_t size;
    return said(model.variable(address, &size, host));
}
int cudaGetSymbolSize(size_t *size, const void *host) {
    void *address;
    return said(model.variable(&address, size, host));
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
    return said(model.occupancy(blocks, kernel, threads, shared));
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads, size_t shared,
                                                           unsigned flags) {
    return said(model.occupancy(blocks, kernel, threads, shared));
}
int cudaFuncSetCacheConfig(const void *kernel, int config) { return 0; }
int cudaOccupancyMaxActiveClusters(int *count, const void *kernel, const Config *config) {
    return said(model.clusters(count, kernel, config));
}
const char *cudaGetErrorString(int error) { return error ? "the PTX model refused it" : "no error"; }
const char *cudaGetErrorName(int error) { return cudaGetErrorString(error); }

// ---- tensor maps

int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                           int interleave, int swizzle, int l2, int fill) {
    return model.tensor_map(map, type, rank, address, dims, strides, box, element_strides, interleave, swizzle, l2,
                            fill);
}
int cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version, unsigned long long flags,
                                     int *status) {
    int known = !strcmp(name, "cuTensorMapEncodeTiled");
    *entry = known ? (void *)cuTensorMapEncodeTiled : NULL;
    if (status) *status = known ? 0 : 1;
    return 0;
}

// ---- CuTe DSL's host code

int _cudaLibraryLoadData(void **library, const void *code, int *options, void **values, unsigned count,
                         int *more, void **more_values, unsigned more_count) {
    *library = calloc(1, sizeof(void *));
    return model.load_library(code, *library);
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    *kernel = calloc(1, sizeof(void *));
    return model.find_kernel(library, name, *kernel);
}
int _cudaLibraryUnload(void *library) { return 0; }
int _cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int device) {
    return cudaFuncSetAttribute(kernel, attribute, value);
}
int _cudaFuncSetAttribute(const void *kernel, int attribute, int value) {
    return cudaFuncSetAttribute(kernel, attribute, value);
}
int _cudaLaunchKernelEx(const Config *config, const void *kernel, void **arguments) {
    return cudaLaunchKernelExC(config, kernel, arguments);
}
int _cudaLaunchKernel(const void *kernel, Dim grid, Dim block, void **arguments, size_t shared, void *order) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, order);
}
int _cuKernelGetAttribute(int *value, int attribute, const void *kernel, int device) {
    return *value = 0, 0;  // static shared memory: the model adds it up itself
}
int _cudaGetDevice(int *device) { return cudaGetDevice(device); }
int _cudaSetDevice(int device) { return cudaSetDevice(device); }
int _cudaGetDeviceCount(int *count) { return cudaGetDeviceCount(count); }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}
int _cudaDeviceSynchronize(void) { return 0; }
int _cudaMemsetAsync(void *to, int value, size_t size, void *order) { return cudaMemsetAsync(to, value, size, order); }
int _cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dims,
                            const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                            int interleave, int swizzle, int l2, int fill) {
    return cuTensorMapEncodeTiled(map, type, rank, address, dims, strides, box, element_strides, interleave, swizzle,
                                  l2, fill);
}
int cuda_dialect_init_library_once(void **library, int (*load)(void **), int (*to_device)(void **, int)) {
    if (*library) return 0;
    int error = load(library);
    return error || !to_device ? error : to_device(library, 0);
}
void cuda_dialect_unload_library_once(void **library) { *library = NULL; }
const char *cuda_dialect_get_error_name(int error) { return cudaGetErrorName(error); }
void cuda_dialect_print_on_error(int error) {}
