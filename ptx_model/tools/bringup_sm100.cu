// The stages of bringup_sm100.py: each kernel has one piece of sm_100a more than the one ahead of it. All have one block
// of 128 threads, the last one a pair of blocks. Sums are exact, so outputs compare bit for bit.
//
// A wait that lasts longer than WAIT_NS writes who waited for what into `report`, which is memory of the host, and traps.
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"
#include "tma.cuh"

#ifndef WAIT_NS
#define WAIT_NS 2'000'000'000ull
#endif

namespace {

constexpr int THREADS = 128, M = 128, N = 64, TILE_K = 64;  // of bf16: a row of a tile has 128 bytes
constexpr int A_BYTES = M * 128, B_BYTES = N * 128, STAGES = 3, COLUMNS = 512;
constexpr int SCALES_A = 256, SCALES_B = 272;  // columns of tensor memory

enum Role : uint32_t { PRODUCER = 1, MULTIPLIER = 2, EPILOGUE = 3 };
enum Name : uint32_t { FULL = 1, EMPTY = 2, DONE = 3 };

// report[0]: entries so far; then 8 words each: role, barrier, its stage, phase, tile, block, warp, 0
constexpr uint32_t ENTRY = 8, ENTRIES = 127;

struct Waiter {
    uint32_t* report;
    Role role;

    // Wait until the phase of that parity is over.
    __device__ void operator()(uint32_t barrier, uint32_t phase, Name name, uint32_t stage, uint32_t tile) const {
        const uint64_t begin = now();
        while (!over(barrier, phase & 1))
            if (now() - begin > WAIT_NS) give_up(name, stage, phase, tile);
    }
    static __device__ uint64_t now() {
        uint64_t t;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
        return t;
    }
    static __device__ bool over(uint32_t barrier, uint32_t parity) {
        uint32_t yes;
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(yes) : "r"(barrier), "r"(parity) : "memory");
        return yes;
    }
    __device__ void give_up(Name name, uint32_t stage, uint32_t phase, uint32_t tile) const {
        const uint32_t entry = atomicAdd_system(report, 1u);
        if (entry < ENTRIES) {
            volatile uint32_t* to = report + ENTRY * (entry + 1);
            const uint32_t words[ENTRY] = {role, name, stage, phase, tile, blockIdx.x, threadIdx.x / 32, 0};
            for (uint32_t i = 0; i < ENTRY; ++i) to[i] = words[i];
        }
        __threadfence_system();
        asm volatile("trap;");
    }
};

__device__ uint32_t tmem_alloc(uint32_t* slot) {  // by all threads; COLUMNS columns
    if (threadIdx.x < 32) {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(ptx::smem_address(slot)),
                     "n"(COLUMNS) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    return *slot;
}

__device__ void tmem_free(uint32_t tmem) {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    if (threadIdx.x < 32)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tmem), "n"(COLUMNS));
}

__device__ void tmem_load(uint32_t (&v)[8], uint32_t at) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7])
                 : "r"(at));
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

// out[lane][columns] = tensor memory from column `first` on; a warp has the 32 lanes that it may touch.
__device__ void tmem_dump(uint32_t tmem, int first, int columns, uint32_t* out) {
    const uint32_t lanes = (threadIdx.x / 32) << 21;
    for (int c = 0; c < columns; c += 8) {
        uint32_t v[8];
        tmem_load(v, tmem + lanes + first + c);
        for (int i = 0; i < 8; ++i) out[threadIdx.x * columns + c + i] = v[i];
    }
}

__device__ void load_box(uint32_t to, const void* map, int x, int y, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

__device__ void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// A tile whose rows have 128 bytes, swizzled, 8 rows in 1024 bytes.
__device__ uint64_t tile_desc(uint32_t at) {
    return 2ull << 61 | 1ull << 46 | uint64_t(1024 / 16) << 32 | (at & 0x3FFFF) / 16;
}
// 32 rows of 16 bytes: the scales of 128 rows.
__device__ uint64_t scales_desc(uint32_t at) {
    return 1ull << 46 | uint64_t(128 / 16) << 32 | uint64_t(128 / 16) << 16 | (at & 0x3FFFF) / 16;
}

__device__ void commit(uint32_t barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
                 : "memory");
}

__device__ void multiply_bf16(uint32_t d, uint64_t a, uint64_t b, uint32_t form, bool adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(d), "l"(a), "l"(b), "r"(form),
        "r"(uint32_t(adds)) : "memory");
}

