// In a runner: the player's memory, the allocator that hands it out, the modules that are loaded, and the export of a
// recorded call as JSON. Nothing that comes from here is believed (harness/judge/replies.py, harness/player/).
#include "shared_memory.cuh"

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

using shared::Failed;
using shared::need;

const CUstream QUEUE = CU_STREAM_PER_THREAD;  // recorded in place of the legacy default one, which cannot record
constexpr size_t ALIGN = 512;
constexpr int MOST_PARAMETERS = 4096;
constexpr size_t MOST_NODES = 4096;  // of a recorded call, with its mark: as many as the judge takes (replies.py)

std::mutex guard;
std::map<uintptr_t, size_t> spare, used;  // ranges of scratch memory: address, bytes
uintptr_t scratch;
size_t top;  // behind the last byte of it that was ever handed out

struct Image {
    std::string bytes;
    CUmodule trial = nullptr;  // to compare functions of one name
};
std::vector<Image> images;
std::map<CUmodule, size_t> modules;  // their images, of those that a call of the driver loaded and returned,
std::map<CUfunction, size_t> first;  // or of which it returned this function
thread_local long loaded = -1;       // the image that was loaded last within a call of the driver
bool watching = true;  // not while images are loaded for a trial
thread_local bool recording;  // by this thread: another one's default stream is another one
CUgraph recorded;
std::map<size_t, CUfunction> owners;  // by image, a function of the recorded call
std::string exported, error_text;

// Of CUPTI's headers: what the callback of a loaded module receives.
struct ResourceData {
    CUcontext context;
    void* handle;
    void* descriptor;
};
struct ModuleData {
    uint32_t id;
    size_t size;
    const char* cubin;
};
struct CallData {
    int site;  // 0: before the call, 1: behind it
    const char* name;
    void** parameters;
};
constexpr int DRIVER = 1, RESOURCE = 3, MODULE_LOADED = 6;
constexpr uint32_t LOAD_DATA = 19, LOAD_DATA_EX = 20, GET_FUNCTION = 683;  // cuModuleLoadData, its Ex, cuKernelGetFunction
// Calls of the driver that enqueue, by CUPTI's number: at which offset of their parameters the stream is.
constexpr uint32_t LAUNCH_EX = 652;  // cuLaunchKernelEx, whose first parameter points to a configuration
const std::map<uint32_t, size_t> STREAM_AT = {
    {LAUNCH_EX, offsetof(CUlaunchConfig, hStream)},
    {307, 40}, {477, 40},                                               // cuLaunchKernel, cuLaunchCooperativeKernel
    {277, 24}, {279, 24}, {281, 24}, {289, 8}, {291, 8}, {306, 24},     // cuMemcpyHtoDAsync_v2, DtoH, DtoD, 2D, 3D, any
    {216, 24}, {218, 24}, {220, 24}, {222, 40}, {224, 40}, {226, 40},   // cuMemsetD8Async, D16, D32, D2D8, D2D16, D2D32
    {119, 8}, {295, 0}, {527, 0}, {598, 16}, {600, 8},                  // cuEventRecord, cuStreamWaitEvent,
};                                                                      // cuLaunchHostFunc, cuMemAllocAsync, cuMemFreeAsync

