"""The runner's end of the judge's socket, spoken by a thread: right replies, or what a Script puts in place of one."""

import contextlib
import ctypes
import json
import os
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from harness.runner import buffers, claims, clock, gate, tree, wire
from problems.common import load

LIMIT_S = 0.15  # for a runner whose script never ends its reply
HOSTILE_LIMIT_S = 0.4  # for one whose script leaves half a message behind; all others get the judge's own limits
HONEST_LIMIT_S = 60  # for one that replies: only a fake that broke keeps the judge waiting
PAUSE_S = 0.002  # between parts of a message
CLAIM = {"type": "Tensor", "dtype": "float16", "shape": [4], "stride": [1], "device": "cuda", "same": True}
GPU_US = 1e5  # that an honest fake claims: no clock outside contradicts it
RAW_LIMIT = 2**16  # bytes that fit into a socket's buffer whatever the judge does
# What a script does in place of a right reply. Of BROKEN the judge can make no right reply; HARMLESS comes out right;
# of the others it depends on what is sent. SILENT ones cost their time limit.
SILENT = ("never", "drips", "cut and waits", "announces more and waits")
BROKEN = (
    *SILENT,
    "closes",
    "half closes",
    "exits",
    "cut",
    "announces more",
    "oversized",
    "bytes",
    "body",
    "nested",
    "descriptors",
    "more descriptors than it says",
    "64 descriptors",
    "100 descriptors",
)
HARMLESS = ("split", "late", "descriptors in the body")
OTHERS = ("object", "changed", "twice", "thrice", "early", "more bytes", "another kind", "fails", "huge", "endless")
WAYS = (*BROKEN, *HARMLESS, *OTHERS)


@dataclass
class Script:
    """What one submission's runner does. at: the reply that is replaced; nth: of that kind, over all its processes;
    way: one of WAYS; value, places: JSON that is sent, and where in a right reply; computes: it writes right outputs.

    did: how often it was done, and the judge read what came of it: FakeChild counts that.
    """

    at: str = ""
    nth: int = 0
    way: str = ""
    value: object = None
    places: tuple[int, ...] = ()
    raw: bytes = b""
    number: int = 0
    computes: bool = True
    did: int = 0
    read: int = 0
    seen: Counter = field(default_factory=Counter)

    @property
    def limit_s(self) -> float:
        """For the judge to wait for it."""
        if self.way in SILENT:
            return LIMIT_S
        return HOSTILE_LIMIT_S if self.way in (*BROKEN, *OTHERS) else HONEST_LIMIT_S


SCRIPTS: dict[str, Script] = {}  # by the name of the submission's file, without .py
BROKE: list[str] = []  # what the checker raised, and the fakes themselves
HONEST = Script()


def framed(body: bytes, length: int | None = None, fds: int = 0) -> bytes:
    """`body` as a message, announced with another length or number of descriptors where these are given."""
    return struct.pack("<II", len(body) if length is None else length, fds) + body


