// The warpgroups that multiply: one makes scores to probabilities, two sum values, 256 of the dims each.
#pragma once

#include "sm90_attend.cuh"
#include "sm90_products.cuh"

namespace fmha {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float TO_LOG2 = 0.04419417382415922f * LOG2E;  // 512^-0.5, for scores in powers of two
// P may reach 2^8: sums stay far inside fp32, and bf16 is as fine there as below 1.
constexpr float RESCALE_THRESHOLD = 8.f;

// ---- scores: the second warpgroup

// Of a lane's two rows, 16 warp + lane / 4 and 8 on; sums of its own columns.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY};  // running maximum, up to RESCALE_THRESHOLD too small; -inf: no entry yet
    float sum[2] = {0, 0}, rounded[2] = {0, 0};  // of p, for lse; of p in bf16, which P V has

    // s: scores, to probabilities, two in a word: pairs[row][8 columns]. -> what O is to be multiplied by.
    template <int COLUMNS>
    __device__ __forceinline__ float2 update(const float (&s)[COLUMNS], uint32_t (&pairs)[2][COLUMNS / 4]) {
        float largest[2], alpha[2] = {1.f, 1.f};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            largest[h] = s[2 * h];
#pragma unroll
            for (int i = 0; i < COLUMNS / 4; ++i)
                largest[h] = fmaxf(largest[h], fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
            largest[h] *= TO_LOG2;
        }
        if (__any_sync(~0u, largest[0] > top[0] + RESCALE_THRESHOLD || largest[1] > top[1] + RESCALE_THRESHOLD)) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {  // for the first tile with entries, and seldom again
                largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
                largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
                const bool moves = largest[h] > top[h] + RESCALE_THRESHOLD;
                alpha[h] = moves ? exp2_fast(top[h] - largest[h]) : 1.f;
                top[h] = moves ? largest[h] : top[h];
                sum[h] *= alpha[h], rounded[h] *= alpha[h];
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float zero = top[h] == -INFINITY ? 0.f : top[h];
            float exact = 0, as_bf16 = 0;
#pragma unroll
            for (int i = 0; i < COLUMNS / 4; ++i) {
                const float a = exp2_fast(fmaf(s[4 * i + 2 * h], TO_LOG2, -zero));
                const float b = exp2_fast(fmaf(s[4 * i + 2 * h + 1], TO_LOG2, -zero));
                const uint32_t pair = pairs[h][i] = pack_bf16x2(a, b);
                exact += a + b;
                as_bf16 += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xFFFF0000);
            }
            sum[h] += exact, rounded[h] += as_bf16;
        }
        return make_float2(alpha[0], alpha[1]);
    }
};

template <class F>
struct Scores {
    const Problem& p;
    SharedStorage<F>& shared;
    int warp, lane, row;  // row: the upper of this lane's two

    // A part of the item's queries, by one thread. Heads that do not exist come as zeros.
    __device__ __forceinline__ void load_queries(const Item<F>& item, int part) const {
        const uint32_t full = smem_address(&shared.q_full[part]);
        const int head = item.head(p), token = item.token(p);
        const uint64_t policy = l2_evict_first();
        arrive_and_expect_tx(full, TILES / PARTS * F::Q_TILE);
#pragma unroll
        for (int i = 0; i < TILES / PARTS; ++i) {
            const int t = subtile(part, i);
            tma_load_3d(smem_address(shared.q) + t * F::Q_TILE, &p.q, 64 * t, p.heads_outer ? token : head,
                        p.heads_outer ? head : token, full, policy);
        }
    }

