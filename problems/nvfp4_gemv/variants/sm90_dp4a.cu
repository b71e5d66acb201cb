// nvfp4_gemv by byte tables and dp4a: x stays in registers, weights pass through a short private ring of each warp.
//
// a    e2m1, two a byte, (l, m, k / 2) bytes, low nibble first       sfa  e4m3, (l, m, k / 16)
// b    e2m1, (l, 128, k / 2) bytes, only row 0 of the 128 counts     sfb  e4m3, (l, 128, k / 16), likewise
// c    fp16 (l, m)
// k is a multiple of 64, so a row of codes is 32-byte aligned and a row of scales only 4-byte aligned.
//
// A CTA owns neighbouring rows of one batch, a warp one slice of 1024 values along k, whose part of x it decodes itself:
// no barrier stands before the first product. Every lane holds the same 32 values of x for all rows. The slices' sums of a
// row meet in shared memory and are added in a fixed order.
// A doubled e2m1 value is an integer of -12 to 12, so the dot product of a block is an exact integer below 16 * 144.
#include <cstdint>
#include <cuda_fp16.h>

constexpr int SLICE = 1024;                       // values of a row that a warp takes: 32 a lane, two blocks, 16 B of codes
constexpr int SLICE_CODES = SLICE / 2;            // bytes
constexpr int SLICE_SCALES = SLICE / 16;          // bytes
constexpr int ROW_BYTES = SLICE_CODES + SLICE_SCALES;
constexpr int MAX_PARTIALS = 8192;                // slices times rows of a CTA: bounds the partial sums in shared memory to 32 KiB
constexpr int MAGIC = 0x4B400000;                 // 1.5 * 2^23 as a float: small integers added to it are its low bits
constexpr float MAGIC_VALUE = 12582912.f;

// ---- device helpers

// Byte i of the eight is picked by bits 2:0 of a selector nibble; bit 3 replicates the byte's sign bit instead, here 0.
__device__ __forceinline__ uint32_t pick(uint32_t low, uint32_t high, uint32_t selectors) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
    return bytes;
}
__device__ __forceinline__ int dot4(uint32_t unsigned_bytes, int signed_bytes, int sum) {
    int result;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(unsigned_bytes), "r"(signed_bytes), "r"(sum));
    return result;
}

// |2 w| of the e2m1 codes 0 to 7.
struct Table {
    uint32_t low, high;
    __device__ __forceinline__ Table() {
        // + threadIdx.z, which is 0: else the compiler moves these constants to a register for every single use.
        low = 0x03020100u + threadIdx.z, high = 0x0C080604u + threadIdx.z;
    }
    // Four codes in bits 15:0 -> bytes |2 w| where the sign bit is 0, and 0 where it is 1. With all signs flipped: the others.
    __device__ __forceinline__ uint32_t positive(uint32_t codes) const { return pick(low, high, codes); }
};

// Two e4m3 bytes -> two floats.
__device__ __forceinline__ float2 scales(uint16_t bytes) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bytes));
    return __half22float2(*reinterpret_cast<__half2*>(&halves));
}

__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ uint4 load16(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}
__device__ __forceinline__ uint16_t load2(uint32_t from) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from));
    return v;
}

// A lane's 32 values of x: 2 x and -2 x as signed bytes, its two scales, and -MAGIC_VALUE times them.
struct X {
    int plus[8], minus[8];
    float scale[2], shift[2];
    __device__ __forceinline__ X(Table table, uint4 codes, uint16_t scale_bytes, bool inside) {
        uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
        float2 const s = scales(inside ? scale_bytes : 0);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t const four = (inside ? words[i / 2] : 0u) >> (16 * (i % 2));
            plus[i] = __vsub4(table.positive(four), table.positive(four ^ 0x8888u));
            minus[i] = __vneg4(plus[i]);
        }
        scale[0] = s.x, scale[1] = s.y;
        shift[0] = -MAGIC_VALUE * scale[0], shift[1] = -MAGIC_VALUE * scale[1];
    }
};

