"""`python -m harness cluster ADDRESS`: a job for each problem and variant on a Ray cluster.

A job has one GPU, or a node's processors. It gets the files of this checkout, and returns the file of its run, which is
written here as soon as the job ends. Nothing is kept of a job whose node or process is lost: it runs again elsewhere.
"""

import ctypes
import dataclasses
import functools
import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, TextIO

from harness.judge import options
from harness.judge.options import Options
from harness.problem import folders
from harness.problem.folders import UsageError
from harness.results import output, text
from harness.tools import remote
from harness.tools.remote import ROOT, RUNS, TREE, Request

RETRIES = 4  # of a job whose node, or whose process there, is lost
GRAVEST = (2, 3, 4, 5, 1, 6, 7, 0)  # exit codes, as harness/judge/verdict.py ranks verdicts


def run(address: str, args: Options, stdout: TextIO) -> int:
    """Run the jobs of `args`. Return the gravest exit code. stdout: of --json -. UsageError: no Ray, no cluster."""
    for problem in str(args.problem).split(","):
        options.see(dataclasses.replace(args, problem=problem))
    try:
        import ray

        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except ImportError:
        raise UsageError("cluster needs the Python package ray: run `make setup-system`") from None
    except Exception as error:  # Ray has no common class for what may go wrong here
        raise UsageError(f"no cluster at {address!r}: {text.line(error, 300)} (local starts one)") from None
    codes, lines = [], []
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        if not nodes:
            raise UsageError(f"cluster: no worker with processors has joined {address!r} yet: try again when one has")
        device = args.device or ("cuda" if any(node.get("GPU") for node in nodes) else "cpu")
        # All processors of a node, since a variant uses all; of the smallest node, so that every node can serve.
        smallest = min(int(node["CPU"]) for node in nodes)
        resources = {"num_gpus": 1} if device.startswith("cuda") else {"num_cpus": smallest}
        jobs = _jobs(args, device)
        if not jobs:
            raise UsageError(f"--all: {args.problem} has no variant for {device}")
        with remote.copied(path for request in jobs.values() for path in request.files) as copy:
            packed = subprocess.run(["tar", "-C", copy, "-cz", "."], check=True, capture_output=True).stdout
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the nodes have no such module
        judge = ray.remote(_judge).options(max_retries=RETRIES, scheduling_strategy="SPREAD", **resources)
        files, env = ray.put(packed), remote.commit()
        pending = {judge.remote(files, request.arguments, env): name for name, request in jobs.items()}
        output.say(f"{len(jobs)} jobs on {len(nodes)} nodes")
        while pending:
            (reference,), _ = ray.wait(list(pending), num_returns=1)
            name = pending.pop(reference)
            result: dict[str, Any] = {"code": output.USAGE_EXIT, "json": "", "runs": {}}
            try:
                result = ray.get(reference)
            except ray.exceptions.RayError as error:
                result["log"] = f"lost after {RETRIES + 1} attempts: {text.line(error, 300)}"
            for path, content in result["runs"].items():
                (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
                (ROOT / path).write_bytes(content)
            output.say(f"{name}:\n{text.clean(result['log'])}")
            codes.append(result["code"] if result["code"] in GRAVEST else output.USAGE_EXIT)
            lines.append(result["json"])
    finally:
        ray.shutdown()
    if args.json:
        output.deliver(args.json, "".join(lines), stdout)
    # Of --all, a variant for other machines does not count.
    return min((code for code in codes if code != 7 or not args.all), key=GRAVEST.index, default=7)


def _jobs(args: Options, device: str) -> dict[str, Request]:
    """Return a request for each problem of args.problem and variant, by a name; with --all, all for the device."""
    jobs, targets = {}, {"cpu"} if device == "cpu" else {"sm90", "sm100"}
    for problem in args.problem.split(","):
        variants = [args.variant]
        if args.all:
            variants = [name for name, of, _ in folders.listing(folders.place(problem)) if targets & {*of}]
        for variant in variants:
            name = f"{problem} {variant or ' '.join(args.submission or ['winner'])}"
            chosen = dataclasses.replace(args, problem=problem, variant=variant, all=False, device=device)
            jobs[name] = remote.request(chosen)
    return jobs


def _judge(packed: bytes, arguments: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Run harness/run.py on a node, in a copy of the checkout. packed: its archive; env: more of its environment.
    Return {"code", "log", "json": lines of --json, "runs": {path: content} of runs' files}. Ray sends this function by
    value, so it uses the standard library only.
    """
    with tempfile.TemporaryDirectory(prefix="kernel-job-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        tree, out = Path(folder, TREE), Path(folder, "job", "json")
        out.parent.mkdir()
        sent = {*tree.glob(RUNS)}
        # What compiles once serves the next job of this node too. Ray sets OMP_NUM_THREADS.
        env = {"KERNEL_BUILD_DIR": str(Path.home() / ".cache" / "dsv4-kernels" / "build"), **os.environ, **env}
        env.pop("OMP_NUM_THREADS", None)
        die_with_parent = functools.partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL, 0, 0, 0)
        command = [sys.executable, "harness/run.py", *arguments]
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        done = subprocess.run(command, cwd=tree, env=env, stdout=pipe, stderr=both, preexec_fn=die_with_parent)
        return {
            "code": done.returncode,
            "log": done.stdout.decode(errors="replace"),
            "json": out.read_text() if out.is_file() else "",
            "runs": {str(path.relative_to(tree)): path.read_bytes() for path in {*tree.glob(RUNS)} - sent},
        }
