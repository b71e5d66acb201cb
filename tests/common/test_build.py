"""problems/common/build.py: what is compiled when, what an error says, and that no build blocks a later one."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from ctypes import c_int
from pathlib import Path

import pytest

from problems.common import build
from tests.support.marks import first, needs_nvcc

ROOT = Path(build.__file__).resolve().parent.parent.parent
SOURCE = '#include "value.h"\nextern "C" int value() { return VALUE; }\n'
# Stands in for g++ on PATH: answers --version, else notes the call, waits as told and runs the real one.
COMPILER = """\
#!/bin/sh
if [ "$1" = --version ]; then exec {real} --version; fi
echo call >> {calls}
if [ -e {slow} ]; then : > {started}; sleep 60; fi
sleep {delay}
exec {real} "$@"
"""
# One build in a process of its own; prints what the built function returns.
BUILD = "import sys; from problems.common import build; print(build.cpp(sys.argv[1]).function('value')())"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a source, a counting compiler first on PATH, and a build directory; caches emptied around it."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("KERNEL_BUILD_DIR", str(tmp_path / "builds"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    use_compiler(tmp_path)
    (tmp_path / "value.h").write_text("#define VALUE 1\n")
    (tmp_path / "source.cpp").write_text(SOURCE)
    forget()
    yield tmp_path
    forget()


def use_compiler(place: Path, delay: float = 0) -> None:
    real = [folder for folder in os.environ["PATH"].split(":") if folder != str(place / "bin")]
    file, notes = place / "bin/g++", {name: place / name for name in ("calls", "slow", "started")}
    file.write_text(COMPILER.format(real=shutil.which("g++", path=":".join(real)), delay=delay, **notes))
    file.chmod(0o755)


def forget() -> None:
    """Empty the caches of this process, as a new process would find them."""
    build._build.cache_clear()
    build._version.cache_clear()


def calls(place: Path) -> int:
    return len((place / "calls").read_text().splitlines()) if (place / "calls").exists() else 0


def value(place: Path) -> int:
    forget()
    return build.cpp(place / "source.cpp").function("value")()


def test_a_second_build_runs_no_compiler_and_source_header_flags_and_compiler_are_all_part_of_its_key(place):
    for _ in range(2):
        assert (value(place), calls(place)) == (1, 1)
    first = build.cpp(place / "source.cpp")
    assert first is build.cpp(place / "source.cpp") and first.target == "cpu"
    (place / "value.h").write_text('#include "deeper.h"\n')
    for count in (2, 3):
        (place / "deeper.h").write_text(f"#define VALUE {count}\n")
        assert (value(place), calls(place)) == (count, count)
    (place / "source.cpp").write_text(SOURCE.replace("VALUE;", "VALUE + 10;"))
    assert (value(place), calls(place)) == (13, 4)
    build.cpp(place / "source.cpp", flags=("-DOTHER",))
    assert calls(place) == 5
    (place / "source.cpp").write_text(SOURCE)
    (place / "value.h").write_text("#define VALUE 1\n")
    assert (value(place), calls(place)) == (1, 5), "the first build is still there"
    compiler = place / "bin/g++"
    compiler.write_text(compiler.read_text().replace("exec", 'echo "another compiler"; exec', 1))
    assert (value(place), calls(place)) == (1, 6)


def test_a_header_of_problems_common_needs_no_path_and_is_part_of_the_key(place, monkeypatch):
    monkeypatch.setattr(build, "COMMON", place / "common")
    (place / "common").mkdir()
    (place / "value.h").rename(place / "common/value.h")
    assert (value(place), calls(place)) == (1, 1)
    (place / "common/value.h").write_text("#define VALUE 5\n")
    assert (value(place), calls(place)) == (5, 2)


@needs_nvcc
def test_an_error_of_nvcc_names_file_and_line(place):
    (place / "kernel.cu").write_text("__global__ void f() {\n  nonsense;\n}\n")
    with pytest.raises(build.BuildError, match=r"kernel\.cu\(2\): error: identifier \"nonsense\" is undefined"):
        build.cuda(place / "kernel.cu", "sm90")


def test_a_header_of_the_compiler_may_stand_in_quotes_and_a_missing_one_is_named_with_its_line(place):
    (place / "source.cpp").write_text('#include "cstdint"\nextern "C" int32_t value() { return 3; }\n')
    assert value(place) == 3
    (place / "source.cpp").write_text('\n#include "absent.h"\nextern "C" int value() { return 1; }\n')
    with pytest.raises(build.BuildError, match=r"source\.cpp:2:10: fatal error: absent\.h: No such file"):
        value(place)


ELSEWHERE = {
    "an absolute path": '#include "{outside}/secret.h"',
    "a path that leads out": '#include "../outside/secret.h"',
    "one that is switched off": '#if 0\n#include "../outside/secret.h"\n#endif',
    "a link": '#include "link.h"',
    "a link to itself": '#include "loop.h"',
    "a Python file": '#include "reference.py"',
    "a pipe": '#include "pipe.h"',
    "a folder": '#include "below"',
    "nothing": '#include "absent.h"',
    "a device": '#include "/dev/zero"',
    "a null byte": '#include "value\0.h"',
    "no text": b'#include "\xff\xfe.h"',
    "a long name": '#include "' + "x" * 2**20 + '.h"',
    "a line that does not end": '#include "value.h',
    "a long line": "#" + " " * 2**20,
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_an_include_that_leads_elsewhere_is_the_compilers(tmp_path, what):
    """It is neither read nor copied, whatever it names, and whatever stands in the file."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for path in (folder / "below", outside):
        path.mkdir(parents=True)
    for path in (outside / "secret.h", folder / "value.h", folder / "reference.py"):
        path.write_text("// x\n")
    for link, to in (("link.h", outside / "secret.h"), ("loop.h", "loop.h")):
        (folder / link).symlink_to(to)
    os.mkfifo(folder / "pipe.h")
    text = ELSEWHERE[what]
    text = text if isinstance(text, bytes) else text.replace("{outside}", str(outside)).encode()
    (folder / "a.cu").write_bytes(text + b'\n#include "b.cuh"\n')
    (folder / "b.cuh").write_text("")
    assert build.closure(folder / "a.cu") == [folder / "a.cu", folder / "b.cuh"]


