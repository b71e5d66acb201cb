"""--ray ADDRESS: one job for each problem and variant on a Ray cluster, each with one GPU, or a node's processors.

A job gets the files that git knows, and returns the records that it made; these are appended here as soon as it is
done, each once. A job whose node is lost runs again elsewhere. docs/remote.md has the details.
"""

from __future__ import annotations

import argparse
import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from harness.problem import folders
from harness.problem.folders import UsageError
from harness.results import output, record, text
from harness.tools import on_node, remote

NAME = "harness/run.py"
OUT = remote.ROOT / "leaderboard" / "out" / "ray"  # /RUN/: the whole output of each job
RETRIES = 4  # of a job whose node, or whose process there, is lost
SAY_S = 60.0  # between two lines while nothing ends
LOST_EXIT = 2
GRAVEST = (2, 3, 4, 5, 1, 6, 7, 0)  # exit codes, as harness/judge/verdict.py ranks verdicts
# What Ray calls a GPU -> the target of its architecture.
TARGETS = {"H100": "sm90", "H200": "sm90", "H20": "sm90", "GH200": "sm90", "B200": "sm100", "GB200": "sm100"}
_LABEL = "accelerator_type:"


@dataclass(frozen=True)
class Job:
    """One problem and one variant. words: arguments of harness/run.py; outside: files to send besides the checkout's;
    targets: what the variant is made for, () where that is not known.
    """

    name: str
    words: list[str]
    outside: list[Path]
    targets: tuple[str, ...] = ()


def run(args: argparse.Namespace, further: list[str], defaults: argparse.Namespace, stdout: TextIO) -> int:
    """Run the jobs that `args` names on the cluster at args.ray. Return the exit code of the gravest one.

    UsageError: no Ray here, no cluster there, or options that do not go together.
    """
    _see_options(args)
    ray = _connected(args.ray)
    try:
        device = args.device or ("cuda" if ray.cluster_resources().get("GPU") else "cpu")
        jobs = list(jobs_of(args, further, defaults, device))
        return _Cluster(ray, device, args, stdout).run(jobs)
    finally:
        ray.shutdown()


def _see_options(args: argparse.Namespace) -> None:
    odd = [f"--{name}" for name in ("resume", "events", "on", "shard") if getattr(args, name) is not None]
    if odd:
        raise UsageError(f"{output.apart('--ray', odd)}; each job is a whole run on a node")
    if args.device not in (None, "cpu", "cuda"):
        raise UsageError(f"--ray: --device must be cpu or cuda, got {args.device!r}: Ray chooses the GPU")


def _connected(address: str) -> Any:
    """Return the module ray, connected. UsageError: it is not installed, or no cluster answers."""
    try:
        import ray
    except ImportError:
        raise UsageError("--ray needs the Python package ray: run `make setup-system`") from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=True)
    except Exception as error:  # Ray has no common class for what may go wrong here
        said = text.line(error, 300)
        raise UsageError(
            f"--ray: no cluster at {address!r}: {said} (`ray status` shows one; auto is this node's)"
        ) from None
    return ray


def jobs_of(args: argparse.Namespace, further: list[str], defaults: argparse.Namespace, device: str) -> Iterator[Job]:
    """Yield a job for each problem of args.problem (names with commas between) and each variant that is asked for.

    With --all these are all variants, but for those that are for no such device.
    """
    for problem in args.problem.split(","):
        one = argparse.Namespace(**{**vars(args), "problem": problem, "all": False, "ray": None, "device": device})
        for name, targets in _variants(args, problem, device):
            one.variant = name or one.variant
            words, outside = remote.words_of(one, further, defaults, set(remote.known_files()))
            said = one.variant or (Path(one.submission).stem if one.submission else "winner")
            yield Job(f"{problem} {said}", words, outside, targets)


def _variants(args: argparse.Namespace, problem: str, device: str) -> Sequence[tuple[str | None, tuple[str, ...]]]:
    """Return (name, targets) of each variant; None is what `args` names already."""
    if not args.all:
        return [(None, ())]
    folder = folders.place(problem)
    found = [(name, targets) for name, targets, _ in folders.listing(folder)]
    kept = [(name, targets) for name, targets in found if any((t == "cpu") == (device == "cpu") for t in targets)]
    if not kept:
        raise UsageError(f"--ray --all: {problem} has no variant for {device}")
    return kept


