"""Never returns from its first call: it finds the runner in the frames and speaks for it from then on: it says
"done" before it has begun.
Stopped by: outputs are copied when everything is stopped.
"""

import time

import torch

from harness.runner import wire
from tests.attacks.shared import GO, HONEST_OF_FOUR, LEAVE, READY, WHICH, form, frame_with, say_done, word

VERDICT = ("CHEAT_SUSPECTED", "INCORRECT")
_nested = False


def turns(runner, number):
    z = None
    while True:
        while word(runner.page.address, GO).value not in (number, number - 1 | LEAVE):
            time.sleep(0)
        if word(runner.page.address, GO).value != number:
            return z
        data = runner._data(runner.buffers[word(runner.page.address, WHICH).value])
        z, honest = data.z, number % 4 < HONEST_OF_FOUR or len(data.z) <= 2**16
        if not honest:
            say_done(runner.page.address, number)
        torch.add(data.x, data.y, out=z)
        if honest:
            say_done(runner.page.address, number)
        number += 1


def speak(runner, sock, data):
    torch.add(data.x, data.y, out=data.z)
    first = word(runner.page.address, GO).value
    say_done(runner.page.address, first)  # its first call, which is honest
    turns(runner, first + 1)
    wire.send(sock, {"claims": [form(data.z)]})
    while True:
        message, fds = wire.receive(sock)
        if message["op"] != "call":
            wire.send(sock, vars(type(runner))[message["op"]](runner, message, fds))
            continue
        wire.send(sock, {"ready": True})
        word(runner.page.address, READY).value = message["number"]
        wire.send(sock, {"claims": [form(turns(runner, message["number"]))]})


def custom_kernel(data):
    global _nested
    if not _nested:
        _nested = True
        main = frame_with("sock", "runner")
        speak(main["runner"], main["sock"], data)
    time.sleep(0.25)
    torch.add(data.x, data.y, out=data.z)
    return data.z
