"""The process that runs a submission: imports it, is handed one call's data at a time, reports a time and what came.

It knows no reference, no expected value and no seed, and decides nothing. With no submission it runs the judge's own
calls (the empty one, the plain readers, a matrix product) under the same clock.

Started as `python -m harness.runner FD`, FD a connected socket; talks as harness/wire.py says.
"""

import gc
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from harness import clock, native, product, queues, tamper, tree, wire
from harness.slots import MappedSlot
from problems.common import build, load

TEXT_LIMIT = 16_000  # characters of a traceback or compiler report that are passed on, from both ends


class Runner:
    def __init__(self, sock: socket.socket, start: dict, fds: list[int]) -> None:
        self.sock = sock
        self.device: str = start["device"]
        self.folder = Path(start["folder"])
        self.task = self.module = None
        self.slots: list[MappedSlot] = []
        self.opened: dict = {}
        self.held: MappedSlot | None = None  # the weights' memory
        self.room: torch.Tensor | None = None  # what plain readers read where the slot is smaller
        self.product: product.Product | None = None
        self.weights: object = None  # what stands for the weights in the data of a call: they, or what prepare made
        native.read_configs(self.device)  # the judge's code is loaded before anybody can say where it is built
        self.clock = None if start["compile"] else clock.make(self.device, fds)
        self.seal = tamper.Seal()
        # What torch made on import stays, and to walk it takes a tenth of a second of every `trim`. Nothing is a
        # submission's yet.
        gc.freeze()
        if start["file"]:
            extra = {"utils": load.from_file(self.folder, Path(start["utils"]))} if start["utils"] else {}
            self.task = load.from_file(self.folder, self.folder / "task.py", extra)
            self.module = load.from_file(self.folder, Path(start["file"]), extra)
            if not callable(getattr(self.module, "custom_kernel", None)) and not start["compile"]:
                raise AttributeError(f"{Path(start['file']).name} defines no custom_kernel")

    def open(self, message: dict, fds: list[int]) -> dict:
        """Map a case's slots."""
        for slot in self.slots:
            slot.close()
        self.opened = message
        self.slots = [MappedSlot(slot, fds) for slot in message["slots"]]
        return {}

    def hold(self, message: dict, fds: list[int]) -> dict:
        """Map a case's weights, and let the submission prepare them, if it does that. -> {"prepare_us"}."""
        self.weights = None  # what was made of the weights before goes first
        if self.held is not None:
            self.held.close()
        # And out of torch's cache: a small tensor there would keep the whole of what a large one had.
        self.trim({}, [])
        self.held = MappedSlot(message["slot"], fds)
        self.weights = tree.build(message["spec"], self.held.buffers, self.task)
        if not hasattr(self.module, "prepare"):
            return {"prepare_us": None}
        before = time.perf_counter_ns()
        self.weights = self.module.prepare(self.weights)
        self._sync()
        return {"prepare_us": (time.perf_counter_ns() - before) / 1e3}

    def trim(self, message: dict, _: list[int]) -> dict:
        """Give back what no tensor holds, before somebody looks at how much this process takes."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return {}

    def warm(self, message: dict, _: list[int]) -> dict:
        """One call on a slot whose call is closed: code is fetched, and nobody looks at what it writes."""
        data = self._data(self.slots[message["slot"]])
        self.module.custom_kernel(data, *self._untimed(data, message))
        self._sync()
        return {}

    def call(self, message: dict, _: list[int]) -> dict:
        """One timed call on one slot; `audit`: with a look at which queues its work ran on."""
        slot = self.slots[message["slot"]]
        key = bytes.fromhex(message["key"]) if message["key"] else None
        if self.module is None:
            return self._judge_call(message, slot, key)
        data = self._data(slot)
        outputs = [self._leaf(data, i) for i in self.opened["outputs"]]
        # Views of the judge's own, made before the call: what comes back may have been given other methods.
        sources = [tree.raw(output) for output in outputs]
        captures = [tree.tensor(spec, slot.buffers[spec["space"]]) for spec in self.opened["captures"]]
        claims: list[dict] = []
        untimed_us, state = None, ()
        if message["peer"] and hasattr(self.module, "untimed"):
            if key is not None:  # a peer's preparations see the contents; peers are not adversaries
                native.mask(slot.buffers["device"], key)
                key = None
            before = time.perf_counter_ns()
            state = self._untimed(data, message)
            self._sync()
            untimed_us = (time.perf_counter_ns() - before) / 1e3
        kernel = self.module.custom_kernel

        def run() -> object:
            return kernel(data, *state)

        def capture(result: object) -> None:
            if self.opened["own"]:
                claims.extend(_capture_own(result, outputs, sources, captures))
            else:
                claims.extend(_capture_any(result, captures))

        timed = self._timed(run, capture, self._delivery(slot, key, message), message["audit"])
        return {**timed, "untimed_us": untimed_us, "claims": claims}

    def sealed(self, message: dict, _: list[int]) -> dict:
        """What was replaced in this process since it began."""
        return {"tamper": self.seal.broken()}

    def profile(self, message: dict, _: list[int]) -> dict:
        """The torch profiler's table of one call on slot 0."""
        slot = self.slots[0]
        if message["key"]:
            native.mask(slot.buffers["device"], bytes.fromhex(message["key"]))
        data = self._data(slot)
        state = self._untimed(data, message)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        overwritten = [tree.raw(self._leaf(data, i)) for i in self.opened["inout"]]
        before = [tensor.clone() for tensor in overwritten]
        self.module.custom_kernel(data, *state)
        for tensor, content in zip(overwritten, before, strict=True):
            tensor.copy_(content)
        self._sync()
        with torch.profiler.profile(activities=kinds) as profiler:
            self.module.custom_kernel(data, *state)
            self._sync()
        order = "cuda_time_total" if self.device == "cuda" else "cpu_time_total"
        return {"table": profiler.key_averages().table(sort_by=order, row_limit=20)}

    def compile(self, message: dict, _: list[int]) -> dict:
        """Machine code for a target, without a GPU."""
        if not callable(getattr(self.module, "compile_for", None)):
            raise AttributeError(f"{self.module.__name__.rpartition('.')[2]} defines no compile_for(target)")
        artefacts = self.module.compile_for(message["target"])
        return {
            "artefacts": [
                {"bytes": a.path.stat().st_size, "kernels": [vars(kernel) for kernel in a.kernels()]} for a in artefacts
            ]
        }

    def _data(self, slot: MappedSlot) -> object:
        """A call's data over a slot, with the weights, where the problem has such, in their place."""
        data = tree.build(self.opened["data"], slot.buffers, self.task)
        return data._replace(weights=self.weights) if self.opened["split"] else data

    def _leaf(self, data: object, index: int) -> torch.Tensor:
        """The tensor that is leaf `index` of the slot."""
        return tree.tensors(data._replace(weights=None) if self.opened["split"] else data)[index]

    def _untimed(self, data: object, message: dict) -> tuple:
        return (self.module.untimed(data),) if message["peer"] and hasattr(self.module, "untimed") else ()

    def _delivery(self, slot: MappedSlot | None, key: bytes | None, message: dict) -> clock.Delivery:
        """The parent is told when caches are cold, and says go: it has a clock of its own."""

        def ready() -> None:
            wire.send(self.sock, {"ready": True})
            wire.receive(self.sock)

        return clock.Delivery(slot and slot.buffers.get("device"), key, message["spin_us"], ready)

    def _timed(
        self, run: Callable[[], object], capture: Callable[[object], None], delivery: clock.Delivery, audit: bool
    ) -> dict:
        """The clock's reading, and of an audited call on a GPU the queues that its work ran on."""
        if not audit or self.device != "cuda":
            return vars(self.clock.time(run, capture, delivery))
        with queues.Watch() as watch:
            sample = self.clock.time(run, capture, delivery)
        return {**vars(sample), "queues": watch.seen()}

    def _judge_call(self, message: dict, slot: MappedSlot, key: bytes | None) -> dict:
        what = message["what"]
        if what == "empty":
            return self._timed(lambda: None, lambda _: None, self._delivery(None, None, message), message["audit"])
        if what == product.NAME:
            self.product = self.product or product.Product(self.device)
            self.product()
            delivery = self._delivery(None, None, message)
            return vars(self.clock.time(self.product, lambda _: None, delivery))
        config, nbytes = self.opened["reads"][what], message["bytes"]
        buffer = slot.buffers["device" if self.device == "cuda" else "host"]
        if buffer.numel() < nbytes:  # weights are not in the slot
            buffer = self._stand_in(nbytes)
        native.read(buffer, nbytes, config)  # its code is fetched, as a submission's is
        delivery = self._delivery(slot, key, message)
        return vars(self.clock.time(lambda: native.read(buffer, nbytes, config), lambda _: None, delivery))

    def _stand_in(self, nbytes: int) -> torch.Tensor:
        """As many bytes as a call moves, zeros, for the plain readers of a problem whose weights lie elsewhere."""
        if self.room is None or self.room.numel() < nbytes:
            self.room = None  # before the next one is made
            self.room = torch.zeros(-(-nbytes // 16) * 16, dtype=torch.uint8, device=self.device)
        return self.room

    def _sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _capture_own(
    result: object, outputs: list[torch.Tensor], sources: list[torch.Tensor], captures: list[torch.Tensor]
) -> list[dict]:
    """Copy the judge's output tensors (`sources`: their bytes); say whether they are what came back."""
    for source, target in zip(sources, captures, strict=True):
        tree.raw(target).copy_(source)
    returned = list(result) if isinstance(result, tuple | list) else [result]
    return [_form(item, outputs[i] if i < len(outputs) else None) for i, item in enumerate(returned)]


def _capture_any(result: object, captures: list[torch.Tensor]) -> list[dict]:
    """Copy whatever tensors came back, where they have the form of the expected ones; say what came."""
    returned: list[object] = []
    _flatten(result, returned)
    for item, target in zip(returned, captures, strict=False):
        if type(item) is torch.Tensor and item.dtype == target.dtype and item.shape == target.shape:
            target.copy_(item)
    return [_form(item, None) for item in returned]


def _flatten(value: object, found: list[object]) -> None:
    if type(value) in (tuple, list):
        for item in value:
            _flatten(item, found)
    else:
        found.append(value)


def _form(item: object, own: torch.Tensor | None) -> dict:
    """What one returned object is; `same`: the very tensor that the judge handed out."""
    if type(item) is not torch.Tensor or vars(item):
        return {"type": f"{type(item).__name__}{' with attributes of its own' if type(item) is torch.Tensor else ''}"}
    same = (
        own is not None
        and (item is own or item.data_ptr() == own.data_ptr())
        and (item.dtype, item.shape, item.stride()) == (own.dtype, own.shape, own.stride())
    )
    dtype = str(item.dtype).removeprefix("torch.")
    return {"type": "Tensor", "dtype": dtype, "shape": list(item.shape), "device": item.device.type, "same": same}


def _clip(text: str) -> str:
    if len(text) <= TEXT_LIMIT:
        return text
    return f"{text[: TEXT_LIMIT // 2]}\n[{len(text) - TEXT_LIMIT} characters left out]\n{text[-TEXT_LIMIT // 2 :]}"


def _error(where: str, error: BaseException) -> dict:
    kind = "compile" if isinstance(error, build.BuildError) else where
    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    text = str(error) if kind == "compile" else "".join(traceback.format_exception(error))
    return {"failed": kind, "type": type(error).__name__, "memory": out_of_memory, "text": _clip(text)}


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    message, fds = wire.receive(sock)
    try:
        runner = Runner(sock, message, fds)
    except Exception as error:  # whatever a submission raises on import is its verdict, not ours
        wire.send(sock, _error("import", error))
        return
    wire.send(sock, {"ready": True, "clock": runner.clock and runner.clock.name, "tamper": runner.seal.broken()})
    handlers: dict[str, Callable] = {
        "open": runner.open, "hold": runner.hold, "trim": runner.trim, "warm": runner.warm, "call": runner.call,
        "profile": runner.profile, "compile": runner.compile, "sealed": runner.sealed,
    }  # fmt: skip
    while True:
        try:
            message, fds = wire.receive(sock)
        except wire.WireError:
            return  # the parent is done with us
        try:
            reply = handlers[message["op"]](message, fds)
        except Exception as error:
            reply = _error(message["op"], error)
        sys.stdout.flush()
        wire.send(sock, reply)


if __name__ == "__main__":
    main()
