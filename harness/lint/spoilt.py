"""The right answer spoilt, in ways that a check lets through which sees no sign, no order or not every element.

Each function returns a copy, of the same form, of an output that has elements. AbsentError: none would surely be wrong.
"""

import random

import torch

from harness.checker import values

KNOWN = 0.125  # of the largest element: a smaller one counts as zero
PLACES = 8  # elements that are changed one at a time in a case


class AbsentError(Exception):
    """A candidate that does not apply to this case; the message says why."""


def special(exact: torch.Tensor, value: float) -> torch.Tensor:
    """Return the answer with NaN or infinity in the last element that is finite."""
    at = values.positions(torch.isfinite(values.numbers(floating(exact))))
    if not len(at):
        raise AbsentError("no element is finite")
    return values.put(exact, at[-1:], value)


def largest_zero(exact: torch.Tensor) -> torch.Tensor:
    at = int(_sizes(exact).argmax())
    return _zeroed(exact, slice(at, at + 1))


def half_zero(exact: torch.Tensor) -> torch.Tensor:
    """Return the answer with the second half of its elements zero."""
    return _zeroed(exact, slice(exact.numel() // 2, None))


def one_changed(exact: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Return up to PLACES answers with one element, drawn by `seed` among large ones, changed into the farthest."""
    size, x = _sizes(exact), values.numbers(exact).flatten()
    places = values.positions(size >= KNOWN * size.max()).tolist()
    drawn = random.Random(seed).sample(places, min(PLACES, len(places)))
    far = {at: int((x - x[at]).abs().nan_to_num(0, 0, 0).argmax()) for at in drawn}
    return [values.put(exact, torch.tensor([at]), float(x[other])) for at, other in far.items()]


def scaled(exact: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the answer times `factor`, saturated."""
    if exact.dtype not in values.BITS and not exact.dtype.is_signed:
        raise AbsentError("its type has no sign")
    _sizes(exact)
    return values.like(exact, values.cast(values.numbers(exact) * factor, exact.dtype))


def rolled(exact: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    """Return the answer with each element one place further along an axis; None: in the order of all elements."""
    bits = values.bits(exact).contiguous()
    made = bits.roll(1) if axis is None else bits.roll(1, axis)
    same = [bits.sort(a).values.equal(made.sort(a).values) for a in range(bits.dim() if axis is None else 0)]
    if any(same) and not made.equal(bits):
        raise AbsentError("its rows or columns hold the same, in another order")
    return _of_bits(exact, made)


def floating(exact: torch.Tensor) -> torch.Tensor:
    if exact.dtype not in values.BITS:
        raise AbsentError("not of a floating-point type")
    return exact


def _sizes(exact: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes in fp64, 0 for what is not finite."""
    if exact.dtype == values.FP4:
        raise AbsentError("of packed values")
    size = values.numbers(exact).abs().nan_to_num(0, 0, 0)
    if not float(size.max()):
        raise AbsentError("all of it is zero")
    return size


def _zeroed(exact: torch.Tensor, where: slice) -> torch.Tensor:
    flat = values.bits(exact).flatten().clone()
    flat[where] = 0
    return _of_bits(exact, flat)


def _of_bits(exact: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    return values.like(exact, bits.view(exact.shape).view(exact.dtype))
