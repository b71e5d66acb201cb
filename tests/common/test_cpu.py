"""problems/common/cpu.py: what a launcher's status becomes, and that its function is compiled once."""

import ctypes
from pathlib import Path

import pytest

from problems.common import build, cpu

THREADS = """
#include "cpu_threads.h"
extern "C" int launch(int64_t threads, int64_t* seen) {
    return cpu::on_threads(threads, [&](int64_t i) { seen[i]++; });
}
"""
HEADER = build.COMMON / "cpu_threads.h"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (1, "this CPU lacks AVX2"),
        (2, "the system refused a thread"),
        (3, "the system refused memory"),
        (4, "an index is outside the pages"),
    ],
)
def test_a_status_is_an_error_that_names_the_variant(status, said):
    with pytest.raises(RuntimeError, match=f"^cpu_some: {said}$"):
        cpu.Launcher(Path("variants/cpu_some.cpp"), (), needs="AVX2").check(status)


def test_statuses_are_those_of_the_header():
    assert f"kNoInstructions = 1, kNoThreads = 2, kNoMemory = 3, kBadIndex = {cpu.BAD_INDEX} " in HEADER.read_text()
    cpu.Launcher(Path("cpu_some.cpp"), ()).check(0)


def test_the_function_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNEL_BUILD_DIR", str(tmp_path / "builds"))
    source = tmp_path / "cpu_some.cpp"
    source.write_text('extern "C" int launch(int status) { return status; }\n')
    launcher = cpu.Launcher(source, (ctypes.c_int,))
    assert launcher.function(3) == 3 and launcher.function is launcher.function


def test_every_thread_gets_one_number(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNEL_BUILD_DIR", str(tmp_path / "builds"))
    source = tmp_path / "cpu_some.cpp"
    source.write_text(THREADS)
    seen = (ctypes.c_int64 * 4)()
    launcher = cpu.Launcher(source, (ctypes.c_int64, ctypes.c_int64 * 4))
    assert launcher.function(4, seen) == 0 and list(seen) == [1, 1, 1, 1]
