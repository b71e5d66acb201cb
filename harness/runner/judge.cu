// What the judge itself runs on a GPU: memory that two processes share, a spin, a mark, and the plain readers that
// make the roof. Everything goes to the default queue, like the submissions.
#include <cstdint>
#include <cuda.h>
#include <cuda_runtime.h>
#include <ctime>

// Of the interpreter that loads this.
extern "C" void* PyObject_CallObject(void* callable, void* arguments);

namespace {

// Fills every SM to its last thread (two CTAs of 1024 each), so that nothing on another queue can run before the start
// event. One thread of each CTA looks at the clock; the others wait.
__global__ void __launch_bounds__(1024, 2) spin(unsigned long long nanoseconds) {
    if (threadIdx.x == 0) {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do {
            __nanosleep(200);
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        } while (now - start < nanoseconds);
    }
    __syncthreads();
}

// Stands between the start event and the call: an early programmatic launch in the call reaches back to this kernel at
// most, never into the spin.
__global__ void mark() {}

__device__ __forceinline__ uint4 load(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Each thread keeps U independent 16-byte loads in flight. The sink is never written in practice; it keeps the loads.
template <int U>
__global__ void read(const uint4* __restrict__ data, size_t n, unsigned* sink) {
    const size_t step = size_t(gridDim.x) * blockDim.x;
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    unsigned sum = 0;
    for (; i + (U - 1) * step < n; i += U * step) {
        uint4 v[U];
#pragma unroll
        for (int u = 0; u < U; ++u) v[u] = load(data + i + u * step);
#pragma unroll
        for (int u = 0; u < U; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    for (; i < n; i += step) {
        const uint4 v = load(data + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9E3779B9u) atomicXor(sink, sum);
}

// As above, with a contiguous piece of the data for each block: fewer pages a block.
template <int U>
__global__ void read_pieces(const uint4* __restrict__ data, size_t n, unsigned* sink) {
    const size_t piece = (n + gridDim.x - 1) / gridDim.x, first = blockIdx.x * piece;
    const size_t last = first + piece < n ? first + piece : n;
    unsigned sum = 0;
    size_t i = first + threadIdx.x;
    for (; i + (U - 1) * size_t(blockDim.x) < last; i += U * size_t(blockDim.x)) {
        uint4 v[U];
#pragma unroll
        for (int u = 0; u < U; ++u) v[u] = load(data + i + u * size_t(blockDim.x));
#pragma unroll
        for (int u = 0; u < U; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    for (; i < last; i += blockDim.x) {
        const uint4 v = load(data + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9E3779B9u) atomicXor(sink, sum);
}

// One word of every `stride` bytes from every SM: the translations of a slot are as warm as those of weights that stay in
// one process, while its data stays cold. Without it a call pays for what other processes evicted.
struct Touched {
    struct {
        const char* data;
        size_t bytes;
    } part[16];  // native.TOUCHED
    int count;
    size_t stride;
};
__global__ void touch(Touched touched, unsigned* sink) {
    unsigned sum = 0;
    for (int k = 0; k < touched.count; ++k)
        for (size_t i = threadIdx.x * touched.stride; i < touched.part[k].bytes; i += blockDim.x * touched.stride)
            sum ^= *(const volatile unsigned*)(touched.part[k].data + i);
    if (sum == 0x9E3779B9u) atomicXor(sink, sum);
}

// A secret that the runner holds before it is due travels masked: XOR with the ChaCha keystream (8 rounds, 256-bit key,
// the counter is the index of the 64-byte line). Masking twice restores.
struct Key {
    unsigned word[8];
};

__device__ __forceinline__ void quarter(unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
    a += b; d = __funnelshift_l(d ^ a, d ^ a, 16);
    c += d; b = __funnelshift_l(b ^ c, b ^ c, 12);
    a += b; d = __funnelshift_l(d ^ a, d ^ a, 8);
    c += d; b = __funnelshift_l(b ^ c, b ^ c, 7);
}

__global__ void mask(uint4* data, size_t lines, Key key) {
    for (size_t line = blockIdx.x * size_t(blockDim.x) + threadIdx.x; line < lines;
         line += size_t(gridDim.x) * blockDim.x) {
        unsigned init[16] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};  // the constants of the cipher
#pragma unroll
        for (int i = 0; i < 8; ++i) init[4 + i] = key.word[i];
        init[12] = unsigned(line), init[13] = unsigned(line >> 32), init[14] = init[15] = 0;
        unsigned x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] = init[i];
#pragma unroll
        for (int round = 0; round < 4; ++round) {
#pragma unroll
            for (int i = 0; i < 4; ++i) quarter(x[i], x[4 + i], x[8 + i], x[12 + i]);
#pragma unroll
            for (int i = 0; i < 4; ++i) quarter(x[i], x[4 + (i + 1) % 4], x[8 + (i + 2) % 4], x[12 + (i + 3) % 4]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4 v = data[4 * line + i];
            v.x ^= x[4 * i] + init[4 * i], v.y ^= x[4 * i + 1] + init[4 * i + 1];
            v.z ^= x[4 * i + 2] + init[4 * i + 2], v.w ^= x[4 * i + 3] + init[4 * i + 3];
            data[4 * line + i] = v;
        }
    }
}

__global__ void write_junk(uint4* data, size_t n) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
        data[i] = make_uint4(unsigned(i), 0, 0, 0);
}

// Drops the lines of a buffer from L2 without writing them back; what the buffer holds is undefined afterwards.
__global__ void discard(char* data, size_t bytes) {
    const size_t step = size_t(gridDim.x) * blockDim.x * 128;
    for (size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * 128; i + 128 <= bytes; i += step)
        asm volatile("discard.global.L2 [%0], 128;" ::"l"(data + i) : "memory");
}

__device__ __forceinline__ unsigned long long mixed(unsigned long long x) {  // splitmix64's finaliser
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Adds to `sum` what depends on every byte of `data` and on its place; `first` is the place of its first word. Whoever
// knows the digest of outputs has them all. `data` is aligned to 8 bytes.
__global__ void digest(const unsigned char* data, size_t bytes, unsigned long long first, unsigned long long* sum) {
    const size_t words = (bytes + 7) / 8;
    unsigned long long part = 0;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += size_t(gridDim.x) * blockDim.x) {
        unsigned long long word = 0;
        if (8 * i + 8 <= bytes) word = ((const unsigned long long*)data)[i];
        else
            for (size_t k = 8 * i; k < bytes; ++k) word |= (unsigned long long)data[k] << 8 * (k - 8 * i);
        part += mixed(word + mixed(first + i + 1));
    }
    for (int lane = 16; lane; lane /= 2) part += __shfl_xor_sync(~0u, part, lane);
    if (threadIdx.x % 32 == 0 && part) atomicAdd(sum, part);
}

// The word that ends a batch, in memory of the host: the digest, never 0.
__global__ void stamp(const unsigned long long* sum, volatile unsigned long long* word) {
    *word = *sum | 1;
    __threadfence_system();
}

__global__ void open_gate(volatile unsigned* word) {
    *word = 1;
    __threadfence_system();
}

cudaEvent_t start_event, stop_event;

double now_us() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

struct Config {
    int blocks_per_sm;  // 0: as many blocks as give every thread one round of loads
    int threads, loads, pieces;
};
// Twelve shapes around what was fastest on an H200 for 8 to 132 MB; the roof is the best of them in the same run.
constexpr Config CONFIGS[] = {
    {8, 256, 4, 0}, {4, 512, 4, 0}, {2, 1024, 4, 0}, {4, 256, 8, 0}, {2, 512, 8, 0}, {1, 1024, 8, 0},
    {0, 256, 4, 0}, {0, 512, 4, 0}, {0, 256, 8, 0}, {8, 256, 4, 1}, {2, 1024, 4, 1}, {4, 512, 4, 1},
};

}  // namespace

extern "C" {

int judge_configs() { return sizeof(CONFIGS) / sizeof(CONFIGS[0]); }

int judge_allocate(size_t bytes, void** pointer) { return cudaMalloc(pointer, bytes); }
int judge_free(void* pointer) { return cudaFree(pointer); }
int judge_export(void* pointer, void* handle) { return cudaIpcGetMemHandle((cudaIpcMemHandle_t*)handle, pointer); }
int judge_import(const void* handle, void** pointer) {
    return cudaIpcOpenMemHandle(pointer, *(const cudaIpcMemHandle_t*)handle, cudaIpcMemLazyEnablePeerAccess);
}
int judge_close(void* pointer) { return cudaIpcCloseMemHandle(pointer); }
int judge_reset_l2() { return cudaCtxResetPersistingL2Cache(); }

// Mask `bytes` (a multiple of 64) of `data` with the 32 bytes at `key`; a second time unmasks.
int judge_mask(void* data, size_t bytes, const void* key, int sms) {
    if (bytes % 64) return cudaErrorInvalidValue;
    mask<<<8 * sms, 256>>>((uint4*)data, bytes / 64, *(const Key*)key);
    return cudaGetLastError();
}

// Leave no line in L2 that was written before, dirty ones neither: lines written last outlive any flush by reading, so
// they are driven out by writing `bytes` of junk, and the junk is dropped without being written back.
int judge_clean(void* junk, size_t bytes, int sms) {
    write_junk<<<8 * sms, 512>>>((uint4*)junk, bytes / 16);
    discard<<<8 * sms, 512>>>((char*)junk, bytes);
    return cudaGetLastError();
}

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
};
struct Called {
    double host_us;  // until the call returned to here
    int ran_dry;     // 1: the device had reached the start event before the stop event was enqueued
    int error;
};

// One timed call, from the spin to the copies of its outputs, with no Python in between but the call's own: what it
// returns is looked at afterwards. Return that, null if it raised. `arguments` is a tuple.
void* judge_call(unsigned long long spin_ns, int sms, void* kernel, void* arguments, const Copy* copies, int count,
                 Called* called) {
    cudaError_t error = cudaSuccess;
    if (!start_event) {
        error = cudaEventCreate(&start_event);
        if (!error) error = cudaEventCreate(&stop_event);
    }
    if (!error) {
        spin<<<2 * sms, 1024>>>(spin_ns);
        error = cudaEventRecord(start_event, 0);
        mark<<<1, 32>>>();
    }
    if (!error) error = cudaGetLastError();
    const double before = now_us();
    void* result = PyObject_CallObject(kernel, arguments);
    called->host_us = now_us() - before;
    const cudaError_t dry = cudaEventQuery(start_event);
    if (!error) error = cudaEventRecord(stop_event, 0);
    for (int i = 0; i < count && !error; ++i)
        error = cudaMemcpyAsync(copies[i].to, copies[i].from, copies[i].bytes, cudaMemcpyDefault, 0);
    called->ran_dry = dry == cudaSuccess;
    called->error = error;
    return result;
}
int judge_elapsed(float* us) {
    const cudaError_t error = cudaEventElapsedTime(us, start_event, stop_event);
    *us *= 1e3f;
    return error;
}

// A page that checker and runner share: the runner's queue waits for the word `open`, the checker for the word `done`.
struct GatePage {
    unsigned open;
    unsigned char room[60];
    unsigned long long done;  // native.DONE_OFFSET
};
// Let the device see a page of the host. `seen`: its address there.
int judge_show(void* page, size_t bytes, void** seen) {
    const cudaError_t error = cudaHostRegister(page, bytes, cudaHostRegisterMapped);
    return error ? error : cudaHostGetDevicePointer(seen, page, 0);
}
int judge_hide(void* page) { return cudaHostUnregister(page); }

// Hold the default queue until the gate is open. A queue that waits so takes no SM and no time slice.
int judge_await_gate(GatePage* seen) {
    static CUresult (*wait)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;
    if (!wait) {
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", (void**)&wait, 12000, cudaEnableDefault, &found);
        if (error || found != cudaDriverEntryPointSuccess) return error ? error : cudaErrorNotSupported;
    }
    return wait(0, (CUdeviceptr)&seen->open, 1, CU_STREAM_WAIT_VALUE_EQ) ? cudaErrorNotSupported : cudaSuccess;
}
int judge_digest(const void* data, size_t bytes, unsigned long long first, int sms, unsigned long long* sum) {
    if (uintptr_t(data) % 8) return cudaErrorMisalignedAddress;
    digest<<<8 * sms, 256>>>((const unsigned char*)data, bytes, first, sum);
    return cudaGetLastError();
}
int judge_stamp(const unsigned long long* sum, GatePage* seen) {
    stamp<<<1, 1>>>(sum, &seen->done);
    return cudaGetLastError();
}
int judge_copy(void* to, const void* from, size_t bytes) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, 0);
}

// Keep the device busy, and return when it is done: a device that had no work has lowered its clocks.
int judge_wake(unsigned long long ns, int sms) {
    spin<<<2 * sms, 1024>>>(ns);
    const cudaError_t error = cudaGetLastError();
    return error ? error : cudaStreamSynchronize(0);
}

struct Masked {
    void* data;
    size_t bytes;  // a multiple of 64
    Key key;
};

// After ahead_us, unmask, open the gate, and wait for the last word. us: from before the first unmasking until then; 0:
// that took more than limit_s.
int judge_open(const Masked* parts, int count, GatePage* page, GatePage* seen, int sms, double ahead_us, double limit_s,
               double* us) {
    *us = 0;
    const double asked = now_us();
    while (now_us() - asked < ahead_us) {
    }
    const double start = now_us();
    for (int i = 0; i < count; ++i) mask<<<8 * sms, 256>>>((uint4*)parts[i].data, parts[i].bytes / 64, parts[i].key);
    open_gate<<<1, 1>>>(&seen->open);
    if (const cudaError_t error = cudaGetLastError()) return error;
    const volatile unsigned long long* done = &page->done;
    while (now_us() - start < limit_s * 1e6)
        if (*done) {
            *us = now_us() - start;
            break;
        }
    return cudaSuccess;
}
int judge_memory(size_t* free_bytes, size_t* total_bytes) { return cudaMemGetInfo(free_bytes, total_bytes); }

// touched: a Touched. That type is of this file alone, and a function with such a parameter would be too.
int judge_touch(const void* touched, int sms, unsigned* sink) {
    touch<<<2 * sms, 256>>>(*(const Touched*)touched, sink);
    return cudaGetLastError();
}

// Read `bytes` from `data` (16-byte aligned, bytes a multiple of 16) with configuration `index`.
int judge_read(const void* data, size_t bytes, int index, int sms, unsigned* sink) {
    if (index < 0 || index >= judge_configs() || bytes % 16) return cudaErrorInvalidValue;
    const Config c = CONFIGS[index];
    const size_t n = bytes / 16, round = size_t(c.threads) * c.loads;
    const unsigned blocks = c.blocks_per_sm ? c.blocks_per_sm * sms : unsigned((n + round - 1) / round);
    const uint4* p = (const uint4*)data;
    if (c.pieces) read_pieces<4><<<blocks, c.threads>>>(p, n, sink);
    else if (c.loads == 4) read<4><<<blocks, c.threads>>>(p, n, sink);
    else read<8><<<blocks, c.threads>>>(p, n, sink);
    return cudaGetLastError();
}

}  // extern "C"
