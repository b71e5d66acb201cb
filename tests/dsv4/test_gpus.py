"""Commands for several GPUs, here processes of a CPU: what they print, and what the check names."""

import os
import subprocess
import sys

import pytest
import torch

from problems.dsv4_forward import check, passes
from problems.dsv4_forward.generate import generate
from problems.dsv4_forward.parallel import exchange, launch
from problems.dsv4_forward.weights import partition, tree
from tests.dsv4.test_parallel import FOUR, SMALL


def test_two_processes_generate_what_one_does(capsys):
    words = ["--device=cpu", "--format=fp32", "--tokens=5", "--prompt=3,1,2"]
    assert generate.main(words) == 0
    argv = [sys.executable, generate.__file__, *words, "--gpus=2"]
    two = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert two.returncode == 0, two.stderr
    assert two.stdout == capsys.readouterr().out and two.stdout.count(",") == 4 and two.stderr.count("memory:") == 1


def test_the_first_that_fails_gives_the_exit_code_and_ends_the_others(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, time\ntime.sleep(30 * (os.environ['RANK'] != '1'))\nraise SystemExit(7)\n")
    assert launch.start(3, [str(script)]) == 7


# --- what is planted in one process; run by this file as a command: FAULT


class Late(exchange.HostExchange):
    """In the fourth exchange it gives what came in the third."""

    said: list[torch.Tensor] = []  # noqa: RUF012

    def add(self, part, place):
        came = super().add(part, place)
        if self.said and len(self.said) % 8 == 3 and self.said[-1].shape == came.shape:
            came = self.said[-1]
        self.said.append(came)
        return came


class Backwards(exchange.HostExchange):
    def _all(self, part, place):
        return super()._all(part, place)[::-1]

    def join(self, part, place):
        return torch.cat(super()._all(part, place), dim=-1)


def wrong_shard(name, tensor, gpus, rank, right=partition.part):
    return right(name, tensor, gpus, 0 if name == "layers.2.attn.wo_b.weight" else rank)


def main(fault, gpus):
    if os.environ["RANK"] == "1":
        launch.HostExchange = {"late": Late, "backwards": Backwards}.get(fault, exchange.HostExchange)
        partition.part = wrong_shard if fault == "shard" else partition.part
    mine = launch.joined("cpu")
    cfg = FOUR if gpus == "4" else SMALL
    torch.set_num_threads(1)
    exchange.LEAST_OWN = 8
    prompts = [[5, 9, 2] * 12, [1, 2, 3, 4]]
    case = passes.Case(cfg, "fp32", tree.random(cfg, "fp32", seed=5), prompts, 1, "cpu")
    right = check.check(case, "reference", "cpu", mine=mine)
    return int(not right)


@pytest.mark.parametrize(
    ("fault", "gpus", "named"),
    [
        pytest.param("none", 2, "right", marks=pytest.mark.slow),
        ("shard", 2, "alone: copies after layers.2 are off by"),
        pytest.param("late", 2, "bits: the copies before layers.1 are others on rank 1", marks=pytest.mark.slow),
        pytest.param("backwards", 4, "are others on rank 1 than on rank 0", marks=pytest.mark.slow),
    ],
)
def test_the_check_names_what_is_wrong_on_one_of_the_gpus(fault, gpus, named, capfd):
    code = launch.start(gpus, ["-m", __name__, fault, str(gpus)])
    said = capfd.readouterr().out
    assert named in said and code == (named != "right"), said


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