__host__ __device__ constexpr uint32_t bf16_form(int rows) { return 1 << 4 | 1 << 7 | 1 << 10 | N / 8 << 17 | rows / 16 << 24; }
constexpr uint32_t NVFP4_FORM = 1 << 7 | 1 << 10 | N / 8 << 17 | M / 16 << 24;

struct alignas(1024) Tiles {
    uint8_t a[STAGES][A_BYTES], b[STAGES][B_BYTES];
};
struct alignas(128) Scales {
    uint8_t a[4][512], b[4][512];
};

}  // namespace

extern __shared__ __align__(1024) uint8_t smem[];

// Words through tensor memory and back: in, out (128, 8).
extern "C" __global__ void echo(const uint32_t* in, uint32_t* out, uint32_t* report) {
    __shared__ uint32_t slot;
    const uint32_t tmem = tmem_alloc(&slot), lanes = (threadIdx.x / 32) << 21;
    uint32_t v[8];
    for (int i = 0; i < 8; ++i) v[i] = in[threadIdx.x * 8 + i];
    asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"r"(tmem + lanes),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(v[4]), "r"(v[5]), "r"(v[6]), "r"(v[7]) : "memory");
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
    tmem_dump(tmem, 0, 8, out);
    tmem_free(tmem);
}

// What a copy with a tensor map leaves in shared memory: out, bytes of one tile of A.
extern "C" __global__ void copy(const __grid_constant__ CUtensorMap a, uint32_t* out, uint32_t* report) {
    __shared__ uint64_t full;
    const uint32_t barrier = ptx::smem_address(&full), to = ptx::smem_address(smem);
    if (threadIdx.x == 0) ptx::barrier_init(barrier, 1), ptx::barrier_publish();
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::arrive_and_expect_tx(barrier, A_BYTES);
        load_box(to, &a, TILE_K, 0, barrier);
    }
    Waiter{report, EPILOGUE}(barrier, 0, FULL, 0, 0);
    for (int i = threadIdx.x; i < A_BYTES / 4; i += THREADS) out[i] = ptx::load_shared(to + 4 * i);
}

// Scales of 128 rows, copied to tensor memory: scales, 512 bytes; out (128, 8), of which 4 columns are the scales.
extern "C" __global__ void scales(const uint8_t* from, uint32_t* out, uint32_t* report) {
    __shared__ uint32_t slot;
    __shared__ uint64_t full, done;
    const uint32_t tmem = tmem_alloc(&slot), to = ptx::smem_address(smem);
    const uint32_t arrived = ptx::smem_address(&full), copied = ptx::smem_address(&done);
    if (threadIdx.x == 0) ptx::barrier_init(arrived, 1), ptx::barrier_init(copied, 1), ptx::barrier_publish();
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::arrive_and_expect_tx(arrived, 1024);
        load_bytes(to, from, 1024, arrived);
        Waiter{report, MULTIPLIER}(arrived, 0, FULL, 0, 0);
        for (int i = 0; i < 2; ++i)
            asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(tmem + SCALES_A + 4 * i),
                         "l"(scales_desc(to + 512 * i)) : "memory");
        commit(copied);
    }
    __syncwarp();
    Waiter{report, EPILOGUE}(copied, 0, DONE, 0, 0);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    tmem_dump(tmem, SCALES_A, 8, out);
    tmem_free(tmem);
}

