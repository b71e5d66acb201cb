// The player's native part: it owns the memory of recorded calls, launches them, and reads two clocks. No host code of a
// submission enters this process; its kernels do, and may harm nothing but this process.
//
// Every function returns 0, or a code whose text is player_error(): 1 the request is refused, 2 the device failed (the
// process is of no further use), 3 the call took longer than its limit. Integers go in as size_t, so that player.py
// need not know their types.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "memory.cuh"
#include "readers.cuh"

namespace {

using memory::Memory;
using memory::Window;
using shared::Failed;
using shared::need;

struct Coded : std::runtime_error {
    int code;  // as the functions return it
    Coded(int code, const std::string& what) : std::runtime_error(what), code(code) {}
};
constexpr int REFUSED = 1, FAILED = 2, TOO_LONG = 3;
void require(bool good, const std::string& what) {
    if (!good) throw Coded(REFUSED, what);
}
void need(cudaError_t code, const std::string& what) {
    if (code) throw Failed(what + ": " + cudaGetErrorString(code));
}

// The addresses of call n of a runner are those of slot n; of scratch memory, which all of them share, those of slot 0.
constexpr CUdeviceptr BASE = 0x600000000000, SLOT = 1ull << 38, WEIGHTS = SLOT / 2;
constexpr size_t PAGE = 2 << 20;
constexpr size_t MOST_CALLS = 64, COPIES = 2;
constexpr size_t QUEUED = 700;  // launches that a queue takes which waits for its gate; a thousand block the host
constexpr size_t TOUCH_STRIDE = 1 << 16;
constexpr double AHEAD_US = 30;  // from the last enqueued command until the gate opens: all of it has reached the device
constexpr double LOOK_US = 5e3;  // how often a long call is asked whether it failed

double now_us() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

struct Kernel {
    CUfunction function;
    CUlaunchConfig config;
    std::vector<char> bytes;
    std::vector<void*> parameters;
    CUlaunchAttribute attributes[3];
};
using Nodes = std::vector<std::function<void()>>;  // each enqueues a kernel, a copy or a fill
struct Variable {
    size_t bytes;
    CUdeviceptr place, range;  // range: the start of the memory that it is part of; 0: not known
    std::vector<char> value;
};

// A recorded call: its memory (inputs and outputs COPIES times, of which one is mapped), its code and its launches.
struct Call {
    Memory inputs[COPIES], outputs[COPIES], weights;
    Window io, held;
    Nodes before, nodes;  // of a baseline's setup, which is not timed; of the call
    std::vector<Variable> variables;
    Memory snapshot;  // of scratch memory at capture: its ranges in use, one behind the other
    Window kept;      // where it is mapped
    std::vector<std::pair<size_t, size_t>> used;  // offset and size of each of these
};

// Code that calls share. It stays loaded as long as this process lives.
struct Image {
    CUmodule module;
    std::map<std::string, Variable> variables;  // with the values that they had before any call
};

std::vector<Image> images;
std::string error_text;
CUstream queue;
CUevent before, after;
std::unique_ptr<Call> present;
Memory scratch;
Window scratch_window;
struct Page {
    volatile unsigned open;
    char room[124];
    volatile unsigned done;
} * page;
unsigned turn;
int sms, l2;
size_t device_bytes;
char *junk, *flush;
unsigned* sink;

// Holds the queue until the host has written the word.
__global__ void hold(const volatile unsigned* open, unsigned turn) {
    while (*open != turn) {
    }
}
// Between the start event and the call: an early programmatic launch in the call reaches back to this kernel at most.
__global__ void mark() {}

// One word of every `stride` bytes from every SM: addresses are translated as in a process that ran nothing else.
__global__ void touch(const char* data, size_t bytes, size_t stride, unsigned* sink) {
    unsigned sum = 0;
    for (size_t i = threadIdx.x * stride; i < bytes; i += blockDim.x * stride) sum ^= *(const volatile unsigned*)(data + i);
    if (sum == 0x9E3779B9u) atomicXor(sink, sum);
}

Call& call() {
    require(bool(present), "there is no call");
    return *present;
}

bool holds(CUdeviceptr first, size_t length, CUdeviceptr at, size_t bytes) {
    return at >= first && at - first <= length && bytes <= length - (at - first);
}
// That a copy or fill stays in memory which the call may write, or read.
void inside(const Call& call, CUdeviceptr at, size_t bytes, bool written, const char* what) {
    const size_t fixed = call.inputs[0].bytes;
    bool good = holds(scratch_window.place, scratch_window.bytes, at, bytes);
    good |= holds(call.io.place + fixed, call.io.bytes - fixed, at, bytes);
    if (!written) good |= holds(call.io.place, call.io.bytes, at, bytes) || holds(call.held.place, call.held.bytes, at, bytes);
    require(good, what);
}

size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

using Ranges = std::vector<std::pair<size_t, size_t>>;  // of scratch memory: offset and size of each
Ranges ranges_of(const size_t* used, size_t count) {
    Ranges ranges;
    size_t total = 0;
    for (size_t i = 0; i < count; ++i) {
        const size_t offset = used[2 * i], bytes = used[2 * i + 1];
        require(holds(0, scratch.bytes, offset, bytes), "a range beyond scratch memory");
        ranges.push_back({offset, bytes}), total += bytes;
        require(total <= scratch.bytes, "ranges of more than scratch memory");
    }
    return ranges;
}
size_t sum_of(const Ranges& ranges) {
    size_t total = 0;
    for (auto [_, bytes] : ranges) total += bytes;
    return total;
}

// at_full: what is done when the queue takes no more while it waits.
template <class Full>
void launch(const Nodes& nodes, Full at_full) {
    size_t queued = 0;
    for (const auto& enqueue : nodes) {
        if (queued++ == QUEUED) at_full();
        enqueue();
    }
}

// Scratch memory and module variables as they were when the call was recorded, and poison in what was free then: nothing
// is carried from call to call.
void restore(Call& call) {
    need(cuMemsetD8Async(scratch_window.place, 0xFF, scratch.bytes, queue), "poisoning scratch memory");
    CUdeviceptr kept = call.kept.place;
    for (auto [offset, bytes] : call.used) {
        need(cuMemcpyDtoDAsync(scratch_window.place + offset, kept, bytes, queue), "restoring scratch memory");
        kept += bytes;
    }
    for (const Variable& variable : call.variables)
        need(cuMemcpyHtoDAsync(variable.place, variable.value.data(), variable.bytes, queue), "restoring a variable");
}

// Wait until all that was enqueued is done. TOO_LONG: that takes longer.
void finish(double limit_us) {
    for (const double start = now_us();;) {
        const CUresult code = cuStreamQuery(queue);
        if (code != CUDA_ERROR_NOT_READY) {
            need(code, "the recorded call");
            return;
        }
        if (now_us() - start > limit_us) throw Coded(TOO_LONG, "the call took longer than its limit");
    }
}

void touch_all(CUdeviceptr place, size_t bytes) {
    if (bytes) touch<<<2 * sms, 256, 0, queue>>>((const char*)place, bytes, TOUCH_STRIDE, sink);
}

// No line in L2 that was written or read before: lines written last outlive any flush by reading, so they are driven out
// by writing junk, which is dropped without being written back.
void make_cold(const Call* call) {
    need(cuCtxResetPersistingL2Cache(), "cuCtxResetPersistingL2Cache");
    need(cudaMemsetAsync(flush, 0, 3ull * l2, queue), "cudaMemsetAsync");  // what a kernel may have put there
    readers::write_junk<<<8 * sms, 512, 0, queue>>>((uint4*)junk, 4ull * l2 / 16);
    readers::discard<<<8 * sms, 512, 0, queue>>>(junk, 4ull * l2);
    readers::launch(flush, 3ull * l2 / 16 * 16, readers::FLUSH, sms, sink, queue);
    if (call) {
        touch_all(call->io.place, call->io.bytes);
        touch_all(call->held.place, call->held.bytes);
        for (auto [offset, bytes] : call->used)
            if (bytes >= TOUCH_STRIDE) touch_all(scratch_window.place + offset, bytes);
    }
    need(cudaGetLastError(), "making caches cold");
}

template <class Body>
int guarded(Body body) {
    try {
        body();
        return 0;
    } catch (const Coded& error) {
        error_text = error.what();
        return error.code;
    } catch (const std::exception& error) {
        error_text = error.what();
        return FAILED;
    }
}

}  // namespace

