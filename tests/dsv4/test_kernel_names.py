"""kernel_names.py: --kernels names ops and variants that there are, each once, and what is wrong is said as typed."""

import re

import pytest

from problems.common import load
from problems.dsv4_forward import kernel_names, ops
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
        "reference",
        "winners,nvfp4_gemv=winner",
        "linear_decode=winner,linear=reference",
        "linear=cpu_avx2",
        "linear=high_nibble_first, rms_norm=norm_by_mean_magnitude",
        f"nvfp4_gemv={GEMV / 'torch_dequant.py'}",
        "linear=torch_grouped",
        f"rms_norm={OWN / 'norm_by_mean_magnitude.py'}",
        "linear=sm90_dp4a",
        "mhc_site=reference",
    ],
)
def test_what_there_is_passes(text):
    kernel_names.see(text, "cpu")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("linear=reference,linear=winner", "--kernels must name linear once, got 'linear=reference,linear=winner'"),
        ("nvfp4_gemv=winner, nvfp4_gemv=winner", "--kernels must name nvfp4_gemv once, got "),
        ("linear=reference,winners", "--kernels: winners is about every op, so it must come first, and once, got"),
        ("winners,winners", "--kernels: winners is about every op"),
        ("winners,reference", "--kernels: reference is"),
        ("", "--kernels must be reference, winners or NAME=VARIANT .*nvfp4_gemv.*; got ''$"),
        ("fast", ".*got 'fast'$"),
        ("linear", "--kernels linear: VARIANT must be reference, winner, .* got ''$"),
        ("linear=", "--kernels linear=: VARIANT must be .* got ''$"),
        ("indexer=nothere", "--kernels indexer=nothere: VARIANT must be .*, a variant of indexer .*'nothere'"),
        ("rms_norm=fast", "--kernels rms_norm=fast: .*, a file of dsv4_forward/wrong \\(norm_by_mean_magnitude\\)"),
        (f"linear={GEMV / 'sm90_dp4a.py'}", "--kernels linear=.*: a file of nvfp4_gemv must .* linear=sm90_dp4a$"),
        (f"linear={GEMV / 'cpu_avx2.py'}", "--kernels linear=.*must be named without its path, as nvfp4_gemv=c"),
        (f"fmha={GEMV / 'cpu_avx2.py'}", "--kernels fmha=.*: a file of nvfp4_gemv cannot fill fmha: give one of"),
    ],
)
def test_what_names_nothing_or_a_thing_twice_is_said_as_typed(text, said):
    assert re.match(said, refused(text))


def test_the_names_of_an_op_are_those_of_its_problems_for_the_machine():
    """Of the files of wrong/ only those for the op, since there are dozens of them."""
    for target, names in (("cpu", "cpu_portable, torch_dequant"), ("sm90", "sm90_mma, sm90_triton")):
        said = refused("linear=nope", target)
        assert re.search(f"a variant of linear_decode \\([^)]*{names}[^)]*\\), a variant of nvfp4_gemv \\(", said)
        assert "a variant of moe_gemm (" in said and "(linear_last_block_lost)" in said and len(said) < 600
        assert "peer_" not in said and "sm100_native" not in said and "high_nibble_first" not in said


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


def test_the_rest_is_what_ops_choose_says(weights):
    text = "winners,nvfp4_gemv=winner"
    assert kernel_names.choose(text, "cpu", weights).names == ops.choose(text, "cpu", weights).names


@pytest.mark.parametrize(
    ("op", "text", "said"),
    [
        ("rms_norm", "def rms_norm(:\n", "mine.py:1: not Python: "),
        ("rms_norm", "x = 1\0", "not Python: "),
        ("rms_norm", "def norm(): ...\n", "mine.py must define rms_norm, with the op's interface (torch_ops/)"),
        ("fmha", "x = 1\n", "with the op's interface (torch_ops/), or custom_kernel, as fmha_decode has it"),
        ("nvfp4_gemv", "x = 1\n", "or custom_kernel, as nvfp4_gemv"),
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
