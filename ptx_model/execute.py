"""Execute a kernel of a PTX text on arrays of the host."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ptx_model import (
    barrier,
    collective,
    convert,
    copies,
    fragments,
    integers,
    loads,
    parse,
    policies,
    scalar,
    tcgen05,
    wgmma,
)
from ptx_model.launch import Launch
from ptx_model.machine import Machine
from ptx_model.memory import GlobalMemory
from ptx_model.schedule import INSTRUCTIONS, Scheduler
from ptx_model.tensor_map import TensorMap

# Each of these files registers the instructions that it decodes when it is imported.
INSTRUCTION_FILES = (barrier, collective, convert, copies, fragments, integers, loads, scalar, tcgen05, wgmma)

Axes = int | Sequence[int]


def run(
    ptx: str,
    kernel: str,
    grid: Axes,
    block: Axes,
    arguments: Sequence[Any],
    shared_bytes: int = 0,
    *,
    policy: str = "eager",
    cluster: Axes | None = None,
    memory: Iterable[Any] = (),
    poison: int | None = None,
    multiprocessors: int = 132,
    limit: int = INSTRUCTIONS,
) -> Machine:
    """Execute one kernel launch; arrays among the arguments are read and written in place. Return the machine, whose
    `executed` is the number of instructions of groups of warps.

    ptx: the text of a module; kernel: the name of an .entry in it, or a part that only one name has. grid, block,
    cluster: x or (x, y, z); cluster: by default what the kernel says, else one block. arguments: numpy arrays and torch
    CPU tensors (their address is passed), TensorMap, bytes (a struct), int, float, numpy scalars: each must have the
    size of its parameter, and a plain int or float takes it. shared_bytes: of dynamic shared memory.
    policy: one of POLICIES, "random:SEED" too. memory: further arrays that the kernel may touch, such as those whose
    addresses lie in tensor maps. poison: None, and a read of shared memory that was never written is a fault, or the
    byte that it gets. multiprocessors: on which blocks that wait for each other must fit. limit: instructions of groups
    of warps, then the run counts as endless.

    ValueError: an argument does not fit. Fault: the kernel broke a rule, or uses what is not modelled.
    """
    found = parse.kernels(ptx)
    names = [kernel] if kernel in found else [name for name in found if kernel in name]
    if len(names) != 1:
        raise ValueError(f"kernel must name one of {sorted(found)}, got {kernel!r}, which is in {len(names)} of them")
    code = found[names[0]].kernel
    arrays = [*memory, *(a for a in arguments if hasattr(a, "__array_interface__") or hasattr(a, "data_ptr"))]
    wanted = cluster or code.cluster or 1
    launch = Launch(
        code,
        _axes("grid", grid),
        _axes("block", block),
        pack(code, arguments),
        GlobalMemory([extent(a) for a in arrays if np.ndim(a)]),
        shared_bytes,
        _axes("cluster", wanted),
        multiprocessors=multiprocessors,
        poison=poison,
    )
    counted = np.zeros(64, np.uint8)
    launch.meeting = counted.ctypes.data
    keep = place_globals(launch, [extent(a) for a in (*arrays, counted) if np.ndim(a)], {})
    machine = run_launch(launch, policy, limit)
    del keep
    return machine


def run_launch(launch: Launch, policy: str = "eager", limit: int = INSTRUCTIONS) -> Machine:
    """Execute a launch whose parameters are bytes. See `run`."""
    scheduler = Scheduler(launch, policies.make(policy), limit)
    scheduler.run()
    return scheduler.machine


def place_globals(launch: Launch, regions: list[tuple[int, int]], held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Give the kernel's variables in global memory a place, and the launch `regions` and these as its memory. held: the
    arrays that hold the variables of the module, by name, as earlier launches left them; those that lack are added.
    Return it: it must live as long as the launch.
    """
    for name, variable in launch.kernel.globals.items():
        if name not in held:
            held[name] = variable_array(variable)
        launch.globals[name] = held[name].ctypes.data
    launch.memory = GlobalMemory([*regions, *(extent(a) for a in held.values())])
    return held


def variable_array(variable: parse.Variable) -> np.ndarray:
    """uint8: a variable in global memory, with its first content."""
    array = np.zeros(max(16, -(-variable.size // 16) * 16), np.uint8)
    array[: len(variable.content)] = np.frombuffer(variable.content, np.uint8)
    return array


def extent(array: Any) -> tuple[int, int]:
    """-> (address, bytes) from the first to the last element of an array or tensor."""
    if hasattr(array, "data_ptr"):
        if array.device.type != "cpu" and not getattr(array, "is_cpu", False):
            raise ValueError(f"tensors must be on the CPU, got {array.device}")
        size = array.element_size()
        span = sum((n - 1) * s for n, s in zip(array.shape, array.stride(), strict=True))
        return array.data_ptr(), 0 if not array.numel() else (span + 1) * size
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high - low


def _axes(name: str, value: Axes) -> tuple[int, int, int]:
    axes = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 1 <= len(axes) <= 3 or min(axes) < 1:
        raise ValueError(f"{name} must be x or (x, y, z), all of them positive, got {value}")
    x, y, z = (*axes, *(1,) * (3 - len(axes)))
    return x, y, z


def pack(kernel: parse.Kernel, arguments: Sequence[Any]) -> bytes:
    """The bytes of the kernel's parameters. ValueError: an argument does not fit its parameter."""
    if len(arguments) != len(kernel.parameters):
        raise ValueError(f"arguments must be {len(kernel.parameters)}, one for each parameter, got {len(arguments)}")
    raw = bytearray(kernel.parameter_bytes)
    for i, (argument, (offset, size)) in enumerate(zip(arguments, kernel.parameters.values(), strict=True)):
        packed = _packed(argument, size)
        if len(packed) != size:
            raise ValueError(f"argument {i} must have {size} bytes, got {len(packed)} of {argument!r}")
        raw[offset : offset + size] = packed
    return bytes(raw)


def _packed(argument: Any, size: int) -> bytes:
    if isinstance(argument, TensorMap):
        return argument.encode()
    if isinstance(argument, (bytes, bytearray)):
        return bytes(argument)
    if hasattr(argument, "data_ptr"):
        return int(argument.data_ptr()).to_bytes(8, "little")
    if isinstance(argument, np.ndarray) and argument.ndim:
        return int(argument.ctypes.data).to_bytes(8, "little")
    if isinstance(argument, (np.generic, np.ndarray)):
        return argument.tobytes()
    if isinstance(argument, float):
        return np.array(argument, {4: np.float32, 8: np.float64}.get(size, np.float32)).tobytes()
    return (int(argument) % 2 ** (8 * size)).to_bytes(size, "little")
