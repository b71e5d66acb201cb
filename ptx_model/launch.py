"""A launch: the kernel, its grid and parameters, and where its variables in shared memory lie."""

import math
from dataclasses import dataclass, field

from ptx_model.faults import Fault
from ptx_model.memory import LARGEST_SHARED, SHARED_START, GlobalMemory
from ptx_model.parse import Address, Kernel, Symbol, Vector

# Of one multiprocessor; a grid whose blocks wait for each other must fit on all of them. Registers, which may allow
# fewer, are chosen by ptxas, whose choice the model does not see.
MOST_BLOCKS, MOST_THREADS, SHARED_OF_BLOCKS, SHARED_RESERVED = 32, 2048, 228 * 1024, 1024


@dataclass
class Launch:
    """One kernel launch. grid, block, cluster: x, y, z. shared_bytes: dynamic. parameters: the bytes of all of them.

    poison: None, and a read of shared memory that nothing has written is a fault; or the byte that such a read gets.
    Right kernels do read such bytes, of rows past the end, and drop what comes of them: runs with different bytes must
    then agree.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: bytes
    memory: GlobalMemory
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    globals: dict[str, int] = field(default_factory=dict)  # variables in global memory -> address
    multiprocessors: int = 132
    races: bool = True
    poison: int | None = None
    meeting: int = 0  # address of what a cooperative grid counts at; 0: the launch is not cooperative

    @property
    def threads(self) -> int:
        return math.prod(self.block)

    def resident(self, shared: int) -> int:
        """Return how many clusters may be under way together, at least one. shared: bytes of a block, all in all."""
        each = min(MOST_BLOCKS, MOST_THREADS // self.threads, SHARED_OF_BLOCKS // (shared + SHARED_RESERVED))
        return max(1, self.multiprocessors * max(each, 1) // math.prod(self.cluster))

    def check(self) -> None:
        """Fault("bounds"): a launch that the driver would refuse."""
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise Fault("bounds", f"the grid {self.grid} is no multiple of the cluster {self.cluster}")
        if not 1 <= self.threads <= 1024 or min(self.grid) < 1:
            raise Fault("bounds", f"a grid of {self.grid} blocks of {self.threads} threads cannot be launched")
        limit = self.kernel.threads
        if limit and (self.threads != limit if self.kernel.exact_threads else self.threads > limit):
            raise Fault("bounds", f"{self.threads} threads a block, but the kernel is made for {limit}")
        if len(self.parameters) < self.kernel.parameter_bytes:
            raise Fault("bounds", f"{len(self.parameters)} bytes of parameters for {self.kernel.parameter_bytes}")


@dataclass(frozen=True)
class Layout:
    """A block's shared memory. symbols: address of each variable; end: the first address behind all; static_bytes: of
    variables whose size the kernel knows.
    """

    symbols: dict[str, int]
    end: int
    static_bytes: int

    @property
    def bytes(self) -> int:
        """What the block takes, without what the hardware keeps for itself."""
        return self.end - SHARED_START


def layout(launch: Launch) -> Layout:
    """Lay out the variables that the kernel's instructions name. Fault("bounds"): more than a block has."""
    used = set()
    for instruction in launch.kernel.code:
        used.update(_symbols(instruction.operands))
    symbols: dict[str, int] = {}
    at = SHARED_START
    for variable in launch.kernel.shared:
        if variable.size and variable.name in used:
            at = -(-at // variable.align) * variable.align
            symbols[variable.name] = at
            at += variable.size
    static = at - SHARED_START
    dynamic = [v for v in launch.kernel.shared if not v.size and v.name in used]
    align = max((v.align for v in dynamic), default=1)
    at = -(-at // max(align, 16)) * max(align, 16)
    for variable in dynamic:
        symbols[variable.name] = at
    found = Layout(symbols, at + launch.shared_bytes, static)
    if found.bytes > LARGEST_SHARED:
        raise Fault("bounds", f"{found.bytes} bytes of shared memory, but a block has {LARGEST_SHARED}")
    return found


def _symbols(operands: tuple) -> set[str]:
    found = set()
    for operand in operands:
        if isinstance(operand, Symbol):
            found.add(operand.name)
        elif isinstance(operand, Address):
            found |= _symbols((operand.base, *operand.more))
        elif isinstance(operand, Vector):
            found |= _symbols(operand.items)
    return found