    // s = Q K^T. As soon as a part of the queries has served the item's last tile, the next item's is asked for.
    __device__ __forceinline__ void multiply(float (&s)[F::BLOCK_N / 2], uint32_t stage, uint32_t phase, bool first,
                                             uint32_t item_turn, bool last, const Item<F>& following) const {
        const uint64_t query = make_smem_desc(smem_address(shared.q));
        const uint64_t key = make_smem_desc(smem_address(shared.k[stage]));
        const auto replace = [&](int part) {
            if (!last) return;
            named_barrier_sync<128>(1);  // all four warps have done with it
            if (threadIdx.x % 128 == 0 && following.exists(p)) load_queries(following, part);
        };
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            if (first) wait(smem_address(&shared.q_full[part]), item_turn & 1);
            wait(smem_address(&shared.full[stage][part]), phase);
            fence_proxy_async_shared();  // for the writers, who would wait for what they asked for since
            warpgroup_arrive();
#pragma unroll
            for (int i = 0; i < TILES / PARTS; ++i) {
                const int t = subtile(part, i);
#pragma unroll
                for (int k = 0; k < 4; ++k)  // 16 dims, 32 bytes
                    wgmma(s, query + t * (F::Q_TILE / 16) + 2 * k, key + t * (F::TILE / 16) + 2 * k, part + i + k > 0);
            }
            warpgroup_commit_batch();
        }
        if (last) warpgroup_wait<1>();
        replace(0);
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
        warp_arrive(smem_address(&shared.scored));
        replace(1);
    }

    __device__ __forceinline__ void mask(float (&s)[F::BLOCK_N / 2], uint32_t stage) const {
        const uint4 masks = load_shared16(smem_address(shared.masks[stage]));
        const uint32_t word[4] = {masks.x, masks.y, masks.z, masks.w};
        if ((masks.x & masks.y & masks.z & masks.w) == 0xFFFF) return;
#pragma unroll
        for (int i = 0; i < F::BLOCK_N / 8; ++i) {
            const uint32_t bits = word[i / 2] >> (8 * (i % 2) + 2 * (lane % 4));
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (!(bits >> e & 1)) s[4 * i + e] = s[4 * i + 2 + e] = -INFINITY;
        }
    }

    // lse, and what the sums of values are to be multiplied by.
    __device__ __forceinline__ void finish(Softmax& softmax, const Item<F>& item, const float (&sink)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = softmax.sum[h], rounded = softmax.rounded[h];
#pragma unroll
            for (int lanes = 1; lanes < 4; lanes *= 2) {
                sum += __shfl_xor_sync(~0u, sum, lanes);
                rounded += __shfl_xor_sync(~0u, rounded, lanes);
            }
            if (lane % 4 != 0) continue;
            // With any entry the largest p is at least 2^-RESCALE_THRESHOLD. The sink's may be infinite: it drowns all.
            const float top = softmax.top[h];
            const bool any = top > -INFINITY;
            const float factor = any ? 1.f / (rounded + exp2_fast(sink[h] * LOG2E - top)) : 0.f;
            store_shared(smem_address(&shared.factor[row + 8 * h]), __float_as_uint(factor));
            const int head = item.head(p) + row + 8 * h;
            if (head < p.heads)
                p.lse[int64_t(item.token(p)) * p.heads + head] = any ? (top + log2f(sum)) / LOG2E : INFINITY;
        }
    }

    __device__ __forceinline__ void run() const {
        Phases phases;
        uint32_t turn = 0, item_turn = 0;  // tiles and items so far
        Item<F> item;
        int count = item.count(p);
        for (int part = 0; part < PARTS; ++part)
            if (threadIdx.x % 128 == 0) load_queries(item, part);
#pragma unroll 1
        for (; item.exists(p); ++item_turn) {
            const Item<F> following = item.next(p);
            const int next_count = following.count(p);
            float sink[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) sink[h] = __ldg(p.sink + min(item.head(p) + row + 8 * h, p.heads - 1));
            Softmax softmax;
#pragma unroll 1
            for (int i = 0; i < count; ++i, ++turn) {
                const bool last = i + 1 == count;
                const uint32_t stage = item.tile(i, count) % F::NUM_STAGES;
                float s[F::BLOCK_N / 2];
                multiply(s, stage, phases.take(stage), i == 0, item_turn, last, following);
                mask(s, stage);
                uint32_t pairs[2][F::BLOCK_N / 8];
                const float2 alpha = softmax.update(s, pairs);
                wait(smem_address(&shared.p_empty), turn & 1 ^ 1);
#pragma unroll
                for (int k = 0; k < F::BLOCK_N / 16; ++k)
                    store_shared16(smem_address(&shared.p[warp][k][lane]),
                                   make_uint4(pairs[0][2 * k], pairs[1][2 * k], pairs[0][2 * k + 1],
                                              pairs[1][2 * k + 1]));
                if (lane % 4 == 0) {
                    store_shared(smem_address(&shared.alpha[row]), __float_as_uint(alpha.x));
                    store_shared(smem_address(&shared.alpha[row + 8]), __float_as_uint(alpha.y));
                }
                if (last) finish(softmax, item, sink);
                warp_arrive(smem_address(&shared.p_full));
            }
            item = following, count = next_count;
        }
    }
};

