// The GPUs of one model exchange parts of a sum, or of logits, by stores into each other's memory: no flags, no barrier.
//
// Each rank has three boxes of its own, each with room for `capacity` floats of every rank, full of -0, which stands for
// "not there yet". In exchange e a rank stores its part, with -0 made +0, into box e % 3 of every other rank. While parts
// are under way it empties what exchange e - 1 has left. Then it reads its own box until no word of the others' is empty;
// so each word is its own flag, and a part may arrive in any order. Three boxes suffice: a rank writes for exchange e + 2,
// in box (e - 1) % 3, only when it has this rank's part of exchange e + 1, which was sent behind the emptying. Sums are in
// the order of ranks: equal bits everywhere.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "launch.cuh"

namespace gpus {  // not nameless, since the launcher's parameters are of these types

constexpr int MOST_RANKS = 8, THREADS = 256;
constexpr uint32_t EMPTY = 0x80000000u;  // -0

// What stays from exchange to exchange, in this rank's memory.
struct Progress {
    unsigned epoch;     // exchanges that are over
    unsigned finished;  // blocks of the present one
    unsigned words[3];  // of each rank's part, that exchange e % 3 has written
    unsigned lost;      // 1: one gave up, and later ones do not wait
};

// In memory of the host: whether this rank gave up waiting, in which exchange of the pass, and for which rank.
struct Lost {
    volatile unsigned found, place, rank;
};

struct Exchange {
    float* boxes[MOST_RANKS];  // of each rank, [3][ranks][capacity]
    Progress* progress;
    Lost* lost;
    const void* part;
    void* out;
    int rank, ranks, capacity;  // in floats
    int count;                  // floats of a part, a multiple of 4
    int row;                    // join: floats of a row of a part; 0: add
    int bf16;                   // part and out of add
    int place;                  // the number of this exchange in the pass, for messages
    unsigned limit_us;
};

__device__ __forceinline__ uint4 load_box(const float* at) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_box(float* at, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ uint32_t sent(float value) {
    const uint32_t bits = __float_as_uint(value);
    return bits == EMPTY ? 0u : bits;
}

__device__ __forceinline__ unsigned long long now_us() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns / 1000;
}

// Four values of this rank's part, as they are sent.
__device__ __forceinline__ uint4 part_of(const Exchange& x, int quad) {
    if (!x.bf16) {
        const float4 f = ((const float4*)x.part)[quad];
        return {sent(f.x), sent(f.y), sent(f.z), sent(f.w)};
    }
    const __nv_bfloat162* pair = (const __nv_bfloat162*)x.part + 2 * quad;
    const float2 a = __bfloat1622float2(pair[0]), b = __bfloat1622float2(pair[1]);
    return {sent(a.x), sent(a.y), sent(b.x), sent(b.y)};
}

// Wait for a quad of a rank's part. False: it did not come in time.
__device__ bool arrived(const Exchange& x, const float* at, int rank, uint4& v) {
    for (unsigned long long start = 0;;) {
        v = load_box(at);
        if (v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY) return true;
        if (*(volatile unsigned*)&x.progress->lost) return false;
        if (!start) start = now_us();
        if (now_us() - start <= x.limit_us) continue;
        if (!atomicExch(&x.progress->lost, 1u)) {
            x.lost->place = x.place, x.lost->rank = rank;
            __threadfence_system();
            x.lost->found = 1;
        }
        return false;
    }
}

__global__ void __launch_bounds__(THREADS) exchange(const __grid_constant__ Exchange x) {
    programmatic::wait();  // a push ahead of it could overtake the emptying of this rank's exchange before
    programmatic::trigger();
    const unsigned epoch = *(volatile unsigned*)&x.progress->epoch;
    const int box = epoch % 3, before = (epoch + 2) % 3, quads = x.count / 4;
    const size_t own = (size_t)x.ranks * x.capacity;
    const int first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    const bool lost = *(volatile unsigned*)&x.progress->lost;
    for (int quad = first; !lost && quad < quads; quad += step) {
        const uint4 words = part_of(x, quad);
        for (int turn = 1; turn < x.ranks; turn++) {  // not all to the same rank at once
            const int to = (x.rank + turn) % x.ranks;
            store_box(x.boxes[to] + box * own + (size_t)x.rank * x.capacity + 4 * quad, words);
        }
    }
    float* old = x.boxes[x.rank] + before * own;
    const int left = x.progress->words[before] / 4;
    for (int rank = 0; rank < x.ranks; rank++)
        for (int quad = first; rank != x.rank && quad < left; quad += step)
            store_box(old + (size_t)rank * x.capacity + 4 * quad, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
    const float* mine = x.boxes[x.rank] + box * own;
    for (int quad = first; !lost && quad < quads; quad += step) {
        float4 total = {0, 0, 0, 0};
        for (int rank = 0; rank < x.ranks; rank++) {
            uint4 v;
            if (rank == x.rank)
                v = part_of(x, quad);
            else if (!arrived(x, mine + (size_t)rank * x.capacity + 4 * quad, rank, v))
                break;
            const float4 f = *(const float4*)&v;
            if (x.row) {  // a part's rows lie side by side
                const int at = 4 * quad / x.row, column = 4 * quad % x.row;
                *(float4*)((float*)x.out + ((size_t)at * x.ranks + rank) * x.row + column) = f;
            } else {
                total = rank ? make_float4(total.x + f.x, total.y + f.y, total.z + f.z, total.w + f.w) : f;
            }
        }
        if (x.row) continue;
        if (x.bf16) {
            __nv_bfloat162* pair = (__nv_bfloat162*)x.out + 2 * quad;
            pair[0] = __floats2bfloat162_rn(total.x, total.y), pair[1] = __floats2bfloat162_rn(total.z, total.w);
        } else {
            ((float4*)x.out)[quad] = total;
        }
    }
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&x.progress->finished, 1u) + 1 == gridDim.x) {
        x.progress->finished = 0, x.progress->words[box] = x.count, x.progress->words[before] = 0;
        __threadfence();
        *(volatile unsigned*)&x.progress->epoch = epoch + 1;
    }
}

}  // namespace gpus

extern "C" int launch_exchange(const gpus::Exchange* given, int blocks, int early) {
    return programmatic::launch_early(gpus::exchange, dim3(blocks), dim3(gpus::THREADS), 0, early, *given);
}
