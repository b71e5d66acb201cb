"""A runner's private folder: what is in it and what is not, what is kept of it, and that nothing else stays."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness.problem import folders
from harness.sandbox import policy, process, workdir
from harness.sandbox.process import Child
from harness.sandbox.workdir import CacheError, Workdir
from problems.common import build
from tests.harness.conftest import CPU, GEMV
from tests.support import SUPPORT, comes, copy_of, warm, write_files
from tests.support.marks import first, needs_nvcc

ROOT = process.ROOT
GPU_MODE = folders.find(str(SUPPORT / "gpu_mode" / "vectoradd"))
LIMIT_S = 120
START = {"device": "cpu", "files": None, "compile": False, "definitions": {}, "records": ""}


@pytest.fixture
def box(make):
    return make()


@pytest.fixture
def forked_children():
    """For a test of what a runner finds, beside others of how it starts."""
    with warm.installed():
        yield


@pytest.fixture
def builds(tmp_path, monkeypatch) -> Path:
    """A build folder of this test's own, with the judge's code in it."""
    judge = workdir.gate.artefact().path.parent
    shutil.copytree(judge, tmp_path / "builds" / judge.name)
    monkeypatch.setenv("KERNEL_BUILD_DIR", str(tmp_path / "builds"))
    return tmp_path / "builds"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def runner(box: Workdir, extra: dict[str, str] | None = None, **message: object) -> Child:
    """A started runner in `box`, ready."""
    child = Child("harness.runner.runner", extra, box.jail)
    reply, _ = child.request({**START, "folder": str(box.folder), "file": str(box.file), **message}, LIMIT_S)
    assert reply.get("ready"), reply
    return child


def compiled(box: Workdir, target: str, extra: dict[str, str] | None = None) -> dict:
    """What a runner says of its compile step."""
    child = runner(box, extra, compile=True)
    reply, _ = child.request({"op": "compile", "target": target}, LIMIT_S)
    child.close()
    assert reply.get("artefacts"), reply
    return reply


def test_it_holds_the_closure_and_nothing_else(box):
    problems, judge = box.jail.code / "problems", box.jail.code / "harness"
    variant = {f"variants/{name}" for name in ("cpu_portable.py", "cpu_portable.cpp", "cpu_rows.h")}
    assert files(problems / "nvfp4_gemv") == {"task.py"} | variant
    assert files(problems / "common") == {path.name for path in build.COMMON.iterdir() if path.is_file()}
    assert {name.partition("/")[0] for name in files(problems)} == {"nvfp4_gemv", "common", "__init__.py"}
    assert {path.name for path in box.jail.code.iterdir()} == {"harness", "problems"}
    assert {"runner/runner.py", "runner/wire.py", "runner/gate.cpp"} < files(judge)
    private = ("judge", "checker", "lint", "player", "sandbox", "tools", "run.py")
    assert not [name for name in private if (judge / name).exists()]
    assert not [
        name
        for name in files(box.jail.code)
        if "reference" in name or "wrong" in name or name.endswith((".jsonl", ".pyc"))
    ]
    assert box.file.read_bytes() == CPU.read_bytes() and box.folder / "variants" == box.file.parent


def test_runner_knows_its_own_modules_and_messages_name_the_real_files(box):
    """Every import of harness.runner.runner is served from the private code, the checkout being out of reach."""
    child = runner(box)
    maps = Path(f"/proc/{child.pid}/maps").read_text().splitlines()
    child.close()
    assert maps and not [line for line in maps for name in policy.SECRET if f"{ROOT}/{name}/" in line]
    text = f'File "{box.file}", line 3; {box.folder}/task.py; {box.jail.code}/harness/runner.py; {box.jail.home}/x'
    assert box.restore(text) == (
        f'File "{CPU}", line 3; {GEMV.folder}/task.py; {ROOT}/harness/runner.py; <private>/home/x'
    )
    before = box.jail.taken()
    (box.jail.cache / "xdg").mkdir()
    (box.jail.cache / "xdg" / "hidden").write_bytes(os.urandom(2**20))
    assert 2**20 <= box.jail.taken() - before < 2**20 + 2**15


def test_a_submission_from_elsewhere_keeps_its_places(tmp_path, make, forked_children):
    """Headers below the file too: their way to each other stays. Nothing comes from above it."""
    included = ("deep/shared.h", "nvfp4.cuh", "../above.h", "secret.txt")
    texts = {
        "mine/sub.py": "from task import Case\ndef custom_kernel(data): pass\n",
        "mine/sub.cpp": "".join(f'#include "{name}"\n' for name in included),
        "mine/deep/shared.h": "#define SEVEN 7\n",
        "mine/secret.txt": "not of the closure",
        "above.h": "#define EIGHT 8\n",
    }
    file = write_files(tmp_path, texts) / "mine" / "sub.py"
    box = make(file)
    top = box.folder / "submission"
    assert files(top) == {"deep/shared.h", "sub.py", "sub.cpp"} and box.file == top / "sub.py"
    assert box.restore(f"{box.file}:3") == f"{file}:3"
    runner(box).close()


def test_a_folder_of_gpu_mode_brings_its_utils(make, forked_children):
    box = make(GPU_MODE.folder / "submission.py", GPU_MODE)
    assert Path(box.files["utils.py"]).read_bytes() == GPU_MODE.files["utils.py"].read_bytes()
    assert not list(box.jail.code.rglob("reference.py")) and not list(box.jail.code.rglob("eval.py"))
    runner(box, files=box.files).close()


BUILDS = """
import os
from pathlib import Path
import torch
from harness.runner import gate
from problems.common import build

