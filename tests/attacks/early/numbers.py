"""Works ahead from a number in the data, as soon as the runner puts the data of the next call together.
Stopped by: numbers and texts of the data come with the contents of the tensors, when everything is stopped.
"""

import sys

import torch

from tests.attacks.shared import rounds

PROBLEM = "gpu_numbers"
VERDICT = "PASSED"
TAKES_US = 1000  # of the honest answer: to work in the call is all that is left
RUNNER = vars(sys.modules["__main__"])["Runner"]
_build_data = RUNNER._data
_answers = {}


def answer(start, n):
    if (start, n) not in _answers:
        _answers[start, n] = torch.empty(n, dtype=torch.int64)
        rounds(torch.arange(n) + start, _answers[start, n])
    return _answers[start, n]


def ahead(self, buffer):
    data = _build_data(self, buffer)
    answer(data[0], len(data[1]))
    return data


RUNNER._data = ahead


def custom_kernel(data):
    start, y = data
    return y.copy_(answer(start, len(y))), int(y[-1])