// A B^T: `tiles` tiles along K through a ring of STAGES, of each the first `steps` steps of 16. out fp32 (128, 64).
extern "C" __global__ void product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                                   int tiles, int steps, uint32_t* out, uint32_t* report) {
    __shared__ uint32_t slot;
    __shared__ uint64_t barriers[2 * STAGES + 1];
    Tiles& at = *reinterpret_cast<Tiles*>(smem);
    const uint32_t full = ptx::smem_address(barriers), empty = full + 8 * STAGES, done = empty + 8 * STAGES;
    const uint32_t tmem = tmem_alloc(&slot);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES + 1; ++i) ptx::barrier_init(full + 8 * i, 1);
        ptx::barrier_publish();
    }
    __syncthreads();
    if (threadIdx.x == 32) {
        const Waiter wait{report, PRODUCER};
        for (int t = 0; t < tiles; ++t) {
            const uint32_t s = t % STAGES, phase = t / STAGES;
            if (phase) wait(empty + 8 * s, phase - 1, EMPTY, s, t);
            ptx::arrive_and_expect_tx(full + 8 * s, A_BYTES + B_BYTES);
            load_box(ptx::smem_address(at.a[s]), &a, t * TILE_K, 0, full + 8 * s);
            load_box(ptx::smem_address(at.b[s]), &b, t * TILE_K, 0, full + 8 * s);
        }
    } else if (threadIdx.x == 64) {
        const Waiter wait{report, MULTIPLIER};
        for (int t = 0; t < tiles; ++t) {
            const uint32_t s = t % STAGES;
            wait(full + 8 * s, t / STAGES, FULL, s, t);
            asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
            const uint64_t left = tile_desc(ptx::smem_address(at.a[s])), right = tile_desc(ptx::smem_address(at.b[s]));
            for (int k = 0; k < steps; ++k) multiply_bf16(tmem, left + 2 * k, right + 2 * k, bf16_form(M), t || k);
            commit(empty + 8 * s);
        }
        commit(done);
    }
    __syncwarp();
    Waiter{report, EPILOGUE}(done, 0, DONE, 0, tiles - 1);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    tmem_dump(tmem, 0, N, out);
    tmem_free(tmem);
}

// NVFP4: A (128, 256), B (64, 256) of e2m1, their scales in blocks of 512 bytes, four each. out fp32 (128, 64).
extern "C" __global__ void nvfp4(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                                 const uint8_t* a_scales, const uint8_t* b_scales, uint32_t* out, uint32_t* report) {
    __shared__ uint32_t slot;
    __shared__ uint64_t barriers[2];
    Tiles& at = *reinterpret_cast<Tiles*>(smem);
    Scales& factors = *reinterpret_cast<Scales*>(smem + sizeof(Tiles));
    const uint32_t full = ptx::smem_address(barriers), done = full + 8;
    const uint32_t tmem = tmem_alloc(&slot);
    if (threadIdx.x == 0) ptx::barrier_init(full, 1), ptx::barrier_init(done, 1), ptx::barrier_publish();
    __syncthreads();
    if (threadIdx.x == 32) {
        ptx::arrive_and_expect_tx(full, A_BYTES + B_BYTES + sizeof(Scales));
        load_box(ptx::smem_address(at.a[0]), &a, 0, 0, full);
        load_box(ptx::smem_address(at.b[0]), &b, 0, 0, full);
        load_bytes(ptx::smem_address(factors.a), a_scales, sizeof(factors.a), full);
        load_bytes(ptx::smem_address(factors.b), b_scales, sizeof(factors.b), full);
    } else if (threadIdx.x == 64) {
        Waiter{report, MULTIPLIER}(full, 0, FULL, 0, 0);
        asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
        for (int i = 0; i < 4; ++i) {
            const uint64_t from[2] = {scales_desc(ptx::smem_address(factors.a[i])),
                                      scales_desc(ptx::smem_address(factors.b[i]))};
            const uint32_t to[2] = {tmem + SCALES_A + 4 * i, tmem + SCALES_B + 4 * i};
            for (int j = 0; j < 2; ++j)
                asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to[j]), "l"(from[j]) : "memory");
        }
        const uint64_t left = tile_desc(ptx::smem_address(at.a[0])), right = tile_desc(ptx::smem_address(at.b[0]));
        for (int i = 0; i < 4; ++i)
            asm volatile(
                "{\n.reg .pred p;\nsetp.ne.u32 p, %6, 0;\n"
                "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [%0], %1, %2, %3, [%4], [%5], p;\n}"
                "\n" ::"r"(tmem), "l"(left + 2 * i), "l"(right + 2 * i), "r"(NVFP4_FORM), "r"(tmem + SCALES_A + 4 * i),
                "r"(tmem + SCALES_B + 4 * i), "r"(i) : "memory");
        commit(done);
    }
    __syncwarp();
    Waiter{report, EPILOGUE}(done, 0, DONE, 0, 0);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    tmem_dump(tmem, 0, N, out);
    tmem_free(tmem);
}

