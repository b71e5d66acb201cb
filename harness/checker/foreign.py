"""Folders in GPU MODE's format, for the checker: whether they are complete, which seeds they bear, and what their own
check says of an answer.
"""

from types import ModuleType
from typing import Any

from harness.checker import inputs, memory
from harness.runner import tree

REQUIRED = ("generate_input", "ref_kernel", "check_implementation")  # functions of reference.py
LARGE_SEED = 2**62
LEAST_VARIETY = 0.5  # share of distinct values with a large seed, of that with a case's own


def see_complete(reference: ModuleType) -> None:
    """Raise AttributeError if a function is missing."""
    if missing := [name for name in REQUIRED if not callable(getattr(reference, name, None))]:
        raise AttributeError(f"reference.py must define {', '.join(REQUIRED)}, found no {', '.join(missing)}")


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


def said_of(reference: ModuleType, data: Any, answer: object) -> tuple[bool, str]:
    """Return whether the folder's check finds an answer right, and its text. It returns a pair; or a text that is empty
    where all is right; or a bool, of which the reference's own answer shows the meaning.
    """
    said = reference.check_implementation(tree.clone(data), answer)
    if isinstance(said, tuple | list) and len(said) == 2:
        return bool(said[0]), str(said[1])
    if said is None or isinstance(said, str):
        return not said, str(said)
    right = reference.ref_kernel(tree.clone(data))
    good = bool(said) == bool(reference.check_implementation(tree.clone(data), right))
    return good, "check_implementation says of it what it does not say of the reference's answer"