def pack(known: list[str], outside: list[Path]) -> bytes:
    """Return an archive: tree/ with the checkout's files and records, sent/ with others by their absolute path."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name in known:
            archive.add(remote.ROOT / name, f"tree/{name}", recursive=False)
        for name in remote.records():
            archive.add(record.RESULTS / name, f"tree/{on_node.RESULTS}/{name}", recursive=False)
        for path in dict.fromkeys(outside):
            archive.add(path, f"sent{path}", recursive=False)
    return buffer.getvalue()


class _Cluster:
    """The jobs of one command on a cluster."""

    def __init__(self, ray: Any, device: str, args: argparse.Namespace, stdout: TextIO) -> None:
        self.ray, self.device, self.args, self.stdout = ray, device, args, stdout
        self.out = OUT / record.new_run_id()
        self.json: list[bytes] = []

    def run(self, jobs: list[Job]) -> int:
        ray, env = self.ray, remote.commit()
        ray.cloudpickle.register_pickle_by_value(on_node)
        files = ray.put(pack(remote.known_files(), [path for job in jobs for path in job.outside]))
        codes: list[int] = []
        pending: dict[Any, Job] = {}
        for job in jobs:
            resources = self._resources(job)
            if resources is None:
                output.say(f"{job.name}: not run: no GPU of the cluster is for {', '.join(job.targets)}")
                continue
            # Lost nodes and killed processes are tried again; what the job itself raises is not.
            remote_job = ray.remote(on_node.job).options(
                max_retries=RETRIES, retry_exceptions=False, scheduling_strategy="SPREAD", **resources
            )
            pending[remote_job.remote(files, job.words, env)] = job
        total = len(pending)
        output.say(f"{total} jobs on {self._nodes()}; their whole output comes to {self.out.relative_to(remote.ROOT)}")
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=SAY_S)
            if not done:
                output.say(f"{len(pending)} of {total} jobs are not done; {self._nodes()}")
            for one in done:
                codes.append(self._take(pending.pop(one), one, f"[{total - len(pending)}/{total}]"))
        self._write_json()
        return min(codes, key=GRAVEST.index) if codes else 7

    def _resources(self, job: Job) -> dict[str, Any] | None:
        """Return what a job asks of a node; None: no node has it."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if self.device == "cpu":
            # All processors of a node, since a variant uses all; of the smallest node, so that every node can serve.
            return {"num_cpus": max(1, int(min(have["CPU"] for have in nodes if have.get("CPU"))))}
        kinds = {name.removeprefix(_LABEL) for have in nodes for name in have if name.startswith(_LABEL)}
        fitting = sorted(kind for kind in kinds if TARGETS.get(kind) in job.targets)
        if not job.targets or not kinds or kinds - set(TARGETS):
            return {"num_gpus": 1}  # the run there says whether its GPU will do
        return {"num_gpus": 1, "resources": {_LABEL + fitting[0]: 0.001}} if fitting else None

    def _nodes(self) -> str:
        have = self.ray.cluster_resources()
        count = sum(node["Alive"] for node in self.ray.nodes())
        return f"{count} nodes with {have.get('CPU', 0):g} processors and {have.get('GPU', 0):g} GPUs"

    def _take(self, job: Job, reference: Any, number: str) -> int:
        """Append the records of a finished job, and show its output. Return its exit code."""
        try:
            found = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            said = text.line(text.first_line(str(error), 300) or type(error).__name__, 300)
            output.complain(f"{NAME}: {number} {job.name}: lost after {RETRIES + 1} attempts: {said}")
            return LOST_EXIT
        added = sum(remote.bring(name, data) for name, data in found["records"].items())
        self.json.append(found["json"])
        log = self.out / f"{text.line(job.name).replace(' ', '-').replace('/', '_')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(found["log"], encoding="utf-8")
        code = found["code"] if found["code"] in GRAVEST else LOST_EXIT
        output.say(f"{number} {job.name} on {found['node']}: exit code {found['code']}, {added} new runs")
        last = found["log"].splitlines()[-4:] if code else found["log"].splitlines()[-2:]
        output.say("\n".join(f"    {text.line(line)}" for line in last))
        return code

    def _write_json(self) -> None:
        said = b"".join(self.json).decode(errors="replace")
        if self.args.json == "-":
            output.say(said, self.stdout)
        elif self.args.json:
            output.write_whole(Path(self.args.json), said)
