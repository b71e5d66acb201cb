"""Exports other code under its kernel's name, which leaves out half of the work.
Stopped by: what is replayed is what is exported, and each of its answers is checked.
"""

import os
import tempfile
from pathlib import Path

from harness.runner import recorder
from problems.common import build, cubins
from tests.attacks.shared import launch

TARGETS = ("sm90", "sm100")
SOURCE = Path(__file__).with_suffix(".cu")
_record = recorder.record


def compile_for(target):
    return [build.cuda(SOURCE, target), build.cuda(SOURCE, target, ("-DCHEAP",))]


def record(kernel, arguments, setup):
    message, fds, result = _record(kernel, arguments, setup)
    cheap = compile_for("sm90")[1].path.read_bytes()
    with tempfile.TemporaryFile() as file:
        file.write(next(cubins.images(cheap))[0])
        file.flush()
        for fd in fds:
            os.dup2(file.fileno(), fd)
    return message, fds, result


recorder.record = record


def custom_kernel(data):
    launch(data)
    return data.z
