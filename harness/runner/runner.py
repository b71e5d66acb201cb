"""The process that runs a submission. It imports the submission, makes one call at a time, and says what came back.

It has no reference, no expected value and no seed, and decides nothing. On a CPU it has no clock either: it waits for
the judge's "go" and says "done" (harness/runner/gate.cpp). Without a submission it makes the judge's own calls (the
empty call, the plain readers, a matrix product) under the same clock.

It starts as `python -m harness.runner.runner FD`, where FD is a connected socket, and exchanges the messages of
harness/runner/wire.py.
"""

import contextlib
import ctypes
import gc
import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from harness.runner import batch, claims, clock, failure, gate, integrity, matmul, native, objects, streams, tree, wire
from harness.runner.buffers import MappedBuffer, Page
from problems.common import build, cubins, load

TRACE_LIMIT = 2**20  # characters; the judge takes no more
SUPPLY = 24  # data of calls on one buffer that are made before the first one
COPIED_BYTES = 2**28  # at once, in the empty call's copies of outputs; more than L2 holds


class Runner:
    """A submission in this process, the buffers that it is called on, and its weights.

    A public method handles the request of its name: it takes the message and its descriptors, and returns the reply.
    """

    def __init__(self, sock: socket.socket, start: dict, fds: list[int]) -> None:
        self.sock = sock
        self.device: str = start["device"]
        self.folder = Path(start["folder"])
        self.task: ModuleType | None = None
        self.module: Any = None  # the submission; None: the judge's own calls
        self.buffers: list[MappedBuffer] = []
        self.page: Page  # on a CPU, from the first `open` on
        self.opened: dict = {}
        self.held: MappedBuffer | None = None  # the weights' memory
        self.room: torch.Tensor | None = None  # what plain readers read where the buffer is smaller
        self.copied: torch.Tensor | None = None  # what the empty call copies
        self.product: matmul.Product | None = None
        self.weights: Any = None  # the weights in the data of a call, or what prepare made of them
        native.read_configs(self.device)  # loads the judge's code before the submission can replace it
        self.clock = clock.CudaClock() if self.device == "cuda" and not start["compile"] else None
        self.integrity = integrity.IntegrityCheck() if self.clock else None
        self.switches = integrity.Switches()
        # What torch made on import stays, and to walk it takes a tenth of a second of every `trim`. Nothing is a
        # submission's yet.
        gc.freeze()
        if start["file"]:
            if start["files"] is not None:  # a folder in GPU MODE's format
                load.bind(self.folder, {name: Path(path) for name, path in start["files"].items()})
            if "cpp_extension" in Path(start["file"]).read_text(errors="replace"):
                from harness.runner import extensions  # it imports setuptools, which takes a third of a second

                extensions.reuse_builds()
            if start["files"] is None:
                self.task = load.from_file(self.folder, self.folder / "task.py")
            elif "task.py" in start["files"]:
                self.task = load.bound("task")  # of whose classes the submission's own import is
            if start.get("common"):
                _replace_common(Path(start["common"]))
            self.module = load.from_file(self.folder, Path(start["file"]))
            kernel = getattr(self.module, "custom_kernel", None)
            if not callable(kernel) and not start["compile"]:
                other = "" if kernel is None else f": its custom_kernel is {type(kernel).__name__}, no function"
                raise AttributeError(f"it defines no custom_kernel(data), which the judge calls{other}")

    def changes(self, *_: object) -> dict:
        """Return what was replaced in this process, and which of torch's switches were changed. Put these back."""
        return {"replaced": self.integrity.broken() if self.integrity else [], "switches": self.switches.restore()}

    def open(self, message: dict, fds: list[int]) -> dict:
        """Map a case's buffers, and on a CPU the page that hands over calls."""
        for buffer in self.buffers:
            buffer.close()
        if self.device == "cpu":
            self.page = Page(fds.pop(0))
        self.opened = message
        if self.module is not None:
            objects.define(message["definitions"])
        self.buffers = [MappedBuffer(buffer, fds) for buffer in message["buffers"]]
        return {}

    def hold(self, message: dict, fds: list[int]) -> dict:
        """Map a case's weights, and let the submission prepare them if it defines `prepare`."""
        self.weights = None  # frees what was made of the previous weights
        if self.held is not None:
            self.held.close()
        # And out of torch's cache: a small tensor there would keep the whole of what a large one had.
        self.trim({}, [])
        self.held = MappedBuffer(message["buffer"], fds)
        self.weights = tree.build(message["spec"], self.held.memory, self.task)
        if not hasattr(self.module, "prepare"):
            return {"prepared": False}
        self.weights = self.module.prepare(self.weights)
        self._sync()
        return {"prepared": True}

    def trim(self, message: dict, _: list[int]) -> dict:
        """Free what no tensor holds, before the judge measures this process. heap: free also what malloc
        keeps of freed memory, tens of MiB behind a small block that is still in use.
        """
        gc.collect()
        if message.get("heap"):
            ctypes.CDLL(None).malloc_trim(0)
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return {}

    def warm(self, message: dict, _: list[int]) -> dict:
        """Make a call on a buffer whose call is closed, to fetch code. No process reads what it writes."""
        data = self._data(self.buffers[message["buffer"]])
        self.module.custom_kernel(data, *self._setup(data, message))
        self._sync()
        return {}

    def call(self, message: dict, _: list[int]) -> dict:
        if self.device == "cpu":
            return self._turns(message)
        buffer = self.buffers[message["buffer"]]
        if self.module is None:
            return self._judge_call(message, buffer)
        return self._timed_call(message, buffer)

    def _turns(self, message: dict) -> dict:
        """Make calls on a CPU: for each, wait for the judge's "go", call the kernel, and say "done". Reply after the
        last one. The judge's own calls are one for each of `whats` and each buffer.
        """
        if self.module is None:
            kernel = _call
            calls = tuple(
                () if what == "empty" else (self._judges_kernel(what, message["bytes"], buffer),)
                for what in message["whats"]
                for buffer in self.buffers
            )
        else:
            kernel = self.module.custom_kernel
            calls = tuple(self._arguments(buffer, message) for buffer in self.buffers)
            if self._is_fresh(message):
                kernel = _on_fresh(kernel)
        noting = None
        if not self.opened["ours"]:
            kernel = noting = claims.Noting(kernel, self.page)
        gc.disable()
        wire.send(self.sock, {"ready": True})
        result = gate.bindings().take_turns(self.page.address, message["number"], kernel, calls)
        if self.module is None:
            return {"claims": [], "switches": []}
        if noting:
            forms = noting.said
        else:
            data = calls[gate.bindings().which(self.page.address)][0]
            forms = claims.forms(result, [self._leaf(data, i) for i in self.opened["outputs"]])
        return {"claims": forms, "switches": self.switches.restore()}

    def _timed_call(self, message: dict, buffer: MappedBuffer) -> dict:
        """Make a call on a GPU between two events; `audit`: record which streams its work ran on."""
        key = bytes.fromhex(message["key"]) if message["key"] else None
        data = self._data(buffer)
        outputs = [self._leaf(data, i) for i in self.opened["outputs"]]
        captures = self.opened["captures"]
        returned: list[dict] = []
        setup_us, state = None, ()
        if message["baseline"] and hasattr(self.module, "setup"):
            if key is not None:  # a baseline's preparations see the contents; baselines are not adversaries
                native.mask(buffer.memory["device"], key)
                key = None
            before = time.perf_counter_ns()
            state = self._setup(data, message)
            self._sync()
            setup_us = (time.perf_counter_ns() - before) / 1e3

        def capture(result: object) -> None:
            if not self.opened["ours"]:
                returned.extend(claims.capture_any(result, captures, buffer))

        call = native.Call(
            self.module.custom_kernel, (data, *state), self._copies(buffer) if self.opened["ours"] else ()
        )
        timed, result = self._timed(call, capture, self._delivery(buffer, key, message), message["audit"])
        if self.opened["ours"]:
            returned = claims.forms(result, outputs)
        return {**timed, "setup_us": setup_us, "claims": returned}

    def _copies(self, buffer: MappedBuffer) -> tuple[tuple[int, int, int], ...]:
        """Return (to, from, bytes) of the outputs that a call receives."""
        leaves = tree.leaves(self.opened["data"])
        pairs = zip(self.opened["captures"], (leaves[i] for i in self.opened["outputs"]), strict=True)
        return tuple((buffer.address(to), buffer.address(leaf), leaf["nbytes"]) for to, leaf in pairs)

    def batch(self, message: dict, fds: list[int]) -> dict:
        """Enqueue one call on each buffer behind the gate of a page, and the digest of what they wrote. Say that all of
        it is enqueued, or before any of it, `at_once`, where a call waits for the device. Reply when it is done.
        """
        page, found = batch.GatePage(fds.pop(0)), torch.zeros(1, dtype=torch.int64, device=self.device)
        arguments = [(self._data(buffer),) for buffer in self.buffers] if self.module else []
        # The judge's empty calls copy what is copied behind a call whose outputs are its own.
        copies = () if self.module or self.opened["ours"] else self._as_many_copies()
        self._sync()
        if message["at_once"]:
            # Here, since this processor stays awake too: while a runner waited for the judge's work, it came to enqueue
            # a call so slowly that the device waited for it.
            native.wake(batch.WAKE_S)
        native.await_gate(page.seen)
        if message["at_once"]:
            wire.send(self.sock, {"ready": True})
        said, results, memories = [], [], [buffer.memory["device"] for buffer in self.buffers]
        for i, buffer in enumerate(self.buffers):
            native.touch_next(memories, i)  # the unmasking by another process has emptied the TLBs
            results.append(self.module.custom_kernel(*arguments[i]) if self.module else native.copy(copies))
            if self.module and not self.opened["ours"]:
                said.append(claims.capture_any(results.pop(), self.opened["captures"], buffer))
        native.digest([region for buffer in self.buffers for region in batch.written(self.opened, buffer)], found)
        native.stamp(found, page.seen)
        if not message["at_once"]:
            wire.send(self.sock, {"ready": True})
        if self.opened["ours"]:
            for buffer in self.buffers:
                native.copy(self._copies(buffer))
        self._sync()
        page.close()
        if self.opened["ours"] and self.module:
            outputs = [[self._leaf(data, i) for i in self.opened["outputs"]] for (data,) in arguments]
            said = [claims.forms(*pair) for pair in zip(results, outputs, strict=True)]
        return {"calls": said}

    def profile(self, message: dict, _: list[int]) -> dict:
        buffer = self.buffers[0]
        if message["key"]:
            native.mask(buffer.memory["device"], bytes.fromhex(message["key"]))
        data = self._data(buffer)
        state = self._setup(data, message)
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
        return {"table": profiler.key_averages().table(sort_by=order, row_limit=20), "trace": _trace(profiler)}

    def compile(self, message: dict, _: list[int]) -> dict:
        if not callable(getattr(self.module, "compile_for", None)):
            raise AttributeError("it defines no compile_for(target), which the judge calls")
        artefacts = self.module.compile_for(message["target"])
        return {"artefacts": [{"bytes": a.path.stat().st_size, "kernels": _kernels(a)} for a in artefacts]}

    def _data(self, buffer: MappedBuffer) -> Any:
        """Return a call's data over a buffer, with the weights in their place where the problem has such."""
        values = tree.unpacked(self.opened.get("values"), buffer.memory)
        data = tree.build(self.opened["data"], buffer.memory, self.task, values)
        return data._replace(weights=self.weights) if self.opened["split"] else data

    def _arguments(self, buffer: MappedBuffer, message: dict) -> tuple:
        """Return what a call on a CPU is made with: its data, or of a folder from elsewhere a supply of it."""
        if self._is_fresh(message):
            leaf = self.opened.get("values")
            values = tree.tensor(leaf, buffer.memory["host"]) if leaf else None
            return (_Supply(lambda: self._data(buffer), values),)
        data = self._data(buffer)
        return data, *self._setup(data, message)

    def _is_fresh(self, message: dict) -> bool:
        """Return whether each call gets its data anew. A baseline has one, which it may see before its setup."""
        return not self.opened["ours"] and not message["baseline"]

    def _leaf(self, data: Any, index: int) -> torch.Tensor:
        return tree.tensors(data._replace(weights=None) if self.opened["split"] else data)[index]

    def _setup(self, data: Any, message: dict) -> tuple:
        return (self.module.setup(data),) if message["baseline"] and hasattr(self.module, "setup") else ()

    def _delivery(self, buffer: MappedBuffer | None, key: bytes | None, message: dict) -> clock.Delivery:
        """Return what a call is timed on. The runner says when caches are cold, and waits for the judge's "go"."""

        def ready() -> None:
            # Until the reply is sent, which the parent's clock waits for: a collection can take over a millisecond.
            gc.disable()
            wire.send(self.sock, {"ready": True})
            wire.receive(self.sock)

        device = buffer.memory.get("device") if buffer else None
        return clock.Delivery(device, key, message["spin_us"], ready)

    def _timed(
        self, call: native.Call, capture: Callable[[object], None], delivery: clock.Delivery, audit: bool
    ) -> tuple[dict, object]:
        """Return the clock's reading, of an audited call with the streams that its work ran on; and what came back."""
        if self.clock is None:
            raise RuntimeError("only a runner on a GPU has a clock")
        if not audit:
            sample, result = self.clock.time(call, capture, delivery)
            return vars(sample), result
        with streams.watch() as watched:
            sample, result = self.clock.time(call, capture, delivery)
        return {**vars(sample), "activity": streams.seen(watched)}, result

    def _judge_call(self, message: dict, buffer: MappedBuffer) -> dict:
        what = message["what"]
        if what == "empty":
            call = native.Call(_nothing, (), self._as_many_copies())
            return self._timed(call, _nothing, self._delivery(None, None, message), message["audit"])[0]
        kernel = self._judges_kernel(what, message["bytes"], buffer)
        kernel()  # its code is fetched, as a submission's is
        # A reader unmasks its buffer as a submission's runner does: how long that takes is part of being ready.
        key = bytes.fromhex(message["key"]) if message["key"] else None
        delivery = self._delivery(None if what == matmul.NAME else buffer, key, message)
        return self._timed(native.Call(kernel), _nothing, delivery, False)[0]

    def _as_many_copies(self) -> tuple[tuple[int, int, int], ...]:
        """Return copies of as many bytes as are copied behind a submission's call: the parent's clock runs until that
        is done.
        """
        total = sum(spec.get("most", spec["nbytes"]) for spec in self.opened["captures"] if spec["space"] == "device")
        part = min(total, COPIED_BYTES)
        if self.copied is None or self.copied.numel() < 2 * part:
            self.copied = None  # before the next one is made
            self.copied = torch.zeros(2 * part, dtype=torch.uint8, device=self.device)
        place = self.copied.data_ptr()
        return tuple((place + part, place, min(part, total - start)) for start in range(0, total, COPIED_BYTES))

    def _judges_kernel(self, what: str, nbytes: int, buffer: MappedBuffer) -> Callable[[], object]:
        """Return a call of the judge: the matrix product, or one of the plain readers over `nbytes`. Where the buffer
        is smaller, since weights are separate, the reader reads as many zeros.
        """
        if what == matmul.NAME:
            self.product = self.product or matmul.Product(self.device)
            return self.product
        config = self.opened["reads"][what]
        part = buffer.memory.get("device" if self.device == "cuda" else "host")
        if part is None or part.numel() < nbytes:
            if self.room is None or self.room.numel() < nbytes:
                self.room = None  # before the next one is made, and not kept by torch: other processes need the memory
                if self.device == "cuda":
                    torch.cuda.empty_cache()
                self.room = torch.zeros(-(-nbytes // 16) * 16, dtype=torch.uint8, device=self.device)
            part = self.room
        return lambda: native.read(part, nbytes, config)

    def _sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _kernels(artefact: build.Artefact) -> list[dict]:
    """What the compiler's report and, where nvdisasm is installed and reads it, the machine code say of each kernel."""
    found: dict[str, dict] = {}
    if artefact.target in build.ARCH:
        with contextlib.suppress(RuntimeError, OSError, subprocess.SubprocessError):  # the code is right without it
            found = cubins.instructions(artefact.path)
    return [vars(kernel) | cubins.named(found, kernel.name) for kernel in artefact.kernels()]


def _trace(profiler: torch.profiler.profile) -> str:
    """Return what the profiler saw as JSON for a viewer of traces; "" where that is too long for a reply."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        said = Path(file.name).read_text(errors="replace")
    return said if len(said) <= TRACE_LIMIT else ""


def _nothing(*_: object) -> None:
    pass


def _replace_common(folder: Path) -> None:
    """From now on the modules of problems.common that are imported are those in `folder`, of another commit. What this
    process and task.py hold already stays as it is.
    """
    for name in [name for name in sys.modules if name.startswith("problems.common.")]:
        del sys.modules[name]
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location("problems.common", init, submodule_search_locations=[str(folder)])
    if spec is None:
        raise ImportError(f"{init} is no Python source")
    package = sys.modules["problems.common"] = importlib.util.module_from_spec(spec)
    vars(sys.modules["problems"])["common"] = package  # an import looks for names there too


class _Supply:
    """Data over a buffer for many calls: one may change a list, an attribute or a gradient in it. values: the numbers,
    texts and objects in it, which come with the contents of its tensors; what was made ahead serves if they are still
    the same, else data is made within the call.
    """

    def __init__(self, build_data: Callable[[], Any], values: torch.Tensor | None) -> None:
        self.build_data, self.values = build_data, values
        self.made_of = self._present()
        self.made: list[Any] = []
        with contextlib.suppress(ValueError):  # nothing is in a new buffer yet
            self.made = [build_data() for _ in range(SUPPLY)]

    def _present(self) -> bytes:
        return b"" if self.values is None else _bytes(self.values)

    def take(self) -> Any:
        """Return the data of a call."""
        if not self.made or self._present() != self.made_of:
            self.made = [self.build_data()]
            self.made_of = self._present()
        return self.made.pop()


def _on_fresh(kernel: Callable) -> Callable:
    """Return `kernel` as a function of a supply."""
    return lambda supply: kernel(supply.take())


def _call(kernel: Callable[[], object]) -> object:
    return kernel()


def _bytes(values: torch.Tensor) -> bytes:
    return ctypes.string_at(values.data_ptr(), values.numel())


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    message, fds = wire.receive(sock)
    file = message["file"]
    try:
        runner = Runner(sock, message, fds)
    except BaseException as error:  # whatever a submission raises on import, SystemExit too, is its verdict, not ours
        wire.send(sock, failure.reply("import", error, file))
        return
    wire.send(sock, {"ready": True, "clock": runner.clock and runner.clock.name, **runner.changes()})
    handlers: dict[str, Callable] = {
        "open": runner.open,
        "hold": runner.hold,
        "trim": runner.trim,
        "warm": runner.warm,
        "call": runner.call,
        "batch": runner.batch,
        "profile": runner.profile,
        "compile": runner.compile,
        "sealed": runner.changes,
    }
    while True:
        try:
            message, fds = wire.receive(sock)
        except wire.WireError:
            return  # the parent is done with us
        try:
            reply = handlers[message["op"]](message, fds)
        except BaseException as error:  # SystemExit too: its line is worth more than an exit code
            reply = failure.reply(message["op"], error, file, runner.module)
        sys.stdout.flush()
        wire.send(sock, reply)
        gc.enable()


if __name__ == "__main__":
    main()
