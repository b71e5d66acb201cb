"""Of a folder whose calls return tensors of their own, the end of the answer is written by a thread until it is
stopped.

Threads that sleep make the stop slow.
"""

import torch

from harness.runner import gate
from tests.attacks.shared import HONEST_OF_FOUR, VARIANT, attack, calls, honest_call

PROBLEM = "gpu_rounds"
VERDICT = ("CHEAT_SUSPECTED", "INCORRECT", "INVALID_MEASUREMENT")
VARIANTS = {
    "looks_nowhere": "Notes a second tensor at an address where nothing is, so that the judge has no words to look at."
    " Stopped by: a look that fails counts as words that changed.",
    "switches": "Notes a tensor that does not change, and puts the address of the answer in its place after `done`."
    " Stopped by: addresses count as they are at `done`.",
}
_decoy = torch.zeros(2**16, dtype=torch.uint8)
_note = gate.Gate.note_returned


def note(self, page, places, said):
    if not calls % 4 < HONEST_OF_FOUR:
        if VARIANT == "looks_nowhere":
            places = [*places, (4096, 2**56)]
        elif places[0][1] == _decoy.numel():
            places = [(_decoy.data_ptr(), _decoy.numel())]
    _note(self, page, places, said)


gate.Gate.note_returned = note


def custom_kernel(data):
    y = torch.empty_like(data)
    attack(data, y, honest_call())
    return y
