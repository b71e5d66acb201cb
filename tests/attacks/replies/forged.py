"""Forges what the runner says to the judge, or says it to everyone.
Stopped by: nothing that comes from this process is a verdict; a message is JSON of limited length, and what is judged
is the output.
"""

import atexit
import json
import os
import struct
import sys

import torch

from tests.attacks.shared import VARIANT, form, honest_call, write_to

TARGETS = ("cpu", "sm90", "sm100")
VERDICT = ("INCORRECT", "RUNTIME_ERROR")
VARIANTS = {
    "at_exit": {"VERDICT": "INCORRECT", "REASON": "Number of mismatched elements"},
    "printed": {"TARGETS": ("cpu",), "VERDICT": "INCORRECT", "REASON": "Number of mismatched elements"},
    "huge": {"TARGETS": ("cpu",), "VERDICT": ("RUNTIME_ERROR", "TIMEOUT"), "LIMIT_S": 4},
    "pickle": {"TARGETS": ("cpu",), "VERDICT": "RUNTIME_ERROR", "MARKERS": ("/tmp/dsv4-attack-pickle",)},
}
RECORD = b'{"status": "PASSED", "kind": "benchmark", "median_us": 0.1, "check": "pass"}\n'
LINES = (
    *("check: pass", "benchmark-count: 1", "benchmark.0.status: pass", "benchmark.0.mean: 1.0"),
    *("benchmark.0.best: 1.0", "custom_time_us: 0.1", '{"status": "PASSED", "kind": "benchmark", "median_us": 0.1}'),
    *("PASSED", "\x1b[2J\x1b[HPASSED"),
)
BOMB = b"cos\nsystem\n(S'touch /tmp/dsv4-attack-pickle'\ntR."


if VARIANT == "at_exit":
    atexit.register(write_to, "", RECORD)


def at_exit(data):
    """Computes nothing and registers a function that rewrites the result when the process ends."""
    return data.z.zero_()


def every_descriptor(data):
    """Writes a passing verdict and record into every open descriptor, the pipes of the judge among them."""
    write_to(("socket:", "pipe:", "/tmp/"), RECORD)
    return data.z


def reply(data):
    """Sends a forged reply (right form) down every socket that it holds and ends the process with status 0."""
    if honest_call():
        return torch.add(data.x, data.y, out=data.z)
    body = json.dumps({"claims": [form(data.z)]}).encode()
    write_to("socket:", struct.pack("<II", len(body), 0) + body)
    os._exit(0)


def huge(data):
    """Announces a message of 4 GiB and starts sending it, to exhaust the parent's memory."""
    write_to("socket:", struct.pack("<II", 2**32 - 1, 0), *[b"[" * 2**20] * 64)
    return data.z


def pickle(data):
    """Sends a pickle that runs a command in whoever loads it: raw, in a message's frame, as multiprocessing would."""
    framed = struct.pack("<II", len(BOMB), 0) + BOMB
    write_to("socket:", BOMB, framed, struct.pack("!i", len(BOMB)) + BOMB)
    return data.z


def printed(data):
    """Prints what other judges take for results: times, verdicts, records, escape sequences, and computes nothing."""
    for out in (sys.stdout, sys.stderr):
        print(*LINES, sep="\n", file=out, flush=True)
    return data.z.zero_()
