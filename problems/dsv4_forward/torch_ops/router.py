"""Choose the experts of each token, and their weights. Source: section 12 of README.md's account of DeepSeek's
model.py.

Sizes: N tokens, d hidden, E experts, K of them a token, V vocabulary.
"""

import torch

from problems.dsv4_forward.torch_ops import linear
from problems.dsv4_forward.weights.config import Config


def scores(u: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return sqrt(softplus(u @ weight^T)), fp32 (N, E), products in fp32. u: fp32 or bf16 (N, d); weight: the same (E,
    d).
    """
    logits = torch.empty(len(u), len(weight), dtype=torch.float32, device=u.device)
    linear.matmul(u, weight, logits)
    return torch.nn.functional.softplus(logits).sqrt_()


def route(
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    tokens: torch.Tensor,
    cfg: Config,
    out_ids: torch.Tensor,
    out_weights: torch.Tensor,
) -> None:
    """Write the K experts of each token, and weights that sum to routed_scaling_factor.

    u: fp32 or bf16 (N, d); weight: the same (E, d). Either bias: fp32 (E,), and the K best of score + bias are chosen,
    best first; or table: int64 (V, K), and the experts are table[token], of an id outside of 0 .. V - 1 the nearest
    row's. In both, a weight is the score without bias, divided by their sum (no epsilon), times the factor. tokens:
    int64 (N,). out_ids: int32 (N, K), out_weights: fp32 (N, K). ValueError: both or neither of bias and table, or a
    shape or dtype is not that.
    """
    k = cfg.num_experts_per_tok
    if (bias is None) == (table is None):
        raise ValueError("a router needs either bias or table, got " + ("neither" if bias is None else "both"))
    for name, out, dtype in (("out_ids", out_ids, torch.int32), ("out_weights", out_weights, torch.float32)):
        if out.shape != (len(u), k) or out.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {(len(u), k)}, got {out.dtype} {tuple(out.shape)}")
    if table is not None and table.shape[1] != k:
        raise ValueError(f"table must name {k} experts a token, got {table.shape[1]}")
    score = scores(u, weight)
    chosen = table[tokens.clamp(0, len(table) - 1)] if bias is None else torch.topk(score + bias, k, dim=1).indices
    out_ids.copy_(chosen)
    gates = score.gather(1, chosen)
    torch.div(gates, gates.sum(1, keepdim=True), out=out_weights).mul_(cfg.routed_scaling_factor)
