"""kernel_names.py: --kernels names ops and variants that there are, each once, and what is wrong is said as typed."""

import re

import pytest

from problems.common import load
from problems.dsv4_forward import kernel_names
from problems.dsv4_forward.weights import tree
from tests.dsv4.linears import SMALL

GEMV = load.PROBLEMS / "nvfp4_gemv" / "variants"
OWN = load.PROBLEMS / "dsv4_forward" / "wrong"


@pytest.fixture(scope="module")
def weights():
    return tree.random(SMALL, "nvfp4", seed=3)


def refused(text: str, target: str = "cpu") -> str:
    with pytest.raises(ValueError) as caught:
        kernel_names.see(text, target)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "winners",
        "winners,nvfp4_gemv=winner",
        "linear=cpu_avx2",
        "linear=high_nibble_first, rms_norm=norm_by_mean_magnitude",
        f"nvfp4_gemv={GEMV / 'torch_dequant.py'}",
        f"rms_norm={OWN / 'norm_by_mean_magnitude.py'}",
    ],
)
def test_what_there_is_passes(text):
    kernel_names.see(text, "cpu")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("linear=reference,linear=winner", "--kernels must name linear once, got 'linear=reference,linear=winner'"),
        ("linear=reference,winners", "--kernels: winners is about every op, so it must come first, and once, got"),
        ("", "--kernels must be reference, winners or NAME=VARIANT .*nvfp4_gemv.*; got ''$"),
        ("linear", "--kernels linear: VARIANT must be reference, winner, .* got ''$"),
        ("indexer=nothere", "--kernels indexer=nothere: VARIANT must be .*, a variant of indexer .*'nothere'"),
        ("rms_norm=fast", "--kernels rms_norm=fast: .*, a file of dsv4_forward/wrong \\(norm_by_mean_magnitude\\)"),
        (f"linear={GEMV / 'sm90_dp4a.py'}", "--kernels linear=.*: a file of nvfp4_gemv must .* linear=sm90_dp4a$"),
        (f"fmha={GEMV / 'cpu_avx2.py'}", "--kernels fmha=.*: a file of nvfp4_gemv cannot fill fmha: give one of"),
    ],
)
def test_what_names_nothing_or_a_thing_twice_is_said_as_typed(text, said):
    assert re.match(said, refused(text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("moe_gemm=torch_grouped", "--kernels moe_gemm=torch_grouped: for experts, swiglu_limit must be 10, is 1"),
        ("linear=sm90_mma", "--kernels linear=sm90_mma: sm90_mma is for sm90, sm100, not cpu"),
        ("winners, linear=peer_torch", "--kernels linear=peer_torch: a baseline is there to be compared with"),
    ],
)
def test_what_cannot_run_is_said_as_typed(text, said, weights):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        kernel_names.choose(text, "cpu", weights)


@pytest.mark.parametrize(
    ("op", "text", "said"),
    [
        ("rms_norm", "def rms_norm(:\n", "mine.py:1: not Python: "),
        ("rms_norm", "def norm(): ...\n", "mine.py must define rms_norm, with the op's interface (torch_ops/)"),
        ("fmha", "x = 1\n", "with the op's interface (torch_ops/), or custom_kernel, as fmha_decode has it"),
    ],
)
def test_a_file_that_defines_no_kernel_is_refused(op, text, said, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert said in refused(f"{op}={file}") and f"--kernels {op}={file}: " in refused(f"{op}={file}")


@pytest.mark.parametrize("text", ["def fmha(): ...", "from x import fmha", "fmha = print", "def custom_kernel(): ..."])
def test_a_file_that_defines_a_kernel_is_not_refused(text, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(text + "\n")
    kernel_names.see(f"fmha={file}", "cpu")
