"""The player's handling of messages, on a native library that only notes its calls."""

import ctypes
import os
import socket
import tempfile
import threading

import pytest

from harness.player import player
from harness.runner import wire
from problems.common import cubins

FILL = {"kind": "fill", "to": 1, "pitch": 64, "width": 16, "height": 2, "value": 7, "element": 4}
COPY = {"kind": "copy", "to": 2, "from": 3, "bytes": 12}
NUMBERS = ("image", "shared", "cooperative", "early", "dynamic_shared", "carveout", "not_portable")
KERNEL = {"kind": "kernel", "name": "add", "layout": [0, 8, 8, 4], "values": "00" * 12} | dict.fromkeys(NUMBERS, 1)
KERNEL |= {name: [4, 2, 1] for name in ("grid", "block", "cluster")}
VARIABLES = [{"image": 0, "name": "count", "value": "0102"}]
LOAD = {"before": [FILL], "nodes": [KERNEL, COPY], "variables": VARIABLES, "used": [0, 512], "kept": True}
LOAD |= {"images": [0, 1]}


def plain(argument: object) -> object:
    return [*argument] if isinstance(argument, ctypes.Array) else getattr(argument, "value", argument)


class Library:
    """Notes each call with its plain arguments, and returns the code that it is told."""

    def __init__(self) -> None:
        self.calls: list[list] = []
        self.code = 0
        self.player_error = lambda: b"what went \xff wrong"
        self.player_readers = lambda: 6
        self.player_device_bytes = lambda: 2**36

    def __getattr__(self, name: str):
        def called(*arguments: object) -> int:
            self.calls.append([name.removeprefix("player_"), *map(plain, arguments)])
            for made in arguments[4:5] if name == "player_memory" else ():
                made[:] = [os.open(os.devnull, os.O_RDONLY), -1, os.open(os.devnull, os.O_RDONLY), -1, -1]
            return self.code

        return called


@pytest.fixture
def library(monkeypatch) -> Library:
    made = Library()
    monkeypatch.setattr(player.ctypes, "CDLL", lambda *_, **__: made)
    monkeypatch.setattr(cubins, "variables", lambda image: [("count", 2), ("table", 8)])
    return made


def file_of(content: bytes) -> int:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return os.dup(file.fileno())


def test_a_call_is_loaded_in_order_and_every_variable_is_known(library):
    """Images; a setup's nodes, which are not timed; the call's; variables, those without a value too; the end."""
    kept = file_of(b"")
    player.Player("it").load(LOAD, [file_of(b"first"), file_of(b"second"), kept])
    start, *images, fill, before, kernel, copy, count, table, other, last, ready = library.calls
    assert start == ["start"] and images == [["image", b"first"], ["image", b"second"]]
    assert fill == ["fill", 1, 64, 16, 2, 7, 4] and before == ["before"] and copy == ["copy", 2, 3, 12]
    launch = [4, 2, 1, 4, 2, 1, 1, 1, 4, 2, 1, 1, 1, 1, 1]  # grid, block, shared, cooperative, cluster, ...
    assert kernel == ["kernel", 1, b"add", launch, [0, 8, 8, 4], 2, bytes(12), 12]
    assert [count, table] == [["variable", 0, b"count", b"\1\2", 2], ["variable", 0, b"table", None, 0]]
    assert [other, last] == [["variable", 1, b"count", None, 0], ["variable", 1, b"table", None, 0]]
    assert ready == ["ready", [0, 512], 1, kept]


def test_code_is_loaded_once_for_all_calls_that_have_it(library):
    """The second call has only the second image, to which its kernel and variables belong."""
    made = player.Player("it")
    made.load(LOAD | {"kept": False}, [file_of(b"first"), file_of(b"second")])
    library.calls.clear()
    made.load(LOAD | {"kept": False, "images": [1], "nodes": [KERNEL | {"image": 0}]}, [])
    _, _, kernel, *variables, _ = library.calls
    assert kernel[:3] == ["kernel", 1, b"add"]
    assert variables == [["variable", 1, b"count", b"\1\2", 2], ["variable", 1, b"table", None, 0]]


def test_images_that_cannot_be_loaded_are_refused(library, monkeypatch):
    with pytest.raises(player.RefusedError, match="of no image"):
        player.Player("it").load(LOAD | {"kept": False, "images": [0]}, [file_of(b"first")])
    library.calls.clear()
    monkeypatch.setattr(player, "IMAGE_LIMIT", 5)
    with pytest.raises(player.RefusedError, match="an image of more than"):
        player.Player("it").load(LOAD | {"kept": False}, [file_of(b"fives"), file_of(b"sixsix")])
    assert library.calls == [["start"]]


PLAY = {"copy": 1, "what": 2, "bytes": 64, "limit_s": 1.5, "takes": [{"to": 1, "from": 2, "bytes": 3}]}


@pytest.mark.parametrize(("code", "kind"), [(1, player.RefusedError), (2, player.LostError), (3, player.LostError)])
def test_codes_of_the_native_part_are_errors_with_its_text(library, code, kind):
    """Of a call that failed no answer is taken."""
    made = player.Player("it")
    assert made.play(PLAY, []).keys() == {"us", "host_us"}
    library.code = code
    with pytest.raises(kind, match=r"^TIMEOUT what went . wrong$" if code == 3 else r"^what went . wrong$"):
        made.play(PLAY, [])
    played = ["play", 1, 2, 64, 1.5, [0, 0]]
    assert library.calls[1:] == [played, ["take", 1, 2, 3], played]


def test_the_process_answers_until_the_judge_is_gone(library, monkeypatch):
    """A failed request is answered too."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(player.sys, "argv", ["player", str(theirs.detach())])
    thread = threading.Thread(target=player.main)
    thread.start()

    def asked(message: dict, fds: tuple[int, ...] = ()) -> tuple[dict, list[int]]:
        wire.send(ours, message, fds)
        return wire.receive(ours, 30)

    assert asked({"library": "it"})[0] == {"readers": 6, "device_bytes": 2**36}
    reply, fds = asked({"op": "memory", "number": 1, "inputs": 1, "outputs": 0, "weights": 0})
    assert reply == {} and len(fds) == 2 and library.calls[-1] == ["memory", 1, 1, 0, 0, [0] * 5]
    for fd in fds:
        os.close(fd)
    library.code = 1
    assert asked({"op": "snapshot", "used": [0, 512]})[0] == {"failed": "RefusedError", "text": "what went � wrong"}
    ours.close()
    thread.join(30)
    assert not thread.is_alive()
