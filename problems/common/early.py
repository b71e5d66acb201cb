"""Whether the first kernel of a variant's call may begin before the kernel ahead of the call has ended.

A judged call's may not: it would overlap the judge's own kernels. Who calls variants one behind the other, and knows
all kernels between, says so with `behind_kernels`; a variant that has something to load ahead asks `allowed` in each
call, and launches its first kernel as launch.cuh has it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_allowed: ContextVar[bool] = ContextVar("early", default=False)


@contextmanager
def behind_kernels(known: bool = True) -> Iterator[None]:
    """Within: a call may begin early, if `known`. Every kernel then waits for the one ahead before it ends, even one
    that reads nothing of it; and no kernel writes weights, or what a variant says that it reads before it waits.
    """
    token = _allowed.set(known)
    try:
        yield
    finally:
        _allowed.reset(token)


def allowed() -> bool:
    """Return whether the caller of this call has said so."""
    return _allowed.get()
