// sm90_few_heads' end: what the blocks of a cluster have summed goes to those that join parts of the outputs.
#pragma once

#include <cuda_fp16.h>

#include "sm90_few_heads_sum.cuh"

namespace fmha::few {

// As arrive, at another block's barrier. For who wrote nothing that the other block reads: a release to the whole
// cluster would wait like a fence.
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ float4 load_stats(uint32_t from) {
    uint4 const v = load_shared16(from);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), 0);
}

// Which units of the sums each block joins: from `first` of it on, up to the next one's. It gets `most` of each block.
struct Pieces {
    Divisor blocks;
    uint32_t most;
    __device__ __forceinline__ explicit Pieces(Divisor blocks) : blocks(blocks), most(blocks(UNITS + blocks.by - 1)) {}
    // Bytes that a block receives, of all blocks with itself.
    __device__ __forceinline__ uint32_t bytes(uint32_t block) const {
        return blocks.by * ((first(block + 1) - first(block)) * 16 + BLOCK_M * STATS + WARPS * SCALE_ROW);
    }
    __device__ __forceinline__ uint32_t first(uint32_t block) const { return blocks(block * UNITS); }
    __device__ __forceinline__ uint32_t owner(uint32_t unit) const { return (blocks.by * (unit + 1) - 1) / UNITS; }
    // Where a block has its unit of the sums of block `from`.
    __device__ __forceinline__ uint32_t received(uint32_t from, uint32_t unit, uint32_t block) const {
        return SMEM_RECEIVED + (from * most + unit - first(block)) * 16;
    }
};

// What the sums of this lane's two rows have been divided by, powers of two, and their stats.
struct Left {
    float scale[2];
    float4 stats[2];
};
// The block's O to its shared memory as fp16, of which 1 to 2 is the largest of a row in a warp's dims.
__device__ __forceinline__ Left leave_sums(Softmax& softmax, const float (&o)[DIMS / 8][4], uint32_t smem) {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Left left;
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float largest = 0;
#pragma unroll
        for (int n = 0; n < DIMS / 8; ++n)
            largest = fmaxf(largest, fmaxf(fabsf(o[n][2 * h]), fabsf(o[n][2 * h + 1])));
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            softmax.sum[h] += __shfl_xor_sync(~0u, softmax.sum[h], lanes);
            softmax.rounded[h] += __shfl_xor_sync(~0u, softmax.rounded[h], lanes);
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
        }
        uint32_t const exponent = __float_as_uint(largest) & 0x7F800000;
        left.scale[h] = __uint_as_float(exponent), inverse[h] = __uint_as_float((254u << 23) - exponent);
        left.stats[h] = make_float4(softmax.top[h], softmax.sum[h], softmax.rounded[h], 0);
    }
    // Of the four matrices of a store: lanes 0-15 rows 0-15 of the left 8 dims, lanes 16-31 of the right ones.
    uint32_t const to = smem + SMEM_SUMS + lane % 16 * SUM_ROW + (warp * DIMS / 8 + lane / 16) * 16;
#pragma unroll
    for (int n = 0; n < DIMS / 8; n += 2)
        stmatrix_x4(to + n * 16, pack_f16x2(o[n][0] * inverse[0], o[n][1] * inverse[0]),
                    pack_f16x2(o[n][2] * inverse[1], o[n][3] * inverse[1]),
                    pack_f16x2(o[n + 1][0] * inverse[0], o[n + 1][1] * inverse[0]),
                    pack_f16x2(o[n + 1][2] * inverse[1], o[n + 1][3] * inverse[1]));
    return left;
}

// To a block's shared memory. A block alone stores, and its own barrier is enough: memcheck refuses st.async there.
struct Mail {
    Pieces const& pieces;
    uint32_t smem;
    __device__ __forceinline__ void give(uint32_t block, uint32_t to, uint32_t v) const {
        if (pieces.blocks.by == 1)
            store_shared(smem + to, v);
        else
            st_async(in_block(block, smem + to), v, in_block(block, smem + RECEIVED_BARRIER));
    }
    __device__ __forceinline__ void give16(uint32_t block, uint32_t to, uint4 v) const {
        if (pieces.blocks.by == 1)
            store_shared16(smem + to, v);
        else
            st_async16(in_block(block, smem + to), v, in_block(block, smem + RECEIVED_BARRIER));
    }
};

// Each unit of the sums to the block that joins it.
__device__ __forceinline__ void send_units(Mail const& mail, int rank) {
    uint4 units[UNITS / NUM_THREADS];
#pragma unroll
    for (int i = 0; i < UNITS / NUM_THREADS; ++i) {
        uint32_t const unit = threadIdx.x + i * NUM_THREADS;
        uint32_t const row = unit / ROW_UNITS, column = unit % ROW_UNITS;
        units[i] = load_shared16(mail.smem + SMEM_SUMS + row * SUM_ROW + column * 16);
    }
#pragma unroll
    for (int i = 0; i < UNITS / NUM_THREADS; ++i) {
        uint32_t const unit = threadIdx.x + i * NUM_THREADS, owner = mail.pieces.owner(unit);
        mail.give16(owner, mail.pieces.received(rank, unit, owner), units[i]);
    }
}

