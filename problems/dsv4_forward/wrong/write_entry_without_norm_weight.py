"""Wrong: the weight of the norm of compressed entries is left out."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import compressor, writes

TARGETS = ("cpu", "sm90", "sm100")


def write_entry(
    projected,
    ape,
    norm_weight,
    position,
    sequence,
    tail,
    emit,
    ratio,
    overlap,
    freqs,
    eps,
    dtype,
    pages,
    index,
    hadamard=False,
):
    out, ones = torch.empty(len(emit), pages.width, dtype=dtype, device=projected.device), torch.ones_like(norm_weight)
    compressor.compress(projected, ape, ones, position, sequence, tail, emit, ratio, overlap, freqs, eps, dtype, out)
    if len(emit):
        writes.write(out, pages, index, hadamard)


prepare = judged_call.with_functions(write_entry=write_entry)
custom_kernel = judged_call.run
compile_for = judged_call.compile_nothing
