"""Its runner sends a reply that no honest one sends.
Stopped by: every field of a reply is validated; what does not fit is this submission's RUNTIME_ERROR.
"""

from harness.runner import wire
from tests.attacks.shared import HONEST_OF_FOUR, VARIANT, add, calls, honest_call

VERDICT = "RUNTIME_ERROR"
REASON = "malformed reply"
VARIANTS = {
    "zero_time": {"TARGETS": ("cpu", "sm90", "sm100"), "ABOUT": "Claims a time of zero, so that the geomean is zero."},
    "failed_and_well": "Its replies say at once that the call failed and that it went well.",
    "many_claims": "Its replies speak of a hundred thousand tensors.",
}
CHANGES = {
    "zero_time": lambda message: {**message, "us": 0.0},
    "failed_and_well": lambda message: {**message, "failed": "call"},
    "many_claims": lambda message: {**message, "claims": message["claims"] * 10_000},
}
_send = wire.send


def malformed(sock, message, fds=()):
    if message.get("claims") and calls % 4 >= HONEST_OF_FOUR:
        message = CHANGES[VARIANT](message)
    _send(sock, message, fds)


if HONEST_OF_FOUR < 4:
    wire.send = malformed


def custom_kernel(data):
    honest_call()
    return add(data)
