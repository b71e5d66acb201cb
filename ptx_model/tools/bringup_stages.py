"""The stages of bringup_sm100.py: what each kernel gets, what numpy says that it must write, and one run of it."""

import base64
import ctypes
import json
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from problems.common import build, tma
from ptx_model import formats
from ptx_model.tensor_map import swizzled

M, N, TILE_K = 128, 64, 64  # of a tile: bringup_sm100.cu
RING_TILES = 7  # more than twice the ring's 3 stages
REPORT_WORDS = 1024  # 4 KB
ENTRY = 8  # words of an entry: bringup_sm100.cu
ROLES = {1: "producer", 2: "multiplier", 3: "epilogue"}
BARRIERS = {1: "full", 2: "empty", 3: "done"}
SHOWN = 5  # elements of a difference


@dataclass(frozen=True)
class Stage:
    """launch: the function of bringup_sm100.cu. arrays: on the device, by name. maps: (array, box rows) of its tensor
    maps, whose rows have 128 bytes in the box; bytes wide: see `_descriptor`. numbers: further arguments, in front of
    the output. want: the output, uint32 words.
    """

    launch: str
    arrays: dict[str, np.ndarray]
    want: np.ndarray
    maps: tuple[tuple[str, int], ...] = ()
    pointers: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()


