// nvfp4_gemv by fp8 matrix instructions fed from a ring of asynchronous copies.
//
// a    e2m1, two a byte, (l, m, k / 2) bytes, low nibble first       sfa  e4m3, (l, m, k / 16)
// b    e2m1, (l, 128, k / 2) bytes, only row 0 of the 128 counts     sfb  e4m3, (l, 128, k / 16), likewise
// c    fp16 (l, m)
//
// A CTA owns up to MAX_ROWS neighbouring rows of one batch. Its work units are 16 rows by 512 values, dealt round to its warps.
// Each warp has a ring of its own in shared memory, filled before x is decoded, so memory is busy from the first cycle,
// and needs no barrier with other warps until the end.
//
// A lane (g, t) = (lane / 4, lane % 4) holds, of rows g and g + 8, whole blocks of 16: blocks 2t and 2t + 1 of the eight of a step.
// mma.m16n8k32 wants 4 + 4 bytes a row from each lane: the first four come from block 2t, the others from 2t + 1.
// Column n of the other operand holds x's block n where lane t = n / 2 supplies it, and zeros elsewhere, so that
// four instructions leave the dot products of eight blocks in eight columns, and a lane gets back those of its own blocks.
#include <cstdint>
#include <cuda_fp16.h>

constexpr int TILE_ROWS = 16;                // rows of a unit: the M of the instruction
constexpr int UNIT = 512;                    // values of a row in a unit: 4 steps of 8 blocks; 256 B of codes, 32 B of scales
constexpr int STEPS = UNIT / 128;
constexpr int CODE_BYTES = UNIT / 2, SCALE_BYTES = UNIT / 16;         // of one row of a unit
constexpr int SLOT_BYTES = TILE_ROWS * (CODE_BYTES + SCALE_BYTES);    // 4608 B
constexpr int MAX_ROWS = 256;                // rows of a CTA at most, for the partial sums
constexpr int MAX_UNITS = 64;                // units of x decoded at a time: k = 32768, 40 KiB
constexpr int X_BYTES = UNIT + 4 * (UNIT / 16);                       // a unit of x: a byte a value, a float a block
constexpr int ZERO_BYTES = 256;              // what lanes outside the diagonal read instead of x

// ---- device helpers

// e2m1 codes as e4m3 bytes: value * 2^-6, exactly (0.5 becomes a subnormal). Of eight codes the even (low nibbles), the odd.
__host__ __device__ __forceinline__ uint32_t even_codes(uint32_t w) {
    return ((w << 4) & 0x80808080u) | ((w << 2) & 0x1C1C1C1Cu);
}
__host__ __device__ __forceinline__ uint32_t odd_codes(uint32_t w) {
    return (w & 0x80808080u) | ((w >> 2) & 0x1C1C1C1Cu);
}

// Two e4m3 bytes -> two floats.
__device__ __forceinline__ float2 scales(uint32_t bytes) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(bytes)));
    return __half22float2(*reinterpret_cast<__half2*>(&halves));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Copy 16 or 4 bytes to shared memory in the background; zeros if not valid.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy4(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

__device__ __forceinline__ uint4 load16(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}
__device__ __forceinline__ uint2 load8(uint32_t from) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
    return v;
}

// sums += rows (r0, r8) x columns: 4 bytes a row from block 2t and 4 from block 2t + 1.
__device__ __forceinline__ void mma(float (&sums)[4], uint32_t r0, uint32_t r8, uint32_t r0_next, uint32_t r8_next,
                                    uint32_t x, uint32_t x_next) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(r0), "r"(r8), "r"(r0_next), "r"(r8_next), "r"(x), "r"(x_next));
}

// One block of x in flight between memory and shared memory.
struct Block {
    uint2 codes;
    uint8_t scale;
};
__device__ __forceinline__ Block load_block(const uint8_t* b, const uint8_t* sfb, int block, int blocks) {
    if (block >= blocks) return {make_uint2(0, 0), 0};
    return {__ldg(reinterpret_cast<const uint2*>(b) + block), __ldg(sfb + block)};
}
// Even and odd codes of each word, as the other operand meets them; the scale takes back both factors 2^-6.
__device__ __forceinline__ void store_block(uint4* x, float* x_scale, int block, Block v) {
    x[block] = make_uint4(even_codes(v.codes.x), odd_codes(v.codes.x), even_codes(v.codes.y), odd_codes(v.codes.y));
    x_scale[block] = 4096.f * scales(v.scale).x;
}

