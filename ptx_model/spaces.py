"""Memory as threads see it: the spaces that an address may be of, and the blocks that shared addresses belong to."""

from typing import Any

import numpy as np

from ptx_model.faults import Fault
from ptx_model.machine import LOCAL, Warps
from ptx_model.memory import LOCAL_WINDOW, PARAMETER_WINDOW, RANK_SHIFT, SHARED_WINDOW, UNSIGNED
from ptx_model.parse import LOCAL_START, PARAMETER_SPACE

_OFFSET = (1 << RANK_SHIFT) - 1


def _resolve(space: str, address: np.ndarray) -> str:
    """The space of generic addresses; "" if they are of several."""
    if space:
        return "global" if space == "const" else space
    shared = (address >= SHARED_WINDOW) & (address < PARAMETER_WINDOW)
    parameters = (address >= PARAMETER_WINDOW) & (address < LOCAL_WINDOW)
    for name, those in (("shared::cluster", shared), ("param", parameters), ("local", address >= LOCAL_WINDOW)):
        if those.all():
            return name
        if those.any():
            return ""
    return "global"


def _parts(address: np.ndarray) -> list[np.ndarray]:
    """Which generic addresses are of which space."""
    edges = np.array([SHARED_WINDOW, PARAMETER_WINDOW, LOCAL_WINDOW])
    space = np.searchsorted(edges, address, side="right")
    return [np.flatnonzero(space == n) for n in np.unique(space)]


def shared_blocks(w: Warps, address: np.ndarray, own: bool) -> list[tuple[Any, np.ndarray, np.ndarray]]:
    """-> (block, which of `address`, their offsets) for each block that shared addresses belong to. own: `address` may
    be of the warps' block only.
    """
    rank = address >> RANK_SHIFT
    found = []
    for r in np.unique(rank):
        blocks = w.block.cluster.blocks
        if not 0 <= r < len(blocks):
            raise Fault("bounds", f"a shared address {int(address[0]):#x} of no block of the cluster")
        block = blocks[r]
        if own and block is not w.block:
            raise Fault(
                "bounds", f"{w.block.name} uses {int(address[0]):#x}, of {block.name}, as an address within itself"
            )
        if block.ended:
            raise Fault("bounds", f"an access to the shared memory of {block.name}, which has ended")
        which = np.flatnonzero(rank == r)
        found.append((block, which, address[which] & _OFFSET))
    return found


def _local(w: Warps, address: np.ndarray, lanes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """-> (bytes, threads) that index local memory. address: of `size` bytes, one of each of the threads `lanes`."""
    offset = address & (LOCAL_WINDOW - 1)
    if (offset & size - 1).any() or (offset < LOCAL_START).any() or (offset + size > len(w.files[LOCAL])).any():
        worst = int(offset[np.argmax((offset & size - 1 != 0) | (offset + size > len(w.files[LOCAL])))])
        raise Fault("bounds", f"an access of {size} bytes to local memory, byte {worst} of {len(w.files[LOCAL])}")
    return offset[:, None] + np.arange(size), lanes[:, None]


def read(
    w: Warps, space: str, address: np.ndarray, lanes: np.ndarray, unit: int, count: int, atomic: bool
) -> np.ndarray:
    """uint (n, count) of `unit` bytes each. lanes: int (n,), the threads that read."""
    if space == "param" and (address >= LOCAL_WINDOW).all():
        space = "local"  # a parameter of a call
    space, agents = _resolve(space, address), w.lane_agents[lanes]
    if not space:
        found = np.empty((len(address), count), UNSIGNED[unit])
        for part in _parts(address):
            found[part] = read(w, "", address[part], lanes[part], unit, count, atomic)
        return found
    if space == "local":
        return np.ascontiguousarray(w.files[LOCAL][_local(w, address, lanes, unit * count)]).view(UNSIGNED[unit])
    if space == "global":
        return w.block.launch.memory.load(address, unit, count)
    if space == "param":
        offset = address & (PARAMETER_WINDOW - 1)
        raw = np.frombuffer(w.block.launch.parameters.ljust(PARAMETER_SPACE, b"\0"), np.uint8)
        at = offset[:, None] + np.arange(unit * count)
        if at.max() >= len(w.block.launch.parameters):
            raise Fault("bounds", f"a read of parameters at byte {int(offset.max())}")
        return raw[at].view(UNSIGNED[unit])
    address = np.where(address >= SHARED_WINDOW, address - SHARED_WINDOW, address)
    out = np.empty((len(address), count), UNSIGNED[unit])
    for block, which, offset in shared_blocks(w, address, space != "shared::cluster"):
        out[which] = block.shared.load(offset, unit, count, agents[which], atomic)
    return out


def write(w: Warps, space: str, address: np.ndarray, lanes: np.ndarray, values: np.ndarray, atomic: bool) -> None:
    """values: uint (n, count). lanes: int (n,), the threads that write."""
    space, agents = _resolve(space, address), w.lane_agents[lanes]
    if not space:
        for part in _parts(address):
            write(w, "", address[part], lanes[part], values[part], atomic)
        return
    if space == "local":
        raw = np.ascontiguousarray(values).view(np.uint8)
        w.files[LOCAL][_local(w, address, lanes, raw.shape[1])] = raw
        return
    w.block.machine.events += 1
    if space == "global":
        w.block.launch.memory.store(address, values)
        return
    if space == "param":
        raise Fault("bounds", "a store to the parameters")
    address = np.where(address >= SHARED_WINDOW, address - SHARED_WINDOW, address)
    for block, which, offset in shared_blocks(w, address, space != "shared::cluster"):
        block.shared.store(offset, values[which], agents[which], atomic)
