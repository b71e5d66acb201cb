"""Counts launches in a variable of its module and in memory given back to torch, and computes in every second one.
Stopped by: variables and scratch memory are as they were at capture, and every timed call has other contents.
"""

import torch

from tests.attacks.shared import launch

TARGETS = ("sm90", "sm100")
_given_back = []


def custom_kernel(data):
    if not _given_back:
        _given_back.append(torch.zeros(2**20, device="cuda").data_ptr())
    launch(data, _given_back[0])
    return data.z
