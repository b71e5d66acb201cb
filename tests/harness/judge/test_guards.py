"""What a call writes between the tensors of a buffer is found, byte by byte, and named by the tensor beside it."""

import os

import pytest
import torch

from harness.checker.guards import Guards
from harness.runner import tree
from harness.runner.buffers import Buffer
from tests.harness.judge.test_inout import FLAT, SPLIT, checker, content, folder

OWN = {"reaper": os.getpid(), "pid": os.getpid()}
STRIDED = torch.zeros(7, 9)[:, 1:6:2]  # whose holes are its own


def guarded(*tensors: torch.Tensor) -> tuple[Guards, Buffer, list[dict]]:
    layout = tree.Layout()
    leaves = tree.leaves(tree.describe(tensors, layout))
    buffer = Buffer(layout.used)
    return Guards(buffer, [(leaf, f"input {i}") for i, leaf in enumerate(leaves)]), buffer, leaves


@pytest.mark.parametrize(
    "tensors",
    [(torch.zeros(1),), (torch.zeros(128), torch.zeros(0), torch.zeros(5, dtype=torch.bool)), (STRIDED, STRIDED.t())],
    ids=["one", "full, empty, odd", "strided"],
)
def test_each_byte_outside_of_the_tensors_is_guarded_and_none_inside(tensors):
    guards, buffer, leaves = guarded(*tensors)
    memory = buffer.memory
    inside = {at for leaf in leaves for at in range(leaf["offset"], leaf["offset"] + leaf["nbytes"])}
    for at in range(len(memory)):
        memory[at] ^= 1
        assert bool(guards.fault(buffer)) == (at not in inside), at
        memory[at] ^= at not in inside  # back, where it matters
    buffer.close()


def test_tensors_are_apart_and_aligned():
    _, buffer, leaves = guarded(*(torch.zeros(n, dtype=torch.uint8) for n in (1, 255, 256, 257, 512, 0, 3)))
    edges = [0, *(edge for leaf in leaves for edge in (leaf["offset"], leaf["offset"] + leaf["nbytes"]))]
    assert all(leaf["offset"] % tree.ALIGN == 0 for leaf in leaves)
    starts, ends = [*edges[1::2], buffer.nbytes], edges[::2]
    assert all(start - end >= tree.GUARD for start, end in zip(starts, ends, strict=True))
    buffer.close()


def test_bytes_are_named_by_the_tensors_beside_them():
    guards, buffer, leaves = guarded(torch.zeros(3), torch.zeros(2), torch.zeros(4))
    memory = buffer.memory
    ends = [leaf["offset"] + leaf["nbytes"] for leaf in leaves]
    for first, last in ((ends[0], ends[0] + 4), (leaves[1]["offset"] - 1, leaves[1]["offset"])):
        memory[first:last] ^= 0x55
    beyond = "the call wrote outside of its tensors"
    assert guards.fault(buffer) == f"{beyond}: 5 bytes behind input 0 and before input 1"
    memory[: leaves[0]["offset"]] ^= 0x55
    memory[ends[2] :] ^= 0x55
    behind = buffer.nbytes - ends[2]
    assert guards.fault(buffer) == (
        f"{beyond}: 512 bytes before input 0, 5 bytes behind input 0 and before input 1, {behind} bytes behind input 2"
    )
    buffer.close()


def test_the_whole_place_of_a_copy_is_the_judges():
    """A folder's answer may come in a wider type than the reference's: the copy has room for it."""
    leaf = {"offset": tree.ALIGN, "nbytes": 4, "most": 8}
    buffer = Buffer(2 * tree.ALIGN)
    guards = Guards(buffer, [(leaf, "the judge's copy")])
    for at, fault in ((0, False), (7, False), (8, True), (-1, True)):
        buffer.memory[tree.ALIGN + at] ^= 1
        assert bool(guards.fault(buffer)) == fault, at
        buffer.memory[tree.ALIGN + at] ^= 1
    buffer.close()


def test_what_lies_between_is_secret_and_new_in_each_call():
    guards, buffer, _ = guarded(torch.zeros(3))
    before = buffer.memory.clone()
    other = Guards(buffer, [])
    assert guards.fault(buffer) and not other.fault(buffer) and len(before.unique()) > 64
    buffer.close()


@pytest.mark.parametrize("classes", [FLAT, SPLIT], ids=["flat", "split"])
def test_the_checker_looks_at_a_call_and_at_its_weights(tmp_path, classes):
    made = checker(folder(tmp_path / "running", classes))
    made.allocate({"op": "allocate", "runner": "r", "bytes": content(made)["host"], "count": 1, **OWN}, [])
    memories = [made.buffers["r"][0]]
    if classes == SPLIT:
        made.hold({"runner": "r"}, [])
        memories.append(made.held["r"])
    named = [*(f"output {name}" for name in made.outputs_named), "weights ones"]
    for buffer, name in zip(memories, named, strict=False):
        made.fill({"runner": "r", "buffer": 0}, [])
        assert made._changed("r", made.buffers["r"][0]) == ""
        buffer.memory[-1] ^= 1
        assert made._changed("r", made.buffers["r"][0]).endswith(f"1 byte behind {name}")
    made.release({"op": "release", "runner": "r"}, [])