// ---- values: the third and fourth warpgroup

template <class F>
struct Values256 {
    const Problem& p;
    SharedStorage<F>& shared;
    int half, warp, lane, row;  // half: of the dims; row: the upper of this lane's two

    __device__ __forceinline__ float2 two_rows(const float* rows) const {
        return make_float2(__uint_as_float(load_shared(smem_address(rows + row))),
                           __uint_as_float(load_shared(smem_address(rows + row + 8))));
    }

    // o += P V. o: of this half's halves; wgmma names no more registers than a thread has at the launch.
    __device__ __forceinline__ void add_tile(float (&o)[2][64], uint32_t stage, uint32_t turn, bool first,
                                             bool last) const {
        wait(smem_address(&shared.p_full), turn & 1);
        uint4 a[F::BLOCK_N / 16];
#pragma unroll
        for (int k = 0; k < F::BLOCK_N / 16; ++k) a[k] = load_shared16(smem_address(&shared.p[warp][k][lane]));
        const float2 alpha = two_rows(shared.alpha);
        warp_arrive(smem_address(&shared.p_empty));
        fence_proxy_async_shared();
        if (!first && __any_sync(~0u, alpha.x != 1.f || alpha.y != 1.f)) {
#pragma unroll
            for (int i = 0; i < 128; ++i) o[i / 64][i % 64] *= i % 4 < 2 ? alpha.x : alpha.y;
        }
        const uint64_t values =
            make_smem_desc(smem_address(shared.k[stage]) + TILES / 2 * half * F::TILE, F::TILE);
        warpgroup_fence_operand(o[0]), warpgroup_fence_operand(o[1]);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            // The second part lets the next tile's scores go first: it is summed while those are made to probabilities.
            if (part == 1 && !last) wait(smem_address(&shared.scored), turn + 1 & 1);
            warpgroup_arrive();
#pragma unroll
            for (int k = 0; k < F::BLOCK_N / 16; ++k)
                wgmma_rows(o[part], a[k], values + (k * (16 * 128) + 2 * part * F::TILE) / 16, !first || k > 0);
            warpgroup_commit_batch();
            warpgroup_wait<0>();
            warpgroup_fence_operand(o[part]);
            warp_arrive(smem_address(&shared.empty[stage][part]));
        }
        hold(a);
    }

    // 64 columns at a time by way of this warp's place in shared memory.
    __device__ __forceinline__ void write(const float (&o)[2][64], const Item<F>& item) const {
        const float2 factor = two_rows(shared.factor);
        const uint32_t staging = smem_address(shared.out[4 * half + warp]);
        const int matrix_row = lane % 16, chunk = lane % 8;
        const int first = item.head(p) + 16 * warp;
        __nv_bfloat16* const to = p.out + item.token(p) * p.token_stride + first * p.head_stride +
                                  half * (HEAD_DIM / 2) + 8 * chunk;
        const auto pair = [&](int i, float by) { return pack_bf16x2(o[i / 64][i % 64] * by, o[i / 64][i % 64 + 1] * by); };
#pragma unroll
        for (int round = 0; round < 4; ++round) {
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                const int at = 4 * (8 * round + i);
                stmatrix_x4(staging + matrix_row * 128 + ((i + lane / 16) ^ matrix_row % 8) * 16, pair(at, factor.x),
                            pair(at + 2, factor.y), pair(at + 4, factor.x), pair(at + 6, factor.y));
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int of = 4 * i + lane / 8;
                const uint4 v = load_shared16(staging + of * 128 + (chunk ^ of % 8) * 16);
                if (first + of < p.heads)
                    *reinterpret_cast<uint4*>(to + of * p.head_stride + 64 * round) = v;
            }
            __syncwarp();
        }
    }

    __device__ __forceinline__ void run() const {
        float o[2][64];
        undefined(o[0]), undefined(o[1]);
        uint32_t turn = 0;
        Item<F> item;
        int count = item.count(p);
#pragma unroll 1
        while (item.exists(p)) {
            const Item<F> following = item.next(p);
            const int next_count = following.count(p);
#pragma unroll 1
            for (int i = 0; i < count; ++i, ++turn)
                add_tile(o, item.tile(i, count) % F::NUM_STAGES, turn, i == 0, i + 1 == count);
            write(o, item);
            item = following, count = next_count;
        }
    }
};

}  // namespace fmha
