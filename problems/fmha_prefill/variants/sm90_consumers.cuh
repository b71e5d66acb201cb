// The warpgroups that multiply: one makes scores to probabilities, two sum values, 256 of the dims each.
#pragma once

#include "sm90_attend.cuh"
#include "sm90_products.cuh"

namespace fmha {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float TO_LOG2 = 0.04419417382415922f * LOG2E;  // 512^-0.5, for scores in powers of two
// P may reach 2^8: sums stay far inside fp32, and bf16 is as fine there as below 1.
constexpr float RESCALE_THRESHOLD = 8.f;
constexpr float MOST = 1u << int(RESCALE_THRESHOLD);  // 2 to that: a sum of P up to it has no p above it
static_assert(RESCALE_THRESHOLD == int(RESCALE_THRESHOLD), "MOST is that power of two only if it is whole");

// Scores, the second warpgroup. Of a lane's two rows, 16 warp + lane / 4 and 8 on; sums of its own columns.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY};  // running maximum, up to RESCALE_THRESHOLD too small; -inf: no entry yet
    float sum[2] = {0, 0};  // of p, for lse

    // Moves the running maximum of rows that have grown. -> what O is to be multiplied by.
    template <int COLUMNS>
    __device__ __forceinline__ float2 raise(const float (&s)[COLUMNS]) {
        float alpha[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = s[2 * h];
#pragma unroll
            for (int i = 0; i < COLUMNS / 4; ++i)
                largest = fmaxf(largest, fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
            largest *= TO_LOG2;
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const bool moves = largest > top[h] + RESCALE_THRESHOLD;
            alpha[h] = moves ? exp2_fast(top[h] - largest) : 1.f;
            top[h] = moves ? largest : top[h];
            sum[h] *= alpha[h];
        }
        return make_float2(alpha[0], alpha[1]);
    }

    // s: scores, to probabilities, two in a word: pairs[row][8 columns]. -> what O is to be multiplied by. But for an
    // item's first tile the maximum is hardly ever to be moved, so that is seen by the sums, and done again then.
    template <int COLUMNS>
    __device__ __forceinline__ float2 update(const float (&s)[COLUMNS], uint32_t (&pairs)[2][COLUMNS / 4], bool first) {
        float2 alpha = make_float2(1.f, 1.f);
        float exact[2];
        bool sure = first;
#pragma unroll 1
        while (true) {
            if (sure) alpha = raise(s);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float zero = top[h] == -INFINITY ? 0.f : top[h];
                exact[h] = 0;
#pragma unroll
                for (int i = 0; i < COLUMNS / 4; ++i) {
                    const float a = exp2_fast(fmaf(s[4 * i + 2 * h], TO_LOG2, -zero));
                    const float b = exp2_fast(fmaf(s[4 * i + 2 * h + 1], TO_LOG2, -zero));
                    pairs[h][i] = pack_bf16x2(a, b);
                    exact[h] += a + b;
                }
            }
            const bool large = exact[0] > MOST || exact[1] > MOST || fminf(top[0], top[1]) == -INFINITY;
            if (sure || !__any_sync(~0u, large)) break;
            sure = true;
        }
        sum[0] += exact[0], sum[1] += exact[1];
        return alpha;
    }
};

template <class F>
struct Scores {
    const Problem& p;
    SharedStorage<F>& shared;
    int warp, lane, row;  // row: the upper of this lane's two

    // s = Q K^T. Each part of the queries' dims is given back as soon as it has served the item's last tile.
    // -> the tile's masks.
    __device__ __forceinline__ uint4 multiply(float (&s)[F::BLOCK_N / 2], uint32_t stage, uint32_t phase, bool first,
                                              uint32_t item_turn, bool last) const {
        const uint64_t query = make_smem_desc(smem_address(shared.q));
        const uint64_t key = make_smem_desc(smem_address(shared.k[stage]));
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            if (part % 2 == 0) {  // two at a time: half of the fences
#pragma unroll
                for (int i = part; i < part + 2; ++i) {
                    if (first) wait(smem_address(&shared.q_full[i]), item_turn & 1);
                    wait(smem_address(&shared.full[stage][i]), phase);
                }
                fence_proxy_async_shared();  // for the writers, who would wait for what they asked for since
            }
            warpgroup_arrive();
#pragma unroll
            for (int i = 0; i < 8; ++i) {  // 16 dims, 32 bytes
                const int t = subtile(part, i / 4), k = i % 4;
                wgmma(s, query + t * (F::Q_TILE / 16) + 2 * k, key + t * (F::TILE / 16) + 2 * k, part + i > 0);
            }
            warpgroup_commit_batch();
        }
        const uint4 masks = load_shared16(smem_address(shared.masks[stage]));
        if (last) {
            warpgroup_wait<3>(), warp_arrive(smem_address(&shared.q_empty[0]));
            warpgroup_wait<2>(), warp_arrive(smem_address(&shared.q_empty[1]));
            warpgroup_wait<1>(), warp_arrive(smem_address(&shared.q_empty[2]));
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
        warp_arrive(smem_address(&shared.scored));
        if (last) warp_arrive(smem_address(&shared.q_empty[3]));
        return masks;
    }

