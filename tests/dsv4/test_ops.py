"""ops.py: what fills an op and why, and what --kernels may say."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from problems.common import load
from problems.dsv4_forward import ops, prepared
from problems.dsv4_forward.weights import tree
from tests.dsv4.linears import SMALL, inputs, product

DECODE, GEMV = (f"{name}/{load.winner(load.PROBLEMS / name, 'cpu')}" for name in ("linear_decode", "nvfp4_gemv"))
LINEARS = ("linear", "grouped_linear", "two_linears")  # on a CPU no variant norms an input
VARIANTS, OWN = load.PROBLEMS / "nvfp4_gemv" / "variants", load.PROBLEMS / "dsv4_forward"


@pytest.fixture(scope="module")
def model():
    return {fmt: tree.random(SMALL, fmt, seed=3) for fmt in ("bf16", "released", "nvfp4_experts", "nvfp4")}


def lines(chosen: ops.Chosen) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in chosen.report[: len(ops.NAMES)])


def test_kernels_chosen_in_inference_mode_work_outside(model):
    with torch.inference_mode():
        chosen = ops.choose("winners", "cpu", model["nvfp4"])
    w = model["nvfp4"].layers[0].attn.wkv
    with torch.no_grad():
        assert bool(product(inputs(1, w.k), w, chosen.ops.linear).isfinite().all())


def test_every_op_has_a_reference_and_a_line_of_winners():
    assert set(ops.WINNERS) == set(ops.NAMES) >= {*ops.FUSED, *ops.ASKED_FOR}
    assert all(callable(value) for value in vars(ops.REFERENCE).values())
    for file in ("submission.py", "variants/composed.py"):
        composes = load.constants(load.PROBLEMS / "dsv4_forward" / file, "COMPOSES")["COMPOSES"]
        assert {one for several in ops.WINNERS.values() for one in several} - {ops.OWN} <= set(composes), file
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.REFERENCE.linear = None


def test_winners_in_nvfp4(model):
    chosen = ops.choose("winners", "cpu", model["nvfp4"])
    assert all(chosen.names[op] == DECODE for op in LINEARS) and lines(chosen)["two_linears"] == f"{DECODE}, reference"
    assert chosen.ops.rms_norm is ops.REFERENCE.rms_norm and lines(chosen)["rms_norm"] == "reference"
    assert chosen.report[len(ops.NAMES)].startswith(f"{DECODE}: ")


@pytest.mark.parametrize("fmt", ["bf16", "released", "nvfp4_experts"])
def test_winners_in_formats_without_nvfp4_linears(model, fmt):
    chosen = ops.choose("winners", "cpu", model[fmt])
    assert all(chosen.names[op] == DECODE for op in (*LINEARS, "shared"))
    if fmt != "nvfp4_experts":
        why = "no FP4 experts in bf16" if fmt == "bf16" else "swiglu_limit must be 10, is 1"
        assert lines(chosen)["experts"].startswith("reference (not moe_gemm/") and why in lines(chosen)["experts"]
        assert chosen.ops.experts is ops.REFERENCE.experts


def test_an_output_that_a_kernel_cannot_write_gets_room_elsewhere():
    whole = torch.zeros(65, dtype=torch.bfloat16)
    assert prepared.room_for(whole, 64) is whole and prepared.room_for(whole[1:], 64).data_ptr() % 64 == 0


def test_a_problem_named_fills_the_ops_that_it_has_calls_of(model):
    without = ops.choose("winners,linear_decode=reference", "cpu", model["bf16"]).names
    assert without["linear"] == "reference" != without["mhc_site"]
    with pytest.raises(ValueError, match="--kernels moe_gemm=torch_grouped: experts: swiglu_limit must be 10, is 1"):
        ops.choose("moe_gemm=torch_grouped", "cpu", model["nvfp4"])
    with pytest.raises(ValueError, match="--kernels nvfp4_gemv=cpu_avx2: linear: no NVFP4 linears in bf16"):
        ops.choose("nvfp4_gemv=cpu_avx2", "cpu", model["bf16"])
    of_linears = ops.choose("linear_decode=torch_dequant", "cpu", model["released"]).names
    assert {op for op, name in of_linears.items() if name != "reference"} == {*LINEARS}
    behind = ops.choose("nvfp4_gemv=winner", "cpu", model["nvfp4"]).names
    assert behind["linear"] == behind["grouped_linear"] == GEMV
    ahead = ops.choose("winners,nvfp4_gemv=winner", "cpu", model["nvfp4"])
    assert lines(ahead)["linear"].startswith(f"{GEMV}, {DECODE}, ")
    assert ops.choose("reference", "cpu", model["bf16"]).ops is ops.REFERENCE
    given = ops.choose("winners", "cpu", model["bf16"], {"norm_linears": print}).names
    assert given["norm_linears"] == "a function" and given["linear"] == DECODE


def kernels(name: str, calls: list, *most: int) -> SimpleNamespace:
    """Kernels of one op that serve calls of at most so many rows."""

    def served(x: torch.Tensor, **_: object) -> object:
        calls.append(name)
        return None if len(x) <= most[0] else NotImplemented

    return SimpleNamespace(
        OPS=("rms_norm", "two_linears"),
        TARGETS=("cpu",),
        SOURCE=load.PROBLEMS / f"{name}.cu",
        ops=lambda target: {"rms_norm": served, "two_linears": served},
    )


def test_a_call_goes_to_the_first_that_serves_it_then_to_torch(monkeypatch, model):
    calls: list[str] = []
    monkeypatch.setattr(ops, "KERNELS", (kernels("own", calls, 1),))
    monkeypatch.setitem(ops.WINNERS, "two_linears", (ops.OWN,))
    chosen = ops.choose("winners", "cpu", model["bf16"])
    assert chosen.names["rms_norm"] == "dsv4_forward/own" and chosen.names["mhc_pre"] == "reference"
    call = {"weight": None, "eps": 0.0, "out": torch.zeros(2, 4)}
    chosen.ops.rms_norm(x=torch.ones(1, 4), **call)
    assert calls == ["own"] and not bool(call["out"].any()) and chosen.ops.rms_norm(x=torch.ones(2, 4), **call) is None
    assert calls == ["own"] * 2 and bool((call["out"] == 1).all())
    assert chosen.ops.two_linears(x=torch.ones(1, 4)) is None
    assert chosen.ops.two_linears(x=torch.ones(2, 4)) is NotImplemented, "the walk does its steps"
    assert ops.choose("winners", "sm90", model["bf16"]).names["rms_norm"] == "reference"


MIXED = {"linear": "linear_decode/torch_dequant", "grouped_linear": "nvfp4_gemv/zeros"}
MIXED |= {"two_linears": DECODE, "shared": DECODE}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("nvfp4_gemv=cpu_portable", dict.fromkeys(("linear", "grouped_linear"), "nvfp4_gemv/cpu_portable")),
        ("linear=torch_dequant", {"linear": "linear_decode/torch_dequant"}),
        ("grouped_linear=zeros", {"grouped_linear": "linear_decode/zeros"}),
        ("nvfp4_gemv=cpu_portable, linear=reference", {"grouped_linear": "nvfp4_gemv/cpu_portable"}),
        ("winners,mhc_site=reference,nvfp4_gemv=zeros,linear=torch_dequant,moe_gemm=reference", MIXED),
        ("rms_norm=reference", {}),
        ("rms_norm=winner", {}),
        (f"linear={VARIANTS / 'torch_dequant.py'}", {"linear": "nvfp4_gemv/torch_dequant"}),
    ],
)
def test_names_fill_ops_and_later_ones_count(text, names, model):
    chosen = ops.choose(text, "cpu", model["nvfp4"])
    assert {op: name for op, name in chosen.names.items() if name != "reference"} == names
    plain = vars(ops.REFERENCE)
    others = {op for op, function in vars(chosen.ops).items() if function not in (plain[op], ops.apart)}
    assert others == set(names)


def test_an_op_takes_a_file_with_the_interface_of_the_op_or_of_its_problem(tmp_path, model):
    own = tmp_path / "mine.py"
    own.write_text("def rms_norm(x, weight, eps, out):\n    out.fill_(3)\n\n\nlinear = None\n")
    submission = tmp_path / "entry.py"
    submission.write_text(
        "from task import unpack\n\nTARGETS = ('cpu',)\n\n\ndef custom_kernel(data):\n    unpack(data)\n"
        "    return data.outputs.out.fill_(2)\n"
    )
    chosen = ops.choose(f"rms_norm={own},linear={submission}", "cpu", model["nvfp4"])
    assert lines(chosen)["rms_norm"] == f"{own}, reference" and chosen.names["linear"] == "linear_decode/entry"
    out = torch.empty(2, 3)
    chosen.ops.rms_norm(x=out, weight=None, eps=1e-6, out=out)
    assert bool((out == 3).all())
    w = model["nvfp4"].layers[0].attn.wq_a
    got = product(inputs(2, w.k).bfloat16(), w, chosen.ops.linear)
    assert len(got.unique()) == 1 and float(got[0, 0]) > 0


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("", "cpu", "--kernels must be reference, winners or NAME=VARIANT .*rms_norm.*nvfp4_gemv.*; got ''$"),
        ("fast", "cpu", r"^(?!.*\b(mhc_site|experts|choose),.* \1[,;]).*; got 'fast'"),  # each name once
        ("linear", "cpu", "--kernels linear: VARIANT must be reference, winner, .* got ''$"),
        ("linear=reference,linear=winner", "cpu", "--kernels must name linear once, got 'linear=reference,linear=winn"),
        ("linear=reference,winners", "cpu", "--kernels: winners is about every op, so it must come first, and once"),
        ("indexer=nothere", "cpu", "--kernels indexer=nothere: VARIANT must be .*, a variant of indexer .*'nothere'"),
        ("linear=cpu_avx3", "cpu", "--kernels linear=cpu_avx3: .* a variant of linear_decode .*cpu_avx2.*'cpu_avx3'"),
        ("rms_norm=fast", "cpu", r"--kernels rms_norm=fast: .*, a kernel of dsv4_forward/wrong.py \(norm_by_mean_"),
        (f"fmha={VARIANTS / 'cpu_avx2.py'}", "cpu", "--kernels fmha=.*: a file of nvfp4_gemv cannot fill fmha"),
        ("rms_norm=tests/conftest.py", "cpu", "conftest.py must define rms_norm, with the op's interface"),
        ("linear=tests/conftest.py", "cpu", "conftest.py must define linear, .* or custom_kernel, as linear_decode or"),
        ("linear=sm90_mma", "cpu", "--kernels linear=sm90_mma: sm90_mma is for sm90, sm100, not cpu"),
        ("winners, linear=peer_torch", "cpu", "--kernels linear=peer_torch: a baseline is there to be compared with"),
    ],
)
def test_what_cannot_be_had_is_an_error_that_says_why(text, target, message):
    with pytest.raises(ValueError, match=message):
        ops.kernels(text, target)


def test_a_file_must_define_a_kernel(tmp_path):
    file = tmp_path / "mine.py"
    for text, said in (("def rms_norm(:", ":1: not Python: "), ("def norm(): ...", " must define rms_norm")):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"mine.py{said}"):
            ops.kernels(f"rms_norm={file}", "cpu")
    for text in ("def fmha(): ...", "from x import fmha", "fmha = print", "def custom_kernel(): ..."):
        file.write_text(f"TARGETS = ('cpu',)\n{text}\n")
        assert ops.kernels(f"fmha={file}", "cpu")["fmha"][0].file == file