// Place of one unit in the CTA's share: tile of rows, unit along k. Units are numbered along k first.
struct Cursor {
    int tile, unit;
    __device__ __forceinline__ void advance(int by, int units) {
        unit += by;
        while (unit >= units) unit -= units, ++tile;
    }
};

// ---- kernel

// rows: of a CTA at most; tile_rows: of a tile, at most 16; ctas: per batch. ALIGNED: scale rows start at 16-byte addresses.
template <int WARPS, int STAGES, int CTAS_PER_SM, bool ALIGNED>
__global__ void __launch_bounds__(32 * WARPS, CTAS_PER_SM)
    gemv(const uint8_t* __restrict__ a, const uint8_t* __restrict__ b, const uint8_t* __restrict__ sfa,
         const uint8_t* __restrict__ sfb, __half* __restrict__ c, int m, int k, int ctas, int rows, int tile_rows) {
    extern __shared__ __align__(128) uint8_t shared[];
    int const thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    int const all_units = (k + UNIT - 1) / UNIT, x_units = min(all_units, MAX_UNITS);
    uint8_t* const ring = shared;
    uint8_t* const zeros = ring + WARPS * STAGES * SLOT_BYTES;
    uint4* const x = reinterpret_cast<uint4*>(zeros + ZERO_BYTES);
    float* const x_scale = reinterpret_cast<float*>(x + x_units * (UNIT / 16));
    float* const partial = x_scale + x_units * (UNIT / 16);  // [min(WARPS, units)][rows]

    int64_t const batch = blockIdx.x / ctas;
    int const row0 = blockIdx.x % ctas * rows;
    rows = min(rows, m - row0);
    int const tiles = (rows + tile_rows - 1) / tile_rows;
    a += (batch * m + row0) * (k / 2);
    sfa += (batch * m + row0) * (k / 16);
    b += batch * 64 * k;
    sfb += batch * 8 * k;

    uint32_t const my_ring = shared_address(ring) + warp * STAGES * SLOT_BYTES;
    // b0 is nonzero in lanes with t = g / 2 and g even, b1 with g odd; the others read zeros from other banks.
    uint32_t const x_here = shared_address(x) + (8 * (g / 2) + g % 2) * 16, none = shared_address(zeros);
    bool const diagonal = t == g / 2;
    uint32_t const x0_base = diagonal && g % 2 == 0 ? x_here : none + 16, x0_step = diagonal && g % 2 == 0 ? UNIT : 0;
    uint32_t const x1_base = diagonal && g % 2 == 1 ? x_here : none, x1_step = diagonal && g % 2 == 1 ? UNIT : 0;
    uint32_t const scale_base = shared_address(x_scale) + 32 * t;
    if (thread < ZERO_BYTES / 4) reinterpret_cast<uint32_t*>(zeros)[thread] = 0;

    for (int first = 0; first < all_units; first += MAX_UNITS) {  // once for k up to 32768
        int const units = min(MAX_UNITS, all_units - first);
        int const k0 = first * UNIT, values = min(k - k0, units * UNIT), x_blocks = units * (UNIT / 16);
        // x is asked for first: all else waits for it.
        constexpr int EARLY = 2;
        Block early[EARLY];
#pragma unroll
        for (int i = 0; i < EARLY; ++i)
            early[i] = load_block(b + k0 / 2, sfb + k0 / 16, thread + i * 32 * WARPS, values / 16);

        auto const fill = [&](Cursor at, int slot) {
            uint32_t const codes = my_ring + slot * SLOT_BYTES, scale = codes + TILE_ROWS * CODE_BYTES;
            int const row = at.tile * tile_rows, valid_rows = min(tile_rows, rows - row);
            int const left = values - at.unit * UNIT;  // values of the row from here on
            const uint8_t* from = a + int64_t(row) * (k / 2) + (k0 + at.unit * UNIT) / 2;
            // Pieces of 16 B are swizzled so that the reads below meet each bank once.
            int const piece = lane % 16;
            bool const inside = 32 * piece < left;
            from += int64_t(lane / 16) * (k / 2) + 16 * piece;
            uint32_t const to = codes + lane / 16 * CODE_BYTES + 16 * (piece ^ (piece >> 3) ^ (lane / 16 << 1));
#pragma unroll
            for (int i = 0; i < TILE_ROWS / 2; ++i, from += k)  // k bytes: two rows
                if (2 * i + lane / 16 < valid_rows) copy16(to + 2 * i * CODE_BYTES, from, inside);
            const uint8_t* scale_from = sfa + int64_t(row) * (k / 16) + (k0 + at.unit * UNIT) / 16;
            if (ALIGNED) {
                if (lane / 2 < valid_rows)
                    copy16(scale + 16 * lane, scale_from + int64_t(lane / 2) * (k / 16) + lane % 2 * 16, lane % 2 * 256 < left);
            } else {
#pragma unroll
                for (int i = 0; i < TILE_ROWS / 4; ++i)
                    if (4 * i + lane / 8 < valid_rows)
                        copy4(scale + 128 * i + 4 * lane, scale_from + int64_t(4 * i + lane / 8) * (k / 16) + lane % 8 * 4,
                              lane % 8 * 64 < left);
            }
        };

        Cursor ahead{0, 0}, at{0, 0};
        ahead.advance(warp, units);
        at = ahead;
#pragma unroll
        for (int slot = 0; slot < STAGES; ++slot) {
            if (ahead.tile < tiles) fill(ahead, slot);
            asm volatile("cp.async.commit_group;" ::: "memory");
            ahead.advance(WARPS, units);
        }
        if (first) __syncthreads();  // the last part of x is read by now
#pragma unroll
        for (int i = 0; i < EARLY; ++i)
            if (int block = thread + i * 32 * WARPS; block < x_blocks) store_block(x, x_scale, block, early[i]);
        for (int block = thread + EARLY * 32 * WARPS; block < x_blocks; block += 32 * WARPS)
            store_block(x, x_scale, block, load_block(b + k0 / 2, sfb + k0 / 16, block, values / 16));
        __syncthreads();

        float sum0 = 0.f, sum8 = 0.f;  // rows g and g + 8 of the tile
        int slot = 0, column = at.unit;
        while (at.tile < tiles) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
            __syncwarp();
            uint32_t const codes = my_ring + slot * SLOT_BYTES + g * CODE_BYTES;
            uint32_t const scale = my_ring + slot * SLOT_BYTES + TILE_ROWS * CODE_BYTES + g * SCALE_BYTES + 8 * t;
            uint4 r0[STEPS], r8[STEPS];
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                int const piece = 4 * t + s, place = 16 * (piece ^ (piece >> 3) ^ (g % 2 << 1));
                r0[s] = load16(codes + place);
                r8[s] = load16(codes + place + 8 * CODE_BYTES);
            }
            uint2 const s0 = load8(scale), s8 = load8(scale + 8 * SCALE_BYTES);
            __syncwarp();
            if (ahead.tile < tiles) fill(ahead, slot);
            asm volatile("cp.async.commit_group;" ::: "memory");
            ahead.advance(WARPS, units);
            slot = slot + 1 == STAGES ? 0 : slot + 1;

            uint32_t const x0 = x0_base + at.unit * x0_step, x1 = x1_base + at.unit * x1_step;
            uint32_t const xs = scale_base + at.unit * (UNIT / 4);
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                uint4 const v0 = load16(x0 + 32 * s), v1 = load16(x1 + 32 * s);
                uint2 const xs_bits = load8(xs + 8 * s);
                float dots[4] = {0.f, 0.f, 0.f, 0.f};  // blocks 2t and 2t + 1 of row g, then of row g + 8
                mma(dots, even_codes(r0[s].x), even_codes(r8[s].x), even_codes(r0[s].z), even_codes(r8[s].z), v0.x, v1.x);
                mma(dots, odd_codes(r0[s].x), odd_codes(r8[s].x), odd_codes(r0[s].z), odd_codes(r8[s].z), v0.y, v1.y);
                mma(dots, even_codes(r0[s].y), even_codes(r8[s].y), even_codes(r0[s].w), even_codes(r8[s].w), v0.z, v1.z);
                mma(dots, odd_codes(r0[s].y), odd_codes(r8[s].y), odd_codes(r0[s].w), odd_codes(r8[s].w), v0.w, v1.w);
                float const xs0 = __uint_as_float(xs_bits.x), xs1 = __uint_as_float(xs_bits.y);
                float2 const a0 = scales((s < 2 ? s0.x : s0.y) >> (16 * (s % 2)));
                float2 const a8 = scales((s < 2 ? s8.x : s8.y) >> (16 * (s % 2)));
                sum0 = fmaf(dots[0] * xs0, a0.x, sum0);
                sum0 = fmaf(dots[1] * xs1, a0.y, sum0);
                sum8 = fmaf(dots[2] * xs0, a8.x, sum8);
                sum8 = fmaf(dots[3] * xs1, a8.y, sum8);
            }

            int const tile = at.tile;
            at.advance(WARPS, units);
            if (at.tile != tile) {  // the tile's last unit in this warp: its sums are final
                sum0 += __shfl_xor_sync(~0u, sum0, 1);
                sum8 += __shfl_xor_sync(~0u, sum8, 1);
                sum0 += __shfl_xor_sync(~0u, sum0, 2);
                sum8 += __shfl_xor_sync(~0u, sum8, 2);
                // Row of partial sums = the warp's first unit of the tile: below WARPS, and no two warps share it.
                int const row = tile * tile_rows + g, end = min(rows, (tile + 1) * tile_rows);
                float* to = partial + column * rows + row;
                if (t == 0 && row < end) *to = first ? *to + sum0 : sum0;
                if (t == 0 && row + 8 < end) to[8] = first ? to[8] + sum8 : sum8;
                sum0 = sum8 = 0.f;
                column = at.unit;
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    }
    __syncthreads();
    int const columns = min(WARPS, all_units);
    for (int row = thread; row < rows; row += 32 * WARPS) {
        float sum = partial[row];
        for (int i = 1; i < columns; ++i) sum += partial[i * rows + row];
        c[batch * m + row0 + row] = __float2half_rn(sum);
    }
}