def compile_for(target):
    made = build.cpp(Path(__file__).with_suffix(".cpp"))
    assert made.function("seven")() == 7
    assert torch.equal(torch.ones(600, 600) @ torch.ones(600, 600), torch.full((600, 600), 600.0))
    assert str(made.path).startswith(os.environ["KERNEL_BUILD_DIR"])
    gate.read_configs()
    return [made]
"""


def test_torch_and_a_build_work_in_it(tmp_path, make):
    """A tensor operation on threads, g++ through problems.common.build, and what was built is loaded and called."""
    write_files(tmp_path, {"sub.py": BUILDS, "sub.cpp": 'extern "C" int seven() { return 7; }\n'})
    box = make(tmp_path / "sub.py")
    assert compiled(box, "cpu")["artefacts"][0]["bytes"] > 0
    assert list(box.jail.cache.glob("build/sub-cpu-*/sub.so"))
    assert len(list(box.jail.cache.glob("build/gate-cpu-*/gate.so"))) == 1, "the judge's is not built again"


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("name", ["sm90_plain", "sm90_cute"])
def test_a_gpu_variant_compiles_in_it(name, make):
    box = make(GEMV.variant(name).file)
    assert compiled(box, "sm90", {"CUTE_DSL_ARCH": "sm_90a"})["artefacts"][0]["bytes"] > 0
    assert list(box.jail.cache.glob(f"build/{name}*"))


def test_what_a_compile_step_made_serves_the_next_runner(builds, make):
    assert workdir.build_folder(CPU, GEMV, "cpu") is None
    one = make()
    made = {"build/mine/code.so": "made", "build/mine/tool": "run me"}
    (write_files(one.jail.cache, made) / "build" / "mine" / "tool").chmod(0o755)
    kept = one.publish(workdir.key(CPU, GEMV, "cpu"))
    one.remove()
    assert workdir.build_folder(CPU, GEMV, "cpu") == kept
    assert files(kept) == set(made), "the judge's own code is not among it"
    mine = make(kept=kept).jail.cache / "build" / "mine"
    assert (mine / "code.so").read_text() == "made" and os.access(mine / "tool", os.X_OK)
    (mine / "code.so").write_text("poisoned")
    assert (kept / "build" / "mine" / "code.so").read_text() == "made", "a runner has a copy"


def test_what_was_published_first_stays(builds, box):
    (box.jail.cache / "build" / "x").write_text("first")
    kept = box.publish("k")
    (box.jail.cache / "build" / "x").write_text("second")
    assert box.publish("k") == kept and (kept / "build" / "x").read_text() == "first"
    assert [path.name for path in kept.parent.iterdir()] == ["k"]


def test_the_judges_code_in_a_cache_is_the_judges(builds, tmp_path, make):
    """A compile step that replaces it serves nobody, not even where it was published by other means."""
    one = make()
    artefact = next(one.jail.cache.glob("build/gate-cpu-*/gate.so"))
    honest = artefact.read_bytes()
    artefact.write_bytes(b"poisoned")
    poisoned = tmp_path / "poisoned"
    shutil.copytree(one.jail.cache, poisoned)
    second = make(kept=poisoned)
    assert next(second.jail.cache.glob("build/gate-cpu-*/gate.so")).read_bytes() == honest


def test_links_and_special_files_are_not_kept(builds, box, tmp_path):
    (tmp_path / "secret").write_text("outside")
    cache = box.jail.cache
    (cache / "link").symlink_to(tmp_path / "secret")
    (cache / "folder_link").symlink_to(tmp_path)
    os.mkfifo(cache / "fifo")
    (cache / "plain").write_text("kept")
    assert files(box.publish("k")) == {"plain"}
    assert not any(path.is_symlink() for path in (builds / "closures").rglob("*"))


DENIED = PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("CACHE_LIMIT", 1000, "GiB"),
        ("CACHE_FILES", 5, "files"),
        ("CACHE_PATH", 9, "letters"),
        ("shutil.copyfile", Mock(side_effect=DENIED), "cannot be copied: Permission denied"),
    ],
)
def test_a_cache_that_is_too_much_is_refused_whole(builds, box, monkeypatch, limit, value, said):
    deep = box.jail.cache / "a" / "b" / "c" / "d" / "e"
    deep.mkdir(parents=True)
    (deep / "large").write_bytes(bytes(2000))
    monkeypatch.setattr(f"harness.sandbox.workdir.{limit}", value)
    with pytest.raises(CacheError, match=said):
        box.publish("k")
    assert not list((builds / "closures").iterdir())


def test_a_half_filled_one_is_never_used_and_goes(builds, box):
    """What a killed process left is removed by a later one, but not what another may still be filling."""
    closures = builds / "closures"
    closures.mkdir(parents=True, exist_ok=True)
    for name, age_s in (("tmp-dead", workdir.HALF_FILLED_S + 60), ("tmp-busy", 60)):
        (closures / name).mkdir()
        os.utime(closures / name, times=(time.time() - age_s,) * 2)
    box.publish("k")
    assert {path.name for path in closures.iterdir()} == {"k", "tmp-busy"}


def test_the_key_is_of_all_that_a_build_depends_on(tmp_path, monkeypatch):
    folder, common = copy_of(GEMV.folder, tmp_path / "nvfp4_gemv"), copy_of(build.COMMON, tmp_path / "common")
    monkeypatch.setattr(build, "COMMON", common)
    copy = replace(GEMV, folder=folder)
    file = folder / "variants" / "cpu_portable.py"

    def key(target: str = "cpu") -> str:
        return workdir.key(file, copy, target)

    start = key()
    assert key() == start and key("sm90") != start
    seen = {start}
    mine = ("variants/cpu_portable.py", "variants/cpu_portable.cpp", "variants/cpu_rows.h", "task.py")
    shared = ("../common/nvfp4.cuh", "../common/build.py")
    for name in ("reference.py", "variants/cpu_avx2.cpp", "README.md", "wrong.py", *mine, *shared):
        with open(folder / name, "a") as source:
            source.write("\n# a change\n" if name.endswith(".py") else "\n// a change\n")
        before = len(seen)
        seen.add(key())
        assert len(seen) - before == (name in mine + shared), name
    monkeypatch.setattr(workdir, "_versions", lambda target: ("another compiler",))
    assert key() not in seen


def test_removal_leaves_nothing_however_a_runner_left_it(tmp_path, place):
    box = Workdir.make(CPU, GEMV, base=place)
    child = Child("harness.runner.runner", jail=box.jail)
    child.kill()
    deep = os.open(box.jail.tmp, os.O_RDONLY)
    for _ in range(1500):  # beyond what a path can name, and what a recursion can follow
        os.mkdir("deeper", dir_fd=deep)
        below = os.open("deeper", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    (box.jail.home / "closed" / "in").mkdir(parents=True)
    (box.jail.home / "closed").chmod(0)
    (box.jail.home / "link").symlink_to(tmp_path)
    box.remove()
    box.remove()
    assert list(place.iterdir()) == []


SCRIPT = """
import os, sys, time
sys.path[:0] = [{root!r}]
from harness.problem import folders
from harness.sandbox import workdir
from harness.sandbox.process import Child
gemv = folders.find("nvfp4_gemv")
box = workdir.Workdir.make(gemv.variant("cpu_portable").file, gemv)
child = Child("harness.runner.runner", jail=box.jail)
print(box._place, child.pid, flush=True)
{then}
"""


@pytest.mark.parametrize("then", first(["time.sleep(600)", ""]))
def test_the_folder_goes_with_its_judge(then):
    """kill -9, and a normal end without clearing up."""
    script = SCRIPT.format(root=str(ROOT), then=then)
    judge = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    place, pid = judge.stdout.readline().split()
    if "sleep" in then:
        assert Path(place).is_dir()
        judge.send_signal(signal.SIGKILL)
    judge.wait(timeout=LIMIT_S)
    judge.stdout.close()
    assert comes(lambda: not Path(place).parent.exists() and not Path(f"/proc/{pid}").exists())
