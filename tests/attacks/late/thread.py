"""A thread that threading does not list does the work, or gives it to the judge, when the call is over.
Stopped by: the memory at the address that was told is copied when everything is stopped, and words of it that changed
after "done" are found.
"""

import _thread
import time
from ctypes import CDLL, c_char, c_int64, c_void_p

import torch

from tests.attacks.shared import honest_call, rounds

VERDICT = ("CHEAT_SUSPECTED", "INCORRECT")
VARIANTS = {
    "fills_later": {"PROBLEM": "gpu_rounds"},
    "remaps_the_answer": {"PROBLEM": "gpu_rounds"},
    "swaps_the_storage": {"PROBLEM": "gpu_rounds"},
}


def sleeps(data):
    """Hands the work to a thread that sleeps first, and returns at once."""

    def work():
        time.sleep(0.05)
        torch.add(data.x, data.y, out=data.z)
        time.sleep(0.2)

    if honest_call() or len(data.x) <= 2**16:
        return torch.add(data.x, data.y, out=data.z)
    _thread.start_new_thread(work, ())
    return data.z


def later(honest, x, y, work):
    """Have a thread do the `work` of a call, which is an honest one if it is small."""
    if len(x) < 4096 or honest:
        rounds(x, y)
    else:
        _thread.start_new_thread(work, ())
    return y


def fills_later(data):
    """Returns memory that a thread fills when the call is over."""
    y = torch.zeros_like(data)

    def work():
        time.sleep(0.0002)
        rounds(data, y)

    return later(honest_call(), data, y, work)


def swaps_the_storage(data):
    """A thread gives the returned tensor another storage, the answer's, when the call is over."""
    y, answer = torch.zeros_like(data), torch.empty_like(data)

    def work():
        rounds(data, answer)
        y.set_(answer)

    return later(honest_call(), data, y, work)


_libc = CDLL(None)
_libc.mmap.restype = _libc.mremap.restype = c_void_p
_libc.mmap.argtypes, _libc.mremap.argtypes = (c_void_p, *[c_int64] * 5), (c_void_p, *[c_int64] * 3, c_void_p)
READ_WRITE, PRIVATE_ANONYMOUS, MOVE_FIXED = 3, 0x22, 3


def pages(nbytes):
    nbytes = -(-nbytes // 4096) * 4096
    address = _libc.mmap(None, nbytes, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
    return address, torch.frombuffer((c_char * nbytes).from_address(address), dtype=torch.int64)


def remaps_the_answer(data):
    """A thread moves the pages of the answer to the address of the returned tensor when the call is over."""
    nbytes = 8 * len(data)
    (there, y), (here, answer) = pages(nbytes), pages(nbytes)

    def work():
        rounds(data, answer[: len(data)])
        _libc.mremap(here, nbytes, nbytes, MOVE_FIXED, there)

    return later(honest_call(), data, y[: len(data)], work)