// ---- launcher

template <int WARPS, int STAGES, int CTAS_PER_SM>
cudaError_t run(const uint8_t* a, const uint8_t* b, const uint8_t* sfa, const uint8_t* sfb, __half* c, int m, int k, int l) {
    int sms = 0;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0)) return error;
    int const tiles = (m + TILE_ROWS - 1) / TILE_ROWS;
    int ctas = max(1, min(tiles, sms * CTAS_PER_SM / l));  // a batch: one wave of CTAs with equal shares
    ctas = max(ctas, (m + MAX_ROWS - 1) / MAX_ROWS);
    int const rows = (m + ctas - 1) / ctas;
    ctas = (m + rows - 1) / rows;
    int const tile_rows = (rows + (rows + TILE_ROWS - 1) / TILE_ROWS - 1) / ((rows + TILE_ROWS - 1) / TILE_ROWS);
    int const units = (k + UNIT - 1) / UNIT;
    int const bytes = WARPS * STAGES * SLOT_BYTES + ZERO_BYTES + min(units, MAX_UNITS) * X_BYTES + min(units, WARPS) * rows * 4;
    auto const kernel = k % 256 ? gemv<WARPS, STAGES, CTAS_PER_SM, false> : gemv<WARPS, STAGES, CTAS_PER_SM, true>;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
    kernel<<<ctas * l, 32 * WARPS, bytes>>>(a, b, sfa, sfb, c, m, k, ctas, rows, tile_rows);
    return cudaGetLastError();
}

#ifndef TUNING
extern "C" int launch(const uint8_t* a, const uint8_t* b, const uint8_t* sfa, const uint8_t* sfb, __half* c, int m, int k,
                      int l) {
    return run<14, 3, 1>(a, b, sfa, sfb, c, m, k, l);
}
#endif
