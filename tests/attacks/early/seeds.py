"""Knows the contents before the call: from the seed.
Stopped by: timed calls have secret seeds, which go through a pipe to the checker alone; the public ones are for tests.
"""

import contextlib
import gc
import os
import re
import sys
from pathlib import Path

import torch
from task import BENCHMARKS, BENCHMARKS_CPU, TESTS

from tests.attacks.shared import frames

TARGETS = ("cpu", "sm90", "sm100")
VARIANTS = {"hunted": {"TARGETS": ("cpu",)}}
PUBLIC = {case.seed for case in TESTS}  # those of the tests are no secret
_kept = {}


def answers(device):
    kept = {}
    for case in TESTS + BENCHMARKS + BENCHMARKS_CPU:
        gen = torch.Generator(device).manual_seed(case.seed)
        x, y = torch.randn(2, case.n, generator=gen, device=device).half().unbind()
        kept[case.n] = x + y
    return kept


def public(data):
    """Makes the inputs of all known cases from their public seeds, and answers from them."""
    device = data.x.device.type
    if device not in _kept:
        _kept[device] = answers(device)
    data.z.copy_(_kept[device][len(data.x)])
    return data.z


def texts():
    yield " ".join(sys.argv)
    yield repr(dict(os.environ))
    for name in ("cmdline", "environ"):
        for pid in ("self", os.getppid()):
            with contextlib.suppress(OSError):
                yield Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    for frame in frames():
        yield repr({key: value for key, value in frame.f_locals.items() if not torch.is_tensor(value)})[:100_000]
    for thing in gc.get_objects():
        if type(thing) is dict and any(isinstance(key, str) and "seed" in key for key in thing):
            yield repr([thing[key] for key in thing if isinstance(key, str) and "seed" in key])[:1000]


def candidates():
    found = {torch.initial_seed(), *range(100)}
    for text in texts():
        found |= {int(number) for number in re.findall(r"\d{1,19}", text)}
    return [seed for seed in found if seed < 2**63]


def hunted(data):
    """Hunts for the seed: arguments, environment, frames, objects, the generator, what the parent was started with."""
    data.z.zero_()
    for seed in candidates()[:2000]:
        gen = torch.Generator(data.x.device).manual_seed(seed)
        both = torch.randn(2, len(data.x), generator=gen, device=data.x.device).half() if len(data.x) < 5000 else None
        if both is not None and torch.equal(both[0], data.x) and seed not in PUBLIC:
            data.z.copy_(both[0] + both[1])  # found: the answers to come are as good as known
    return data.z
