"""Folders in GPU MODE's format, for the checker: whether they are complete, which seeds they bear, and what their own
check says of an answer.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch

from harness.checker import inputs, memory
from harness.runner import claims, failure, objects, tree
from harness.runner.failure import RefusedError

REQUIRED = ("generate_input", "ref_kernel", "check_implementation")  # functions of reference.py
RAISED = "check_implementation raised"  # so begins what is said then
# What Python raises where an answer is put together otherwise than a check expects.
MISFITS = tuple(f"{RAISED} {name}" for name in ("AttributeError", "IndexError", "KeyError", "TypeError", "ValueError"))
LARGE_SEED = 2**62
LEAST_VARIETY = 0.5  # share of distinct values with a large seed, of that with a case's own


def see_complete(reference: ModuleType) -> None:
    """Raise RefusedError if a function is missing."""
    if missing := [name for name in REQUIRED if not callable(getattr(reference, name, None))]:
        raise RefusedError(f"reference.py must define {', '.join(REQUIRED)}, found no {', '.join(missing)}")


def is_narrow(reference: ModuleType, case: dict, seed: int) -> bool:
    """Return whether contents of a case lose variety, or cannot be made, with a seed of 63 bits. A folder that adds
    the seed to numbers of fp32 makes constants of them. seed: the case's own.
    """
    before = memory.variety(inputs.of_folder(reference, {**case, "seed": seed}))
    try:
        data = inputs.of_folder(reference, {**case, "seed": seed + LARGE_SEED})
    except Exception:  # whatever a folder's code raises that was not made for such seeds
        return True
    return any(b < LEAST_VARIETY * a for a, b in zip(before, memory.variety(data), strict=False))


def parts_of(answer: object, device: str) -> list[torch.Tensor]:
    """Return the tensors within the reference's answer. RefusedError: it has other objects, nothing in it that the
    judge could wait for, or more than a runner can say.
    """
    parts = tree.parts(answer)
    if odd := [_kind(part) for part in parts if not objects.is_strided(part)]:
        hints = {"complex": "a tensor of it", "dtype": "its text, str(...)"}
        instead = [f"; return {hint} instead" for name, hint in hints.items() if any(name in kind for kind in odd)]
        raise RefusedError(
            "ref_kernel must return tensors, arrays, real numbers and texts, in tuples, lists, dicts or dataclasses, "
            f"got {', '.join(odd)}{''.join(instead[:1])}"
        )
    if answer is None or (not parts and tree.within_answer(answer) == ([], [])):
        raise RefusedError(f"ref_kernel must return the answer, got {answer}: return the buffer that it writes")
    if device == "cuda" and not any(part.is_cuda for part in parts):  # its clock copies an answer behind the call
        raise RefusedError("ref_kernel must return a tensor on the GPU there, got none: return one of the numbers")
    if (many := _count(answer)) > claims.CLAIMS:
        raise RefusedError(
            f"an answer may have at most {claims.CLAIMS} tensors, numbers and texts, the limit of this judge, got "
            f"{many}: return a tensor of them"
        )
    return parts


def _kind(part: object) -> str:
    return f"{part.layout} {type(part).__name__}" if isinstance(part, torch.Tensor) else type(part).__name__


def _count(answer: object) -> int:
    inner = tree.within_answer(answer)
    return sum(map(_count, inner[1])) if inner and inner[1] else 1


def said_of(reference: ModuleType, data: Any, answer: object) -> tuple[bool, str]:
    """Return whether the folder's check finds an answer right, and its text. The check returns a pair; or a text or a
    list that is empty if all is right; or a bool, of which the reference's own answer shows the meaning. If it raises,
    the answer is wrong, unless it raises on the reference's own too. RefusedError: it returns something else, or
    raises on the reference's own answer, or says that it is wrong as well.
    """

    def check(something: object) -> object:
        return reference.check_implementation(tree.clone(data), something)

    def of_own() -> object:
        """What the check says of the reference's own answer."""
        answer = reference.ref_kernel(tree.clone(data))
        try:
            return check(answer)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            said = failure.of_folder(error, Path(str(reference.__file__))).partition("\n")[0]
            raise RefusedError(f"check_implementation raises on the reference's own answer too: {said}") from None

    try:
        said = check(answer)
    except Exception as error:  # whatever a folder's check raises
        of_own()
        return False, f"{RAISED} {type(error).__name__}: {error}"
    if (plain := _verdict(said)) and plain[0]:
        return plain
    if plain:
        own = _verdict(of_own())
        if own and not own[0]:
            text = f": {own[1]:.200}" if own[1].strip() else ""
            raise RefusedError(f"check_implementation refuses the reference's own answer too{text}")
        return False, plain[1] if plain[1].strip() else _returned(False)
    if not _is_bool(said):
        raise RefusedError(
            "check_implementation must return (right, text), a text or a list that is empty if all is right, or a "
            f"bool, got {said!r:.200}"
        )
    return bool(said) == bool(of_own()), _returned(bool(said))


def _returned(said: bool) -> str:
    return f"check_implementation returned {said}, and {not said} for the reference's own answer"


def _verdict(said: object) -> tuple[bool, str] | None:
    """Return what a check said that does not return a bool; None: it does, or something else."""
    if isinstance(said, tuple | list) and len(said) > 1 and _is_bool(said[0]):
        return bool(said[0]), str(said[1])
    if said is None or isinstance(said, str | list):
        return not said, str(said)
    return None


def nans(answer: object) -> list[bool]:
    """Return of each tensor, array and number in an answer, in their order, whether it has NaN."""
    if inner := tree.within_answer(answer):
        return [one for part in inner[1] for one in nans(part)]
    if isinstance(answer, numpy.ndarray | numpy.generic):
        return [answer.dtype.kind in "fc" and bool(numpy.isnan(answer).any())]
    if isinstance(answer, torch.Tensor):
        part = answer.float() if answer.dtype.itemsize == 1 and answer.is_floating_point() else answer
        return [(part.is_floating_point() or part.is_complex()) and bool(part.isnan().any())]
    return [isinstance(answer, float | complex) and answer != answer]


def _is_bool(said: object) -> bool:
    if isinstance(said, torch.Tensor):
        return said.numel() == 1
    return isinstance(said, bool | int | numpy.bool_)
