"""Compute the op route in one launch for up to 32 tokens in bf16, else with a matmul and one kernel behind it.

In torch these are 12 launches. The one launch reads the router's matrix before the kernel ahead has ended: no launch
just ahead may write it. The interface and formulas are those of torch_ops/router.py.
"""

from ctypes import POINTER, Structure, c_float
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.kernels.arguments import Own, addresses, expect, fields
from problems.dsv4_forward.torch_ops import linear
from problems.dsv4_forward.weights.config import Config

MOST_CHOSEN = 32  # one a lane
MOST_EXPERTS = 1024  # 32 a lane, whose choices are the bits of a word
FEW_TOKENS, FEW_EXPERTS = 32, 384  # that one launch takes, as in the source


class _Call(Structure):
    """router.cu's Call."""

    _fields_ = [
        *fields("u weight logits bias table tokens ids weights exchange", "vocab count experts hidden chosen"),
        ("factor", c_float),
    ]


class Router(Own):
    """The op on one build. Two launches on one device must not run at once: their blocks share an exchange."""

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("route",)

    def __init__(self, built: build.Artefact) -> None:
        self._choose, self._route = (built.function(name, POINTER(_Call)) for name in ("launch_choose", "launch_route"))
        self._words = built.function("route_words")
        self._exchanges: dict[torch.device, torch.Tensor] = {}  # kept: tags grow from launch to launch

    def route(
        self,
        u: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        table: torch.Tensor | None,
        tokens: torch.Tensor,
        cfg: Config,
        out_ids: torch.Tensor,
        out_weights: torch.Tensor,
    ) -> object:
        """Compute torch_ops router.route; of equal scores the lower id wins. ValueError: a tensor that is not
        contiguous, or of another dtype or shape.
        """
        experts, chosen = len(weight), cfg.num_experts_per_tok
        if not chosen <= experts <= MOST_EXPERTS or chosen > MOST_CHOSEN:
            return NotImplemented
        if (bias is None) == (table is None):
            raise ValueError("a router needs either bias or table, got " + ("neither" if bias is None else "both"))
        expect("out_ids", out_ids, torch.int32, (len(u), chosen))
        expect("out_weights", out_weights, torch.float32, (len(u), chosen))
        expect("tokens", tokens, torch.int64, (len(u),))
        if bias is not None:
            expect("bias", bias, torch.float32, (experts,))
        if table is not None:
            expect("table", table, torch.int64, (len(table), chosen))
        if u.dim() != 2 or weight.shape != (experts, u.shape[1]):
            raise ValueError(f"u and weight must be (N, d) and (E, d), got {tuple(u.shape)} and {tuple(weight.shape)}")
        if not len(u):
            return None
        tensors = addresses(bias=bias, table=table, tokens=tokens, ids=out_ids, weights=out_weights)
        sizes = {"count": len(u), "experts": experts, "hidden": u.shape[1], "chosen": chosen}
        vocab = 0 if table is None else len(table)
        call = _Call(**tensors, **sizes, vocab=vocab, factor=cfg.routed_scaling_factor)
        if len(u) <= FEW_TOKENS and experts <= FEW_EXPERTS and _loads_whole(u) and _loads_whole(weight):
            call.u, call.weight, call.exchange = (t.data_ptr() for t in (u, weight, self._exchange(u.device)))
            code = self._route(call)
        else:
            logits = torch.empty(len(u), experts, dtype=torch.float32, device=u.device)
            linear.matmul(u, weight, logits)
            call.logits = logits.data_ptr()
            code = self._choose(call)
        build.check(code, "route")
        return None

    def _exchange(self, device: torch.device) -> torch.Tensor:
        """Where the blocks of a launch hand each other logits, int64, zero at first."""
        if device not in self._exchanges:
            with torch.inference_mode(False):
                self._exchanges[device] = torch.zeros(self._words(), dtype=torch.int64, device=device)
        return self._exchanges[device]


def _loads_whole(matrix: torch.Tensor) -> bool:
    """Whether its rows are bf16 and begin at multiples of 16 bytes."""
    aligned = matrix.data_ptr() % 16 == 0 and matrix.shape[1] % 8 == 0
    return matrix.dtype == torch.bfloat16 and aligned and matrix.is_contiguous()
