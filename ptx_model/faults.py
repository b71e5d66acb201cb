"""The error that the model raises where a kernel does what the hardware forbids, or waits for what never comes."""

# What a fault may be. Tests and tables of mutants compare this word, not the text behind it.
KINDS = {
    "deadlock": "every warp waits, and nothing that is under way can wake one",
    "race": "two accesses, at least one of them a write, that nothing orders",
    "unwritten": "a read of shared or tensor memory that nothing has written",
    "bounds": "an access outside of the memory that it may touch, or a misaligned one",
    "barrier": "an mbarrier or a named barrier used against its rules",
    "descriptor": "a shared memory descriptor, an instruction descriptor or a tensor map with a field out of range",
    "tensor memory": "tensor memory that is not allocated, not freed, or not of this warp",
    "divergence": "an instruction for a whole warp that not all of its threads execute together",
    "limit": "more instructions than the run may take",
    "not modelled": "an instruction, or a form of one, that the model does not have",
}


class Fault(Exception):
    """What went wrong, and where. kind: a key of KINDS. what: one sentence. where: PTX line, source line, CTA, warp;
    empty until the machine, which knows them, adds it.
    """

    def __init__(self, kind: str, what: str, where: str = "") -> None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {sorted(KINDS)}, got {kind!r}")
        super().__init__(kind, what, where)
        self.kind, self.what, self.where = kind, what, where

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" + (f"\n  at {self.where}" if self.where else "")