// One tile by a pair of blocks, each with 128 of the 256 rows of A and 32 of the 64 of B: out fp32 (256, 64).
extern "C" __global__ void __cluster_dims__(2)
    pair(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, uint32_t* out,
         uint32_t* report) {
    __shared__ uint32_t slot;
    __shared__ uint64_t barriers[2];
    Tiles& at = *reinterpret_cast<Tiles*>(smem);
    const uint32_t full = ptx::smem_address(barriers), done = full + 8, rank = ptx::cluster_rank();
    if (threadIdx.x < 32) {
        asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(ptx::smem_address(&slot)),
                     "n"(COLUMNS) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
    }
    if (threadIdx.x == 0) ptx::barrier_init(full, 1), ptx::barrier_init(done, 1), ptx::barrier_publish();
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    ptx::cluster_sync();
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    const uint32_t tmem = slot;
    if (threadIdx.x == 32) {
        const uint32_t leaders = full & 0xFEFFFFFF;  // the barrier of the even block
        if (rank == 0) ptx::arrive_and_expect_tx(full, 2 * (A_BYTES + B_BYTES / 2));
        const uint32_t to[2] = {ptx::smem_address(at.a[0]), ptx::smem_address(at.b[0])};
        const void* maps[2] = {&a, &b};
        const int rows[2] = {int(rank) * M, int(rank) * N / 2};
        for (int i = 0; i < 2; ++i)
            asm volatile(
                "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                "[%0], [%1, {%2, %3}], [%4];" ::"r"(to[i]), "l"(maps[i]), "r"(0), "r"(rows[i]), "r"(leaders)
                : "memory");
    } else if (threadIdx.x == 64 && rank == 0) {
        Waiter{report, MULTIPLIER}(full, 0, FULL, 0, 0);
        asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
        const uint64_t left = tile_desc(ptx::smem_address(at.a[0])), right = tile_desc(ptx::smem_address(at.b[0]));
        for (int k = 0; k < 4; ++k)
            asm volatile(
                "{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
                "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(tmem), "l"(left + 2 * k),
                "l"(right + 2 * k), "r"(bf16_form(2 * M)), "r"(k) : "memory");
        asm volatile(
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;"
            ::"r"(done), "h"(uint16_t(3)) : "memory");
    }
    __syncwarp();
    Waiter{report, EPILOGUE}(done, 0, DONE, 0, 0);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    tmem_dump(tmem, 0, N, out + rank * M * N);
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    ptx::cluster_sync();
    if (threadIdx.x < 32)
        asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(tmem), "n"(COLUMNS));
}

// ---- launches. tensors: what each stage has tensor maps for. Return a cudaError_t.

namespace {

constexpr int SHARED = sizeof(Tiles) + sizeof(Scales);

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int blocks, Arguments... arguments) {
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED))
        return error;
    kernel<<<blocks, THREADS, SHARED>>>(arguments...);
    return cudaGetLastError();
}

int encoded(const tma::Tensor* tensors, int count, CUtensorMap* maps) {
    tma::Encode encode;
    if (const cudaError_t error = tma::find_encode(&encode)) return error;
    for (int i = 0; i < count; ++i)
        if (!tma::encode_map(encode, tensors[i], maps + i)) return cudaErrorInvalidValue;
    return 0;
}

}  // namespace

extern "C" int launch_echo(const uint32_t* in, uint32_t* out, uint32_t* report) {
    return launch(echo, 1, in, out, report);
}
extern "C" int launch_copy(const tma::Tensor* tensors, uint32_t* out, uint32_t* report) {
    CUtensorMap maps[1];
    if (const int error = encoded(tensors, 1, maps)) return error;
    return launch(copy, 1, maps[0], out, report);
}
extern "C" int launch_scales(const uint8_t* from, uint32_t* out, uint32_t* report) {
    return launch(scales, 1, from, out, report);
}
extern "C" int launch_product(const tma::Tensor* tensors, int tiles, int steps, uint32_t* out, uint32_t* report) {
    CUtensorMap maps[2];
    if (const int error = encoded(tensors, 2, maps)) return error;
    return launch(product, 1, maps[0], maps[1], tiles, steps, out, report);
}
extern "C" int launch_nvfp4(const tma::Tensor* tensors, const uint8_t* a_scales, const uint8_t* b_scales, uint32_t* out,
                            uint32_t* report) {
    CUtensorMap maps[2];
    if (const int error = encoded(tensors, 2, maps)) return error;
    return launch(nvfp4, 1, maps[0], maps[1], a_scales, b_scales, out, report);
}
extern "C" int launch_pair(const tma::Tensor* tensors, uint32_t* out, uint32_t* report) {
    CUtensorMap maps[2];
    if (const int error = encoded(tensors, 2, maps)) return error;
    return launch(pair, 2, maps[0], maps[1], out, report);
}
