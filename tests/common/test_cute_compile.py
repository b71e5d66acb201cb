"""The CuTe DSL variants refuse, while tracing, what would be wrong or slow on a GPU; no GPU is needed for that."""

import importlib.util
import json
import os

import pytest

from problems.common import build, load
from tests.support import ROOT, forked
from tests.support.marks import first

# Found and not imported, which takes 2 s: the test does that in a separate process.
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("cutlass"), reason="needs CuTe DSL")

# The DSL takes its architecture from the environment at import, and traces only what stands in a file.
SCRIPT = '''
import json, os, sys
from problems.common import build, load

variant = load.variant("nvfp4_gemv", sys.argv[1])
from cutlass import Float8E4M3FN, Float16, Int16, Int32, cute
from cutlass.cute.runtime import make_ptr


@cute.jit
def slice_rows(at: cute.Pointer, n: Int32):  # across the rows of a matrix, not along one
    variant.vector(cute.make_tensor(at, cute.make_layout((4, n), stride=(n, 1)))[None, 0], 4, "a chunk of a")


@cute.jit
def short_slice(at: cute.Pointer, n: Int32):  # two words where four are read
    variant.vector(cute.make_tensor(at, cute.make_layout((2, n)))[None, 0], 4, "a chunk of a")


def message(call):
    try:
        call()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def pointer(dtype, align):
    return make_ptr(dtype, 0, cute.AddressSpace.gmem, align)


def compile_launch(align):
    pointers = [pointer(*view) for view in ((Int32, align), (Int32, 16), (Int16, 2), (Float8E4M3FN, 1), (Float16, 2))]
    cute.compile(variant.launch, *pointers, *(Int32(1) for _ in range(4)), variant.DEFAULT)


def compile_for_another():
    """With the other architecture in the environment."""
    target, = variant.TARGETS
    os.environ["CUTE_DSL_ARCH"] = next(arch for known, arch in build.ARCH.items() if known != target)
    variant.compile_for(target)


print(json.dumps({
    "aligned": message(lambda: compile_launch(16)),
    "misaligned": message(lambda: compile_launch(8)),
    "rows": message(lambda: cute.compile(slice_rows, pointer(Int32, 16), Int32(8))),
    "short": message(lambda: cute.compile(short_slice, pointer(Int32, 16), Int32(8))),
    "other": message(lambda: variant.compile_for("cpu")),
    "warps": message(lambda: variant.Plan(warps=33, rows=1, prefetch=0)),
    "rows of a plan": message(lambda: variant.Plan(warps=1, rows=33, prefetch=0)),
    "architecture": message(compile_for_another),
    "few rows": [variant.plan_for(m, 64, 1)[0].rows <= m for m in range(1, 9)],
}))
'''


FILES = sorted((load.PROBLEMS / "nvfp4_gemv" / "variants").glob("*_cute.py"))


# One is enough for every day: 10 s of a processor each.
@pytest.mark.parametrize("file", first(FILES), ids=lambda file: file.stem)
def test_assertions_fire_while_tracing(file, tmp_path):
    (target,) = load.constants(file, "TARGETS")["TARGETS"]
    script = tmp_path / "trace.py"
    script.write_text(SCRIPT)
    env = {"CUTE_DSL_ARCH": build.ARCH[target], "PYTHONPATH": str(ROOT), "KERNEL_BUILD_DIR": str(tmp_path / "build")}
    done = forked.run([script, file.stem], env=os.environ | env, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["aligned"] == "" and "a chunk of a must be aligned to 16 bytes, got 8" in said["misaligned"]
    assert all("a chunk of a must be a slice of 4 words of stride 1" in said[name] for name in ("rows", "short"))
    assert said["other"].startswith("ValueError: target must be one of")
    assert all(
        "ValueError: warps must be 1 to 32 and rows 1 to 32" in said[name] for name in ("warps", "rows of a plan")
    )
    assert said["architecture"].startswith(f"RuntimeError: CUTE_DSL_ARCH must be '{build.ARCH[target]}'")
    assert all(said["few rows"]) and not list(tmp_path.glob("build/*"))