extern "C" {

const char* player_error() { return error_text.c_str(); }
int player_readers() { return readers::count(); }
size_t player_device_bytes() { return device_bytes; }

int player_start() {
    return guarded([] {
        CUdevice device;
        CUcontext context;
        need(cuInit(0), "cuInit");
        need(cuDeviceGet(&device, 0), "cuDeviceGet");
        need(cuDeviceTotalMem(&device_bytes, device), "cuDeviceTotalMem");
        need(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
        need(cuCtxSetCurrent(context), "cuCtxSetCurrent");
        need(cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device), "cuDeviceGetAttribute");
        need(cuDeviceGetAttribute(&l2, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, device), "cuDeviceGetAttribute");
        need(cuStreamCreate(&queue, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
        need(cuEventCreate(&before, CU_EVENT_DEFAULT), "cuEventCreate");
        need(cuEventCreate(&after, CU_EVENT_DEFAULT), "cuEventCreate");
        need(cudaMalloc(&junk, 4ull * l2), "cudaMalloc");
        need(cudaMalloc(&flush, 3ull * l2), "cudaMalloc");
        need(cudaMalloc(&sink, 4), "cudaMalloc");
        need(cudaMemset(flush, 0, 3ull * l2), "cudaMemset");
        need(cudaHostAlloc((void**)&page, sizeof(Page), cudaHostAllocMapped), "cudaHostAlloc");
        memset((void*)page, 0, sizeof(Page));
    });
}

// Forget the call. Make scratch memory for those of the next runner.
int player_scratch(size_t bytes, int* descriptor) {
    return guarded([=] {
        present.reset();
        scratch_window = Window();
        scratch = Memory();
        scratch = Memory(whole_pages(bytes));
        scratch_window = Window(BASE, scratch.bytes);
        scratch_window.show(scratch, Memory(), false);
        *descriptor = scratch.descriptor();
    });
}

// Forget the call. Make the memory of call `number` of a runner, a multiple of 2 MiB each. descriptors: of inputs and of
// outputs, COPIES times each, and of weights; -1 for none.
int player_memory(size_t number, size_t inputs, size_t outputs, size_t weights, int* descriptors) {
    return guarded([=] {
        require(number && number < MOST_CALLS, "a call must have a number from 1 to 63");
        require(inputs % PAGE + outputs % PAGE + weights % PAGE == 0, "memory must be whole pages");
        require(inputs < WEIGHTS / 2 && outputs < WEIGHTS / 2 && weights < WEIGHTS, "a call's memory is too large");
        present.reset();
        present.reset(new Call);
        Call& call = *present;
        for (size_t i = 0; i < COPIES; ++i) call.inputs[i] = Memory(inputs), call.outputs[i] = Memory(outputs);
        call.weights = Memory(weights);
        call.io = Window(BASE + number * SLOT, inputs + outputs);
        call.held = Window(BASE + number * SLOT + WEIGHTS, weights);
        for (size_t i = 0; i < COPIES; ++i) {
            descriptors[2 * i] = call.inputs[i].descriptor();
            descriptors[2 * i + 1] = call.outputs[i].descriptor();
        }
        descriptors[2 * COPIES] = call.weights.descriptor();
    });
}

// Copy the ranges of scratch memory that are in use. used: offset and size of each. descriptor: of the copy, -1 for none.
int player_snapshot(const size_t* used, size_t count, int* descriptor) {
    return guarded([=] {
        const Memory copy(whole_pages(sum_of(ranges_of(used, count))));
        *descriptor = copy.descriptor();
        if (!copy.bytes) return;
        Window window(0, copy.bytes);
        window.show(copy, Memory(), false);
        CUdeviceptr to = window.place;
        for (auto [offset, bytes] : ranges_of(used, count)) {
            need(cuMemcpyDtoD(to, scratch_window.place + offset, bytes), "copying scratch memory");
            to += bytes;
        }
        need(cuCtxSynchronize(), "copying scratch memory");
    });
}

int player_image(const void* image) {
    return guarded([=] {
        Image loaded;
        need(cuModuleLoadData(&loaded.module, image), "cuModuleLoadData");
        images.push_back(loaded);
    });
}

struct Launch {
    unsigned grid[3], block[3], shared;
    unsigned cooperative, cluster[3], early;
    int dynamic_shared, carveout, not_portable;
};

// A kernel of image `image`. layout: offset and size of each parameter; values: of all parameters, by these offsets.
int player_kernel(size_t image, const char* name, const Launch* about, const unsigned* layout,
                  size_t count, const char* values, size_t bytes) {
    return guarded([=] {
        Call& call = ::call();
        require(image < images.size(), "a kernel of no image");
        const auto kernel = std::make_shared<Kernel>();
        CUfunction& function = kernel->function;
        const std::string named = std::string("kernel ") + name;
        need(cuModuleGetFunction(&function, images[image].module, name), named);
        size_t offset, size, total = 0;
        for (size_t i = 0; i < count; ++i) {
            need(cuFuncGetParamInfo(function, i, &offset, &size), named + ", its parameters");
            require(layout[2 * i] == offset && layout[2 * i + 1] == size, named + ": parameters are not those of its code");
            total = total > offset + size ? total : offset + size;
        }
        require(cuFuncGetParamInfo(function, count, &offset, &size) != CUDA_SUCCESS, named + ": too few parameters");
        require(bytes == total, named + ": its parameters have another size");
        kernel->bytes.assign(values, values + bytes);
        kernel->bytes.push_back(0);  // there is an address also without parameters
        for (size_t i = 0; i < count; ++i) kernel->parameters.push_back(kernel->bytes.data() + layout[2 * i]);
        const Launch& l = *about;
        // The most of all launches: where a call sets it for each, only the last one's is known.
        const auto MOST_SHARED = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        int most = 0, wanted = l.dynamic_shared > int(l.shared) ? l.dynamic_shared : int(l.shared);
        need(cuFuncGetAttribute(&most, MOST_SHARED, function), named);
        if (wanted > most) need(cuFuncSetAttribute(function, MOST_SHARED, wanted), named + ": its shared memory");
        cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, l.carveout);  // -1: the default
        if (l.not_portable) cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
        unsigned used = 0;
        if (l.cooperative) {
            kernel->attributes[used].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
            kernel->attributes[used++].value.cooperative = 1;
        }
        if (l.cluster[0]) {
            kernel->attributes[used].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            kernel->attributes[used++].value.clusterDim = {l.cluster[0], l.cluster[1], l.cluster[2]};
        }
        if (l.early) {
            kernel->attributes[used].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            kernel->attributes[used++].value.programmaticStreamSerializationAllowed = 1;
        }
        kernel->config = {l.grid[0], l.grid[1], l.grid[2], l.block[0], l.block[1], l.block[2], l.shared, queue,
                          kernel->attributes, used};
        call.nodes.push_back([kernel, named] {
            need(cuLaunchKernelEx(&kernel->config, kernel->function, kernel->parameters.data(), nullptr), named);
        });
    });
}

int player_copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return guarded([=] {
        Call& call = ::call();
        inside(call, to, bytes, true, "a copy to memory that is neither scratch nor output");
        inside(call, from, bytes, false, "a copy from memory that is not the call's");
        call.nodes.push_back([=] { need(cuMemcpyDtoDAsync(to, from, bytes, queue), "copy"); });
    });
}

int player_fill(CUdeviceptr to, size_t pitch, size_t width, size_t height, size_t value, size_t element) {
    return guarded([=] {
        Call& call = ::call();
        require(element == 1 || element == 2 || element == 4, "a fill of elements of an unknown size");
        require(height && width < SLOT && height < SLOT / (pitch | 1), "a fill that is too large");
        inside(call, to, pitch * (height - 1) + width * element, true, "a fill of memory that is neither scratch nor output");
        const size_t step = height > 1 ? pitch : width * element;
        call.nodes.push_back([=] {
            if (element == 1) need(cuMemsetD2D8Async(to, step, value, width, height, queue), "fill");
            if (element == 2) need(cuMemsetD2D16Async(to, step, value, width, height, queue), "fill");
            if (element == 4) need(cuMemsetD2D32Async(to, step, value, width, height, queue), "fill");
        });
    });
}

// The nodes so far are those of a setup.
int player_before() {
    return guarded([] { call().before.swap(call().nodes); });
}

// An image's variable, with its value at capture; null: as loaded. All come before the first call that has the image.
int player_variable(size_t image, const char* name, const void* value, size_t bytes) {
    return guarded([=] {
        Call& call = ::call();
        require(image < images.size(), "a variable of no image");
        const std::string named = std::string("variable ") + name;
        auto& variables = images[image].variables;
        if (!variables.count(name)) {
            Variable loaded{};
            const CUresult code = cuModuleGetGlobal(&loaded.place, &loaded.bytes, images[image].module, name);
            if (code == CUDA_ERROR_NOT_FOUND && !value) return;  // a symbol of the compiler's that the driver hides
            need(code, named);
            if (cuMemGetAddressRange(&loaded.range, nullptr, loaded.place) != CUDA_SUCCESS) loaded.range = 0;
            loaded.value.resize(loaded.bytes);
            need(cuMemcpyDtoH(loaded.value.data(), loaded.place, loaded.bytes), named);
            variables[name] = loaded;
        }
        Variable variable = variables[name];
        require(!value || bytes == variable.bytes, named + " has another size");
        if (value) memcpy(variable.value.data(), value, bytes);
        auto& all = call.variables;  // neighbours are restored as one: a header of CUTLASS's may bring a thousand bytes
        Variable* last = all.empty() || !variable.range || all.back().range != variable.range ? nullptr : &all.back();
        if (last && last->place + last->bytes == variable.place) {
            last->bytes += variable.bytes;
            last->value.insert(last->value.end(), variable.value.begin(), variable.value.end());
        } else {
            all.push_back(std::move(variable));
        }
    });
}

// All of the call is there. used, descriptor: the ranges of scratch memory whose contents are kept, and of their copy.
int player_ready(const size_t* used, size_t count, int descriptor) {
    return guarded([=] {
        Call& call = ::call();
        call.used = ranges_of(used, count);
        call.snapshot = Memory(whole_pages(sum_of(call.used)), descriptor);
        call.kept = Window(0, call.snapshot.bytes);
        call.kept.show(call.snapshot, Memory(), true);
    });
}

// Make the call on the contents of copy `copy`. us: event pair, host's clock. what: 0 the call, 1 nothing, 2 and
// more a plain reader over `bytes` from its inputs on.
int player_play(size_t copy, size_t what, size_t bytes, double limit_s, double* us) {
    return guarded([=] {
        Call& call = ::call();
        const double limit_us = limit_s * 1e6;
        require(copy < COPIES && what < 2 + readers::count(), "no such copy or reader");
        require(what < 2 || bytes <= call.io.bytes, "a reader of more than there is");
        double start = 0;
        const auto open = [&] {
            for (const double asked = now_us(); now_us() - asked < AHEAD_US;) {
            }
            start = now_us();
            page->open = turn;
        };
        const auto enqueue = [&](auto at_full) {
            if (what == 0) launch(call.nodes, at_full);
            if (what > 1) readers::launch((const char*)call.io.place, bytes, what - 2, sms, sink, queue);
        };
        // On the contents of the call before, so that the code is where a call that ran just now has it.
        if (call.io.mapped) {
            if (what == 0) restore(call), launch(call.before, [] {});
            enqueue([] {});
            finish(limit_us);
        }
        call.io.show(call.inputs[copy], call.outputs[copy], true);
        if (!call.held.mapped) call.held.show(call.weights, Memory(), true);
        if (what == 0) restore(call), launch(call.before, [] {});
        make_cold(&call);
        finish(limit_us);
        hold<<<1, 1, 0, queue>>>(&page->open, ++turn);
        need(cuEventRecord(before, queue), "cuEventRecord");
        mark<<<1, 32, 0, queue>>>();
        enqueue(open);
        need(cuEventRecord(after, queue), "cuEventRecord");
        need(cuStreamWriteValue32(queue, (CUdeviceptr)&page->done, turn, 0), "cuStreamWriteValue32");
        if (!start) open();
        double looked = start, now;
        while (page->done != turn) {
            now = now_us();
            if (now - looked < LOOK_US) continue;
            looked = now;
            if (now - start > limit_us) throw Coded(TOO_LONG, "the call took longer than its limit");
            if (cuStreamQuery(queue) != CUDA_ERROR_NOT_READY) break;
        }
        us[1] = now_us() - start;
        finish(limit_us);
        float ms = 0;
        need(cuEventElapsedTime(&ms, before, after), "cuEventElapsedTime");
        us[0] = ms * 1e3;
    });
}

// Copy bytes of a call's memory, say an answer in scratch memory to its outputs.
int player_take(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return guarded([=] {
        Call& call = ::call();
        inside(call, to, bytes, true, "an answer's copy outside the outputs");
        inside(call, from, bytes, false, "an answer in memory that is not the call's");
        need(cuMemcpyDtoDAsync(to, from, bytes, queue), "copying an answer");
        need(cuStreamSynchronize(queue), "copying an answer");
    });
}

}  // extern "C"
