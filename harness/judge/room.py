"""How many submissions and buffers a benchmark may have alive at once, so that a folder with large data fits in memory.

Only folders from elsewhere are measured: those of this repository say what their weights take, and fit.
"""

from dataclasses import dataclass

from harness.problem.folders import UsageError

SHARE = 0.9  # of the memory, that a run may take
PROCESS_BYTES = 700 * 2**20  # of a process on a device that holds nothing: context, code, what evicts its caches
GIB = 2**30


@dataclass(frozen=True)
class Footprint:
    """What one case takes. buffer: bytes of a buffer with inputs and copies of outputs; working: of the reference with
    its inputs and its answer, at most; total: of all memory; case: its text.
    """

    case: str
    buffer: int
    working: int
    total: int

    def needed(self, processes: int, buffers: int) -> int:
        """Return the bytes that a run takes: the checker, whose check may take as much as the reference; the judge's
        own runner, which copies an output; and `processes` runners, each of which may take what the reference takes.
        """
        judge = PROCESS_BYTES + (buffers + 1) * self.buffer
        runner = PROCESS_BYTES + buffers * self.buffer + self.working
        return PROCESS_BYTES + 2 * self.working + judge + processes * runner


@dataclass(frozen=True)
class Room:
    """handles: submissions alive at once; buffers: of each process."""

    handles: int
    buffers: int


def choose(footprints: list[Footprint], most: Room, paired: bool) -> Room:
    """Return the largest room within `most` in which every case fits: with fewer submissions at once, which only takes
    longer, then with fewer buffers. A pair stays together. UsageError: there is none.
    """
    handles = most.handles if paired else 1
    for room in (most, *(Room(handles, buffers) for buffers in range(most.buffers, 0, -1))):
        if all(each.needed(room.handles, room.buffers) <= SHARE * each.total for each in footprints):
            return room
    worst = max(footprints, key=lambda each: each.needed(handles, 1))
    needed, total = worst.needed(handles, 1) / GIB, worst.total / GIB
    raise UsageError(
        f"{worst.case}: a run takes about {needed:.0f} GiB with one buffer a process ({worst.buffer / GIB:.1f} GiB for "
        f"a buffer, {worst.working / GIB:.1f} for the reference), and may take {SHARE * total:.0f} of {total:.0f} GiB: "
        "leave this case out with --case, or use a machine with more memory"
    )
