"""The process that makes recorded calls on a GPU and times them. No host code of a submission runs in it.

It owns the memory: inputs, outputs and weights of each call, and scratch memory, which the checker and a runner map by
descriptors. It knows no reference and no seed. It starts as `python -m harness.player.player FD`, where FD is a
connected socket, and exchanges the messages of harness/runner/wire.py. The native part is player.cu.
"""

import ctypes
import os
import socket
import sys
from ctypes import byref, c_char_p, c_double, c_int, c_size_t, c_uint
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
        typed = (c_size_t(each) if isinstance(each, int) else each for each in arguments)
        code = getattr(self.library, f"player_{name}")(*typed)
        if code:
            text = self.library.player_error().decode(errors="replace")
            raise (RefusedError if code == 1 else LostError)(text if code != 3 else f"TIMEOUT {text}")

    def scratch(self, message: dict, _: list[int]) -> dict:
        """Forget all calls, and make scratch memory for the calls of the next runner."""
        fd = c_int(-1)
        self._do("scratch", message["bytes"], byref(fd))
        return {"address": BASE, "fds": [fd.value]}

    def memory(self, message: dict, _: list[int]) -> dict:
        """Make the memory of a call: "inputs", "outputs" and "weights" bytes. Descriptors: inputs and outputs COPIES
        times, then weights, without those of no bytes.
        """
        made = (c_int * (2 * COPIES + 1))()
        self._do("memory", *(message[name] for name in ("number", "inputs", "outputs", "weights")), made)
        return {"fds": [fd for fd in made if fd >= 0]}

    def move(self, message: dict, _: list[int]) -> dict:
        """Put the memory of a call elsewhere, as it would be in a new process. Descriptors as of `memory`."""
        made = (c_int * (2 * COPIES + 1))()
        self._do("move", message["number"], made)
        return {"fds": [fd for fd in made if fd >= 0]}

    def load(self, message: dict, fds: list[int]) -> dict:
        """Take a recorded call, whose memory was made: its images, kernels, copies, fills and variables."""
        number, images = message["number"], [_content(fd) for fd in fds]
        known = {(at["image"], at["name"]): bytes.fromhex(at["value"]) for at in message["variables"]}
        for image in images:
            self._do("image", number, image)
        for node in message["before"]:
            getattr(self, f"_{node['kind']}")(number, node)
        self._do("before", number)  # the nodes so far are not timed
        for node in message["nodes"]:
            getattr(self, f"_{node['kind']}")(number, node)
        for i, image in enumerate(images):
            for name, _ in cubins.variables(image):
                value = known.get((i, name))
                self._do("variable", number, i, name.encode(), value, len(value or b""))
        used = (c_size_t * len(message["used"]))(*message["used"])
        self._do("ready", number, used, len(used) // 2)
        return {}

    def _kernel(self, number: int, node: dict) -> None:
        words = [*node["grid"], *node["block"], node["shared"], node["cooperative"], *node["cluster"], node["early"]]
        words += [node["dynamic_shared"], node["carveout"], node["not_portable"]]
        launch, layout = (c_uint * len(words))(*words), (c_uint * len(node["layout"]))(*node["layout"])
        name, values = node["name"].encode(), bytes.fromhex(node["values"])
        self._do("kernel", number, node["image"], name, launch, layout, len(layout) // 2, values, len(values))

    def _copy(self, number: int, node: dict) -> None:
        self._do("copy", number, node["to"], node["from"], node["bytes"])

    def _fill(self, number: int, node: dict) -> None:
        self._do("fill", number, *(node[name] for name in ("to", "pitch", "width", "height", "value", "element")))

    def play(self, message: dict, _: list[int]) -> dict:
        """Make a call on the contents of one of its copies. Return "us" of the event pair, and "host_us" of the host's
        clock. what: 0 the call, 1 nothing, 2 and more a plain reader over "bytes".
        """
        us, number, limit_s = (c_double * 2)(), message["number"], c_double(message["limit_s"])
        self._do("play", number, message["copy"], message["what"], message["bytes"], limit_s, us)
        for take in message["takes"]:
            self._do("take", number, take["to"], take["from"], take["bytes"])
        return {"us": us[0], "host_us": us[1]}


def _content(fd: int) -> bytes:
    try:
        content = os.pread(fd, IMAGE_LIMIT + 1, 0)  # at once: its writer may change it at any time
    finally:
        os.close(fd)
    if len(content) > IMAGE_LIMIT:
        raise RefusedError(f"an image of more than {IMAGE_LIMIT // 2**20} MiB")
    return content


def main() -> None:
    player: Player | None = None

    def answer(message: dict, fds: list[int]) -> dict:
        nonlocal player
        try:
            if player:
                return dict(getattr(player, message["op"])(message, fds))
            player = Player(message["library"])
            return {"readers": player.library.player_readers()}
        except (RefusedError, LostError) as error:
            return {"failed": type(error).__name__, "text": str(error)}

    wire.serve(socket.socket(fileno=int(sys.argv[1])), answer)


if __name__ == "__main__":
    main()