    __device__ __forceinline__ void mask(float (&s)[F::BLOCK_N / 2], const uint4& masks) const {
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

    // lse. The sum is at least 1, of the largest p, where there is an entry.
    __device__ __forceinline__ void finish(const Softmax& softmax, const Item<F>& item) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = softmax.sum[h] + __shfl_xor_sync(~0u, softmax.sum[h], 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float top = softmax.top[h];
            const int head = item.head + row + 8 * h;
            float log2;
            asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(sum));
            if (lane % 4 == 0 && head < p.heads)
                p.lse[int64_t(item.token) * p.heads + head] = top > -INFINITY ? (top + log2) * LN2 : INFINITY;
        }
    }

    __device__ __forceinline__ void run() const {
        uint32_t turn = 0, item_turn = 0;  // tiles and items so far
        Item<F> item = Item<F>::first(p);
        int count = item.count(p, item.length(p));
#pragma unroll 1
        for (; item.exists(); ++item_turn) {
            const Item<F> following = item.next(p);
            int next_length = following.length(p);
            Softmax softmax;
#pragma unroll 1
            for (int i = 0; i < count; ++i, ++turn) {
                const bool last = i + 1 == count;
                const uint32_t stage = turn % F::NUM_STAGES, phase = turn / F::NUM_STAGES % 2;
                float s[F::BLOCK_N / 2];
                mask(s, multiply(s, stage, phase, i == 0, item_turn, last));
                uint32_t pairs[2][F::BLOCK_N / 8];
                const float2 alpha = softmax.update(s, pairs, i == 0);
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
                if (last && lane % 4 == 0) {  // for those that sum values
                    store_shared(smem_address(&shared.top[row]), __float_as_uint(softmax.top[0]));
                    store_shared(smem_address(&shared.top[row + 8]), __float_as_uint(softmax.top[1]));
                }
                warp_arrive(smem_address(&shared.p_full));
            }
            finish(softmax, item);
            keep_in_register(next_length);
            item = following, count = item.count(p, next_length);
        }
    }
};

// Values, the third and fourth warpgroup.
template <class F>
struct Values {
    const Problem& p;
    SharedStorage<F>& shared;
    int half, warp, lane, row;  // half: of the dims; row: the upper of this lane's two

    __device__ __forceinline__ float2 two_rows(const float* rows) const {
        return make_float2(__uint_as_float(load_shared(smem_address(rows + row))),
                           __uint_as_float(load_shared(smem_address(rows + row + 8))));
    }

    static __device__ __forceinline__ float both(uint32_t pair) {
        return __uint_as_float(pair << 16) + __uint_as_float(pair & 0xFFFF0000);
    }

