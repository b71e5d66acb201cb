// c = A b in plain C++, for any CPU: a table turns a byte into two integers, a block is an exact integer dot product.
#include <cstring>

#include "cpu_rows.h"
#include "nvfp4.cuh"

namespace {

constexpr int64_t kBlock = 16;        // weights that share a scale
constexpr int64_t kStep = 4 * kBlock;  // weights a step; k is a multiple of it
constexpr float kUnit = 1.0f / 4.0f;  // the codes of A and of b are both doubled

struct Pair {
    int16_t low, high;  // doubled codes of one byte
};

class Worker {
  public:
    explicit Worker(const gemv::Problem& p) : p_(p), b_(p.k), scale_(p.k / kBlock) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            pairs_[byte] = {static_cast<int16_t>(nvfp4::e2m1_doubled(nvfp4::low_code(byte))),
                            static_cast<int16_t>(nvfp4::e2m1_doubled(nvfp4::high_code(byte)))};
            scales_[byte] = nvfp4::e4m3_to_float(byte);
        }
    }

    // Decode this batch's vector.
    void batch(int64_t i) {
        for (int64_t j = 0; j < p_.k; j += kStep) decode(p_.vector(i) + j / 2, &b_[j]);
        for (int64_t j = 0; j < p_.k / kBlock; j++) scale_[j] = scales_[p_.vector_scales(i)[j]] * kUnit;
    }

    void rows(const gemv::Rows& r) const {
        for (int64_t i = 0; i < r.count; i++)
            r.c[i] = nvfp4::float_to_half_bits(row(r.codes + i * (r.k / 2), r.scales + i * (r.k / kBlock)));
    }

  private:
    // kStep / 2 bytes of codes -> kStep integers, in order.
    void decode(const uint8_t* codes, int16_t* out) const {
        for (int64_t j = 0; j < kStep / 2; j++) std::memcpy(out + 2 * j, &pairs_[codes[j]], sizeof(Pair));
    }

    // One sum for each block of a step, so that no addition waits for the one before it.
    float row(const uint8_t* codes, const uint8_t* scales) const {
        float sums[kStep / kBlock] = {};
        for (int64_t at = 0; at < p_.k; at += kStep) {
            int16_t a[kStep];
            decode(codes + at / 2, a);
            for (int64_t n = 0; n < kStep / kBlock; n++) {
                int dot = 0;  // exact: at most 16 * 144
                for (int64_t j = n * kBlock; j < (n + 1) * kBlock; j++) dot += a[j] * b_[at + j];
                const int64_t block = at / kBlock + n;
                sums[n] += scales_[scales[block]] * scale_[block] * static_cast<float>(dot);  // exact but for the sum
            }
        }
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }

    const gemv::Problem& p_;
    std::vector<int16_t> b_;    // doubled codes of b
    std::vector<float> scale_;  // scale of each block of b, times kUnit
    Pair pairs_[256];
    float scales_[256];
};

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    return gemv::on_all_cores<Worker>(gemv::Problem(tensors, sizes));
}
