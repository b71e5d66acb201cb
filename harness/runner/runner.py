"""The process that runs a submission: `python -m harness.runner.runner FD`, FD a connected socket
(harness/runner/wire.py). It imports the submission, makes one call at a time, and says what came back. It has no
reference, no expected value and no seed, decides nothing, and has no clock. On a CPU it waits for the judge's "go" and
says "done" (gate.cpp); on a GPU it records a call, which the player makes and times (recorder.py). Without a submission
it makes the judge's own calls on a CPU: the empty call and the plain readers.
"""

import contextlib
import ctypes
import gc
import io
import operator
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

from harness.runner import claims, failure, gate, objects, recorder, tree, wire
from harness.runner.buffers import Buffer, Page
from problems.common import build, cubins, load

TRACE_LIMIT = 2**20  # characters; the judge takes no more
SUPPLY = 24  # data of calls on one buffer that are made before the first one
WARMUPS = 3  # calls before the one that is recorded: they compile, load code, and find the sizes of scratch memory
LIBC = ctypes.CDLL(None)
AHEAD_CYCLES = 500_000  # that the GPU waits, ahead of a call that is timed here, while it is enqueued


class Runner:
    """A submission in this process, its buffers and weights. A public method handles the request of its name."""

    def __init__(self, sock: socket.socket, start: dict, fds: list[int]) -> None:
        self.sock = sock
        self.device: str = start["device"]
        self.folder, self.file = Path(start["folder"]), start["file"]
        self.task: ModuleType | None = None
        self.module: Any = None  # the submission; None: the judge's own calls
        self.buffers: list[Buffer] = []
        self.page: Page  # on a CPU, from the first `open` on
        self.opened: dict = {}
        self.held: Buffer | None = None  # the weights' memory
        self.room: torch.Tensor | None = None  # what plain readers read where the buffer is smaller
        self.weights: Any = None  # the weights in the data of a call, or what prepare made of them
        self.mapped: list[recorder.Mapped] = []  # on a GPU, the memory of the present call
        self.prepare_us: float | None = None
        self.flush: torch.Tensor | None = None  # what empties L2 ahead of a call that is timed here
        if start["records"]:
            recorder.prepare(start["records"])
            recorder.use_scratch(**start["scratch"], fd=fds.pop(0))
        gate.read_configs()  # loads the judge's code before the submission can replace it
        # What torch made on import stays, and to walk it takes a tenth of a second of every `trim`.
        gc.freeze()
        if start["file"]:
            if start["files"] is not None:  # a folder in GPU MODE's format
                load.bind(self.folder, {name: Path(path) for name, path in start["files"].items()})
                objects.define(start["definitions"])
            if "cpp_extension" in Path(start["file"]).read_text(errors="replace"):
                from harness.runner import extensions  # it imports setuptools, which takes a third of a second

                extensions.reuse_builds()
            if start["files"] is None:
                self.task = load.from_file(self.folder, self.folder / "task.py")
            elif "task.py" in start["files"]:
                self.task = load.bound("task")  # of whose classes the submission's own import is
            self.module = load.from_file(self.folder, Path(start["file"]))
            if start["records"]:  # what it imported stays too; of its calls nothing is there yet
                gc.freeze()
            kernel = getattr(self.module, "custom_kernel", None)
            if not callable(kernel) and not start["compile"]:
                other = "" if kernel is None else f": its custom_kernel is {type(kernel).__name__}, no function"
                if kernel is None and hasattr(self.module, "ModelNew"):
                    other = ": its ModelNew is KernelBench's, see docs/gpu_mode.md, KernelBench"
                raise AttributeError(f"it defines no custom_kernel(data), which the judge calls{other}")

    def open(self, message: dict, fds: list[int]) -> dict:
        """Map a case's buffers on a CPU, and the page that hands over calls."""
        for buffer in self.buffers:
            buffer.close()
        self.page = Page(fds.pop(0))
        self.opened = message
        if self.module is not None:
            objects.define(message["definitions"])
        nbytes = message["bytes"]
        self.buffers = [Buffer(nbytes, fds.pop(0) if nbytes else -1) for _ in range(message["count"])]
        return {}

    def hold(self, message: dict, fds: list[int]) -> dict:
        """Map a case's weights on a CPU, and let the submission prepare them if it defines `prepare`."""
        self.weights = None  # frees what was made of the previous weights
        if self.held is not None:
            self.held.close()
        # And out of torch's cache: a small tensor there would keep the whole of what a large one had.
        self.trim({}, [])
        self.held = Buffer(message["nbytes"], fds.pop(0))
        self.weights = tree.build(message["spec"], self.held.memory, self.task)
        if not hasattr(self.module, "prepare"):
            return {"prepared": False}
        self.weights = self.module.prepare(self.weights)
        return {"prepared": True}

    def trim(self, message: dict, _: list[int]) -> dict:
        """Free what no tensor holds, before memory is measured. heap: also what malloc keeps of freed memory."""
        gc.collect()
        if message.get("heap"):
            LIBC.malloc_trim(0)
        return {}

    def record(self, message: dict, fds: list[int]) -> dict:
        """Map a call's memory, prepare its weights, warm up, and record a call, or say why it cannot be recorded."""
        self.map_call(message, fds)
        for _ in range(WARMUPS):
            self._warm_up(message)
        gc.collect()
        prepared, data = {"prepare_us": self.prepare_us}, self._data(self.mapped[0])
        setup = getattr(self.module, "setup", None) if message["baseline"] else None
        try:
            recorded, files, result = recorder.record(self.module.custom_kernel, (data,), setup)
            if not message["ours"]:
                recorded["takes"], recorded["claims"] = self._takes(result, message)
        except Exception as error:
            reason = f"its call cannot be recorded: {failure.first_line('call', error, self.file or '', self.module)}"
            for _ in range(WARMUPS + 1):  # the runtime and libraries say later what failed while a call was recorded
                with contextlib.suppress(Exception):
                    torch.cuda._sleep(0)  # asks the runtime
                    self._warm_up(message)
            return {**prepared, "unrecorded": reason, "branches": isinstance(error, recorder.BranchesError)}
        if message["ours"]:
            recorded["claims"] = claims.forms(result, [self._leaf(data, i) for i in message["outputs"]])
        return {**prepared, **recorded, "fds": files}

    def _warm_up(self, message: dict) -> None:
        data = self._data(self.mapped[0])  # made anew: a folder's call may keep things in it, as in a dict of weights
        self.module.custom_kernel(data, *self._setup(data, message))
        torch.cuda.synchronize()

    def map_call(self, message: dict, fds: list[int]) -> dict:
        """Map a call's memory, to record or to `time` it, and let the submission prepare its weights."""
        for old in self.mapped:
            old.close()
        self.weights, self.opened, sizes = None, message, message["sizes"]
        self.trim({}, [])  # frees what was prepared for another call, also where it refers to itself
        parts = [(fds.pop(0) if sizes[name] else -1, sizes[name]) for name in ("inputs", "outputs")]
        self.mapped = [recorder.Mapped(parts, message["address"])]
        objects.define(message["definitions"])
        if message["split"]:
            self.mapped.append(recorder.Mapped([(fds.pop(0), sizes["weights"])], message["weights_address"]))
            self.weights = self._prepared(tree.build(message["weights"], self.mapped[1].memory, self.task))
        return {}

    def _prepared(self, weights: Any) -> Any:
        """Return what the submission makes of the weights, and note how long that takes."""
        self.prepare_us = None
        if not hasattr(self.module, "prepare"):
            return weights
        start = time.perf_counter()
        prepared = self.module.prepare(weights)
        torch.cuda.synchronize()
        self.prepare_us = 1e6 * (time.perf_counter() - start)
        return prepared

    def _takes(self, result: object, message: dict) -> tuple[list[dict], list[dict]]:
        """Return the copies that bring a folder's answer to the judge, and its claim. NotRecordedError: none can."""
        claim, parts = claims.told(result)
        takes = []
        for item, spec in zip(parts, message["captures"], strict=False):
            if not claims.is_plain(item) or not item.is_cuda or tree.extent(item) != item.numel():
                raise recorder.NotRecordedError("its answer is no tensor of the GPU, or has gaps")
            place = self.mapped[0].address + spec["offset"]
            takes.append({"to": place, "from": item.data_ptr(), "bytes": min(item.nbytes, spec["most"])})
        if len(tree.leaves(claim)) != len(parts):
            raise recorder.NotRecordedError("its answer has numbers or texts, which the host makes")
        return takes, [claim]

    def time(self, message: dict, _: list[int]) -> dict:
        """Make a call in this process, by events: its time can be forged by the submission."""
        if self.flush is None:
            self.flush = torch.empty(message["flush"], dtype=torch.uint8, device="cuda")
        data = self._data(self.mapped[0])
        state = self._setup(data, message)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.flush.fill_(1)
        torch.cuda.synchronize()
        gc.disable()
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        result = self.module.custom_kernel(data, *state)
        stop.record()
        torch.cuda.synchronize()
        if self.opened["ours"]:
            returned = claims.forms(result, [self._leaf(data, i) for i in self.opened["outputs"]])
        else:
            returned = claims.capture_any(result, self.opened["captures"], self.mapped[0].memory)
            torch.cuda.synchronize()
        return {"us": 1e3 * start.elapsed_time(stop), "claims": returned}

    def call(self, message: dict, _: list[int]) -> dict:
        """Make calls on a CPU, each on the judge's "go"; reply after the last. whats: the judge's own, per buffer."""
        if self.module is None:
            kernel = operator.call
            pairs = [(kind, buffer) for kind in message["whats"] for buffer in self.buffers]
            nbytes = message["bytes"]
            calls = tuple((self._judges_kernel(*pair, nbytes),) if pair[0] != "empty" else () for pair in pairs)
        else:
            kernel = operator.call if self._is_fresh(message) else self.module.custom_kernel
            calls = tuple(self._arguments(buffer, message) for buffer in self.buffers)
        noting = None
        if not self.opened["ours"]:
            kernel = noting = claims.Noting(kernel, self.page)
        gc.disable()
        wire.send(self.sock, {"ready": True})
        result = gate.bindings().take_turns(self.page.address, message["number"], kernel, calls)
        if self.module is None:
            return {"claims": []}
        if noting:
            forms = noting.said
        else:
            data = calls[gate.bindings().which(self.page.address)][0]
            forms = claims.forms(result, [self._leaf(data, i) for i in self.opened["outputs"]])
        return {"claims": forms}

    def profile(self, message: dict, _: list[int]) -> dict:
        data = self._data(self.mapped[0] if self.device == "cuda" else self.buffers[0])
        state, kinds = self._setup(data, message), torch.profiler.ProfilerActivity
        overwritten = [tree.raw(self._leaf(data, i)) for i in self.opened["inout"]]
        before = [tensor.clone() for tensor in overwritten]
        self.module.custom_kernel(data, *state)
        for tensor, content in zip(overwritten, before, strict=True):
            tensor.copy_(content)
        self._sync()
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA][: 1 + (self.device == "cuda")]) as profiler:
            self.module.custom_kernel(data, *state)
            self._sync()
        order = "cuda_time_total" if self.device == "cuda" else "cpu_time_total"
        return {"table": profiler.key_averages().table(sort_by=order, row_limit=20), "trace": _trace(profiler)}

    def compile(self, message: dict, _: list[int]) -> dict:
        if not callable(getattr(self.module, "compile_for", None)):
            raise AttributeError("it defines no compile_for(target), which the judge calls")
        artefacts = self.module.compile_for(message["target"])
        return {"artefacts": [{"bytes": a.path.stat().st_size, "kernels": _kernels(a)} for a in artefacts]}

    def _data(self, buffer: Buffer | recorder.Mapped) -> Any:
        """Return a call's data over a buffer, with the weights in their place where the problem has such."""
        values = tree.unpacked(self.opened.get("values"), buffer.memory)
        data = tree.build(self.opened["data"], buffer.memory, self.task, values)
        return data._replace(weights=self.weights) if self.opened["split"] else data

    def _arguments(self, buffer: Buffer, message: dict) -> tuple:
        """Return what a call on a CPU is made with: its data, or of a folder from elsewhere a call on its own."""
        if self._is_fresh(message):
            leaf = self.opened.get("values")
            values = tree.tensor(leaf, buffer.memory) if leaf else None
            return (_FreshCall(self.module.custom_kernel, lambda: self._data(buffer), values),)
        data = self._data(buffer)
        return data, *self._setup(data, message)

    def _is_fresh(self, message: dict) -> bool:
        """Return whether each call gets its data anew. A baseline has one, which it may see before its setup."""
        return not self.opened["ours"] and not message["baseline"]

    def _leaf(self, data: Any, index: int) -> torch.Tensor:
        return tree.tensors(data._replace(weights=None) if self.opened["split"] else data)[index]

    def _setup(self, data: Any, message: dict) -> tuple:
        return (self.module.setup(data),) if message["baseline"] and hasattr(self.module, "setup") else ()

    def _judges_kernel(self, kind: str, buffer: Buffer, nbytes: int) -> Callable[[], object]:
        """Return a plain reader over `nbytes`; of a smaller buffer, since weights are separate, over zeros."""
        config = self.opened["reads"][kind]
        part = buffer.memory
        if part.numel() < nbytes:
            if self.room is None or self.room.numel() < nbytes:
                self.room = None  # before the next one is made
                self.room = torch.zeros(-(-nbytes // 16) * 16, dtype=torch.uint8)
            part = self.room
        return lambda: gate.read(part, nbytes, config)

    def _sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _kernels(artefact: build.Artefact) -> list[dict]:
    """What the compiler's report and, where nvdisasm is installed and reads it, the machine code say of each kernel."""
    instructions: dict[str, dict] = {}
    if artefact.target in build.ARCH:
        with contextlib.suppress(RuntimeError, OSError, subprocess.SubprocessError):  # the code is right without it
            instructions = cubins.instructions(artefact.path)
    return [vars(kernel) | cubins.named(instructions, kernel.name) for kernel in artefact.kernels()]


def _trace(profiler: torch.profiler.profile) -> str:
    """Return what the profiler saw as JSON for a viewer of traces; "" where that is too long for a reply."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        trace = Path(file.name).read_text(errors="replace")
    return trace if len(trace) <= TRACE_LIMIT else ""


class _FreshCall:
    """A call on its own data. values: its numbers, texts and objects, with which data made ahead is used."""

    def __init__(self, kernel: Callable, build_data: Callable[[], Any], values: torch.Tensor | None) -> None:
        self.kernel, self.build_data, self.values = kernel, build_data, values
        self.made_of = self._present()
        self.made: list[Any] = []
        with contextlib.suppress(ValueError):  # nothing is in a new buffer yet
            self.made = [build_data() for _ in range(SUPPLY)]

    def _present(self) -> bytes:
        return b"" if self.values is None else ctypes.string_at(self.values.data_ptr(), self.values.numel())

    def __call__(self) -> object:
        if not self.made or self._present() != self.made_of:
            self.made = [self.build_data()]
            self.made_of = self._present()
        return self.kernel(self.made.pop())


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a submission prints is shown, also of one that crashes
    sock = socket.socket(fileno=int(sys.argv[1]))
    message, fds = wire.receive(sock)
    file = message["file"]
    try:
        runner = Runner(sock, message, fds)
    except BaseException as error:  # whatever a submission raises on import, SystemExit too, is its verdict, not ours
        wire.send(sock, failure.reply("import", error, file))
        return
    wire.send(sock, {"ready": True})

    def answer(message: dict, fds: list[int]) -> dict:
        try:
            reply: dict = getattr(runner, message["op"])(message, fds)
        except BaseException as error:  # SystemExit too: its line is worth more than an exit code
            reply = failure.reply(message["op"], error, file, runner.module)
        LIBC.fflush(None)  # what C code printed, before the process may be killed
        gc.enable()
        return reply

    wire.serve(sock, answer)


if __name__ == "__main__":
    main()