// Four times two blocks of a row against x. Exact up to the two last steps: MAGIC + dot is a float, and scale times dot has 16 bits.
__device__ __forceinline__ float row_sum(Table table, uint4 codes, uint16_t scale_bytes, const X& x) {
    uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
    float2 const s = scales(scale_bytes);
    float terms[2];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
        int dot = MAGIC;
#pragma unroll
        for (int i = 2 * block; i < 2 * block + 2; ++i) {
            uint32_t const flipped = words[i] ^ 0x88888888u;
            dot = dot4(table.positive(words[i]), x.plus[2 * i], dot);
            dot = dot4(table.positive(words[i] >> 16), x.plus[2 * i + 1], dot);
            dot = dot4(table.positive(flipped), x.minus[2 * i], dot);
            dot = dot4(table.positive(flipped >> 16), x.minus[2 * i + 1], dot);
        }
        terms[block] = fmaf(__int_as_float(dot), x.scale[block], x.shift[block]);
    }
    return fmaf(terms[1], s.y, terms[0] * s.x);
}

// Sums of N rows over the warp: lane i gets row i / (32 / N). Half of the rows change hands at each of the first exchanges.
template <int N>
__device__ __forceinline__ float reduce(float (&sums)[N], int lane) {
    int bit = 16;
#pragma unroll
    for (int n = N; n > 1; n /= 2, bit /= 2) {
        bool const upper = lane & bit;
#pragma unroll
        for (int i = 0; i < n / 2; ++i) {
            float const keep = upper ? sums[i + n / 2] : sums[i], give = upper ? sums[i] : sums[i + n / 2];
            sums[i] = keep + __shfl_xor_sync(~0u, give, bit);
        }
    }
#pragma unroll
    for (; bit; bit /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], bit);
    return sums[0];
}

// ---- kernel

// ROWS: of a step of a warp, a power of two; DEPTH: steps under way in its ring; ctas: per batch; slices: warps along k.
template <int ROWS, int DEPTH, int WARPS, int CTAS_PER_SM, bool LONG_K>
__global__ void __launch_bounds__(32 * WARPS, CTAS_PER_SM)
    gemv(const uint8_t* __restrict__ a, const uint8_t* __restrict__ b, const uint8_t* __restrict__ sfa,
         const uint8_t* __restrict__ sfb, __half* __restrict__ c, int m, int k, int ctas, int most_rows,
         int slices) {
    static_assert(ROWS % 2 == 0, "one copy brings the scales of two rows");
    constexpr int SLOT = ROWS * ROW_BYTES;
    extern __shared__ __align__(128) uint8_t shared[];
    Table const table;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, groups = blockDim.x / 32 / slices;
    int const slice = warp % slices, group = warp / slices;
    int const batch = blockIdx.x / ctas, cta = blockIdx.x % ctas;
    int const begin = cta * most_rows, rows = min(most_rows, m - begin);
    uint32_t const my_ring = uint32_t(__cvta_generic_to_shared(shared)) + warp * (DEPTH * SLOT);
    float* const partial = reinterpret_cast<float*>(shared + blockDim.x / 32 * (DEPTH * SLOT));  // [slices of k][rows]
    uint32_t const code_row = k / 2, scale_row = k / 16;  // bytes
    int const step = groups * ROWS;
    int const first_row = batch * m + begin;

    int at = slice;  // of k
    do {
        int const value = at * SLICE + 32 * lane;
        // Lanes past the end of a row copy its start, against an x of zeros.
        bool const inside = value < k;
        uint4 const x_codes = __ldg(reinterpret_cast<const uint4*>(b + int64_t(batch) * 64 * k + (inside ? value / 2 : 0)));
        uint16_t const x_scale = __ldg(reinterpret_cast<const uint16_t*>(sfb + int64_t(batch) * 8 * k + (inside ? value / 16 : 0)));

        // The next rows to ask for. A scale row of a slice is 16 words: half a warp copies it.
        int ahead = group * ROWS, word = at * SLICE_SCALES + lane % 16 * 4;
        const uint8_t* codes = a + int64_t(first_row + ahead) * code_row + (inside ? value / 2 : 0);
        const uint8_t* scale = sfa + int64_t(first_row + ahead + lane / 16) * scale_row + (word < int(scale_row) ? word : 0);
        // to: this lane's codes in the slot; its words of scales lie from_codes further on.
        uint32_t const from_codes = ROWS * SLICE_CODES - 12 * lane;
        auto const fill = [&](uint32_t to) {
            if (ahead + ROWS <= rows) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) copy16(to + i * SLICE_CODES, codes + i * code_row);
#pragma unroll
                for (int i = 0; i < ROWS; i += 2) copy4(to + from_codes + i * SLICE_SCALES, scale + i * scale_row);
            } else {
#pragma unroll 1
                for (int i = 0; i < rows - ahead; ++i) {
                    copy16(to + i * SLICE_CODES, codes + i * code_row);
                    if (lane < 16) copy4(to + from_codes + i * SLICE_SCALES, scale + i * scale_row);
                }
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            ahead += step, codes += step * code_row, scale += step * scale_row;
        };
        uint32_t slot = my_ring + 16 * lane, last = slot + (DEPTH - 1) * SLOT;
#pragma unroll 1
        for (int i = 0; i < DEPTH; ++i) fill(slot + i * SLOT);

        X const x(table, x_codes, x_scale, inside);
        float* to = partial + at * rows + group * ROWS + lane / (32 / ROWS);
        int left = rows - group * ROWS - lane / (32 / ROWS);  // rows from this lane's on, of the step
#pragma unroll 1
        for (int row = group * ROWS; row < rows; row += step) {
            asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
            __syncwarp();
            uint4 w[ROWS];
            uint16_t s[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) w[i] = load16(slot + i * SLICE_CODES);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) s[i] = load2(slot + from_codes - 2 * lane + i * SLICE_SCALES);
            __syncwarp();  // all have read: the slot may be filled again
            fill(slot);
            slot = slot == last ? last - (DEPTH - 1) * SLOT : slot + SLOT;
            float sums[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) sums[i] = row_sum(table, w[i], s[i], x);
            float const sum = reduce(sums, lane);
            if (lane % (32 / ROWS) == 0 && left > 0) *to = sum;
            to += step, left -= step;
        }
        if (LONG_K) asm volatile("cp.async.wait_all;" ::: "memory");
        at += slices;
    } while (LONG_K && at * SLICE < k);
    __syncthreads();
    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        float sum = partial[row];
        for (int i = 1; i * SLICE < k; ++i) sum += partial[i * rows + row];
        c[first_row + row] = __float2half_rn(0.25f * sum);  // both operands were doubled
    }
}