// Scales and stats to all blocks.
__device__ __forceinline__ void send_stats(Mail const& mail, Left const& left, int rank) {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane % 4) return;
#pragma unroll 1
    for (uint32_t block = 0; block < mail.pieces.blocks.by; ++block) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int const row = lane / 4 + 8 * h;
            mail.give(block, SMEM_SCALES + ((rank * WARPS + warp) * BLOCK_M + row) * 4, __float_as_uint(left.scale[h]));
            if (warp == h)
                mail.give16(block, SMEM_STATS + (rank * BLOCK_M + row) * STATS,
                            make_uint4(__float_as_uint(left.stats[h].x), __float_as_uint(left.stats[h].y),
                                       __float_as_uint(left.stats[h].z), 0));
        }
    }
}

__device__ __forceinline__ void send_sums(Left const& left, Pieces const& pieces, int rank, uint32_t smem) {
    Mail const mail = {pieces, smem};
    send_units(mail, rank);
    send_stats(mail, left, rank);
}

// What the sums of each block are to be multiplied by, [BLOCK_M][MOST_BLOCKS] to shared memory; and lse.
__device__ __forceinline__ void weigh(const Problem& p, const Item& item, uint32_t smem) {
    constexpr int LANES = NUM_THREADS / BLOCK_M, EACH = MOST_BLOCKS / LANES;  // lanes of a head, blocks of a lane
    int const row = threadIdx.x / LANES, lane = threadIdx.x % LANES, blocks = p.blocks.by;
    float4 stats[EACH];
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int const block = lane + i * LANES;
        stats[i] = make_float4(-INFINITY, 0, 0, 0);
        if (block < blocks) stats[i] = load_stats(smem + SMEM_STATS + (block * BLOCK_M + row) * STATS);
        top = fmaxf(top, stats[i].x);
    }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    bool const any = top > -INFINITY;
    float weights[EACH], sum = 0, rounded = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        weights[i] = any ? exp2_fast(stats[i].x - top) : 0.f;
        sum = fmaf(weights[i], stats[i].y, sum), rounded = fmaf(weights[i], stats[i].z, rounded);
    }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2)
        sum += __shfl_xor_sync(~0u, sum, lanes), rounded += __shfl_xor_sync(~0u, rounded, lanes);
    int const head = item.head + min(row, item.heads - 1);
    // Infinite if the sink drowns all else; `any`: then the largest p is at least 2^-RESCALE_THRESHOLD.
    float const denominator = rounded + exp2_fast(__ldg(p.sink + head) * LOG2E - top);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        store_shared(smem + SMEM_WEIGHTS + (row * MOST_BLOCKS + lane + i * LANES) * 4,
                     __float_as_uint(any ? weights[i] / denominator : 0.f));
    if (item.rank == 0 && lane == 0 && row < item.heads)
        p.lse[int64_t(item.query) * p.heads + head] = any ? (top + log2f(sum)) / LOG2E : INFINITY;
}

// This block's part of the outputs.
__device__ __forceinline__ void join(const Problem& p, const Item& item, Pieces const& pieces, uint32_t smem) {
    __nv_bfloat16* const out = p.out + (int64_t(item.query) * p.heads + item.head) * HEAD_DIM;
    uint32_t const end = min(pieces.first(item.rank + 1), uint32_t(item.heads * ROW_UNITS));
#pragma unroll 1
    for (uint32_t unit = pieces.first(item.rank) + threadIdx.x; unit < end; unit += NUM_THREADS) {
        uint32_t const row = unit / ROW_UNITS, warp = unit % ROW_UNITS / (DIMS / 8);
        Angles const angles(p.turn, item.query, unit % ROW_UNITS * 8);
        uint32_t const weights = smem + SMEM_WEIGHTS + row * MOST_BLOCKS * 4;
        uint32_t const scales = smem + SMEM_SCALES + (warp * BLOCK_M + row) * 4;
        uint32_t const from = smem + pieces.received(0, unit, item.rank);
        float sum[8] = {};
#pragma unroll 4
        for (uint32_t block = 0; block < pieces.blocks.by; ++block) {
            float const weight = __uint_as_float(load_shared(weights + block * 4)) *
                                 __uint_as_float(load_shared(scales + block * (WARPS * SCALE_ROW)));
            uint4 const v = load_shared16(from + block * pieces.most * 16);
            uint32_t const pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2 const pair = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
                sum[2 * i] = fmaf(weight, pair.x, sum[2 * i]), sum[2 * i + 1] = fmaf(weight, pair.y, sum[2 * i + 1]);
            }
        }
        uint32_t made[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) made[i] = pack_bf16x2(sum[2 * i], sum[2 * i + 1]);
        *reinterpret_cast<uint4*>(out + unit * 8) = angles(make_uint4(made[0], made[1], made[2], made[3]));
    }
}

}  // namespace fmha::few
