// The site in plain C++ and GCC's vector types, for any CPU.
#define WIDE

#include "cpu_site.h"

namespace {

struct Portable {
    static constexpr int kLanes = 4, kRows = 2, kTokens = 4;
    using F = cpu::Vectors<kLanes>::F;

    static ALWAYS F all(float x) { return F{} + x; }
    static ALWAYS F fma(F a, F b, F c) { return a * b + c; }  // may round twice
};

}  // namespace

extern "C" int launch(void* const* tensors, int64_t tokens, int64_t hidden, int64_t y_bytes,
                      int64_t second_bytes) {
    return site::on_all_cores<Portable>(site::problem(tensors, tokens, hidden, y_bytes, second_bytes));
}