def test_a_header_below_the_folder_counts_and_finds_its_way_back(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "a.cu").write_text('  #  include "below/b.cuh"\n#include <cstdint>\n#include "ptx.cuh"\n')
    (tmp_path / "below" / "b.cuh").write_text('#include "../c.inc"\n#include "../a.cu"\n')
    (tmp_path / "c.inc").write_text("")
    seen = build.closure(tmp_path / "a.cu")
    assert set(seen) == {tmp_path / name for name in ("a.cu", "below/b.cuh", "c.inc")} | {build.COMMON / "ptx.cuh"}


def test_a_source_at_the_top_of_the_repository_takes_nothing_below_it(tmp_path, monkeypatch):
    """Nor does one in a folder above it, a home folder, say."""
    repository = tmp_path / "repository"
    monkeypatch.setattr(build, "COMMON", repository / "problems" / "common")
    for name in ("problems/common/fine.h", "problems/gemv/wrong/no.h", "harness/runner/judge.cu", "a.h"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text("")
    named = ("{}problems/gemv/wrong/no.h", "{}harness/runner/judge.cu", "fine.h", "a.h")
    text = "".join(f'#include "{name}"\n' for name in named)
    (repository / "a.cu").write_text(text.format("", ""))
    (tmp_path / "b.cu").write_text(text.format("repository/", "repository/"))
    assert [path.name for path in build.closure(repository / "a.cu")] == ["a.cu", "a.h", "fine.h"]
    assert [path.name for path in build.closure(tmp_path / "b.cu")] == ["b.cu", "fine.h"]


def test_what_is_no_plain_source_is_refused_by_name(tmp_path, monkeypatch):
    """A pipe would be waited for, a device never ends, a link leads elsewhere."""
    (tmp_path / "folder.cu").mkdir()
    os.mkfifo(tmp_path / "pipe.cu")
    (tmp_path / "real.cu").write_text("")
    (tmp_path / "link.cu").symlink_to("real.cu")
    (tmp_path / "linked").symlink_to(tmp_path)
    with open(tmp_path / "huge.cu", "w") as huge:
        huge.truncate(10 * 2**30)
    said = dict.fromkeys(("folder.cu", "pipe.cu", "link.cu", "/dev/zero"), "plain file")
    said |= {"absent.cu": "No such", "linked/real.cu": "symbolic", "huge.cu": "4 MiB", "nul\0.cu": "cannot be read"}
    for name, words in said.items():
        with pytest.raises(build.BuildError, match=words) as caught:
            build.read(tmp_path / name)
        assert name in str(caught.value)
    # As if it had been a plain file when it was looked at, and became another one then.
    plain = os.lstat(tmp_path / "real.cu")
    monkeypatch.setattr(build.os, "lstat", lambda path: plain)
    for name in ("pipe.cu", "link.cu"):
        with pytest.raises(build.BuildError, match=name):
            build.read(tmp_path / name)


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [("CLOSURE_LIMIT", 30, "30 bytes"), ("CLOSURE_FILES", 2, "2 files"), ("INCLUDES", 2, "2 i")],
)
def test_too_much_of_a_source_is_refused(tmp_path, monkeypatch, limit, value, said):
    (tmp_path / "a.cu").write_text('#include "b.h"\n#include "c.h"\n')
    (tmp_path / "b.h").write_text('#include "c.h"\n')
    (tmp_path / "c.h").write_text("")
    assert len(build.closure(tmp_path / "a.cu")) == 3
    monkeypatch.setattr(build, limit, value)
    with pytest.raises(build.BuildError, match=said):
        build.closure(tmp_path / "a.cu")


