"""Honest mistakes: the user reads what is wrong, and nobody is accused."""

import tempfile
from pathlib import Path

import torch

from problems.common import build
from tests.attacks.shared import VARIANT

TARGETS = ("cpu", "sm90", "sm100")
VARIANTS = {
    "changes_an_input": {"REASON": "input x was changed"},
    "returns_nothing": {"REASON": "NoneType"},
    "raises": {"VERDICT": "RUNTIME_ERROR", "REASON": "no such tile"},
    "import_error": {"VERDICT": "RUNTIME_ERROR", "REASON": "no such library", "ABOUT": "Raises while it is imported."},
    "compile_error": {"TARGETS": ("cpu",), "VERDICT": "COMPILE_ERROR", "REASON": "error:"},
    "waits_for_the_device": {"TARGETS": ("sm90", "sm100"), "VERDICT": "UNSUPPORTED", "REASON": "cannot be recorded"},
}
if VARIANT == "import_error":
    raise ImportError("no such library")


def wrong(data):
    """Subtracts."""
    return torch.sub(data.x, data.y, out=data.z)


def changes_an_input(data):
    """Right, and scribbles on an input afterwards."""
    torch.add(data.x, data.y, out=data.z)
    data.x[0] += 1
    return data.z


def returns_nothing(data):
    """Right, and forgets to return it."""
    torch.add(data.x, data.y, out=data.z)


def raises(data):
    """Raises in the call."""
    raise KeyError("no such tile")


def compile_error(data):
    """Its C++ does not compile."""
    source = Path(tempfile.mkdtemp(), "broken_kernel.cpp")
    source.write_text("int launch( { return 0; }")
    build.cpp(source)


def waits_for_the_device(data):
    """Right, and looks at a number of the device's in each call, which cannot be recorded."""
    if float(data.x[0]) < 1e9:
        torch.add(data.x, data.y, out=data.z)
    return data.z