void on_loaded(const ModuleData* module) {
    if (!module || !module->cubin || !module->size) return;
    std::lock_guard<std::mutex> lock(guard);
    for (loaded = 0; size_t(loaded) < images.size(); ++loaded) {
        const std::string& bytes = images[loaded].bytes;
        if (bytes.size() == module->size && !memcmp(bytes.data(), module->cubin, module->size)) return;
    }
    images.push_back({std::string(module->cubin, module->size)});
}
// A module is known by the call that returns it: several may have a kernel of one name and form, with other code.
void on_call(uint32_t id, const CallData* call) {
    if (call->site == 0) {
        loaded = -1;
        return;
    }
    if (loaded < 0) return;
    std::lock_guard<std::mutex> lock(guard);
    if (id == GET_FUNCTION) first[**(CUfunction**)call->parameters] = loaded;
    else modules[**(CUmodule**)call->parameters] = loaded;
}
// What a recorded call enqueues on the legacy default stream goes to the one that is recorded. The driver reads its
// parameters after this, which CUPTI does not promise.
void on_enqueue(size_t at, bool extended, const CallData* call) {
    if (!recording || call->site) return;
    CUstream& stream = *(CUstream*)((char*)(extended ? call->parameters[0] : call->parameters) + at);
    if (!stream || stream == CU_STREAM_LEGACY) stream = QUEUE;
}
void on_event(void*, int domain, uint32_t id, const void* data) {
    if (!watching) return;
    const auto enqueues = domain == DRIVER ? STREAM_AT.find(id) : STREAM_AT.end();
    if (domain == RESOURCE && id == MODULE_LOADED) on_loaded((const ModuleData*)((const ResourceData*)data)->descriptor);
    else if (enqueues != STREAM_AT.end()) on_enqueue(enqueues->second, id == LAUNCH_EX, (const CallData*)data);
    else if (domain == DRIVER) on_call(id, (const CallData*)data);
}

void say(const char* format, ...) {
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    exported += text;
}
void say_hex(const std::string& bytes) {
    for (unsigned char c : bytes) say("%02x", c);
}
// Names of kernels are identifiers; what else is in one is shown as "?".
void say_name(const char* name) {
    exported += '"';
    for (; *name; ++name) exported += *name == '"' || *name == '\\' || *name < ' ' || *name > '~' ? '?' : *name;
    exported += '"';
}

using Layout = std::vector<std::pair<size_t, size_t>>;  // offset and size of each parameter
Layout layout_of(CUfunction function) {
    Layout layout;
    size_t offset, size;
    while (layout.size() < MOST_PARAMETERS && !cuFuncGetParamInfo(function, layout.size(), &offset, &size))
        layout.push_back({offset, size});
    return layout;
}
int attribute(CUfunction function, CUfunction_attribute which) {
    int value = 0;
    cuFuncGetAttribute(&value, which, function);
    return value;
}
bool alike(CUfunction one, CUfunction other) {
    for (auto which : {CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                       CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, CU_FUNC_ATTRIBUTE_NUM_REGS,
                       CU_FUNC_ATTRIBUTE_PTX_VERSION, CU_FUNC_ATTRIBUTE_BINARY_VERSION})
        if (attribute(one, which) != attribute(other, which)) return false;
    return layout_of(one) == layout_of(other);
}

// The image that has a kernel: that of its module, or one whose code has a section ".text.NAME", and of several of these
// one whose function is alike.
size_t image_of(CUfunction function, const char* name) {
    CUmodule module;
    if (!cuFuncGetModule(&module, function) && modules.count(module)) return modules[module];
    std::string section = std::string(".text.") + name;
    section.push_back('\0');
    std::vector<size_t> named;
    for (size_t i = 0; i < images.size(); ++i)
        if (memmem(images[i].bytes.data(), images[i].bytes.size(), section.data(), section.size())) named.push_back(i);
    if (named.size() == 1) return named[0];
    for (size_t k = named.size(); k--;) {  // what was loaded last comes first
        Image& image = images[named[k]];
        CUfunction other;
        if (!image.trial && cuModuleLoadData(&image.trial, image.bytes.data())) continue;
        if (!cuModuleGetFunction(&other, image.trial, name) && alike(function, other)) return named[k];
    }
    throw Failed(std::string("no code was found of the kernel ") + name);
}