    // o[part] += P V, sum += P as it is there, in bf16, of this lane's columns.
    __device__ __forceinline__ void add_tile(float (&o)[PARTS][32], float2& sum, uint32_t turn, bool first,
                                             bool last) const {
        const uint32_t stage = turn % F::NUM_STAGES;
        wait(smem_address(&shared.p_full), turn & 1);
        uint4 a[F::BLOCK_N / 16];
#pragma unroll
        for (int k = 0; k < F::BLOCK_N / 16; ++k) a[k] = load_shared16(smem_address(&shared.p[warp][k][lane]));
        const float2 alpha = two_rows(shared.alpha);
        warp_arrive(smem_address(&shared.p_empty));  // the tile's fence was that of the scores, ahead of p_full
        sum = first ? float2{} : make_float2(sum.x * alpha.x, sum.y * alpha.y);
        if (!first && __any_sync(~0u, alpha.x != 1.f || alpha.y != 1.f)) {
#pragma unroll
            for (int i = 0; i < 32 * PARTS; ++i) o[i / 32][i % 32] *= i % 4 < 2 ? alpha.x : alpha.y;
        }
        const uint64_t values = make_smem_desc(smem_address(shared.k[stage]) + half * PARTS * F::TILE, F::TILE);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) warpgroup_fence_operand(o[part]);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            // The second half lets the next tile's scores go first: it is summed while those are made to probabilities.
            if (part == PARTS / 2 && !last) wait(smem_address(&shared.scored), turn + 1 & 1);
            if (part % 2 == 0) warpgroup_arrive();
#pragma unroll
            for (int k = 0; k < F::BLOCK_N / 16; ++k)
                wgmma_rows(o[part], a[k], values + (k * (16 * 128) + part * F::TILE) / 16, !first || k > 0);
            warpgroup_commit_batch();
            if (part % 2 == 0) continue;  // two parts are under way together
            if (part == 1 && p.heads > 0) {  // a block of its own, or it would stand between the first products
#pragma unroll
                for (int k = 0; k < F::BLOCK_N / 16; ++k)
                    sum.x += both(a[k].x) + both(a[k].z), sum.y += both(a[k].y) + both(a[k].w);
            }
            warpgroup_wait<1>();
            warp_arrive(smem_address(&shared.empty[stage][part - 1]));
            warpgroup_wait<0>();
            warp_arrive(smem_address(&shared.empty[stage][part]));
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) warpgroup_fence_operand(o[part]);
        hold(a);
    }

    // 1 / the denominator. sum: of P, of this lane's columns. The sink's share may be infinite: it drowns all. Without a
    // branch: two of these are worked out together.
    static __device__ __forceinline__ float inverse(float sum, float top, float sink) {
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        float inverse;  // keeps subnormal numbers
        asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(sum + exp2_fast(sink * LOG2E - top)));
        return top > -INFINITY ? inverse : 0.f;
    }

    // The last 64 dims, scaled and rounded, rotated by minus an angle.
    __device__ __forceinline__ void turn_back(float (&o)[32], float2 factor, int token) const {
        const float *const cosine = p.cosine + int64_t(token) * (ROPE / 2) + lane % 4;
        const float *const sine = p.sine + int64_t(token) * (ROPE / 2) + lane % 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float c = __ldg(cosine + 4 * i), s = __ldg(sine + 4 * i);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float &x = o[4 * i + 2 * h], &y = o[4 * i + 2 * h + 1];
                const uint32_t pair = pack_bf16x2(x * (h ? factor.y : factor.x), y * (h ? factor.y : factor.x));
                const float a = __uint_as_float(pair << 16), b = __uint_as_float(pair & 0xFFFF0000);
                x = a * c + b * s, y = b * c - a * s;
            }
        }
    }

    static __device__ __forceinline__ void store_global16(uint64_t to, uint4 v) {
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
    }

    // 64 columns at a time by way of this warp's place in shared memory. Few instructions, and four loads of them under
    // way before the first store: this is code that runs once an item, while this warpgroup multiplies nothing.
    __device__ __forceinline__ void write(float (&o)[PARTS][32], float2 sum, float2 sink, const Item<F>& item) const {
        const float2 top = two_rows(shared.top);
        const float2 factor = make_float2(inverse(sum.x, top.x, sink.x), inverse(sum.y, top.y, sink.y));
        const int matrix_row = lane % 16, chunk = lane % 8, first = item.head + 16 * warp + lane / 8;
        const uint32_t staging = smem_address(shared.out[4 * half + warp]);
        uint32_t put[4];  // chunks i + lane / 16 of a row
#pragma unroll
        for (int i = 0; i < 4; ++i)
            put[i] = staging + matrix_row * 128 + ((2 * i + lane / 16) ^ matrix_row % 8) * 16;
        const uint32_t even = staging + lane / 8 * 128 + (chunk ^ lane / 8) * 16;  // rows lane / 8 and 8 on
        const uint32_t odd = staging + lane / 8 * 128 + (chunk ^ lane / 8 ^ 4) * 16 + 4 * 128;
        uint64_t to[4];  // of rows lane / 8, 4 on and so on
        to[0] = __cvta_generic_to_global(p.out + item.token * p.token_stride + first * p.head_stride +
                                         half * (HEAD_DIM / 2) + 8 * chunk);
        int exist = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i) to[i] = to[i - 1] + 8 * p.head_stride;  // bytes
            asm volatile("" : "+l"(to[i]));  // worked out once
            exist |= (first + 4 * i < p.heads) << i;
        }
        float2 last = factor;
        if (p.cosine && half == 1) turn_back(o[PARTS - 1], factor, item.token), last = make_float2(1.f, 1.f);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const float2 by = part < PARTS - 1 ? factor : last;
            uint32_t pairs[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float f = i % 2 ? by.y : by.x;
                pairs[i] = pack_bf16x2(o[part][2 * i] * f, o[part][2 * i + 1] * f);
            }
            if (part) __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; ++i)
                stmatrix_x4(put[i], pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
            __syncwarp();
            uint4 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = load_shared16((i % 2 ? odd : even) + i / 2 * 1024);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (exist >> i & 1) store_global16(to[i] + 128 * part, v[i]);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void run() const {
        float o[PARTS][32] = {};
        float2 sum = {};
        uint32_t turn = 0;
        Item<F> item = Item<F>::first(p);
        int count = item.count(p, item.length(p));
#pragma unroll 1
        while (item.exists()) {
            const Item<F> following = item.next(p);
            int next_length = following.length(p);
            const int head = item.head + row, most = p.heads - 1;
            const float2 sink = make_float2(__ldg(p.sink + min(head, most)), __ldg(p.sink + min(head + 8, most)));
#pragma unroll 1
            for (int i = 0; i < count; ++i, ++turn) add_tile(o, sum, turn, i == 0, i + 1 == count);
            write(o, sum, sink, item);
            keep_in_register(next_length);
            item = following, count = item.count(p, next_length);
        }
    }
};

}  // namespace fmha
