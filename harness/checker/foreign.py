"""Folders in GPU MODE's format, for the checker: are they complete, which seeds they bear, what their check says."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch

from harness.checker import forms, inputs, memory
from harness.runner import claims, failure, tree
from harness.runner.failure import RefusedError

SEED_BITS = (63, 53, 32, 31, 24)  # what 64 bits, fp64, numpy's seed, C's int and fp32 hold, the largest first
LEAST_VARIETY = 0.5  # share of distinct values with a large seed, of that with a case's own


def seed_bits(reference: ModuleType, case: dict, seed: int) -> int:
    """Return the most of SEED_BITS with which a case's contents keep their variety; 0: none. seed: its own."""
    before = memory.variety(inputs.of_folder(reference, {**case, "seed": seed}))
    for bits in SEED_BITS:
        half = 2 ** (bits - 1)
        try:
            data = inputs.of_folder(reference, {**case, "seed": half + seed % half})
        except Exception:  # whatever a folder's code raises that was not made for such seeds
            continue
        if all(b >= LEAST_VARIETY * a for a, b in zip(before, memory.variety(data), strict=False)):
            return bits
    return 0


def see_answer(answer: object, device: str) -> None:
    """RefusedError: the reference's answer has what no answer may have, or nothing that the judge could wait for."""

    def leaf(value: Any, name: str) -> dict:
        if type(value) not in tree.PLAIN:
            tree.see_strided(value, name, "ref_kernel must return")
        return {"type": "value" if value is None else "Tensor", "on_gpu": getattr(value, "is_cuda", False)}

    parts = tree.leaves(tree.walk(answer, leaf, answer=True))
    if not parts:
        raise RefusedError(f"ref_kernel must return the answer, got {answer}: return the buffer that it writes")
    if device == "cuda" and not any(part["on_gpu"] for part in parts):  # its clock copies an answer behind the call
        raise RefusedError("ref_kernel must return a tensor on the GPU there, got none: return one of the numbers")


def said_of(reference: ModuleType, data: Any, answer: object) -> tuple[bool, str]:
    """Return whether the folder's check finds an answer right, and why not. RefusedError: it refuses its own too."""
    right, text = _asked(reference, data, answer)
    if right or _right_in_full(reference, data, answer):
        return True, ""
    claim, parts = claims.told(reference.ref_kernel(tree.clone(data)))
    right_answer = forms.answer(claim, map(tree.clone, parts), forms.classes_of(claim))
    right, complaint = _asked(reference, data, right_answer)
    if not right:
        raise RefusedError(f"check_implementation refuses the reference's own answer too: {complaint:.300}")
    return False, text


def _right_in_full(reference: ModuleType, data: Any, answer: object) -> bool:
    """Whether a check whose reference may use TF32 takes an answer if it may not: that may be the more exact one."""
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        before = [switch.allow_tf32 for switch in switches]
    except RuntimeError:  # the folder sets them for itself, by torch's newer names
        return False
    if not torch.cuda.is_available() or not any(before):
        return False
    try:
        for switch in switches:
            switch.allow_tf32 = False
        return _asked(reference, data, answer)[0]
    finally:
        for switch, was in zip(switches, before, strict=True):
            switch.allow_tf32 = was


def _asked(reference: ModuleType, data: Any, answer: object) -> tuple[bool, str]:
    """Return what a check says as (right, text). What it raises is a no. RefusedError: it returns anything else."""
    try:
        result = reference.check_implementation(tree.clone(data), answer)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a folder's check raises
        line = failure.of_folder(error, Path(str(reference.__file__))).partition("\n")[0]
        return False, f"check_implementation raised: {line}"
    if isinstance(result, tuple | list) and len(result) > 1 and _is_bool(result[0]):
        right, text = bool(result[0]), str(result[1])
    elif result is None or isinstance(result, str | list):
        right, text = not result, str(result)
    elif _is_bool(result):
        right, text = bool(result), ""
    else:
        wanted = "(right, text), a text or a list that is empty if all is right, or a bool"
        raise RefusedError(f"check_implementation must return {wanted}, got {result!r:.200}")
    return right, text if text.strip() else f"check_implementation returned {result!r:.200}"


def _is_bool(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, bool | int | numpy.bool_)


def takes_zeros(reference: ModuleType, data: Any) -> bool:
    """Return whether a folder's check accepts zeros for an answer that has others."""
    claim, parts = claims.told(reference.ref_kernel(tree.clone(data)))
    zeros = forms.answer(claim, map(torch.zeros_like, parts), forms.classes_of(claim))
    return any(bool(tree.raw(part).any()) for part in parts) and _asked(reference, data, zeros)[0]


def nans(answer: object) -> list[bool]:
    """Return of each tensor, array and plain value in an answer, in their order, whether it has NaN."""
    return [_has_nan(leaf) for leaf in tree.taken_apart(answer, answer=True)[1]]


def _has_nan(leaf: object) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return leaf != leaf
    leaf = leaf.float() if leaf.dtype.itemsize == 1 and leaf.is_floating_point() else leaf
    return (leaf.is_floating_point() or leaf.is_complex()) and bool(leaf.isnan().any())
