"""Compute the op mhc_site with a variant of the problem mhc_site, straight on the model's tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from problems.common import load
from problems.dsv4_forward.adapters.common import ALIGNMENT, Adapted, Fallback, fits, placed
from problems.dsv4_forward.weights.config import Config
from problems.dsv4_forward.weights.tree import ModelWeights

PROBLEM = "mhc_site"
UNIT = 64  # d is a multiple of it


@dataclass(frozen=True)
class SiteOp:
    """The op. task: the problem's; kernel: a custom_kernel of it; fallback: the op that computes the calls that the
    kernel does not serve: activations that are not bf16, but for two addends.
    """

    task: ModuleType
    kernel: Callable[..., object]
    fallback: Callable[..., None]

    def __call__(
        self,
        y: torch.Tensor,
        second: torch.Tensor | None,
        copies: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        fn: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        cfg: Config,
        new_copies: torch.Tensor,
        out: torch.Tensor,
        new_post: torch.Tensor,
        new_comb: torch.Tensor,
    ) -> None:
        """As chains.mhc_site. ValueError as the problem's task.unpack."""
        narrow = (copies, weight, new_copies, out) if second is not None else (y, copies, weight, new_copies, out)
        if any(tensor.dtype != torch.bfloat16 for tensor in narrow):
            self.fallback(
                y, second, copies, post, comb, fn, base, scale, weight, cfg, new_copies, out, new_post, new_comb
            )
            return
        if not len(y):
            return
        alignment = ALIGNMENT[y.device.type]
        second = y[:0] if second is None else second
        inputs = [placed(tensor, alignment) for tensor in (y, second, copies, post, comb, fn, base, scale, weight)]
        outputs = new_copies, out, new_post, new_comb
        mine = [t if fits(t, alignment) else torch.empty_like(t).contiguous() for t in outputs]
        self.kernel(self.task.Data(*inputs, *mine))
        for output, made in zip(outputs, mine, strict=True):
            if made is not output:
                output.copy_(made)


def adapt(module: ModuleType, weights: ModelWeights, fallback: Fallback) -> Adapted:
    """Put `module`, a variant of the problem, into the op. -> the op mhc_site, and no lines."""
    task = load.module(load.PROBLEMS / PROBLEM, "task")
    return Adapted({"mhc_site": SiteOp(task, module.custom_kernel, fallback.ops.mhc_site)}, ())


def unserved(cfg: Config) -> str:
    """Return why the problem has no such model, "" if it has."""
    task = load.module(load.PROBLEMS / PROBLEM, "task")
    for name, is_, wanted in (
        ("hc_mult", cfg.hc_mult, task.COPIES),
        ("hc_sinkhorn_iters", cfg.hc_sinkhorn_iters, task.ITERATIONS),
        ("hc_eps", cfg.hc_eps, task.HC_EPS),
        ("rms_norm_eps", cfg.rms_norm_eps, task.NORM_EPS),
    ):
        if is_ != wanted:
            return f"{name} must be {wanted:g}, is {is_:g}"
    return "" if cfg.hidden_size % UNIT == 0 else f"hidden_size must be a multiple of {UNIT}, is {cfg.hidden_size}"
