"""Count what one decode step launches on a GPU, without one: operations of torch, and calls of kernels' launchers."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from problems.common import build, load

# Operations of torch that launch nothing: they make tensors or views of them.
FREE = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "new_empty",
    "new_empty_strided", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "view", "_unsafe_view", "_reshape_alias", "unfold", "is_pinned",
}  # fmt: skip


class Seen(TorchDispatchMode):
    """Counts, by name: torch's operations that launch a kernel, and launchers of compiled kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.launchers = Counter(), Counter()
        self.counting = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if self.counting and name not in FREE:
            self.torch[name] += 1
        if func is torch.ops.aten.mm.dtype_out:  # only a GPU has it
            return kwargs["out"].zero_()
        out = func(*args, **(kwargs or {}))
        if name.startswith(("empty", "new_empty")) and not out.is_floating_point():
            out.zero_()  # indices that no kernel writes are read by what is torch
        return out

    def launcher(self, name: str):
        def launch(*arguments: object) -> int:
            if self.counting:
                self.launchers[name] += 1
            return 0

        return launch


@contextmanager
def pretended(target: str) -> Iterator[Seen]:
    """Within: tensors of the CPU pass for those of a GPU of `target`, whose kernels do nothing but be counted."""
    seen = Seen()
    artefact = SimpleNamespace(function=lambda name, *types: seen.launcher(name), kernels=list)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "cuda", lambda *arguments, **named: artefact)
        patch.setattr(load, "device_target", lambda device: target)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        found = SimpleNamespace(multi_processor_count=132, major=9, minor=0, shared_memory_per_block_optin=232448)
        patch.setattr(load.module(load.PROBLEMS / "moe_gemm", "task"), "validate", lambda *arguments: None)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: found)
        with seen:
            yield seen
