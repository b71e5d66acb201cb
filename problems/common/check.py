"""Compare an output with a higher-precision reference, and report mismatches as GPU MODE's checkers do."""

from dataclasses import dataclass

import torch

SHOWN = 5  # mismatches printed


@dataclass(frozen=True)
class Result:
    """Verdict on one output.

    rel is |got - want| / |want| in the Frobenius norm. Element checks: worst_abs is |got - want| and worst_tol what was
    admitted, at the element where their ratio is largest. Norm checks: the largest |got - want| and the admitted `rel`.
    All are NaN where shapes or dtypes differ.
    """

    ok: bool
    message: str = ""
    rel: float = float("nan")
    worst_abs: float = float("nan")
    worst_tol: float = float("nan")


def form_error(got: object, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """One line saying what was wanted and what came, "" if `got` is a plain tensor of that shape and dtype."""
    if type(got) is not torch.Tensor:
        return f"mismatch found! want a torch.Tensor, got {type(got).__name__}"
    if got.dtype != dtype or tuple(got.shape) != tuple(shape):
        return f"mismatch found! want {dtype} {tuple(shape)}, got {got.dtype} {tuple(got.shape)}"
    return ""


def elementwise(got: torch.Tensor, want: torch.Tensor, tolerance: torch.Tensor, dtype: torch.dtype) -> Result:
    """Pass if |got - want| <= tolerance everywhere.  got: `dtype`; want, tolerance: fp64; all of one shape.

    NaN and infinity in `got` fail. The report counts the mismatches and shows the first five, got before wanted.
    """
    if problem := form_error(got, want.shape, dtype):
        return Result(False, problem)
    got = got.double()
    error = (got - want).abs()
    good = error <= tolerance  # not ~(error > tolerance), which NaN would pass
    # tiny: where nothing is admitted and nothing is off, the ratio is 0 and not NaN
    excess = error / tolerance.clamp_min(torch.finfo(torch.float64).tiny)
    worst = int(excess.nan_to_num(torch.inf, torch.inf).argmax())
    numbers = (_relative(error, want), float(error.flatten()[worst]), float(tolerance.flatten()[worst]))
    if bool(good.all()):
        return Result(True, "", *numbers)
    return Result(False, _report(got, want, ~good), *numbers)


def norm(got: torch.Tensor, want: torch.Tensor, limit: float, dtype: torch.dtype, batch: int) -> Result:
    """Pass if |got - want| / |want| (Frobenius) <= limit in every slice along axis `batch`. For peers, whose own
    output precision is what it is; NaN and infinity fail.
    """
    if problem := form_error(got, want.shape, dtype):
        return Result(False, problem)
    got = got.double()
    error = (got - want).abs()
    slices = want.shape[batch]
    error_by_slice = error.movedim(batch, 0).reshape(slices, -1)
    rel = error_by_slice.norm(dim=1) / want.movedim(batch, 0).reshape(slices, -1).norm(dim=1)
    rel = torch.where(error_by_slice.sum(1) == 0, torch.zeros_like(rel), rel)
    worst = float(rel.max()) if bool(torch.isfinite(rel).all()) else float("inf")
    if worst <= limit:
        return Result(True, "", worst, float(error.max()), limit)
    bad = error > limit * want.abs()
    where = _report(got, want, bad | ~torch.isfinite(got))
    return Result(False, f"relative error {worst:.3g} over {limit:.3g}; {where}", worst, float(error.max()), limit)


def _relative(error: torch.Tensor, want: torch.Tensor) -> float:
    size = float(want.norm())
    return float(error.norm()) / size if size else float(error.norm())


def _report(got: torch.Tensor, want: torch.Tensor, bad: torch.Tensor) -> str:
    lines = [
        "mismatch found! custom implementation doesn't match reference: "
        f"Number of mismatched elements: {int(bad.sum())} of {bad.numel()}"
    ]
    for index in bad.nonzero()[:SHOWN].tolist():
        at = tuple(index)
        lines.append(f"ERROR AT ({', '.join(map(str, at))}): {float(got[at]):.6g} {float(want[at]):.6g}")
    return "\n".join(lines)
