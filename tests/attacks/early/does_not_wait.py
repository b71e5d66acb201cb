"""Replaces the runner's wait for "go" by nothing.
Stopped by: the judge asks for the word in the shared page, and contents are there when everything is stopped, after
that.
"""

from harness.runner import gate
from tests.attacks.shared import READY, VARIANT, add, say_done, word

VERDICT = ("RUNTIME_ERROR", "INCORRECT", "CHEAT_SUSPECTED")
VARIANTS = {
    "silent": "Says to the judge that it is ready, calls and replies.",
    "ready": "Writes to the page that it is ready, calls, says that it is done and replies.",
}


def at_once(page, number, kernel, calls):
    if VARIANT == "silent":
        return kernel(*calls[0])
    word(page, READY).value = number
    result = kernel(*calls[0])
    say_done(page, number)
    return result


gate.bindings().take_turns = at_once


def custom_kernel(data):
    return add(data)
