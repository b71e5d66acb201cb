"""peer_flashmla: FlashMLA's sparse FP8 decode, on the same pages; left out of the time: its schedule, padded lists.

The wheel is tokenspeed-flashmla, on Hopper a main and a combining kernel. Its schedule follows from shapes and from
lengths, and an engine makes it once for all layers of a step; so it is made in setup, by a first call. Lists whose
length is no multiple of 64, and queries whose heads are not 64 or 128, are padded there too, with holes and zeros; such
heads only are copied out within the call, which no benchmark has. Where nothing is padded the kernels write into
data.out and data.lse themselves: the package has no argument for that, so its two allocations are answered with them.
"""

from typing import NamedTuple

import flash_mla
import torch
from task import ENTRY, HEAD_DIM, SCALE, input_t, output_t, unpack
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

TARGETS = ("sm90",)
REQUIRES = ("flash_mla",)

HEADS = (64, 128)  # what the package computes
BLOCK = 64  # entries; lists come in whole blocks


class State(NamedTuple):
    """What a call needs besides data: the package's arguments, and where its results go."""

    arguments: dict
    out: torch.Tensor  # bf16 (B, S, padded H, 512), data.out itself where H needs no padding
    lse: torch.Tensor  # fp32 (B, S, padded H), likewise


class _Into(TorchDispatchMode):
    """Within: an allocation of the shape and dtype of one of `outputs` is answered with that tensor."""

    def __init__(self, outputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.outputs = outputs

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            for output in self.outputs:
                if tuple(args[0]) == tuple(output.shape) and kwargs.get("dtype") == output.dtype:
                    return output
        return func(*args, **kwargs)


def setup(data: input_t) -> State:
    """Views and padded copies of the arguments, and the schedule. ValueError: more than 128 heads, or as unpack says.

    The schedule is for these lengths, and a first call makes it; that one's results are the package's own tensors.
    """
    sizes = unpack(data)
    if data.q.device.type != "cuda":
        raise RuntimeError(f"peer_flashmla needs an NVIDIA GPU, got data on {data.q.device}")
    padded = min((h for h in HEADS if h >= sizes.heads), default=0) - sizes.heads
    if padded < 0:
        raise ValueError(f"heads must be at most {HEADS[-1]}, got {sizes.heads}")
    arguments = {
        "q": pad(data.q, (0, 0, 0, padded)) if padded else data.q,
        "k_cache": _view(data.window, sizes.page_window),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": HEAD_DIM,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "softmax_scale": SCALE,
        "is_fp8_kvcache": True,
        "indices": _whole_blocks(data.window_index),
        "attn_sink": pad(data.sink, (0, padded)) if padded else data.sink,
        "topk_length": data.window_length,
    }
    if sizes.compressed:
        arguments |= {
            "extra_k_cache": _view(data.compressed, sizes.page_compressed),
            "extra_indices_in_kvcache": _whole_blocks(data.compressed_index),
            "extra_topk_length": data.compressed_length,
        }
    flash_mla.flash_mla_with_kvcache(**arguments)
    if not padded:
        return State(arguments, data.out, data.lse)
    heads = sizes.heads + padded
    out = data.out.new_empty(sizes.batch, sizes.queries, heads, HEAD_DIM)
    return State(arguments, out, data.lse.new_empty(sizes.batch, sizes.queries, heads))


def custom_kernel(data: input_t, state: State) -> output_t:
    """Write into data.out and data.lse and return them; `state` is what setup(data) gave.

    RuntimeError: the package allocates its results in another way than it did, so that they are somewhere else.
    """
    with _Into((state.out, state.lse)):
        out, lse = flash_mla.flash_mla_with_kvcache(**state.arguments)  # lse as (B, H, S), a view
    if (out.data_ptr(), lse.data_ptr()) != (state.out.data_ptr(), state.lse.data_ptr()):
        raise RuntimeError("flash_mla did not write where it was told")
    if state.out is not data.out:
        data.out.copy_(state.out[:, :, : data.q.shape[2]])
        data.lse.copy_(state.lse[:, :, : data.q.shape[2]])
    return data.out, data.lse


def _view(pages: torch.Tensor, per_page: int) -> torch.Tensor:
    """uint8 (pages, stride) as the package wants it: e4m3 (pages, P, 1, 584). Its rows are no entries; only the bytes
    from a page to the next and P count.
    """
    shape, strides = (len(pages), per_page, 1, ENTRY), (pages.shape[1], ENTRY, ENTRY, 1)
    return pages.view(torch.float8_e4m3fn).as_strided(shape, strides)


def _whole_blocks(index: torch.Tensor) -> torch.Tensor:
    """int32 (B, S, n) with holes behind it, up to a multiple of BLOCK; itself where it is one."""
    short = -index.shape[2] % BLOCK
    return pad(index, (0, short), value=-1) if short else index
