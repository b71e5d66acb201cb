"""peer_deepgemm_flashinfer: DeepGEMM's paged logits, then FlashInfer's top k by page table; left out: format, schedule.

The wheels are sgl-deep-gemm and flashinfer-python: two launches and an array of all scores. On Hopper DeepGEMM reads
FP8 keys in pages of 64 only, so others are converted in setup, exactly, as an engine that uses it would have stored
them: it reads 132 bytes a key where MXFP4 has 68. Queries are converted there too, with their scales in the weights,
and the schedule is made, which an engine makes once for all layers of a step. FlashInfer writes data.out itself.

FlashInfer compiles its top k at the first call, for a minute and a half, and again in each process, since ninja's
commands name the process's folder. So the compile step's library is kept where builds are, and later processes load it
as they would load one that was installed.
"""

import functools
from typing import NamedTuple

import deep_gemm
import flashinfer
import torch
from flashinfer.jit import env
from flashinfer.jit.topk import gen_topk_module
from task import DIM, input_t, output_t, read_keys, unpack

from problems.common import build, fp8, index_pages

TARGETS = ("sm90",)
REQUIRES = ("deep_gemm", "flashinfer")
ONLY = {"queries": 1}  # DeepGEMM serves 1 and 2 on Hopper, FlashInfer's table has a row for each query

PAGE = 64  # keys of a page that DeepGEMM reads on Hopper
LEAST_AMAX = fp8.E4M3_MAX * 2.0**-126  # its scale is the least normal number
WHOLE = 256  # the length of the rows of scores is a multiple of it


class State(NamedTuple):
    """What a call needs besides data."""

    logits: tuple  # arguments of DeepGEMM's
    table: torch.Tensor  # int32 (B, blocks), data.table without what lies behind the visible blocks
    lengths: torch.Tensor  # int32 (B,)
    per_page: int
    out: torch.Tensor  # data.out as int32 (B, k)


def setup(data: input_t) -> State:
    """Keys, query and weights in the packages' formats, and the schedule. ValueError: several queries a sequence."""
    sizes = unpack(data)
    if data.q.device.type != "cuda":
        raise RuntimeError(f"peer_deepgemm_flashinfer needs an NVIDIA GPU, got data on {data.q.device}")
    if sizes.queries != 1:
        raise ValueError(f"queries must be 1, got {sizes.queries}")
    _top_k_is_built()
    used = torch.arange(sizes.blocks, device=data.q.device) * sizes.per_page < data.visible
    table = torch.where(used, data.table, 0)
    keys, pages = _fp8_pages(data.keys, table, sizes.per_page)
    q = data.q.float()
    scale = fp8.decode_ue8m0(fp8.ue8m0_scale(q.abs().amax(3), fp8.E4M3_MAX, LEAST_AMAX))
    codes = (q / scale.unsqueeze(3)).to(torch.float8_e4m3fn)
    weights = (data.weights * scale).view(sizes.batch, sizes.heads)
    lengths = data.visible.clone()
    count = torch.cuda.get_device_properties(data.q.device).multi_processor_count
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, count)
    longest = -(-pages.shape[1] * PAGE // WHOLE) * WHOLE
    arguments = (codes, keys.view(-1, PAGE, 1, DIM + 4), weights, lengths, pages, schedule, longest, False)
    return State(arguments, table, lengths.view(-1), sizes.per_page, data.out.view(sizes.batch, sizes.topk))


def custom_kernel(data: input_t, state: State) -> output_t:
    """Write into data.out and return it; `state` is what setup(data) gave."""
    logits = deep_gemm.fp8_paged_mqa_logits(*state.logits)
    if not isinstance(logits, torch.Tensor):
        logits = torch.from_dlpack(logits)
    flashinfer.top_k_page_table_transform(
        logits, state.table, state.lengths, state.out.shape[1], page_size=state.per_page, out=state.out
    )
    return data.out


@functools.cache
def _top_k_is_built() -> None:
    spec = gen_topk_module()
    if spec.is_aot:  # installed
        return
    env.FLASHINFER_AOT_DIR = build.directory() / "flashinfer"
    place = spec.aot_path
    if place.is_file():
        return
    spec.extra_cuda_cflags = [*(spec.extra_cuda_cflags or ()), "--split-compile=0"]  # by all processors
    spec.build()
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_suffix(".part")
    part.write_bytes(spec.jit_library_path.read_bytes())
    part.replace(place)


def _fp8_pages(keys: torch.Tensor, table: torch.Tensor, per_page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> pages of 64 FP8 keys, and the table of them. e2m1 and ue8m0 become e4m3 and fp32 without a rounding; FP8 keys
    stay as they are.
    """
    size, kind = index_pages.form(keys.shape[1])
    if (size, kind) == (PAGE, "fp8"):
        return keys, table
    batch, blocks = table.shape
    n = -(-blocks * per_page // PAGE) * PAGE
    entry = torch.arange(n, device=keys.device).clamp(max=blocks * per_page - 1)
    pages = keys.new_empty(batch * n // PAGE, index_pages.page_bytes(PAGE, "fp8"))
    for b in range(batch):
        place = table[b, entry // per_page].long() * per_page + entry % per_page
        if kind == "fp8":
            codes, scales = index_pages.read(keys, place)
        else:
            codes, exponents = fp8.quantise_groups(read_keys(keys, place), DIM, LEAST_AMAX)
            codes, scales = codes.view(torch.uint8), fp8.decode_ue8m0(exponents).view(torch.uint8)
        index_pages.write(pages, b * n + torch.arange(n, device=keys.device), codes, scales)
    own = torch.arange(len(pages), dtype=torch.int32, device=keys.device).view(batch, n // PAGE)
    return pages, own