std::string values_of(const CUDA_KERNEL_NODE_PARAMS& p, const Layout& layout) {
    size_t total = 0;
    for (auto [offset, size] : layout) total = std::max(total, offset + size);
    std::string values(total, '\0');
    if (p.kernelParams) {
        for (size_t i = 0; i < layout.size(); ++i) memcpy(&values[layout[i].first], p.kernelParams[i], layout[i].second);
        return values;
    }
    const void* buffer = nullptr;
    size_t size = 0;
    for (void** e = p.extra; e && *e != CU_LAUNCH_PARAM_END; e += 2) {
        if (e[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = e[1];
        if (e[0] == CU_LAUNCH_PARAM_BUFFER_SIZE) size = *(size_t*)e[1];
    }
    if (buffer) memcpy(&values[0], buffer, std::min(size, total));
    return values;
}

void export_kernel(CUgraphNode node, bool early) {
    CUDA_KERNEL_NODE_PARAMS p = {};
    need(cuGraphKernelNodeGetParams(node, &p), "cuGraphKernelNodeGetParams");
    CUfunction function = p.func;
    if (!function && p.kern) need(cuKernelGetFunction(&function, p.kern), "cuKernelGetFunction");
    const char* name = nullptr;
    need(cuFuncGetName(&name, function), "cuFuncGetName");
    const size_t image = image_of(function, name);
    owners.emplace(image, function);
    CUlaunchAttributeValue cooperative = {}, cluster = {};
    cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &cooperative);
    cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &cluster);
    say("{\"kind\": \"kernel\", \"early\": %s, \"image\": %zu, \"name\": ", early ? "true" : "false", image);
    say_name(name);
    say(", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, \"cooperative\": %s, \"cluster\": [%u, %u, %u]",
        p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ, p.sharedMemBytes,
        cooperative.cooperative ? "true" : "false", cluster.clusterDim.x, cluster.clusterDim.y, cluster.clusterDim.z);
    say(", \"dynamic_shared\": %d, \"carveout\": %d, \"not_portable\": %s, \"layout\": [",
        attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES),
        attribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT),
        attribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) ? "true" : "false");
    const Layout layout = layout_of(function);
    for (size_t i = 0; i < layout.size(); ++i) say("%s%zu, %zu", i ? ", " : "", layout[i].first, layout[i].second);
    say("], \"values\": \"");
    say_hex(values_of(p, layout));
    say("\"}");
}

void export_copy(CUgraphNode node) {
    CUDA_MEMCPY3D p = {};
    need(cuGraphMemcpyNodeGetParams(node, &p), "cuGraphMemcpyNodeGetParams");
    const size_t bytes = p.WidthInBytes * p.Height * p.Depth;
    for (auto type : {p.srcMemoryType, p.dstMemoryType})
        if (type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED)
            throw Failed("the call copies " + std::to_string(bytes) + " bytes from or to the host");
    if (p.Height > 1 || p.Depth > 1) throw Failed("the call copies a range with gaps (cudaMemcpy2D): use a kernel");
    say("{\"kind\": \"copy\", \"to\": %llu, \"from\": %llu, \"bytes\": %zu}",
        (unsigned long long)p.dstDevice + p.dstXInBytes, (unsigned long long)p.srcDevice + p.srcXInBytes, p.WidthInBytes);
}

void export_fill(CUgraphNode node) {
    CUDA_MEMSET_NODE_PARAMS p = {};
    need(cuGraphMemsetNodeGetParams(node, &p), "cuGraphMemsetNodeGetParams");
    say("{\"kind\": \"fill\", \"to\": %llu, \"pitch\": %zu, \"width\": %zu, \"height\": %zu, \"value\": %u, \"element\": %u}",
        (unsigned long long)p.dst, p.pitch, p.width, p.height, p.value, p.elementSize);
}

// The nodes in their one order. Failed: there are several.
std::vector<CUgraphNode> in_line(std::map<CUgraphNode, bool>& early) {
    size_t count = 0, edges = 0;
    need(cuGraphGetNodes(recorded, nullptr, &count), "cuGraphGetNodes");
    if (count > MOST_NODES)
        throw Failed("the call enqueues " + std::to_string(count - 1) + " kernels, copies and fills; at most " +
                     std::to_string(MOST_NODES - 1) + " are recorded");
    std::vector<CUgraphNode> nodes(count);
    if (count) need(cuGraphGetNodes(recorded, nodes.data(), &count), "cuGraphGetNodes");
    need(cuGraphGetEdges(recorded, nullptr, nullptr, nullptr, &edges), "cuGraphGetEdges");
    std::vector<CUgraphNode> from(edges), to(edges);
    std::vector<CUgraphEdgeData> about(edges);
    if (edges) need(cuGraphGetEdges(recorded, from.data(), to.data(), about.data(), &edges), "cuGraphGetEdges");
    std::map<CUgraphNode, int> open;
    std::map<CUgraphNode, std::vector<CUgraphNode>> leaving;
    for (size_t i = 0; i < edges; ++i) {
        ++open[to[i]];
        leaving[from[i]].push_back(to[i]);
        if (about[i].type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC) early[to[i]] = true;
    }
    std::vector<CUgraphNode> order, free;
    for (auto node : nodes)
        if (!open[node]) free.push_back(node);
    while (!free.empty()) {
        if (free.size() > 1) throw Failed("BRANCHES");
        const CUgraphNode node = free[0];
        order.push_back(node), free.clear();
        for (auto next : leaving[node])
            if (!--open[next]) free.push_back(next);
    }
    return order;
}

