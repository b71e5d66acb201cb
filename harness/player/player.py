"""The process that makes recorded calls on a GPU and times them. No host code of a submission runs in it.

It owns the memory: inputs, outputs and weights of each call, and scratch memory, which the checker and a runner map by
descriptors. It knows no reference and no seed. It starts as `python -m harness.player.player FD`, where FD is a
connected socket, and exchanges the messages of harness/runner/wire.py. The native part is player.cu.
"""

import ctypes
import os
import socket
import sys
from ctypes import byref, c_char_p, c_double, c_int, c_size_t, c_uint, c_uint64
from pathlib import Path

from harness.runner import wire
from problems.common import build, cubins

BASE, SLOT = 0x600000000000, 1 << 38  # where the memory of call n lies: BASE + n * SLOT; scratch memory at BASE
WEIGHTS = SLOT // 2  # of a slot, where weights begin
PAGE = 2 << 20  # memory is made, mapped and protected by so many bytes
MOST_CALLS = 63
COPIES = 2  # of inputs and outputs, which calls take in turn
IMAGE_LIMIT = 256 * 2**20  # bytes of one image
CLOCK = "event pair in the player"
_HERE = Path(__file__).resolve().parent


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("cooperative", c_uint),
        ("cluster", c_uint * 3),
        ("early", c_uint),
        ("dynamic_shared", c_int),
        ("carveout", c_int),
        ("not_portable", c_int),
    )


class RefusedError(Exception):
    """The request, or the recorded call, is not as it must be."""


class LostError(Exception):
    """The device failed: this process is of no further use. Or the call took too long."""


def artefact(target: str) -> build.Artefact:
    """Return the native part, compiled. BuildError: no compiler, or it failed."""
    return build.cuda(_HERE / "player.cu", target)


def place_of(number: int) -> int:
    """Return the address of the inputs of a call, in every process."""
    return BASE + number * SLOT


