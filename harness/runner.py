"""The process that runs a submission: imports it, is handed one call's data at a time, reports a time and what came.

It knows no reference, no expected value and no seed, and decides nothing. With no submission it runs the judge's own
calls (the empty one and the plain readers) under the same clock.

Started as `python -m harness.runner FD`, FD a connected socket; talks as harness/wire.py says.
"""

import socket
import sys
import time
import traceback
from pathlib import Path

import torch

from harness import clock, native, tree, wire
from harness.slots import MappedSlot
from problems.common import build, load

TEXT_LIMIT = 16_000  # characters of a traceback or compiler report that are passed on, from both ends


class Runner:
    def __init__(self, sock: socket.socket, start: dict) -> None:
        self.sock = sock
        self.device: str = start["device"]
        self.folder = Path(start["folder"])
        self.task = self.module = None
        self.slots: list[MappedSlot] = []
        self.attached: MappedSlot | None = None  # the one whose device part is mapped
        self.opened: dict = {}
        self.clock = clock.make(self.device)
        if start["file"]:
            extra = {"utils": load.from_file(self.folder, Path(start["utils"]))} if start["utils"] else {}
            self.task = load.from_file(self.folder, self.folder / "task.py", extra)
            self.module = load.from_file(self.folder, Path(start["file"]), extra)
            if not callable(getattr(self.module, "custom_kernel", None)) and not start["compile"]:
                raise AttributeError(f"{Path(start['file']).name} defines no custom_kernel")

    def open(self, message: dict, fds: list[int]) -> dict:
        """Map the host parts of a case's slots; a device part is mapped when its handle comes, with its call."""
        self._attach(None, None)
        self.opened = message
        self.slots = [MappedSlot(slot, fds) for slot in message["slots"]]
        return {}

    def warm(self, message: dict, _: list[int]) -> dict:
        """One call on the slot whose call was closed last: code is fetched, and nobody looks at what it writes."""
        data = tree.build(self.opened["data"], self.attached.buffers, self.task)
        state = (self.module.untimed(data),) if message["peer"] and hasattr(self.module, "untimed") else ()
        self.module.custom_kernel(data, *state)
        self._sync()
        return {}

    def call(self, message: dict, _: list[int]) -> dict:
        """One timed call on one slot."""
        slot = self.slots[message["slot"]]
        self._attach(slot, message["handle"])
        if self.module is None:
            return self._judge_call(message["what"], slot)
        data = tree.build(self.opened["data"], slot.buffers, self.task)
        outputs = [tree.tensors(data)[i] for i in self.opened["outputs"]]
        captures = [tree.tensor(spec, slot.buffers[spec["space"]]) for spec in self.opened["captures"]]
        claims: list[dict] = []
        untimed_us = None
        if message["peer"] and hasattr(self.module, "untimed"):
            before = time.perf_counter_ns()
            state = self.module.untimed(data)
            self._sync()
            untimed_us = (time.perf_counter_ns() - before) / 1e3

            def run() -> object:
                return self.module.custom_kernel(data, state)
        else:

            def run() -> object:
                return self.module.custom_kernel(data)

        def capture(result: object) -> None:
            claims.extend(
                self._capture_own(result, outputs, captures) if self.opened["own"] else _capture_any(result, captures)
            )

        sample = self.clock.time(run, capture, slot.buffers.get("device"))
        return {**vars(sample), "untimed_us": untimed_us, "claims": claims}

    def profile(self, message: dict, _: list[int]) -> dict:
        """The torch profiler's table of one call on slot 0."""
        self._attach(self.slots[0], message["handle"])
        data = tree.build(self.opened["data"], self.slots[0].buffers, self.task)
        state = (self.module.untimed(data),) if message["peer"] and hasattr(self.module, "untimed") else ()
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self.module.custom_kernel(data, *state)
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
        if not artefacts:
            raise RuntimeError("compile_for returned no artefact")
        return {
            "artefacts": [
                {"bytes": a.path.stat().st_size, "kernels": [vars(kernel) for kernel in a.kernels()]} for a in artefacts
            ]
        }

    def _attach(self, slot: MappedSlot | None, handle: str | None) -> None:
        """Let go of the device part of the slot before, and map that of `slot`."""
        if self.attached is not None and self.attached is not slot:
            self.attached.detach()
        self.attached = slot
        if slot is not None:
            slot.attach(handle)

    def _judge_call(self, what: str, slot: MappedSlot) -> dict:
        if what == "empty":
            return vars(self.clock.time(lambda: None, lambda _: None, None))
        config, nbytes = self.opened["reads"][what], self.opened["bytes"]
        buffer = slot.buffers["device" if self.device == "cuda" else "host"]
        native.read(buffer, nbytes, config)  # its code is fetched, as a submission's is
        device = slot.buffers.get("device")
        return vars(self.clock.time(lambda: native.read(buffer, nbytes, config), lambda _: None, device))

    @staticmethod
    def _capture_own(result: object, outputs: list[torch.Tensor], captures: list[torch.Tensor]) -> list[dict]:
        """Copy the judge's output tensors; say whether they are what came back."""
        for source, target in zip(outputs, captures, strict=True):
            tree.raw(target).copy_(tree.raw(source))
        returned = list(result) if isinstance(result, tuple | list) else [result]
        return [_form(item, outputs[i] if i < len(outputs) else None) for i, item in enumerate(returned)]

    def _sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


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
    if type(item) is not torch.Tensor:
        return {"type": type(item).__name__}
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
    message, _ = wire.receive(sock)
    try:
        runner = Runner(sock, message)
    except Exception as error:  # whatever a submission raises on import is its verdict, not ours
        wire.send(sock, _error("import", error))
        return
    wire.send(sock, {"ready": True, "clock": runner.clock.name})
    handlers = {
        "open": runner.open, "warm": runner.warm, "call": runner.call, "profile": runner.profile,
        "compile": runner.compile,
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
