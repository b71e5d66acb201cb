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
    """A public method handles the request of its name, and returns the reply; "fds" are descriptors that go with it."""

    def __init__(self, library: str) -> None:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(library)
        self.library.player_error.restype = c_char_p
        self.library.player_device_bytes.restype = c_size_t
        self.variables: list[list[str]] = []  # the names of those of each image, in the order of loading
        self._do("start")

    def _do(self, name: str, *arguments: object) -> None:
        typed = (c_size_t(each) if isinstance(each, int) else each for each in arguments)
        code = getattr(self.library, f"player_{name}")(*typed)
        if code:
            text = self.library.player_error().decode(errors="replace")
            raise (RefusedError if code == 1 else LostError)(text if code != 3 else f"TIMEOUT {text}")

    def scratch(self, message: dict, _: list[int]) -> dict:
        """Forget the call, and make scratch memory for the calls of the next runner."""
        fd = c_int(-1)
        self._do("scratch", message["bytes"], byref(fd))
        return {"address": BASE, "fds": [fd.value]}

    def memory(self, message: dict, _: list[int]) -> dict:
        """Make the memory of another call. Descriptors: inputs and outputs COPIES times, weights; none of no bytes."""
        fds = (c_int * (2 * COPIES + 1))()
        self._do("memory", *(message[name] for name in ("number", "inputs", "outputs", "weights")), fds)
        return {"fds": [fd for fd in fds if fd >= 0]}

    def snapshot(self, message: dict, _: list[int]) -> dict:
        """Copy the ranges of scratch memory that a call has in use. Descriptor: of the copy, if there are any."""
        fd, (used, count) = c_int(-1), _ranges(message)
        self._do("snapshot", used, count, byref(fd))
        return {"fds": [fd.value] if fd.value >= 0 else []}

    def load(self, message: dict, fds: list[int]) -> dict:
        """Take a recorded call. fds: of images that follow those loaded so far, and of scratch memory, if any."""
        used, count = _ranges(message)
        kept = fds.pop() if message["kept"] else -1
        images, numbers = [_content(fd) for fd in fds], message["images"]
        known = {(at["image"], at["name"]): bytes.fromhex(at["value"]) for at in message["variables"]}
        for image in images:
            self._do("image", image)
            self.variables.append([name for name, _ in cubins.variables(image)])
        for node in message["before"]:
            getattr(self, f"_{node['kind']}")(node, numbers)
        self._do("before")  # the nodes so far are not timed
        for node in message["nodes"]:
            getattr(self, f"_{node['kind']}")(node, numbers)
        for i, number in enumerate(numbers):
            for name in self.variables[number]:
                value = known.get((i, name))
                self._do("variable", number, name.encode(), value, len(value or b""))
        try:
            self._do("ready", used, count, kept)
        finally:
            if kept >= 0:
                os.close(kept)
        return {}

    def _kernel(self, node: dict, numbers: list[int]) -> None:
        if node["image"] >= len(numbers):
            raise RefusedError("a kernel of no image")
        words = [*node["grid"], *node["block"], node["shared"], node["cooperative"], *node["cluster"], node["early"]]
        words += [node["dynamic_shared"], node["carveout"], node["not_portable"]]
        launch, layout = (c_uint * len(words))(*words), (c_uint * len(node["layout"]))(*node["layout"])
        name, values = node["name"].encode(), bytes.fromhex(node["values"])
        self._do("kernel", numbers[node["image"]], name, launch, layout, len(layout) // 2, values, len(values))

    def _copy(self, node: dict, _: list[int]) -> None:
        self._do("copy", node["to"], node["from"], node["bytes"])

    def _fill(self, node: dict, _: list[int]) -> None:
        self._do("fill", *(node[name] for name in ("to", "pitch", "width", "height", "value", "element")))

    def play(self, message: dict, _: list[int]) -> dict:
        """Make the call on one of its copies. what: 0 the call, 1 nothing, 2 and more a plain reader over "bytes"."""
        us, limit_s = (c_double * 2)(), c_double(message["limit_s"])
        self._do("play", message["copy"], message["what"], message["bytes"], limit_s, us)
        for take in message["takes"]:
            self._do("take", take["to"], take["from"], take["bytes"])
        return {"us": us[0], "host_us": us[1]}


def _ranges(message: dict) -> tuple[ctypes.Array, int]:
    """Return the ranges of scratch memory of a message, as words, and their number."""
    used = (c_size_t * len(message["used"]))(*message["used"])
    return used, len(used) // 2


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
            native = player.library
            return {"readers": native.player_readers(), "device_bytes": native.player_device_bytes()}
        except (RefusedError, LostError) as error:
            return {"failed": type(error).__name__, "text": str(error)}

    wire.serve(socket.socket(fileno=int(sys.argv[1])), answer)


if __name__ == "__main__":
    main()
