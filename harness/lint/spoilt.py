"""The right answer with a few elements changed, so that a check lets it through which sees no sign, no order or only
sums.

Each function takes an output and returns a copy of its type, shape and strides. The change of an element is about as
large as the largest element, so a tolerance that refuses "largest element zero" refuses these too. AbsentError: the
output has no elements for which such a change would surely be wrong.
"""

import random

import numpy as np
import torch

from harness.checker import values

APART = 0.75  # of the largest element: what two elements must differ by, at least, to be swapped
BESIDE = 0.25  # of an element: the norm of the rest of its row or column, at least, for its sign to be bound to theirs
KNOWN = 0.125  # of the largest element: a smaller one counts as zero
PLACES = 8  # elements that are changed one at a time in a case


class AbsentError(Exception):
    """A candidate that does not apply to this case; the message says why."""


def axes(exact: torch.Tensor) -> list[int]:
    """Return the axes along which there are two places or more; none of packed values."""
    return [] if exact.dtype == values.FP4 else [axis for axis, size in enumerate(exact.shape) if size > 1]


def negated(exact: torch.Tensor) -> torch.Tensor:
    """Return the answer with its largest element negated. A whole row or column may have either sign (an eigenvector),
    so the element must not be the only one in a row or column that is not zero.
    """
    x, size, largest = _numbers(_signed(exact))
    share = size / largest
    bound = torch.ones_like(size, dtype=torch.bool)
    for axis in axes(exact):
        rest = share.square().sum(axis, keepdim=True) - share.square()
        bound &= rest >= (BESIDE * share) ** 2
    at = int((share * bound).argmax())
    if not axes(exact):
        raise AbsentError("it is one number, whose sign may be free")
    if float((share * bound).flatten()[at]) < 0.5:
        raise AbsentError("each large element is the only one in its row or column, whose sign may be free")
    return _put(exact, [at], -x.flatten()[[at]])


def all_negated(exact: torch.Tensor) -> torch.Tensor:
    """Return the answer with all elements negated."""
    x, *_ = _numbers(_signed(exact))
    return values.like(exact, values.cast(-x, exact.dtype))


def swapped(exact: torch.Tensor) -> torch.Tensor:
    """Return the answer, of two axes or more, with two elements swapped that share no row or column: no order of rows
    or columns has it.
    """
    x, size, largest = _numbers(exact)
    one = int(size.argmax())
    far = torch.where(_apart(exact, one), (x - x.flatten()[one]).abs().nan_to_num(0, 0, 0), 0.0)
    other = int(far.argmax())
    if float(far.flatten()[other]) < APART * largest:
        raise AbsentError("no two elements are far enough apart")
    flat = values.bits(exact).flatten().clone()
    flat[[one, other]] = flat[[other, one]]
    return values.like(exact, flat.view(exact.shape).view(exact.dtype))


def one_changed(exact: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Return up to PLACES answers, each with one element changed into the one that is the farthest from it. `seed`
    draws the elements, among those that are not small: a place that does not count often holds zero.
    """
    x, size, largest = _numbers(exact)
    places = (size >= KNOWN * largest).flatten().nonzero().flatten().tolist()
    flat, found = values.bits(exact).flatten(), []
    for at in random.Random(seed).sample(places, min(PLACES, len(places))):
        far = (x - x.flatten()[at]).abs().nan_to_num(0, 0, 0).flatten()
        if float(far.max()) >= KNOWN * largest:
            made = flat.clone()
            made[at] = flat[int(far.argmax())]
            found.append(values.like(exact, made.view(exact.shape).view(exact.dtype)))
    if not found:
        raise AbsentError("no two elements are far enough apart")
    return found


def swapped_along(exact: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the answer with the contents of two places along an axis swapped."""
    x, size, largest = _numbers(exact)
    rows = x.nan_to_num(0, 0, 0).movedim(axis, 0).reshape(exact.shape[axis], -1)
    one = int(size.movedim(axis, 0).reshape(exact.shape[axis], -1).amax(1).argmax())
    far = (rows - rows[one]).abs().amax(1)
    other = int(far.argmax())
    if float(far[other]) < APART * largest:
        raise AbsentError("no two elements are far enough apart")
    order = list(range(exact.shape[axis]))
    order[one], order[other] = other, one
    moved = values.bits(exact).index_select(axis, torch.tensor(order, device=exact.device))
    return values.like(exact, moved.contiguous().view(exact.dtype))


def moved(exact: torch.Tensor) -> torch.Tensor:
    """Return the answer with the largest element moved into others so that the sums along every axis stay: with one
    axis it is added to another element, with two it is added to two and taken from a fourth, and so on.
    """
    if exact.dtype not in values.BITS:
        raise AbsentError("not of a floating-point type")  # integers may be places, which have a range
    x, size, largest = _numbers(exact)
    one = int(size.argmax())
    # An element of half the size: with one of zero the answer would have the same elements in another order.
    fit = torch.where(_apart(exact, one) & (size >= KNOWN * largest), (size - largest / 2).abs(), torch.inf)
    other = int(fit.argmin())
    if not axes(exact) or not float(fit.flatten()[other]) < torch.inf:
        raise AbsentError("it has no second element that is not zero")
    ends = list(zip(_place(exact, one), _place(exact, other), strict=True))
    made = x.clone()
    for far in np.ndindex(*(1 + (start != end) for start, end in ends)):
        corner = tuple(end if away else start for away, (start, end) in zip(far, ends, strict=True))
        made[corner] += x.flatten()[one] * (1 if sum(far) % 2 else -1)
    if not bool(torch.isfinite(made[torch.isfinite(x)]).all()):
        raise AbsentError("a value beside it is not finite")
    away = made.flatten().sort().values - x.flatten().sort().values
    if float(away.abs().nan_to_num(0, 0, 0).sum()) < KNOWN * largest:
        raise AbsentError("it would be the same elements in another order")
    return values.like(exact, values.cast(made, exact.dtype))


def _numbers(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the values in fp64, their magnitudes (0 for what is not finite), and the largest of these."""
    if exact.dtype == values.FP4:
        raise AbsentError("of packed values")
    if not exact.numel():
        raise AbsentError("it is empty")
    x = values.numbers(exact)
    size = x.abs().nan_to_num(0, 0, 0)
    if not float(size.max()):
        raise AbsentError("all of it is zero")
    return x, size, float(size.max())


def _signed(exact: torch.Tensor) -> torch.Tensor:
    if exact.dtype in values.BITS or (exact.dtype.is_signed and not exact.dtype.is_floating_point):
        return exact
    raise AbsentError("its type has no sign")


def _place(exact: torch.Tensor, at: int) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(at), exact.shape))


def _apart(exact: torch.Tensor, at: int) -> torch.Tensor:
    """Return which elements share no place with the one at flat position `at`, along any axis of several places."""
    found = torch.ones(exact.shape, dtype=torch.bool, device=exact.device)
    place = _place(exact, at)
    for axis in axes(exact):
        found.select(axis, place[axis]).fill_(False)
    return found


def _put(exact: torch.Tensor, at: list[int], numbers: torch.Tensor) -> torch.Tensor:
    flat = values.bits(exact).flatten().clone()
    flat[at] = values.bits(values.cast(numbers, exact.dtype))
    return values.like(exact, flat.view(exact.shape).view(exact.dtype))
