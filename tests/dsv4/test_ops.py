"""ops.py: what fills an op and why; adapters/operators.py: the winners as operators of torch."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from problems.common import load
from problems.dsv4_forward import ops
from problems.dsv4_forward.adapters import decode, gemv, operators
from problems.dsv4_forward.adapters.common import Adapted
from problems.dsv4_forward.weights import tree
from tests.dsv4.linears import REFERENCE, SMALL, inputs, product


@pytest.fixture(scope="module")
def model():
    return {fmt: tree.random(SMALL, fmt, seed=3) for fmt in ("bf16", "released", "nvfp4_experts", "nvfp4")}


def test_kernels_chosen_in_inference_mode_work_outside(model):
    with torch.inference_mode():
        chosen = ops.choose("winners", "cpu", model["nvfp4"])
    w = model["nvfp4"].layers[0].attn.wkv
    with torch.no_grad():
        assert bool(product(inputs(1, w.k), w, chosen.ops.linear).isfinite().all())


# ---------------------------------------------------------------- the table


LINEARS = ("linear", "grouped_linear", "two_linears", "norm_linears")


def lines(chosen: ops.Chosen) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in chosen.report[: len(ops.NAMES)])


def test_the_reference_is_frozen_and_has_a_spec_for_every_op():
    assert len(ops.NAMES) > 20 and all(callable(value) for value in vars(ops.REFERENCE).values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.REFERENCE.linear = None
    assert tuple(spec.name for spec in ops.SPECS) == ops.NAMES


def test_reference_is_the_reference(model):
    chosen = ops.choose("reference", "cpu", model["nvfp4"])
    assert chosen.ops == ops.REFERENCE
    assert set(chosen.names.values()) == {"reference"} and len(chosen.report) == len(ops.NAMES)


def test_winners_in_nvfp4(model):
    chosen = ops.choose("winners", "cpu", model["nvfp4"])
    winner = load.winner(load.PROBLEMS / decode.PROBLEM, "cpu")
    for op in LINEARS:
        assert chosen.names[op] == f"linear_decode/{winner}"
        assert lines(chosen)[op] == f"linear_decode/{winner} (at most 32 tokens)"
    assert chosen.ops.rms_norm is ops.REFERENCE.rms_norm
    assert lines(chosen)["rms_norm"] == "reference (no tuned kernel)"
    assert f"linear_decode/{winner}, linears" in chosen.report[len(ops.NAMES)]


@pytest.mark.parametrize("fmt", ["bf16", "released", "nvfp4_experts"])
def test_winners_in_formats_without_nvfp4_linears(model, fmt):
    chosen = ops.choose("winners", "cpu", model[fmt])
    winner = load.winner(load.PROBLEMS / decode.PROBLEM, "cpu")
    for op in (*LINEARS, "shared"):
        assert lines(chosen)[op] == f"linear_decode/{winner} (at most 32 tokens)"
        assert chosen.fallbacks[op] == ("reference",)
    if fmt != "nvfp4_experts":
        why = "no FP4 experts in bf16" if fmt == "bf16" else "swiglu_limit must be 10, is 1"
        assert lines(chosen)["experts"] == f"reference ({why})"
        assert chosen.ops.experts is ops.REFERENCE.experts


def test_a_problem_named_fills_the_ops_that_it_has_calls_of(model):
    with pytest.raises(ValueError, match="experts=torch_grouped: swiglu_limit must be 10, is 1"):
        ops.choose("moe_gemm=torch_grouped", "cpu", model["nvfp4"])
    of_linears = ops.choose("linear_decode=torch_dequant", "cpu", model["released"]).names
    assert {op for op, name in of_linears.items() if name not in ("reference", "its parts")} == {*LINEARS, "shared"}
    behind = ops.choose("nvfp4_gemv=winner", "cpu", model["nvfp4"]).names
    winner = load.winner(load.PROBLEMS / gemv.PROBLEM, "cpu")
    assert behind["linear"] == behind["grouped_linear"] == f"nvfp4_gemv/{winner}"


def test_an_op_that_spans_others_is_the_chain_of_what_fills_them(model):
    wrong = load.PROBLEMS / "dsv4_forward/wrong/rope_half_split.py"
    chosen = ops.choose(f"rotate={wrong}", "cpu", model["bf16"])
    assert chosen.names["norm_rotate"] == chosen.names["write_key"] == "its parts"
    assert lines(chosen)["write_key"] == "its parts (the chain of rms_norm, rotate, write)"
    assert chosen.names["write_entry"] == "reference" and chosen.ops.write_entry is ops.REFERENCE.write_entry
    x, turn = inputs(2, 64), torch.linspace(0, 3, 8).view(2, 4)
    got, want, other = (torch.empty(2, 64) for _ in range(3))
    chosen.ops.norm_rotate(x, None, 1e-6, turn.cos(), turn.sin(), got)
    ops.REFERENCE.rms_norm(x, None, 1e-6, want)
    chosen.ops.rotate(want, turn.cos(), turn.sin(), want)
    ops.REFERENCE.norm_rotate(x, None, 1e-6, turn.cos(), turn.sin(), other)
    assert torch.equal(got, want) and not torch.equal(got, other)
    given = ops.choose("reference", "cpu", model["bf16"], {"norm_rotate": print, "rms_norm": print})
    assert given.ops.norm_rotate is print and given.names["write_key"] == "its parts"


def test_providers_say_what_they_will_serve():
    first = {spec.name: spec.providers[0] for spec in ops.SPECS if spec.providers}
    flash = dataclasses.replace(SMALL, head_dim=512, swiglu_limit=10.0)
    assert first["fmha"].serves(flash, "nvfp4") == first["fmha"].serves(flash, "released") == ""
    assert "head_dim must be 512, is 128" in first["fmha"].serves(SMALL, "nvfp4")
    assert "584-byte" in first["fmha"].serves(flash, "bf16")
    served = {
        (op, fmt)
        for op in ("experts", "shared")
        for fmt in ("released", "nvfp4_experts", "nvfp4")
        if not first[op].serves(flash, fmt)
    }
    assert served == {(op, fmt) for op in ("experts", "shared") for fmt in ("released", "nvfp4_experts", "nvfp4")}


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """A folder of problems with two of its own; `half` has no submission."""
    for name in ("norms", "half"):
        (tmp_path / name / "variants").mkdir(parents=True)
        (tmp_path / name / "task.py").write_text("input_t = output_t = tuple\n")
    winners = 'WINNERS = {"cpu": ("quick", "plain"), "sm90": ("plain",)}\n'
    (tmp_path / "norms/submission.py").write_text(winners)
    for name, flags in (("quick", '("no_such_flag",)'), ("plain", "()")):
        text = f'TARGETS = ("cpu",)\nCPU_FLAGS = {flags}\n\n\ndef custom_kernel(data):\n    data.append("{name}")\n'
        (tmp_path / f"norms/variants/{name}.py").write_text(text)
    monkeypatch.setattr(load, "PROBLEMS", tmp_path)
    return tmp_path


def adapt_norm(module, model_weights, fallback):
    def rms_norm(x, weight, eps, out):
        fallback.ops.rms_norm(x, weight, eps, out)
        module.custom_kernel(x.calls)

    return Adapted({"rms_norm": rms_norm}, (f"norms for {model_weights.config.name} before {fallback.name}",))


def spec(name: str, *providers: ops.Provider) -> ops.OpSpec:
    return ops.OpSpec(name, vars(ops.REFERENCE)[name], providers)


def test_a_further_problem_is_a_further_provider(problems, monkeypatch, model):
    norms = ops.Provider("norms", "all of them", lambda cfg, fmt: "", adapt_norm)
    specs = (
        spec("rms_norm", norms),
        spec("rotate", dataclasses.replace(norms, serves=lambda cfg, fmt: f"not for {cfg.name} in {fmt}")),
        spec("route", dataclasses.replace(norms, adapt=None)),
        spec("select", dataclasses.replace(norms, problem="half")),
        spec("fmha", dataclasses.replace(norms, problem="absent")),
    )
    monkeypatch.setattr(ops, "SPECS", specs)
    chosen = ops.choose("winners", "cpu", model["bf16"])
    assert {op: line for op, line in lines(chosen).items() if "no tuned" not in line} == {
        "rms_norm": "norms/plain (all of them)",
        "rotate": "reference (not for small in bf16)",
        "route": "reference (no adapter for norms yet)",
        "select": "reference (no folder problems/half yet)",
        "fmha": "reference (no folder problems/absent yet)",
    }
    assert chosen.report[len(ops.NAMES) :] == ("norms for small before reference",)
    x = torch.ones(2, 3).as_subclass(type("Told", (torch.Tensor,), {"calls": []}))
    chosen.ops.rms_norm(x, None, 1e-6, torch.empty(2, 3))
    assert x.calls == ["plain"]
    monkeypatch.setattr(ops, "KERNELS", ())
    sm100 = ops.choose("winners", "sm100", model["bf16"])
    assert lines(sm100)["rms_norm"] == "reference (norms has no winner for sm100)"


def test_a_kernel_of_this_folder_fills_an_op_where_no_winner_does(problems, monkeypatch, model):
    norms = ops.Provider("norms", "all of them", lambda cfg, fmt: "" if fmt == "nvfp4" else "not it", adapt_norm)
    mine = SimpleNamespace(
        OPS=("rms_norm", "rotate"),
        TARGETS=("cpu", "sm100"),
        SOURCE=problems / "mine.cu",
        ops=lambda target: {"rms_norm": print, "rotate": print},
    )
    monkeypatch.setattr(ops, "SPECS", (spec("rms_norm", norms), spec("rotate")))
    monkeypatch.setattr(ops, "KERNELS", (mine,))
    names = {
        (target, fmt): ops.choose("winners", target, model[fmt]).names["rms_norm"]
        for target in ("cpu", "sm100")
        for fmt in ("bf16", "nvfp4")
    }
    mine = "dsv4_forward/mine"
    assert names == {
        ("cpu", "bf16"): mine,
        ("cpu", "nvfp4"): "norms/plain",
        ("sm100", "bf16"): mine,
        ("sm100", "nvfp4"): mine,
    }


def test_a_kernel_of_this_folder_may_fill_an_op_in_some_formats_and_for_some_calls(problems, monkeypatch, model):
    calls = []
    mine = SimpleNamespace(
        OPS=("norm_rotate",),
        TARGETS=("cpu",),
        SOURCE=problems / "mine.cu",
        FORMATS=("bf16",),
        SERVES={"norm_rotate": lambda x, *rest: len(x) == 1},
        ops=lambda target: {"norm_rotate": lambda *given: calls.append(given)},
    )
    monkeypatch.setattr(ops, "KERNELS", (mine,))
    assert ops.choose("winners", "cpu", model["nvfp4"]).names["norm_rotate"] == "reference"
    chosen = ops.choose("winners", "cpu", model["bf16"])
    assert chosen.names["norm_rotate"] == "dsv4_forward/mine"
    turn, got, want = torch.linspace(0, 3, 8).view(2, 4), torch.empty(2, 64), torch.empty(2, 64)
    given = inputs(2, 64), None, 1e-6, turn.cos(), turn.sin()
    chosen.ops.norm_rotate(*given, got)
    ops.REFERENCE.norm_rotate(*given, want)
    assert torch.equal(got, want) and not calls
    chosen.ops.norm_rotate(inputs(1, 64), *given[1:], got)
    assert len(calls) == 1


def test_a_call_that_a_provider_does_not_serve_is_passed_down_the_list_in_order(monkeypatch, model):
    """Three providers, none of which serves the call, and of which the second has no variant in use."""
    calls: list[str] = []

    def provider(name: str) -> ops.Provider:
        def adapt(module, model_weights, fallback):
            def rms_norm(x, weight, eps, out):
                calls.append(name)
                fallback.ops.rms_norm(x, weight, eps, out)

            return Adapted({"rms_norm": rms_norm, "rotate": rms_norm}, (f"{name} before {fallback.name}",))

        return ops.Provider(name, "nothing", lambda cfg, fmt: "", adapt)

    first, unused, last = (provider(name) for name in "abc")
    monkeypatch.setattr(ops, "SPECS", (spec("rms_norm", first, unused, last), spec("rotate", last)))
    choices = [
        ops.Choice("rms_norm", "", "a/x", first, SimpleNamespace(__name__="x")),
        ops.Choice("rotate", "", "c/z", last, SimpleNamespace(__name__="z")),
    ]
    filled, fallbacks, report = ops._fitted(choices, model["bf16"])
    assert fallbacks == {"rms_norm": ("c/z", "reference"), "rotate": ("reference",)}
    assert report == ("a before c/z", "c before reference", "c before reference")
    out = torch.empty(1, 4)
    filled.rms_norm(torch.ones(1, 4), None, 0.0, out)
    assert calls == ["a", "c"] and bool((out == 1).all())


DECODE = f"linear_decode/{load.winner(load.PROBLEMS / decode.PROBLEM, 'cpu')}"
PARTS = {"two_linears": "its parts", "norm_linears": "its parts"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "nvfp4_gemv=cpu_portable",
            {"linear": "nvfp4_gemv/cpu_portable", "grouped_linear": "nvfp4_gemv/cpu_portable", **PARTS},
        ),
        ("linear=torch_dequant", {"linear": "linear_decode/torch_dequant", **PARTS}),
        ("grouped_linear=zeros", {"grouped_linear": "linear_decode/zeros"}),
        ("nvfp4_gemv=cpu_portable, linear=reference", {"grouped_linear": "nvfp4_gemv/cpu_portable"}),
        (
            "winners,mhc_site=reference,nvfp4_gemv=zeros,linear=torch_dequant",
            {
                "linear": "linear_decode/torch_dequant",
                "grouped_linear": "nvfp4_gemv/zeros",
                "two_linears": DECODE,
                "norm_linears": DECODE,
                "shared": DECODE,
                "all_experts": "its parts",
            },
        ),
        ("winners,reference", {}),
        ("rms_norm=reference", {}),
        ("rms_norm=winner", {}),
    ],
)
def test_names_fill_ops_and_later_ones_count(text, names, model):
    chosen = ops.choose(text, "cpu", model["nvfp4"])
    assert {op: name for op, name in chosen.names.items() if name != "reference"} == names
    plain = vars(ops.REFERENCE)
    assert {op for op, function in vars(chosen.ops).items() if function is not plain[op]} == set(names)


@pytest.mark.parametrize(
    "wrong", ["high_nibble_first", "zeros", "skips_last_rows", "ignores_sfb", "b_row_from_padding"]
)
def test_a_wrong_variant_in_an_op_gives_wrong_products(wrong, model):
    w = model["nvfp4"].layers[1].attn
    x, grouped = inputs(2, w.wkv.k), inputs(2, 3, w.wo_a.k)
    right, bad = (ops.choose(f"nvfp4_gemv={name}", "cpu", model["nvfp4"]).ops for name in ("winner", wrong))

    def error(table: ops.Ops, op: str) -> float:
        x_, w_ = (x, w.wkv) if op == "linear" else (grouped, w.wo_a)
        want = product(x_, w_, vars(ops.REFERENCE)[op])
        return float((product(x_, w_, vars(table)[op]) - want).norm() / want.norm())

    for op in ("linear", "grouped_linear"):
        assert error(right, op) < 1e-3 and not error(bad, op) < 1e-2  # NaN where it leaves outputs unwritten


def test_an_op_takes_a_file_with_the_interface_of_the_op_or_of_its_problem(tmp_path, model):
    own = tmp_path / "mine.py"
    own.write_text("def rms_norm(x, weight, eps, out):\n    out.fill_(3)\n\n\nlinear = None\n")
    submission = tmp_path / "entry.py"
    submission.write_text(
        "from task import unpack\n\nTARGETS = ('cpu',)\n\n\ndef custom_kernel(data):\n    unpack(data)\n"
        "    return data.outputs.out.fill_(2)\n"
    )
    chosen = ops.choose(f"rms_norm={own},linear={submission}", "cpu", model["nvfp4"])
    assert lines(chosen)["rms_norm"] == f"{own} (a function with the op's interface)"
    assert chosen.names["linear"] == "linear_decode/entry"
    out = torch.empty(2, 3)
    chosen.ops.rms_norm(out, None, 1e-6, out)
    assert bool((out == 3).all())
    w = model["nvfp4"].layers[0].attn.wq_a
    got = product(inputs(2, w.k).bfloat16(), w, chosen.ops.linear)
    assert len(got.unique()) == 1 and float(got[0, 0]) > 0


@pytest.mark.parametrize(
    ("text", "target", "fmt", "message"),
    [
        ("", "cpu", "nvfp4", "kernels must be reference, winners or NAME=VARIANT .*rms_norm.*moe_gemm.*; got ''"),
        ("fast", "cpu", "nvfp4", r"^(?!.*\b(mhc_site|experts|choose),.* \1[,;]).*; got 'fast'"),  # each name once
        ("winner", "cpu", "nvfp4", "got 'winner'"),
        ("linear=", "cpu", "nvfp4", "got 'linear='"),
        ("gemv=cpu_avx2", "cpu", "nvfp4", "got 'gemv=cpu_avx2'"),
        ("linear=cpu_avx3", "cpu", "nvfp4", "linear=cpu_avx3: no file cpu_avx3, nor one of linear_decode's .*cpu_avx2"),
        ("rms_norm=fast", "cpu", "nvfp4", "rms_norm=fast: no file fast$"),
        ("rms_norm=tests/conftest.py", "cpu", "nvfp4", "conftest.py must define rms_norm, .*: no problem is for it"),
        ("linear=sm90_mma", "cpu", "nvfp4", "linear=sm90_mma: sm90_mma is for sm90, sm100, not cpu"),
        ("linear=cpu_avx2", "sm90", "nvfp4", "linear=cpu_avx2: cpu_avx2 is for cpu, not sm90"),
        ("linear=tests/conftest.py", "cpu", "nvfp4", "conftest is for no target, not cpu"),
        ("linear=peer_torch", "cpu", "nvfp4", "a baseline is there to be compared with"),
        ("nvfp4_gemv=cpu_avx2", "cpu", "bf16", "linear=cpu_avx2: no NVFP4 linears in bf16"),
    ],
)
def test_what_cannot_be_had_is_an_error_that_says_why(text, target, fmt, message, model):
    with pytest.raises(ValueError, match=message):
        ops.choose(text, target, model[fmt])


def test_every_matrix_of_the_linear_ops_is_prepared(model):
    found = [w.name for w in model["nvfp4"].linears()]
    names = {unit.removesuffix(".input_scale") for unit in model["nvfp4"].tensors if unit.endswith(".input_scale")}
    assert len(found) == len(set(found)) and set(found) == {n for n in names if ".ffn." not in n}


# ---------------------------------------------------------------- operators


def gemv_arguments(m: int = 33, k: int = 64, l: int = 3, device: str = "cpu") -> list[torch.Tensor]:
    data = REFERENCE.generate_input(m, k, l, 1, device)
    return [*(tensor.view(torch.uint8) for tensor in data[:6]), data.c.zero_()]


def test_winners_that_fill_ops_are_operators():
    exported = {name for name in vars(operators) if isinstance(vars(operators)[name], torch.library.CustomOpDef)}
    assert {provider.problem for spec in ops.SPECS for provider in spec.providers if provider.adapt} == exported


def test_the_gemv_operator_passes_torchs_own_checks():
    torch.library.opcheck(operators.nvfp4_gemv, gemv_arguments())


def test_the_gemv_operator_writes_the_product():
    data = REFERENCE.generate_input(129, 320, 2, 7, "cpu")
    torch.ops.dsv4.nvfp4_gemv(*(tensor.view(torch.uint8) for tensor in data[:6]), data.c)
    assert REFERENCE.compare(data, REFERENCE.ref_kernel(data), data.c).ok


def test_tracing_refuses_what_the_winner_would_refuse():
    arguments = gemv_arguments()
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in arguments]
        operators.nvfp4_gemv(*fake)
        with pytest.raises(ValueError, match="sfb must be"):
            operators.nvfp4_gemv(*fake[:3], fake[2], *fake[4:])
    with pytest.raises(ValueError, match=r"a must be uint8, .*got torch\.float4_e2m1fn_x2"):
        operators.nvfp4_gemv(arguments[0].view(torch.float4_e2m1fn_x2), *arguments[1:])


@pytest.mark.gpu
def test_the_gemv_operator_passes_torchs_own_checks_on_the_gpu():
    torch.library.opcheck(operators.nvfp4_gemv, gemv_arguments(device="cuda"))


def test_the_operator_of_linears_computes_with_the_weights_of_its_name():
    folder = load.PROBLEMS / decode.PROBLEM
    task, reference = load.module(folder, "task"), load.module(folder, "reference")
    case = {**vars(task.TESTS[0]), "shape": "128x192+64x192_64x128", "tokens": 3, "device": "cpu"}
    data = task.Data(reference.generate_weights(**case), *reference.generate_input(**case))
    operators.hold_linear_decode("mine", data.weights)
    torch.ops.dsv4.linear_decode("mine", data.inputs.x, data.outputs.out)
    assert reference.compare(data, reference.ref_kernel(data), data.outputs.out).ok
    narrow = data.inputs.x[:, 1:]
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(ValueError, match="x must be"):
        operators.linear_decode("mine", mode.from_tensor(narrow), mode.from_tensor(data.outputs.out))
    operators.hold_linear_decode("mine", None)
    with pytest.raises(ValueError, match="name must be one of"):
        torch.ops.dsv4.linear_decode("mine", data.inputs.x, data.outputs.out)
