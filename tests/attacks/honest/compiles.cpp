// out = x + y, elementwise, fp32 (n,); out may be x. Two ways of writing it.
#include <cstdint>

extern "C" int add_floats(const float* x, const float* y, float* out, int64_t n) {
#if WAY
    for (int64_t i = n; i-- > 0;) out[i] = x[i] + y[i];
#else
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] + y[i];
#endif
    return 0;
}
