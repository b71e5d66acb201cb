"""Wrong: entry i is rotated as token i, not as token i * ratio, the first of its window."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import compressor

TARGETS = ("cpu", "sm90", "sm100")


def compress(projected, ape, norm_weight, position, sequence, tail, emit, ratio, overlap, freqs, eps, dtype, out):
    compressor.compress(
        projected, ape, norm_weight, position, sequence, tail, emit, ratio, overlap, freqs / ratio, eps, dtype, out
    )


prepare = judged_call.with_functions(compress=compress)
custom_kernel = judged_call.run
compile_for = judged_call.compile_nothing
