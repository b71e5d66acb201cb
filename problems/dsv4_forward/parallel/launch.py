"""Start a process for each GPU of this host that shares a model, and meet in them. torchrun can start them as well."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from problems.dsv4_forward.layers import Exchange
from problems.dsv4_forward.parallel.exchange import LIMIT_S, SETUP_S, HostExchange, PeerLostError

PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of the environment, as torchrun sets it
HOST_LIMIT_S = 20.0
GRACE_S = LIMIT_S + 0.5  # for the others, when one has failed: to say whom they waited for


class Mine(NamedTuple):
    """This process's place among those that share a model. exchange: None for one alone."""

    gpus: int = 1
    rank: int = 0
    exchange: Exchange | None = None
    device: str = ""

    def meet(self) -> None:
        """Wait for the others, behind work that takes them unlike times: within a pass the exchange waits LIMIT_S only.
        PeerLostError: one did not come.
        """
        if self.exchange is None:
            return
        self.exchange.see()
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.rank} waited for the others ahead of a pass: {error}") from error


def started() -> bool:
    """Return whether this process is one of several."""
    return all(name in os.environ for name in PLACE)


def check(gpus: int, device: str) -> None:
    """Raise ValueError unless the machine has so many."""
    if gpus > 1 and device.startswith("cuda") and gpus > torch.cuda.device_count():
        raise ValueError(f"gpus must be at most those of this machine, {torch.cuda.device_count()}, got {gpus}")


def start(gpus: int, argv: Sequence[str]) -> int:
    """Run Python with `argv` in as many processes. Return 0, or the exit code of the first that failed; the others then
    end within GRACE_S, or are killed. On Ctrl-C, which they get too, likewise.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    threads = str(max(1, len(os.sched_getaffinity(0)) // gpus))
    shared = {"OMP_NUM_THREADS": threads, **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    running: list[subprocess.Popen] = []
    try:
        for rank in map(str, range(gpus)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(gpus)}
            running.append(subprocess.Popen([sys.executable, *argv], env=shared | place))
        while None in (codes := _codes(running)) and not any(codes):
            time.sleep(0.05)
        return next(filter(None, codes), 0)
    finally:
        until = time.monotonic() + GRACE_S
        while None in _codes(running) and time.monotonic() < until:
            time.sleep(0.05)
        for process in running:
            process.kill()
            process.wait()


def _codes(running: Sequence[subprocess.Popen]) -> list[int | None]:
    """The exit codes: None of one that runs, 128 more than the signal of one that a signal ended."""
    return [None if (code := process.poll()) is None else code if code >= 0 else 128 - code for process in running]


def joined(device: str, limit_s: float = LIMIT_S) -> Mine:
    """Meet the others, if this process is one of several; else return Mine() on `device`. limit_s: of the exchange; on
    a CPU, which may be busy, HOST_LIMIT_S at least.
    """
    if not started():
        return Mine(device=device)
    gpus, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if not device.startswith("cuda"):
        return Mine(gpus, rank, HostExchange.of_environment(max(limit_s, HOST_LIMIT_S)), device)
    from problems.dsv4_forward.parallel.gpu_exchange import GpuExchange

    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(place)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=SETUP_S), device_id=place)
    return Mine(gpus, rank, GpuExchange.of_group(limit_s=limit_s), str(place))