// ---- launcher

// One wave of CTAs with nearly equal shares of rows; more waves where a share would pass MAX_PARTIALS.
template <int ROWS, int DEPTH, int WARPS, int CTAS_PER_SM>
cudaError_t run(const uint8_t* a, const uint8_t* b, const uint8_t* sfa, const uint8_t* sfb, __half* c, int m, int k, int l) {
    int sms = 0;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0)) return error;
    int const all_slices = (k + SLICE - 1) / SLICE, slices = min(all_slices, WARPS), warps = WARPS / slices * slices;
    int const step = warps / slices * ROWS, limit = max(MAX_PARTIALS / all_slices / ROWS, 1) * ROWS;
    int const share = max(min(sms * CTAS_PER_SM / l, (m + step - 1) / step), 1);  // CTAs a batch in one wave
    int const rows = min(((m + share - 1) / share + ROWS - 1) / ROWS * ROWS, limit), ctas = (m + rows - 1) / rows;
    int const bytes = warps * DEPTH * ROWS * ROW_BYTES + all_slices * rows * 4;
    auto const kernel = all_slices > slices ? gemv<ROWS, DEPTH, WARPS, CTAS_PER_SM, true>
                                            : gemv<ROWS, DEPTH, WARPS, CTAS_PER_SM, false>;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
    kernel<<<ctas * l, 32 * warps, bytes>>>(a, b, sfa, sfb, c, m, k, ctas, rows, slices);
    return cudaGetLastError();
}

// Arrays as above, on the device; -> a cudaError_t.
extern "C" int launch(const uint8_t* a, const uint8_t* b, const uint8_t* sfa, const uint8_t* sfb, __half* c, int m, int k,
                      int l) {
    return run<2, 2, 32, 1>(a, b, sfa, sfb, c, m, k, l);
}