def _integers(seed: int, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """-> (bf16 bits, values) of small integers: sums of their products are exact in fp32."""
    values = np.random.default_rng(seed).integers(-3, 4, (rows, columns)).astype(np.float32)
    return formats.to_bf16(values), values


def _words(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def _echo() -> Stage:
    words = np.random.default_rng(1).integers(0, 2**32, (128, 8), np.uint32)
    return Stage("launch_echo", {"in": words}, words, pointers=("in",))


def _copy() -> Stage:
    """The second tile of a tensor of 96 columns: its right half is outside, so zeros."""
    bits, _ = _integers(2, M, 96)
    tile = np.zeros((M, TILE_K), np.uint16)
    tile[:, : 96 - TILE_K] = bits[:, TILE_K:]
    raw = np.zeros(M * 128, np.uint8)
    raw[swizzled(np.arange(M * 128), 128)] = tile.view(np.uint8).reshape(-1)
    return Stage("launch_copy", {"a": bits}, raw.view(np.uint32), maps=(("a", M),))


def _scales() -> Stage:
    """Two blocks of 512 bytes: row r has its 4 bytes at 16 (r % 32) + 4 (r // 32); a lane gets those of 4 rows."""
    raw = np.random.default_rng(3).integers(0, 256, 1024, np.uint8)
    by_lane = raw.view(np.uint32).reshape(2, 32, 4).transpose(1, 0, 2).reshape(32, 8)
    return Stage("launch_scales", {"from": raw}, np.tile(by_lane, (4, 1)), pointers=("from",))


def _product(tiles: int, steps: int) -> Stage:
    (a, left), (b, right) = _integers(4, M, tiles * TILE_K), _integers(5, N, tiles * TILE_K)
    used = np.arange(tiles * TILE_K) % TILE_K < 16 * steps
    want = _words(left[:, used] @ right[:, used].T)
    return Stage("launch_product", {"a": a, "b": b}, want, (("a", M), ("b", N)), numbers=(tiles, steps))


def _nvfp4() -> Stage:
    rng = np.random.default_rng(6)
    codes = [rng.integers(0, 16, (rows, 256), np.uint8) for rows in (M, N)]
    bits = [rng.choice(np.array([0x30, 0x38, 0x40], np.uint8), (128, 16)) for _ in range(2)]  # 0.5, 1, 2
    packed = [np.ascontiguousarray(c[:, 0::2] | c[:, 1::2] << 4) for c in codes]
    blocks = [np.ascontiguousarray(s.reshape(4, 32, 4, 4).transpose(2, 1, 0, 3)).reshape(-1) for s in bits]
    left, right = (
        formats.E2M1[c] * np.repeat(formats.E4M3[s[: len(c)]], 16, 1) for c, s in zip(codes, bits, strict=True)
    )
    arrays = {"a": packed[0], "b": packed[1], "a scales": blocks[0], "b scales": blocks[1]}
    return Stage(
        "launch_nvfp4", arrays, _words(left @ right.T), (("a", M), ("b", N)), pointers=("a scales", "b scales")
    )


def _pair() -> Stage:
    (a, left), (b, right) = _integers(7, 2 * M, TILE_K), _integers(8, N, TILE_K)
    return Stage("launch_pair", {"a": a, "b": b}, _words(left @ right.T), (("a", M), ("b", N // 2)))


# In this order, each with one piece more: tensor memory; a copy with a tensor map; a copy to tensor memory; a product;
# a tile of products; a ring of tiles; products with scales; a pair of blocks.
STAGES: dict[str, Callable[[], Stage]] = {
    "echo": _echo,
    "copy": _copy,
    "scales": _scales,
    "product": lambda: _product(1, 1),
    "tile": lambda: _product(1, 4),
    "ring": lambda: _product(RING_TILES, 4),
    "nvfp4": _nvfp4,
    "pair": _pair,
}


def run(names: list[str], where: str, file: str, flags: tuple[str, ...] = (), policy: str = "lazy") -> int:
    """Run stages in this process, "model" or "gpu", and write {stage: {"status", "report", ...}} to `file`: status is
    equal, different (from numpy), trapped (or another error of the device) or failed (no kernel ran); report is what
    waits in vain have left. flags: further ones of nvcc. Return the exit code.
    """
    model = None
    if where == "model":
        from ptx_model import driver

        model = driver.install("sm100")
        model.policy, model.poison = policy, None
    found = {name: _run(STAGES[name](), model, flags) for name in names}
    Path(file).write_text(json.dumps(found))
    return 0


def _run(stage: Stage, model: Any, flags: tuple[str, ...]) -> dict:
    import torch

    report = torch.zeros(REPORT_WORDS, dtype=torch.int32)
    if model:
        model.clear()
    else:
        report = report.pin_memory()  # the device writes to it, and it is still there after a trap
    device = "cpu" if model else "cuda"
    arrays = {key: torch.from_numpy(value.view(np.uint8).copy()).to(device) for key, value in stage.arrays.items()}
    out = torch.full((stage.want.size,), -1, dtype=torch.int32, device=device)
    try:
        code = _launch(stage, arrays, out, report, flags)
        if model:
            model.check()
        build.check(code, stage.launch)
        if not model:
            torch.cuda.synchronize()
        found = _compared(out.cpu().numpy().view(np.uint32), stage.want.reshape(-1))
    except (build.BuildError, ValueError, AttributeError):  # no kernel ran
        found = {"status": "failed", "said": traceback.format_exc()[-2000:]}
    except Exception as error:
        found = {"status": "trapped", "said": f"{type(error).__name__}: {error}"[:2000]}
    return found | {"report": read_report([int(word) & 0xFFFFFFFF for word in report])}


def read_report(words: list[int]) -> list[str]:
    """The entries of a stage's report in words. words: as the kernel wrote them."""
    lines = []
    for n in range(min(words[0], len(words) // ENTRY - 1)):
        role, name, stage, phase, tile, block, warp, _ = words[ENTRY * (n + 1) : ENTRY * (n + 2)]
        lines.append(
            f"{ROLES.get(role, role)} (block {block}, warp {warp}) at barrier {BARRIERS.get(name, name)}[{stage}], "
            f"phase {phase}, tile {tile}"
        )
    return lines


def _launch(stage: Stage, arrays: dict, out: Any, report: Any, flags: tuple[str, ...]) -> int:
    """Call the stage's launcher. Return its error code."""
    fields = [_descriptor(stage.arrays[key], rows).at(arrays[key].data_ptr()).fields() for key, rows in stage.maps]
    tensors = (tma.Fields * max(1, len(fields)))(*fields)
    artefact = build.cuda(Path(__file__).with_name("bringup_sm100.cu"), "sm100", flags)
    pointers = [ctypes.addressof(tensors)] if fields else []
    pointers += [arrays[key].data_ptr() for key in stage.pointers]
    kinds = [ctypes.c_void_p] * len(pointers) + [ctypes.c_int] * len(stage.numbers) + [ctypes.c_void_p] * 2
    launch = artefact.function(stage.launch, *kinds)
    return launch(*pointers, *stage.numbers, out.data_ptr(), report.data_ptr())


def _descriptor(array: np.ndarray, rows: int) -> tma.Descriptor:
    """The tensor map of a matrix of bf16, or of bytes, with boxes of so many rows of 128 swizzled bytes."""
    count, width = array.shape
    kind = "bfloat16" if array.itemsize == 2 else "uint8"
    box = (128 // array.itemsize, rows)
    return tma.check(kind, (width, count), (width * array.itemsize,), box, swizzle="128B")


def _compared(got: np.ndarray, want: np.ndarray) -> dict:
    wrong = np.flatnonzero(got != want)
    if not len(wrong):
        return {"status": "equal", "words": len(want)}
    first = [f"word {i}: got {got[i]:#010x}, wanted {want[i]:#010x}" for i in wrong[:SHOWN]]
    dump = base64.b64encode(zlib.compress(got.tobytes())).decode()  # all words, for who looks at it later
    return {"status": "different", "words": len(want), "wrong": len(wrong), "first": first, "got": dump}