__global__ void mark() {}

template <class Body>
int guarded(Body body) {
    try {
        body();
        return 0;
    } catch (const std::exception& error) {
        error_text = error.what();
        return 1;
    }
}

}  // namespace

extern "C" {

const char* capture_error() { return error_text.c_str(); }
const char* capture_exported() { return exported.c_str(); }

// Tell of every module that is loaded from now on. Before CUDA starts.
int capture_watch(const char* library) {
    return guarded([=] {
        void* cupti = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
        if (!cupti) throw Failed(dlerror());
        auto subscribe = (int (*)(void**, void (*)(void*, int, uint32_t, const void*), void*))dlsym(cupti, "cuptiSubscribe");
        auto enable = (int (*)(uint32_t, void*, int, uint32_t))dlsym(cupti, "cuptiEnableCallback");
        if (!subscribe || !enable) throw Failed("CUPTI lacks cuptiSubscribe");
        static void* subscriber;
        bool failed = subscribe(&subscriber, on_event, nullptr) || enable(1, subscriber, RESOURCE, MODULE_LOADED);
        for (uint32_t id : {LOAD_DATA, LOAD_DATA_EX, GET_FUNCTION}) failed = failed || enable(1, subscriber, DRIVER, id);
        for (auto [id, _] : STREAM_AT) failed = failed || enable(1, subscriber, DRIVER, id);
        if (failed) throw Failed("CUPTI does not tell of modules: another profiler uses it");
    });
}

// Map one or two memories of the player behind each other: at `wanted`, or anywhere where that is 0. The descriptors stay
// open.
int capture_map(const int* descriptors, unsigned long long wanted, const size_t* bytes, unsigned long long* place) {
    return guarded([=] {
        CUcontext context;
        need(cuInit(0), "cuInit");
        need(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
        need(cuCtxSetCurrent(context), "cuCtxSetCurrent");
        *place = shared::reserve(wanted, bytes[0] + bytes[1]);
        if (bytes[0]) shared::map(*place, bytes[0], descriptors[0]);
        if (bytes[1]) shared::map(*place + bytes[0], bytes[1], descriptors[1]);
    });
}
int capture_unmap(unsigned long long place, size_t bytes) {
    return guarded([=] { shared::unmap(place, bytes); });
}

// From now on torch's memory is this.
int capture_scratch(unsigned long long place, size_t bytes) {
    std::lock_guard<std::mutex> lock(guard);
    spare.clear(), used.clear();
    scratch = place, spare[place] = bytes, top = 0;
    return 0;
}
// Ranges of scratch memory that are in use, each the offset and the size of one or of several behind each other. Returns
// how many words were written, at most `most`.
size_t capture_used(size_t* words, size_t most) {
    std::lock_guard<std::mutex> lock(guard);
    size_t count = 0;
    for (auto [at, size] : used) {
        if (count && words[count - 2] + words[count - 1] == at - scratch) words[count - 1] += size;
        else if (count + 2 <= most) words[count++] = at - scratch, words[count++] = size;
    }
    return count;
}
size_t capture_top() {
    std::lock_guard<std::mutex> lock(guard);
    return top;
}
void* capture_malloc(ssize_t size, int, void*) {
    std::lock_guard<std::mutex> lock(guard);
    const size_t wanted = std::max<size_t>(ALIGN, (size_t(size) + ALIGN - 1) / ALIGN * ALIGN);
    for (auto it = spare.begin(); it != spare.end(); ++it) {
        if (it->second < wanted) continue;
        const uintptr_t at = it->first;
        const size_t rest = it->second - wanted;
        spare.erase(it);
        if (rest) spare[at + wanted] = rest;
        used[at] = wanted;
        top = std::max(top, at + wanted - scratch);
        return (void*)at;
    }
    throw Failed("out of memory: no " + std::to_string(size) + " bytes are free of the scratch memory that a call may use");
}
void capture_free(void* pointer, ssize_t, int, void*) {
    std::lock_guard<std::mutex> lock(guard);
    auto it = used.find((uintptr_t)pointer);
    if (it == used.end()) return;
    auto [at, size] = *it;
    used.erase(it);
    auto next = spare.lower_bound(at);
    if (next != spare.end() && at + size == next->first) size += next->second, next = spare.erase(next);
    if (next != spare.begin()) {
        auto last = std::prev(next);
        if (last->first + last->second == at) {
            last->second += size;
            return;
        }
    }
    spare[at] = size;
}

// anew: what was recorded before does not belong to the same call.
int capture_begin(int anew) {
    return guarded([=] {
        if (anew) owners.clear();
        need(cuStreamBeginCapture(QUEUE, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
        mark<<<1, 32, 0, QUEUE>>>();
        recording = true;
    });
}
int capture_end() {
    return guarded([] {
        recording = false;
        if (recorded) cuGraphDestroy(recorded);
        recorded = nullptr;
        need(cuStreamEndCapture(QUEUE, &recorded), "cuStreamEndCapture");
        if (!recorded) throw Failed("nothing was recorded");
    });
}

// Write the recorded call to capture_exported(), and its images to be read by capture_image.
int capture_export() {
    watching = false;
    const int code = guarded([] {
        std::map<CUgraphNode, bool> early;
        const std::vector<CUgraphNode> order = in_line(early);
        exported = "{\"nodes\": [";
        for (auto [function, image] : first) {  // not in the callback, where the driver must not be called
            CUmodule module;
            if (!cuFuncGetModule(&module, function)) modules.emplace(module, image);
        }
        for (size_t i = 1; i < order.size(); ++i) {  // behind the mark
            CUgraphNodeType kind;
            need(cuGraphNodeGetType(order[i], &kind), "cuGraphNodeGetType");
            if (exported.back() == '}') say(", ");
            if (kind == CU_GRAPH_NODE_TYPE_KERNEL) export_kernel(order[i], early[order[i]]);
            else if (kind == CU_GRAPH_NODE_TYPE_MEMCPY) export_copy(order[i]);
            else if (kind == CU_GRAPH_NODE_TYPE_MEMSET) export_fill(order[i]);
            else if (kind == CU_GRAPH_NODE_TYPE_HOST) throw Failed("the call has the host run a function");
            else if (kind == CU_GRAPH_NODE_TYPE_MEM_ALLOC || kind == CU_GRAPH_NODE_TYPE_MEM_FREE)
                throw Failed("the call allocates memory (cudaMallocAsync): use torch.empty, or allocate before");
            else if (kind != CU_GRAPH_NODE_TYPE_EMPTY)
                throw Failed("the call has a node of type " + std::to_string(int(kind)));
        }
        say("], \"images\": [");
        for (auto& [image, function] : owners) say("%s%zu", image == owners.begin()->first ? "" : ", ", image);
        say("]}");
    });
    watching = true;
    return code;
}
const void* capture_image(size_t index, size_t* bytes) {
    *bytes = index < images.size() ? images[index].bytes.size() : 0;
    return *bytes ? images[index].bytes.data() : nullptr;
}
// The value of a variable of image `index`, of which the recorded call has a kernel.
int capture_variable(size_t index, const char* name, void* value, size_t bytes) {
    return guarded([=] {
        CUmodule module;
        CUdeviceptr place;
        size_t size;
        need(cuFuncGetModule(&module, owners.at(index)), "cuFuncGetModule");
        need(cuModuleGetGlobal(&place, &size, module, name), name);
        if (size != bytes) throw Failed(std::string(name) + " has another size");
        need(cuMemcpyDtoH(value, place, bytes), name);
    });
}

}  // extern "C"
