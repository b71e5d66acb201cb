"""sm90_columns: one launch; blocks own columns of all tokens, fn stays in registers, blocks exchange tagged sums."""

import functools
from ctypes import c_int, c_void_p
from pathlib import Path

import torch
from task import Data, addend_bytes, input_t, output_t, unpack

from problems.common import build, early, load

TARGETS = ("sm90", "sm100")
SOURCE = Path(__file__).with_suffix(".cu")
POINTERS = c_void_p * len(Data._fields)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def custom_kernel(data: input_t) -> output_t:
    """Write the four outputs and return them.

    ValueError as unpack says; RuntimeError: the launch, as for d over 128 columns for each multiprocessor.
    """
    sizes = *unpack(data), *addend_bytes(data)
    device = data.y.device
    run = build.cuda(SOURCE, load.device_target(device)).function("launch", POINTERS, c_void_p, *[c_int] * 6)
    exchange, blocks = _exchange(device)
    pointers = POINTERS(*[tensor.data_ptr() for tensor in data])
    build.check(run(pointers, exchange.data_ptr(), *sizes, blocks, early.allowed()), "site_kernel")
    return data.new_copies, data.out, data.new_post, data.new_comb


@functools.cache
@torch.inference_mode(False)
def _exchange(device: torch.device) -> tuple[torch.Tensor, int]:
    """Where the blocks of a launch exchange sums, int64, zero at first; and how many may wait for each other.

    Kept, since tags grow from launch to launch: of what lies there, no launch uses what another one left.
    In the PTX model the first order's count holds for the later ones: with their few multiprocessors a d above 1024,
    which TESTS have, would be refused.
    """
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    words = build.cuda(SOURCE, load.device_target(device)).function("exchange_words", c_int)(blocks)
    return torch.zeros(words, dtype=torch.int64, device=device), blocks