def places(value: object, at: tuple = ()) -> list[tuple]:
    """Paths of everything within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in inner for path in ((*at, key), *places(item, (*at, key)))]


def changed(reply: dict, at: tuple, value: object) -> dict:
    """A copy of `reply` with another value at a place."""
    made = json.loads(json.dumps(reply))
    owner = made
    for key in at[:-1]:
        owner = owner[key]
    owner[at[-1]] = value
    return made


class Peer(threading.Thread):
    """The runner's end of the socket: it answers the judge's requests, right or as its script says."""

    def __init__(self, sock: socket.socket, ended: Callable[[int | None], None]) -> None:
        super().__init__(daemon=True)
        self.sock, self.ended = sock, ended
        self.script = HONEST
        self.acting = False  # its script has been acted out
        self.gone = threading.Event()
        self.buffers: list[buffers.MappedBuffer] = []
        self.kept: object = None  # what the last call returned: the judge reads it in this process's memory

    def run(self) -> None:
        try:
            self._serve()
        except (wire.WireError, OSError, EOFError):
            pass
        except Exception as error:
            BROKE.append(f"a fake runner: {error!r}")
        finally:
            self.ended(0)
            with contextlib.suppress(OSError):
                self.sock.close()

    def _serve(self) -> None:
        start, _ = wire.receive(self.sock)
        self.device, self.folder = start["device"], Path(start["folder"])
        self.own = start["file"] is None
        if not self.own:
            self.script = SCRIPTS.get(Path(start["file"]).stem, HONEST)
            self.task = load.from_file(self.folder, self.folder / "task.py")
        gpu = self.device == "cuda" and not start["compile"]
        self.say(
            "start", {"ready": True, "clock": clock.CudaClock.name if gpu else None, "replaced": [], "switches": []}
        )
        while True:
            message, fds = wire.receive(self.sock)
            getattr(self, message["op"])(message, fds)

    # --- requests

    def open(self, message: dict, fds: list[int]) -> None:
        self.page = buffers.Page(fds.pop(0)) if self.device == "cpu" else None
        self.opened = message
        self.buffers = (
            [buffers.MappedBuffer(buffer, fds) for buffer in message["buffers"]] if self.device == "cpu" else []
        )
        self.say("open", {})

    def hold(self, message: dict, fds: list[int]) -> None:
        if self.device == "cpu":
            self.weights = tree.build(message["spec"], buffers.MappedBuffer(message["buffer"], fds).memory, self.task)
        self.say("hold", {"prepared": True})

    def trim(self, *_: object) -> None:
        self.say("trim", {})

    def warm(self, *_: object) -> None:
        self.say("warm", {})

    def sealed(self, *_: object) -> None:
        self.say("sealed", {"replaced": [], "switches": []})

    def profile(self, *_: object) -> None:
        self.say("profile", {"table": "Name  CPU total\nadd   3 us"})

    def compile(self, *_: object) -> None:
        kernel = {"name": "add", "registers": 8, "stack_bytes": 0, "spill_bytes": 0, "shared_bytes": 0}
        self.say("compile", {"artefacts": [{"bytes": 100, "kernels": [kernel]}]})

    def call(self, message: dict, _: list[int]) -> None:
        self.say("ready", {"ready": True})
        (self._cpu_call if self.device == "cpu" else self._gpu_call)(message)

    def _gpu_call(self, message: dict) -> None:
        wire.receive(self.sock)  # "go"
        reply = {"us": GPU_US, "host_us": 5.0, "host_bound": False, "setup_us": None, "claims": []}
        if not self.own:
            reply["claims"] = [{**CLAIM}]
        if message["audit"]:
            reply["activity"] = {"records": 3, "elsewhere": {}}
        self.say("call", reply)

    def batch(self, message: dict, fds: list[int]) -> None:
        os.close(fds.pop(0))
        self.say("enqueued", {"ready": True})
        self.say("batch", {"calls": [[] if self.own else [{**CLAIM}] for _ in self.opened["buffers"]]})

    def _cpu_call(self, message: dict) -> None:
        number, result = message["number"], None
        while (told := self._told(number, result is not None)) is not None:
            result = () if self.own else self._compute(self.buffers[told])
            self._say_done(number)
            number += 1
        found = []
        if not self.own:
            returned = list(result) if isinstance(result, tuple) else [result]
            found = [{**claims.form(item), "same": self.opened["own"]} for item in returned]
        self.say("call", {"claims": found, "switches": []})

    def _told(self, number: int, later: bool) -> int | None:
        """Wait for the judge's "go" through the words of harness/runner/gate.cpp. -> which call it is; None: there is
        none, where one was made before (`later`).
        """
        words = (ctypes.c_uint32 * 49).from_address(self.page.address)
        if not later:
            words[0] = number
            _wake(self.page.address)
        while words[16] != number:
            if later and words[16] == (number - 1) | 2**31:
                return None
            if self.gone.wait(0.0002):
                raise EOFError
        return words[48]

    def _say_done(self, number: int) -> None:
        ctypes.c_uint32.from_address(self.page.address + 128).value = number
        _wake(self.page.address + 128)

    def _compute(self, buffer: buffers.MappedBuffer) -> object:
        """The right output, or where the script does not compute one of the same form."""
        values = tree.unpacked(self.opened.get("values"), buffer.memory["host"])
        data = tree.build(self.opened["data"], buffer.memory, self.task, values)
        if self.opened["split"]:
            data = data._replace(weights=self.weights)
        result = KERNELS[self.folder.name](data, self.script.computes)
        if not self.opened["own"]:
            self.kept = result
            said = json.dumps([claims.form(result)]).encode()
            gate.bindings().note_returned(self.page.address, [(result.data_ptr(), 4 * result.numel())], said)
        return result

    # --- replies

    def say(self, at: str, right: dict) -> None:
        """Send the right reply, or what the script has in its place."""
        script = self.script
        nth = script.seen[at]
        script.seen[at] += 1
        if script is HONEST or at != script.at or nth < script.nth or (nth > script.nth and script.way in HARMLESS):
            wire.send(self.sock, right)
            return
        script.did += 1
        self.acting = True
        self._act(script, right)

    def _act(self, script: Script, right: dict) -> None:
        body, chance = json.dumps(right).encode(), random.Random(script.number)
        send, way = self.sock.sendall, script.way
        if way in ("never", "closes", "half closes", "exits"):
            self._leave(way, chance)
        elif way.startswith("cut"):
            message = framed(body)
            send(message[: chance.randrange(1, len(message))])
            self._leave("never" if way in SILENT else "closes", chance)
        elif way.startswith("announces more"):
            send(framed(body, len(body) + chance.randint(1, 1000)))
            self._leave("never" if way in SILENT else "closes", chance)
        elif way == "oversized":
            send(framed(body, chance.choice((wire.LIMIT + 1, 2**31, chance.randint(wire.LIMIT + 1, 2**32 - 1)))))
        elif way == "bytes":
            send(script.raw)
            self._leave("closes", chance)
        elif way == "body":
            send(framed(b"\xff" + script.raw))
        elif way == "nested":
            send(framed(b'{"us":' + b"[" * chance.randint(10_000, 50_000)))
        elif way == "drips":
            self._drip(framed(b"x" * wire.LIMIT))
        elif "descriptors" in way:
            self._give(way, body, chance)
        else:
            self._send_others(script, right, body, chance)

    def _send_others(self, script: Script, right: dict, body: bytes, chance: random.Random) -> None:
        send, way = self.sock.sendall, script.way
        if way == "split":
            message = framed(body)
            cuts = sorted(chance.randrange(len(message)) for _ in range(chance.randint(1, 5)))
            for start, end in zip([0, *cuts], [*cuts, len(message)], strict=True):
                send(message[start:end])
                self.gone.wait(PAUSE_S)
        elif way == "late":
            self.gone.wait(chance.uniform(0, 0.05))
            send(framed(body))
        elif way == "object":
            send(framed(json.dumps(script.value).encode()))
        elif way == "changed":
            for number in script.places:
                if at := places(right):
                    right = changed(right, at[number % len(at)], script.value)
            send(framed(json.dumps(right or script.value).encode()))
        elif way in ("twice", "thrice"):
            send(framed(body) * (2 if way == "twice" else 3))
        elif way == "early":
            send(framed(body) + b"".join(framed(json.dumps(one).encode()) for one in chance.choices(KINDS, k=4)))
        elif way == "more bytes":
            send(framed(body) + script.raw)
        elif way == "another kind":
            send(framed(json.dumps(chance.choice(KINDS)).encode()))
        elif way == "fails":
            failed = {"failed": chance.choice(FAILURES), "type": "E", "memory": chance.random() < 0.5}
            send(framed(json.dumps({**failed, "text": script.value}).encode()))
        elif way == "huge":
            field_ = chance.choice(("text", "x", *right))
            filler = chance.choice(("a", "\x1b", [], 1, {}, "\ud800"))
            value = filler * 100_000 if isinstance(filler, str) else [filler] * 100_000
            send(framed(json.dumps({**right, field_: value}).encode()))
        elif way == "endless":
            for _ in range(10_000):
                send(framed(body) * 20)
        else:
            raise ValueError(f"no such way: {way!r}")

    def _leave(self, how: str, chance: random.Random) -> None:
        """Say nothing more: without an end, or with one of several."""
        if how == "never":
            self.gone.wait(60)
        elif how == "half closes":
            self.sock.shutdown(socket.SHUT_WR)
            self.gone.wait(60)
        elif how == "closes":
            self.ended(None)
        else:
            self.ended(chance.choice((0, 1, 127, -6, -9, -11, -40, -64)))
        raise EOFError

    def _drip(self, message: bytes) -> None:
        for byte in message:
            self.sock.sendall(bytes([byte]))
            if self.gone.wait(PAUSE_S):
                raise EOFError

    def _give(self, way: str, body: bytes, chance: random.Random) -> None:
        """A message with descriptors."""
        header, nothing = struct.Struct("<II"), os.open(os.devnull, os.O_RDONLY)
        try:
            if way == "descriptors in the body":  # the kernel drops them
                self.sock.sendall(header.pack(len(body), 0) + body[:1])
                self.gone.wait(PAUSE_S)
                socket.send_fds(self.sock, [body[1:]], [nothing])
                return
            count = {"64 descriptors": 64, "100 descriptors": 100}.get(way, chance.randint(1, 8))
            said = count + chance.randint(1, 9) if way == "more descriptors than it says" else count
            socket.send_fds(self.sock, [header.pack(len(body), said)], [nothing] * count)
            self.sock.sendall(body)
        finally:
            os.close(nothing)


def _add(data: tuple, computes: bool) -> torch.Tensor:
    return data.z.copy_(data.x + data.y) if computes else data.z.zero_()


def _linear(data: tuple, computes: bool) -> torch.Tensor:
    y = data.outputs.y
    return y.copy_((data.weights.w.double() @ data.inputs.x.double()).float()) if computes else y.zero_()


def _add_lists(data: tuple, computes: bool) -> torch.Tensor:
    a, b, scale = data
    return scale * (torch.cat(a) + torch.cat(b)) * (1 if computes else 0)


KERNELS = {"vector_add": _add, "linear": _linear, "vectoradd": _add_lists}
FAILURES = ("import", "compile", "open", "hold", "trim", "warm", "call", "batch", "profile", "sealed", "judge", "")
KINDS = (
    {},
    {"ready": True},
    {"prepared": True},
    {"claims": [], "switches": []},
    {"replaced": [], "switches": []},
    {"us": 1.0, "host_us": 1.0, "host_bound": False},
    {"calls": [[]]},
    {"artefacts": []},
    {"table": ""},
    {"ready": True, "clock": None, "replaced": [], "switches": []},
    {"failed": "call", "type": "E", "memory": False, "text": "x"},
)
_libc = ctypes.CDLL(None)


def _wake(address: int) -> None:
    _libc.syscall(202, ctypes.c_void_p(address), 1, 2**31 - 1, None, None, 0)  # futex, FUTEX_WAKE
