"""Asynchronous work, and the orders in which it is done. A kernel that is right gives the same bits under all of them.

Copies, tensor core products and tensor copies are done some time between the instruction that asks for them and the
wait that needs them. A policy says when.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

COPIES = ("tma", "cp.async")
TENSOR_CORE = ("tcgen05", "wgmma")


@dataclass(eq=False)
class Work:
    """Asynchronous work that an instruction asked for. lane: work of one lane is done in the order of the requests.
    where: the instruction, for people.
    """

    kind: str  # "tma", "cp.async", "tcgen05", "wgmma"
    lane: object
    run: Callable[[], None]
    where: str
    done: bool = False


class Policy:
    """now: the kinds of work that are done when they are asked for; the others wait until every warp is blocked."""

    lockstep = True  # warps that are at the same instruction run as one group

    def __init__(self, name: str, now: tuple[str, ...]) -> None:
        self.name, self._now = name, now

    def at_once(self, work: Work) -> bool:
        """Whether to do `work` when it is asked for."""
        return work.kind in self._now

    def order(self, groups: list) -> list:
        """The order in which groups of warps have their turn."""
        return groups

    def budget(self) -> int:
        """How many instructions a group may execute in its turn."""
        return 1 << 30

    def between(self, pending: list[Work]) -> Work | None:
        """What to do between two turns; asked again until it is None."""
        return None

    def choose(self, pending: list[Work]) -> Work:
        """What to do first when every warp waits."""
        return pending[0]


class Random(Policy):
    """Every warp separately, in a random order with random turns; work at random moments, copies in any order."""

    lockstep = False

    def __init__(self, seed: int) -> None:
        super().__init__(f"random:{seed}", ())
        self._random = random.Random(seed)

    def at_once(self, work: Work) -> bool:
        return self._random.random() < 0.2

    def order(self, groups: list) -> list:
        return self._random.sample(groups, len(groups))

    def budget(self) -> int:
        return self._random.choice((3, 30, 300, 3000))

    def between(self, pending: list[Work]) -> Work | None:
        return self.choose(pending) if pending and self._random.random() < 0.3 else None

    def choose(self, pending: list[Work]) -> Work:
        return self._random.choice(pending)


NAMES = ("eager", "lazy", "late-tma", "late-tensor-core", "random")


def make(name: str) -> Policy:
    """Return the policy of that name; "random:7" is "random" with another seed. ValueError: there is none."""
    if name == "eager":
        return Policy(name, COPIES + TENSOR_CORE)
    if name == "lazy":
        return Policy(name, ())
    if name == "late-tma":
        return Policy(name, TENSOR_CORE)
    if name == "late-tensor-core":
        return Policy(name, COPIES)
    head, _, seed = name.partition(":")
    if head == "random" and (not seed or seed.isdigit()):
        return Random(int(seed or 0))
    raise ValueError(f"policy must be one of {NAMES} or random:SEED, got {name!r}")