def test_a_compiler_error_reaches_the_user_whole(place):
    body = "\n".join(f"int wrong_{i} = undeclared_{i};" for i in range(300))
    (place / "source.cpp").write_text(body)
    with pytest.raises(build.BuildError) as caught:
        value(place)
    message = str(caught.value)
    assert message.startswith("g++ ") and "exit status 1" in message
    assert all(f"undeclared_{i}" in message for i in range(300))
    assert not list((place / "builds").glob("*/*.so"))
    (place / "source.cpp").write_text(SOURCE)
    assert value(place) == 1, "a failed build stands in the way"


def test_a_missing_compiler_and_an_unknown_target_are_one_clear_line(place, monkeypatch):
    with pytest.raises(ValueError, match=r"target must be one of \['sm100', 'sm90'\], got 'sm80'"):
        build.cuda(place / "source.cpp", "sm80")
    monkeypatch.setenv("PATH", str(place / "nowhere"))
    with pytest.raises(build.BuildError, match=r"^g\+\+ is not on PATH: install g\+\+$"):
        build.cpp(place / "source.cpp")
    with pytest.raises(build.BuildError, match=r"^nvcc is not on PATH: install the CUDA toolkit$"):
        build.cuda(place / "source.cpp", "sm90")


def test_arguments_are_those_declared_and_a_missing_function_is_named(place):
    (place / "source.cpp").write_text('extern "C" int add(int x, int y) { return x + y; }\n')
    built = build.cpp(place / "source.cpp")
    assert built.function("add", c_int, c_int)(2, -5) == -3
    with pytest.raises(AttributeError, match="absent"):
        built.function("absent")


