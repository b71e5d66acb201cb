"""Count what one decode step launches on a GPU, without one: operations of torch, and calls of kernels' launchers.

.venv/bin/python -m problems.dsv4_forward.launches          # the table of problems/dsv4_forward/README.md
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from problems.common import build, load
from problems.dsv4_forward import ops
from problems.dsv4_forward.cache import random_state
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.timed_steps import Step
from problems.dsv4_forward.weights import config, tree
from problems.dsv4_forward.weights.config import CSA, HCA, SWA

# Operations of torch that make tensors, or ask. Like those that make views they launch nothing.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_pinned", "_unsafe_view"}
# Kernels that a launcher launches, where it is not one. Attention splits its lists among blocks and joins the parts.
SEVERAL = dict.fromkeys(("copies.launch_mix_copies", "fmha.launch_fmha", "experts.launch_experts"), 2)
SEVERAL |= dict.fromkeys(("sm90_wgmma.launch", "sm90_grouped.decode_linear", "indexer.launch_choose"), 2)
QUANTISING = "sm90_grouped.decode_experts", 13, 18  # a launch more for several tokens in NVFP4: arguments count, form
COUNTED = {"sm90_mma.launch": (1, 2)}  # launchers of several kernels: arguments whose sum says how many
LIBRARY = ("mm", "bmm", "addmm", "baddbmm")  # products that torch leaves to cuBLAS
CONTEXT, BOUND = 300, 310  # tokens of each sequence before the step, and as far as its lists reach
PLACES = {SWA: "a layer of the window only", HCA: "an HCA layer", CSA: "a CSA layer that scores"}
BEFORE, HEAD = "before the layers", "head and next token"


class Seen(TorchDispatchMode):
    """Counts launches by (place in the pass, name): of torch's operations, and of the launchers of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.kernels = Counter(), Counter()
        self.place = ""  # "": nothing is counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if self.place and name not in FREE and not func.is_view:
            self.torch[self.place, name] += 1
        if func is torch.ops.aten.mm.dtype_out:  # only a GPU has it
            return kwargs["out"].zero_()
        if func is torch.ops.aten.bmm.dtype:  # so with this one
            return args[0].new_zeros(*args[0].shape[:2], args[1].shape[2], dtype=args[2])
        out = func(*args, **(kwargs or {}))
        if name.startswith(("empty", "new_empty")) and not out.is_floating_point():
            out.zero_()  # indices that no kernel writes are read by what is torch
        return out

    def launcher(self, name: str):
        def clusters(blocks: int, fit: object) -> int:
            fit._obj.value = 132 // blocks  # of byref
            return 0

        def launch(*arguments: object) -> int:
            if self.place:
                several = sum(arguments[i] for i in COUNTED[name]) if name in COUNTED else SEVERAL.get(name, 1)
                if name == QUANTISING[0]:
                    several += arguments[QUANTISING[1]] > 1 and arguments[QUANTISING[2]] == 1
                self.kernels[self.place, name] += several
            return 0

        return clusters if name == "sm90_wgmma.clusters" else launch


@contextmanager
def pretended(target: str) -> Iterator[Seen]:
    """Within: tensors of the CPU pass for those of a GPU of `target`, whose kernels do nothing but be counted."""
    seen = Seen()

    def built(source: str | Path, *arguments: object) -> SimpleNamespace:
        return SimpleNamespace(function=lambda name, *types: seen.launcher(f"{Path(source).stem}.{name}"))

    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0, shared_memory_per_block_optin=232448)
    moe = load.module(load.PROBLEMS / "moe_gemm", "in_model")
    with (
        mock.patch.object(build, "cuda", built),
        mock.patch.object(load, "device_target", lambda device: target),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True)),
        mock.patch.object(moe, "validate", lambda *arguments: None),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: properties),
        seen,
    ):
        yield seen


class Places:
    """A probe that says in which kind of layer the pass is."""

    def __init__(self, seen: Seen, ratios: tuple[int, ...]) -> None:
        self.seen, self.ratios = seen, ratios
        self.layers = Counter(PLACES[ratio] for ratio in ratios)

    def enter(self, layer: str, residual: object) -> None:
        """Called before a block, and before the head."""
        if self.seen.place:
            self.seen.place = HEAD if layer == "head" else PLACES[self.ratios[int(layer.partition(".")[2])]]


def steps(fmt: str, batches: tuple[int, ...], kernels: str = "winners") -> tuple[list[tuple[Counter, ...]], Counter]:
    """Count a static decode step of tiny-k for sm90, whose CSA layers score, for each number of sequences.

    -> (kernels, operations of torch) of each, by place and name, and how many layers there are by place.
    """
    made = tree.quick(config.find("tiny-k"), fmt, seed=1, device="cpu")
    found = []
    # Whether ids are of the vocabulary is looked up on a CPU only.
    unchecked = mock.patch("problems.dsv4_forward.cache.state.check_tensor", lambda *arguments: None)
    with torch.no_grad(), pretended("sm90") as seen, unchecked:
        probe = Places(seen, made.config.ratios)
        model = Model(made, ops.choose(kernels, "sm90", made).ops, probe=probe)
        for batch in batches:
            state = State(made.config, fmt, sequences=batch, blocks=3 * batch)
            sequences = random_state.fill(state, [CONTEXT] * batch, seed=7)
            state.reserve(dict.fromkeys(sequences, 4))
            one = Step(model, state, sequences, torch.zeros(batch, dtype=torch.int64), BOUND)
            one()  # what is made once
            seen.kernels, seen.torch, seen.place = Counter(), Counter(), BEFORE
            one()
            seen.place = ""
            found.append((seen.kernels, seen.torch))
    return found, probe.layers


def table(batches: tuple[int, ...] = (1, 3)) -> list[str]:
    """Lines of a table in Markdown: launches by place, of one layer, in nvfp4."""
    every, layers = steps("nvfp4", batches)
    found = ["| in nvfp4, on Hopper | B | kernels | library products | torch operations |", "|---|---:|---:|---:|---|"]
    for place in (BEFORE, *PLACES.values(), HEAD):
        for batch, (kernels, operations) in zip(batches, every, strict=True):
            many = layers.get(place, 1)
            launched = sum(count for (at, _), count in kernels.items() if at == place) // many
            mine = {name: count // many for (at, name), count in sorted(operations.items()) if at == place}
            products = sum(mine.pop(name, 0) for name in LIBRARY)
            others = ", ".join(f"{count} {name}" for name, count in mine.items()) or "none"
            found.append(f"| {place} | {batch} | {launched} | {products} | {others} |")
    return found


if __name__ == "__main__":
    print("\n".join(table()))
