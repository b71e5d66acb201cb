"""harness/tools/cpu_profile.py: where the time of a submission on a CPU is spent."""

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import run
from harness.problem import folders
from harness.tools import cpu_profile, profiling

LOG = """/work/x/cpu_a.cpp:7:19: optimized: loop vectorized using 16 byte vectors
/work/x/cpu_a.cpp:7:19: optimized: loop vectorized using 16 byte vectors
/usr/include/c++/12/bits/stl_algo.h:9:1: optimized: loop vectorized using 16 byte vectors
/work/x/cpu_a.cpp:9:2: warning: something else
"""


@pytest.fixture
def profiled(monkeypatch, capsys, tmp_path):
    """Profile a variant of nvfp4_gemv in its smallest benchmark. Return what is printed; files are in tmp_path/kept."""
    monkeypatch.setattr(cpu_profile, "SECONDS", 0.05)
    monkeypatch.setattr(profiling, "OUT", tmp_path / "kept")

    def profile(variant: str) -> str:
        arguments = ["--variant", variant, "--mode", "profile", "--device", "cpu", "--case", "m=7168 k=2048"]
        assert run.main(["nvfp4_gemv", *arguments]) == 0
        return capsys.readouterr().out

    return profile


def test_a_cpp_variant_shows_its_threads_and_the_vectorised_loops(profiled, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_profile, "shutil", SimpleNamespace(which=lambda _: None))
    said = profiled("cpu_portable")
    assert " calls in " in said and " s of processor time, " in said and "\n  thread " in said
    assert "no time by function: perf is not on PATH" in said
    assert "vectorised by g++:\n  cpu_" in said
    stem = tmp_path / "kept" / "nvfp4_gemv-cpu_portable-7168-2048-4"
    assert f"kept: {stem}.txt, {stem}.trace.json" in said
    digest = stem.with_suffix(".txt").read_text()
    assert (
        digest.startswith("nvfp4_gemv cpu_portable, m=7168 k=2048 l=4, 20") and "vectorised by g++:\n  cpu_" in digest
    )
    assert " calls in " in digest and json.loads(Path(f"{stem}.trace.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_perf_is_used_where_it_is_there_and_its_failure_is_said(profiled, monkeypatch, tmp_path):
    fake = tmp_path / "perf"
    fake.write_text("#!/bin/sh\necho 'Access to performance monitoring is limited.'\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "no time by function: perf failed: Access to performance monitoring is limited." in profiled("cpu_portable")


def test_the_report_of_perf_is_cut_to_what_took_most(monkeypatch, tmp_path):
    fake = tmp_path / "perf"
    line = "    {}0.50%  cpu_a.so      [.] (anonymous namespace)::rows  -      -\n"
    (tmp_path / "out").write_text("# a comment\n" + "".join(line.format(n) for n in range(20)))
    fake.write_text(f"#!/bin/sh\ncat {tmp_path}/out\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    head, *rows = cpu_profile.by_function(tmp_path / "perf.data", [])
    assert "perf" in head and len(rows) == cpu_profile.LINES
    assert rows[3].split() == ["30.50%", "cpu_a.so", "(anonymous", "namespace)::rows"]
    assert cpu_profile.by_function(tmp_path / "perf.data", ["no perf"]) == ["no perf"]


def test_processor_time_is_read_by_thread():
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    before = cpu_profile.threads(os.getpid())
    thread = threading.Thread(target=spin)
    thread.start()
    while cpu_profile.threads(os.getpid()).get(thread.native_id, ("", 0.0))[1] < 0.05:
        time.sleep(0.01)
    after = cpu_profile.threads(os.getpid())
    stop.set()
    thread.join()
    assert before[0][1] <= after[0][1] and thread.native_id not in before
    lines = cpu_profile.by_thread(before, after, 1.0, 3)
    assert lines[0].startswith("3 calls in 1.00 s: ")
    assert any(line.startswith(f"  thread {thread.native_id} ") for line in lines)


def test_threads_that_ended_are_in_the_sum():
    before = {0: ("a", 1.0), 7: ("a", 1.0)}
    after = {0: ("a", 4.0), 7: ("a", 2.0), 8: ("b", 0.5)}
    assert cpu_profile.by_thread(before, after, 2.0, 5) == [
        "5 calls in 2.00 s: 3.00 s of processor time, 1.50 processors busy",
        f"  thread 7 {'a':<16}    1.00 s   50%",
        f"  thread 8 {'b':<16}    0.50 s   25%",
        "  threads that ended               1.50 s   75%",
    ]


def test_loops_are_named_once_and_without_the_toolchains():
    assert cpu_profile.by_loop(LOG) == [
        "vectorised by g++:",
        "  cpu_a.cpp:7: loop vectorized using 16 byte vectors (2 times)",
    ]
    assert "no C++ source" in cpu_profile.by_loop("")[0]


@pytest.mark.parametrize("trace", ["", "{", "[]", "[" * 100_000, '{"traceEvents": 3}'])
def test_a_trace_that_is_none_is_not_kept(monkeypatch, tmp_path, trace):
    monkeypatch.setattr(profiling, "OUT", tmp_path)
    problem = folders.find("nvfp4_gemv")
    said = profiling.keep(problem, problem.variant("cpu_portable"), problem.tests[0], ["x"], trace)
    (kept,) = tmp_path.iterdir()
    assert kept.suffix == ".txt" and said.endswith("(no trace: it was too long, or is no JSON)")