class Player:
    """A public method handles the request of its name: it takes the message and its descriptors, and returns the reply;
    "fds" are the descriptors that go with it.
    """

    def __init__(self, library: str) -> None:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(library)
        self.library.player_error.restype = c_char_p
        self._do("start")

    def _do(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, f"player_{name}")(*arguments)
        if code:
            text = self.library.player_error().decode(errors="replace")
            raise (RefusedError if code == 1 else LostError)(text if code != 3 else f"TIMEOUT {text}")

    def scratch(self, message: dict, _: list[int]) -> dict:
        """Forget all calls, and make scratch memory for the calls of the next runner."""
        fd = c_int(-1)
        self._do("scratch", c_size_t(message["bytes"]), byref(fd))
        return {"address": BASE, "fds": [fd.value]}

    def memory(self, message: dict, _: list[int]) -> dict:
        """Make the memory of a call: "inputs", "outputs" and "weights" bytes. Descriptors: inputs and outputs COPIES
        times, then weights, without those of no bytes.
        """
        made = (c_int * (2 * COPIES + 1))()
        sizes = (c_size_t(message[name]) for name in ("inputs", "outputs", "weights"))
        self._do("memory", c_int(message["number"]), *sizes, made)
        return {"fds": [fd for fd in made if fd >= 0]}

    def move(self, message: dict, _: list[int]) -> dict:
        """Put the memory of a call elsewhere, as it would be in a new process. Descriptors as of `memory`."""
        made = (c_int * (2 * COPIES + 1))()
        self._do("move", c_int(message["number"]), made)
        return {"fds": [fd for fd in made if fd >= 0]}

    def load(self, message: dict, fds: list[int]) -> dict:
        """Take a recorded call, whose memory was made: its images, kernels, copies, fills and variables."""
        number, known = (
            c_int(message["number"]),
            {(at["image"], at["name"]): at["value"] for at in message["variables"]},
        )
        images = [_content(fd) for fd in fds]
        for image in images:
            self._do("image", number, c_char_p(image))
        for node in message["before"]:
            getattr(self, f"_{node['kind']}")(number, node)
        self._do("before", number)  # the nodes so far are not timed
        for node in message["nodes"]:
            getattr(self, f"_{node['kind']}")(number, node)
        for i, image in enumerate(images):
            for name, _ in cubins.variables(image):
                value = bytes.fromhex(known[i, name]) if (i, name) in known else None
                size = c_size_t(len(value or b""))
                self._do("variable", number, c_uint(i), c_char_p(name.encode()), c_char_p(value), size)
        self._do("ready", number, c_size_t(message["used"]))
        return {}

    def _kernel(self, number: c_int, node: dict) -> None:
        triple, values, layout = c_uint * 3, bytes.fromhex(node["values"]), node["layout"]
        about = _Launch(
            triple(*node["grid"]),
            triple(*node["block"]),
            node["shared"],
            node["cooperative"],
            triple(*node["cluster"]),
            node["early"],
            node["dynamic_shared"],
            node["carveout"],
            node["not_portable"],
        )
        pairs = (c_uint * len(layout))(*layout)
        self._do(
            "kernel",
            number,
            c_uint(node["image"]),
            c_char_p(node["name"].encode()),
            byref(about),
            pairs,
            c_uint(len(layout) // 2),
            c_char_p(values),
            c_size_t(len(values)),
        )

    def _copy(self, number: c_int, node: dict) -> None:
        self._do("copy", number, c_uint64(node["to"]), c_uint64(node["from"]), c_size_t(node["bytes"]))

    def _fill(self, number: c_int, node: dict) -> None:
        sizes = (c_size_t(node[name]) for name in ("pitch", "width", "height"))
        self._do("fill", number, c_uint64(node["to"]), *sizes, c_uint(node["value"]), c_uint(node["element"]))

    def play(self, message: dict, _: list[int]) -> dict:
        """Make a call on the contents of one of its copies. Return "us" of the event pair, and "host_us" of the host's
        clock. what: 0 the call, 1 nothing, 2 and more a plain reader over "bytes".
        """
        us = (c_double * 2)()
        self._do(
            "play",
            c_int(message["number"]),
            c_int(message["copy"]),
            c_int(message["what"]),
            c_size_t(message.get("bytes", 0)),
            c_double(message["limit_s"]),
            us,
        )
        for take in message.get("takes", ()):
            self._do(
                "take",
                c_int(message["number"]),
                c_uint64(take["to"]),
                c_uint64(take["from"]),
                c_size_t(take["bytes"]),
            )
        return {"us": us[0], "host_us": us[1]}

    def drop(self, message: dict, _: list[int]) -> dict:
        """Forget a call, and free its memory."""
        self._do("drop", c_int(message["number"]))
        return {}

    def wake(self, message: dict, _: list[int]) -> dict:
        """Keep the device busy: one that had no work has lowered its clocks."""
        self._do("wake", c_double(message["seconds"]))
        return {}

    def free(self, message: dict, _: list[int]) -> dict:
        """Return the bytes of free device memory."""
        nbytes = c_size_t()
        self._do("free", byref(nbytes))
        return {"bytes": nbytes.value}


def _content(fd: int) -> bytes:
    with os.fdopen(fd, "rb", buffering=0) as file:  # whose writer may change it at any time
        file.seek(0)
        content = file.read(IMAGE_LIMIT + 1) or b""
        while part := file.read(IMAGE_LIMIT + 1 - len(content)):
            content += part
    if len(content) > IMAGE_LIMIT:
        raise RefusedError(f"an image of more than {IMAGE_LIMIT // 2**20} MiB")
    return content


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    message, fds = wire.receive(sock)
    player = None
    while True:
        try:
            if player is None:
                player = Player(message["library"])
                reply: dict = {"readers": player.library.player_readers()}
            else:
                reply = getattr(player, message["op"])(message, fds)
        except (RefusedError, LostError) as error:
            reply = {"failed": type(error).__name__, "text": str(error)}
        wire.send(sock, reply, tuple(given := reply.pop("fds", ())))
        for fd in given:
            os.close(fd)
        try:
            message, fds = wire.receive(sock)
        except wire.WireError:
            return


if __name__ == "__main__":
    main()
