"""Compare dsv4_kernels.compat with FlashMLA and DeepGEMM on a GPU: python packaging/compare.py

A line for each call: how far apart the results are, in the 2-norm, and the median time of both, with caches as the last
call left them, replayed from CUDA graphs where both can be recorded. Needs the packages flash_mla and deep_gemm.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:] = [str(ROOT), *sys.path[1:], str(ROOT / "packaging")]  # last: an installed wheel is before it

from dsv4_kernels import compat, operators  # noqa: E402
from problems.common import load  # noqa: E402

REPLAYS = 100
Call = Callable[[], Any]  # -> a tensor, of torch or with DLPack, or several


def main() -> None:
    """Print the table."""
    import deep_gemm
    import flash_mla

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {compat.__file__}")
    peer = load.variant("fmha_decode", "peer_flashmla")
    for batch, heads, named in ((1, 64, 512), (32, 64, 512), (128, 64, 512), (32, 128, 1024), (32, 16, 512)):
        form = {"queries": 1, "window": 128, "page_window": 64, "page_compressed": 64, "pool": 4096, "order": "random"}
        data = inputs("fmha_decode", batch=batch, heads=heads, compressed=named, **form)
        row(
            f"flash_mla_with_kvcache, B={batch} H={heads} n=128+{named}",
            partial(compat.flash_mla_with_kvcache, **decode_call(data)),
            partial(flash_mla.flash_mla_with_kvcache, **peer.setup(data).arguments),
        )
    for tokens, heads in ((512, 64), (4096, 64)):
        call = sparse_call(tokens, heads)
        row(
            f"flash_mla_sparse_fwd, T={tokens} H={heads} n=640 (not recorded)",
            partial(compat.flash_mla_sparse_fwd, **call),
            partial(flash_mla.flash_mla_sparse_fwd, **call),
            recorded=False,
        )
    count = torch.cuda.get_device_properties("cuda").multi_processor_count
    for batch, entries in ((1, 8192), (1, 32768), (32, 32768)):
        form = {"queries": 1, "heads": 64, "topk": 1, "kind": "fp8", "per_page": 64}
        data = inputs("indexer", batch=batch, entries=entries, **form)
        call = logits_call(data._replace(table=data.table[:, : entries // 64].contiguous()), entries)
        call["schedule_meta"] = deep_gemm.get_paged_mqa_logits_metadata(call["context_lens"], 64, count)
        row(
            f"fp8_paged_mqa_logits, B={batch} n={entries}",
            partial(compat.fp8_paged_mqa_logits, **call),
            partial(deep_gemm.fp8_paged_mqa_logits, *call.values()),
        )


def row(name: str, ours: Call, theirs: Call, recorded: bool = True) -> None:
    """Print a line. Of several results the first is compared; theirs may have more heads, those that were padded."""
    made = ours(), theirs()
    a, b = (torch.from_dlpack(part if hasattr(part, "__dlpack__") else part[0]) for part in made)
    far = apart(a, b[tuple(map(slice, a.shape))])
    times = [median_us(call, recorded) for call in (ours, theirs)]
    print(f"{name:50} apart {far:.1e}   ours {times[0]:8.1f} us   theirs {times[1]:8.1f} us", flush=True)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The relative distance of two tensors."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def median_us(call: Call, recorded: bool) -> float:
    """Of REPLAYS calls, between two events each."""
    if recorded:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for first, last in pairs:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return 1000 * statistics.median(first.elapsed_time(last) for first, last in pairs[REPLAYS // 10 :])


def inputs(problem: str, **case: object) -> tuple:
    """Data of a case on the GPU."""
    reference = load.module(load.PROBLEMS / problem, "reference")
    return reference.generate_input(**case, content="plain", seed=1, device="cuda")


def decode_call(data: tuple) -> dict:
    """What flash_mla_with_kvcache takes of fmha_decode's data."""
    sizes = operators.task("fmha_decode").unpack(data)
    views = []
    for pages, count in ((data.window, sizes.page_window), (data.compressed, sizes.page_compressed)):
        strides = (pages.shape[1], 584, 584, 1)
        views.append(pages.view(torch.float8_e4m3fn).as_strided((len(pages), count, 1, 584), strides))
    unread = dict.fromkeys(("block_table", "cache_seqlens", "tile_scheduler_metadata"))
    return unread | {
        "q": data.q,
        "k_cache": views[0],
        "head_dim_v": 512,
        "is_fp8_kvcache": True,
        "indices": data.window_index,
        "topk_length": data.window_length,
        "attn_sink": data.sink,
        "extra_k_cache": views[1],
        "extra_indices_in_kvcache": data.compressed_index,
        "extra_topk_length": data.compressed_length,
    }


def sparse_call(tokens: int, heads: int, rows: int = 16384, named: int = 640) -> dict:
    """What flash_mla_sparse_fwd takes, with values that FP8 caches hold."""
    kv = torch.randn(rows, 1, 512, device="cuda")
    kv[:, :, :448] = kv[:, :, :448].to(torch.float8_e4m3fn).float()
    return {
        "q": torch.randn(tokens, heads, 512, device="cuda").bfloat16(),
        "kv": kv.bfloat16(),
        "indices": torch.randint(rows, (tokens, 1, named), dtype=torch.int32, device="cuda"),
        "sm_scale": 512**-0.5,
        "attn_sink": torch.randn(heads, device="cuda"),
    }


def logits_call(data: tuple, entries: int) -> dict:
    """What fp8_paged_mqa_logits takes of indexer's data with FP8 keys in pages of 64, in DeepGEMM's order."""
    return {
        "q": data.q.to(torch.float8_e4m3fn),
        "kv_cache": data.keys.view(-1, 64, 1, 132),
        "weights": data.weights.view(-1, 64),
        "context_lens": data.visible,
        "block_table": data.table,
        "schedule_meta": None,
        "max_context_len": entries,
        "clean_logits": False,
    }


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("compare.py: needs an NVIDIA GPU that torch can use")
    main()
