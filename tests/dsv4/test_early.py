"""What calls of the composed model do that judged calls do not: begin early, and norm an input, in the model that
executes PTX. It runs kernels one behind the other, so it cannot show what a launch reads too early.
"""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from harness.tools import latency as timing
from problems.common import early, load
from problems.dsv4_forward import timed_steps
from problems.dsv4_forward.kernels.norm import Norm
from tests.dsv4 import in_model
from tests.problems.test_in_model import fmha, mhc, moe
from tests.support import ROOT


def normed(fmt: str, k: int, rows: int, tokens: int) -> None:
    """A linear that norms its input has the bits of two steps, whether it begins early or not."""
    folder = load.PROBLEMS / "linear_decode"
    reference, task = load.module(folder, "reference"), load.module(folder, "task")
    variant = load.variant("linear_decode", "sm90_mma")
    case = {"format": fmt, "tokens": tokens, "shape": f"{rows}x{k}", "content": "plain", "seed": 5, "device": "cpu"}
    data = task.Data(reference.generate_weights(**case), *reference.generate_input(**case))
    weight = torch.randn(k, generator=torch.Generator().manual_seed(7)).bfloat16()
    state = variant.prepare(data.weights)
    assert variant.norms(state, tokens) and not variant.norms(state, min(8, 8192 // k) + 1)
    x, results = torch.empty_like(data.inputs.x), []
    Norm.ops("sm90")["rms_norm"](data.inputs.x, weight, 1e-6, x)
    for known in (False, True):
        with early.behind_kernels(known):
            for given, norms in ((x, False), (data.inputs.x, True)):
                results.append(torch.full_like(data.outputs.out, torch.nan))
                one = task.Data(state, task.Inputs(given), task.Outputs(results[-1]))
                variant.with_norm(one, weight, 1e-6) if norms else variant.custom_kernel(one)
    said = data._replace(inputs=task.Inputs(x))
    assert reference.compare(said, reference.ref_kernel(said), results[0]).ok
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_calls_are_early_only_where_the_caller_says_so():
    assert not early.allowed()
    with early.behind_kernels():
        assert early.allowed()
        with early.behind_kernels(False):
            assert not early.allowed()
        assert early.allowed()
    assert not early.allowed()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fmt", "k", "rows", "tokens"), [("nvfp4", 512, 128, 3), ("fp8", 1536, 64, 5), ("nvfp4", 1024, 128, 8)]
)
def test_a_linear_that_norms_its_input_has_the_bits_of_two_steps(fmt, k, rows, tokens):
    """Two multiprocessors, so that blocks have several tiles."""
    call = {"fmt": fmt, "k": k, "rows": rows, "tokens": tokens}
    in_model.run(__name__, [("normed", call)], processors=2)


# argv: as ptx_model.tools.check's.
CHECKED = """
import dataclasses
import sys

from ptx_model.tools import check
from problems.common import early
from ptx_model import driver

EARLY = 6  # cudaLaunchAttributeProgrammaticStreamSerialization
plain, late = driver.Driver.launch, set()


def launch(self, kernel, grid, block, shared, arguments, attributes, count):
    if not driver._value(attributes, count, EARLY)[0]:
        late.add(self._kernels[kernel].name)
    return plain(self, kernel, grid, block, shared, arguments, attributes, count)


driver.Driver.launch = launch
# Of one GPU, since launchers ask once how large it is, and refuse blocks that it has no room for at once.
check.ORDERS = [dataclasses.replace(one, multiprocessors=8) for one in check.ORDERS[::5]]
with early.behind_kernels():
    check.main(sys.argv[1:])
raise SystemExit("".join(name for name in late if "repack" not in name))
"""
JOIN = {"batch": 3, "queries": 1, "heads": 64, "entries": 131, "topk": 16, "kind": "mxfp4", "per_page": 32}
CASES = [
    ("moe_gemm", "sm90_grouped", moe(2, 3, 2, 64, 192, "nvfp4")),
    ("fmha_decode", "sm90_wgmma", fmha(1, 20, 37, 91, "ragged")),
    ("fmha_decode", "sm90_wgmma", {**fmha(1, 8, 37, 91, "ragged"), "batch": 17}),  # too many for slices of 64 heads
    ("indexer", "sm90_join", {**JOIN, "content": "ragged", "seed": 5}),
    ("mhc_site", "sm90_columns", {**mhc(16, 128, "bf16+bf16"), "content": "alike"}),
    ("mhc_site", "sm90_columns", {**mhc(31, 192, "bf16+fp32"), "content": "alike"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "variant", "case"), CASES, ids=["experts", "heads", "few heads", "indexer", "16 tokens", "31"]
)
def test_variants_are_right_where_they_begin_early(problem, variant, case):
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    folder = load.PROBLEMS / problem
    words = [str(folder), str(folder / "variants" / f"{variant}.py"), "sm90", json.dumps([case])]
    ran = subprocess.run([sys.executable, "-c", CHECKED, *words], cwd=ROOT, capture_output=True, text=True)
    replies = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [one["status"] for one in replies] == ["MODEL_CHECKED"] * 2, (replies, ran.stderr[-2000:])
    assert not ran.stderr.strip(), ran.stderr[-2000:]  # kernels that were launched plainly


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
@torch.inference_mode()
def test_replays_have_the_bits_of_steps_that_are_not_early(batch):
    """In a recorded step kernels follow each other so closely that what is read too early would be another step's."""
    case = {"config": "tiny-k", "format": "nvfp4", "batch": batch, "context": 300, "early": 0}
    decode = timed_steps.Decode(case, 20)
    plain, want = decode.step(decode.choose()), []
    decode.reset()
    for _ in range(10):
        plain()
        want.append(plain.logits.clone())
    decode.early = True
    with torch.cuda.stream(torch.cuda.ExternalStream(timing.PER_THREAD)):
        step = decode.step(decode.choose())
        graph = timing._capture(step)
        for _ in range(20):
            decode.reset()
            for logits in want:
                graph.replay()
                assert torch.equal(step.logits, logits)