def test_a_killed_build_does_not_block_the_next(place):
    (place / "slow").touch()
    builder = subprocess.Popen([sys.executable, "-c", BUILD, place / "source.cpp"], cwd=ROOT, start_new_session=True)
    try:
        end = time.monotonic() + 30
        while not (place / "started").exists():
            assert time.monotonic() < end, "the child did not come so far"
            time.sleep(0.05)
        builder.send_signal(signal.SIGKILL)  # its compiler lives on: it must not hold the lock
        builder.wait(60)
        (place / "slow").unlink()
        start = time.monotonic()
        assert value(place) == 1 and time.monotonic() - start < 20
    finally:
        os.killpg(builder.pid, signal.SIGKILL)


def test_concurrent_builds_compile_once(place):
    use_compiler(place, delay=1.5)
    command = [sys.executable, "-c", BUILD, place / "source.cpp"]
    builders = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
    assert [builder.communicate(timeout=60)[0] for builder in builders] == [b"1\n"] * 3
    assert calls(place) == 1 and not list((place / "builds").glob("tmp-*"))


# A header of the toolchain may stand in quotes.
KERNEL = """\
#include "cuda_fp16.h"
__device__ __noinline__ float helper(float x) { return x * x + 1; }
__global__ void scale(float* x, float a) {
    __shared__ float tile[64];
    tile[threadIdx.x] = helper(x[threadIdx.x]);
    __syncthreads();
    x[threadIdx.x] = a * tile[63 - threadIdx.x];
}
__global__ void other(float* x) { x[0] = __half2float(half(1)); }
extern "C" int launch(float* x) { scale<<<1, 64>>>(x, 2); other<<<1, 1>>>(x); return cudaGetLastError(); }
"""


@needs_nvcc
@pytest.mark.parametrize(("target", "arch"), first(sorted(build.ARCH.items(), reverse=True)))
def test_a_kernel_compiles_for_each_target_without_a_gpu(place, target, arch):
    source = place / "kernel.cu"
    source.write_text(KERNEL)
    artefact = build.cuda(source, target)
    assert build.closure(source) == [source]
    assert artefact.path.is_file() and artefact.target == target and arch in artefact.log
    kernels = {"scale" if "scale" in kernel.name else "other": kernel for kernel in artefact.kernels()}
    assert set(kernels) == {"scale", "other"} and len(artefact.kernels()) == 2
    assert all(kernel.registers > 0 and kernel.spill_bytes == 0 for kernel in kernels.values())
    assert (kernels["scale"].shared_bytes, kernels["other"].shared_bytes) == (256, 0)


PTXAS = textwrap.dedent("""\
    ptxas info    : 0 bytes gmem
    ptxas info    : Compiling entry function '_Z1av' for 'sm_90a'
    ptxas info    : Function properties for _Z1av
        0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info    : Used 24 registers, used 1 barriers, 1024 bytes smem
    ptxas info    : Function properties for _Z6helperf
        40 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
    ptxas info    : Compiling entry function '_Z1bv' for 'sm_90a'
    ptxas info    : Function properties for _Z1bv
        32 bytes stack frame, 104 bytes spill stores, 90 bytes spill loads
    ptxas info    : Used 168 registers, used 0 barriers, 32 bytes cumulative stack size
    """)


def test_resources_are_read_from_the_report_of_ptxas():
    kernels = build.Artefact(Path("x.so"), "sm90", PTXAS).kernels()
    assert kernels == [build.Kernel("_Z1av", 24, 0, 0, 1024), build.Kernel("_Z1bv", 168, 32, 104 + 90, 0)]


def test_a_wheels_shared_object_needs_no_compiler_until_its_source_changes(place, monkeypatch):
    made = build.cpp(place / "source.cpp")
    monkeypatch.setattr(build, "PREBUILT", place)
    shutil.copy(made.path, build.prebuilt(place / "source.cpp", "cpu", build.CPP_FLAGS))
    forget()
    monkeypatch.setenv("PATH", str(place / "none"))
    assert build.cpp(place / "source.cpp").function("value")() == 1
    (place / "value.h").write_text("#define VALUE 2\n")
    forget()
    with pytest.raises(build.BuildError, match=r"g\+\+ is not on PATH"):
        build.cpp(place / "source.cpp")
