"""The end-to-end check: it passes what is right, names layer and kernel of what is wrong, and follows decisions."""

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator

import pytest
import torch

from problems import wrong
from problems.common import load
from problems.dsv4_forward import check, ops, passes, trace
from problems.dsv4_forward.torch_ops import rows
from problems.dsv4_forward.trace import CHECKS, Follower, Recorder, margins
from problems.dsv4_forward.weights.config import CSA, TINY
from tests.support.marks import first

SLICE = "tiny-3l8e"  # a layer of each kind


def wrong_for(op: str) -> list[str]:
    """Files that define a wrong function of the op's name."""
    found = []
    for file in wrong.write(load.PROBLEMS / "dsv4_forward"):
        names = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
        found += [str(file)] if op in names else []
    return found


@pytest.fixture(scope="module", autouse=True)
def short_prompts() -> Iterator[None]:
    """Past two windows and blocks of 128, and few; and fewer sequences beside each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "PROMPTS", (300, 37))
        patch.setattr(passes, "WIDE", (40,))
        yield


@pytest.fixture(scope="module")
def case() -> passes.Case:
    """TINY in bf16, two steps: every op is called, the indexer has to select, each compressor has emitted."""
    return check.make("tiny", "bf16", "cpu", steps=2)


def told(case: passes.Case, table: ops.Ops) -> tuple[list[str], Recorder, passes.Pass]:
    """Faults of these ops on the oracle's inputs, what was recorded, and the oracle."""
    recorder = Recorder(table, torch.bfloat16)
    with torch.inference_mode():
        oracle = case.run(recorder.ops(), torch.float32, recorder, None)
    return passes.say_kernels(recorder), recorder, oracle


def options(fmt: str, *words: str) -> list[str]:
    return ["--device", "cpu", "--config", "tiny", "--format", fmt, "--steps", "1", *words]


def test_every_op_has_a_budget_and_a_wrong_kernel():
    assert tuple(CHECKS) == ops.NAMES and all(wrong_for(op) for op in CHECKS)


# With all_experts filled the two ops that it joins are not called.
@pytest.mark.parametrize("wrong", [[op for op in CHECKS if op != "all_experts"], ["all_experts"]], ids=["most", "one"])
def test_every_wrong_kernel_is_named_with_its_layer(wrong, case, capsys):
    """Each is compared on the oracle's inputs, so one pass shows them all, none hidden by another."""
    names = ",".join(f"{op}={wrong_for(op)[0]}" for op in wrong)
    with torch.inference_mode():
        table = ops.choose(names, "cpu", case.weights).ops
    faults, recorder, _ = told(case, table)
    for op in wrong:
        layers = list(dict.fromkeys(layer for (layer, name) in recorder.worst if name.partition(",")[0] == op))
        named = [fault for fault in faults if re.match(rf"\S+ {op}[:,]", fault)]
        assert named, f"{op} passes"
        # In the first layer all copies are equal, so that their mix may be wrong, and no tokens are compressed.
        assert named[0].partition(" ")[0] in layers[: 2 if op in ("mhc_post", "layer_rows") else 1], named[0]


def site(second, cfg, lost=0.0, fewer=0, **named):
    """mhc_site with a part of the second addend lost, or with fewer iterations of Sinkhorn."""
    cfg = dataclasses.replace(cfg, hc_sinkhorn_iters=cfg.hc_sinkhorn_iters - fewer)
    ops.REFERENCE.mhc_site(second=second if second is None else second * (1 - lost), cfg=cfg, **named)


@pytest.mark.parametrize(("fault", "output"), [({}, ""), ({"lost": 1.0}, "new_copies"), ({"fewer": 1}, "new_comb")])
def test_site_between_layers_is_the_one_that_is_checked(fault, output, capsys, monkeypatch):
    monkeypatch.setattr(check, "PROMPTS", (24, 3))
    case = check.make("tiny", "bf16", "cpu", steps=1)
    table = dataclasses.replace(ops.REFERENCE, mhc_site=functools.partial(site, **fault), all_experts=ops.apart)
    faults, recorder, oracle = told(case, table)
    with torch.inference_mode():
        mine = passes.follow(case, Follower(table, recorder.decisions), oracle.logits.argmax(-1))
    assert bool(faults) == bool(output) and all(f" mhc_site: {output} is off by " in one for one in faults)
    assert [name for name, _ in mine.copies] == [name for name, _ in oracle.copies]


@pytest.mark.parametrize("fmt", first(["nvfp4", "released", "bf16"]))
def test_a_flipped_code_is_admitted_where_the_kernel_quantises(fmt, capsys, monkeypatch):
    """Then a row may be off by a tenth, in FP8 by 3 %, if all as one are not off by 2 or 1 %; elsewhere by 1 %."""
    monkeypatch.setattr(check, "PROMPTS", (24, 3))
    case = check.make(SLICE, fmt, "cpu", steps=1)
    row, whole = {"nvfp4": (0.08, 0.02), "released": (0.025, 0.01)}.get(fmt, (0.009, 0))

    def faults(rows: slice, off: float) -> list[str]:
        def experts(x, ids, weights, w13, w2, limit, out):
            ops.REFERENCE.experts(x, ids, weights, w13, w2, limit, out)
            out[rows] *= 1 + off

        return told(case, dataclasses.replace(ops.REFERENCE, experts=experts, all_experts=ops.apart))[0]

    # The first call of a layer has 24 rows, the last one two: there a row is not so much less than all.
    assert not faults(slice(0), 0) and not faults(slice(20, 21), row) and faults(slice(20, 21), 1.5 * row)
    one = faults(slice(20, 21), 0.15)
    assert one and "experts: out is off by 0.1" in one[0] and "of its row, budget" in one[0]
    every = faults(slice(None), 0.04)
    assert every and all(
        part in every[-1] for part in ("experts, as one: out is off by 0.04", f"budget {whole}") if whole
    )


@pytest.mark.slow
@pytest.mark.parametrize("op", CHECKS)
def test_a_wrong_kernel_alone_fails_the_check(case, op, capsys):
    for file in wrong_for(op):
        assert not check.check(case, f"{op}={file}", "cpu")
        said = capsys.readouterr().out
        assert f" {op}" in said.partition("FAULT: ")[2].partition("\n")[0], said[-2000:]


def test_the_command_passes_the_winners(capsys, monkeypatch):
    monkeypatch.setattr(check, "PROMPTS", (9, 5))
    monkeypatch.setattr(passes, "WIDE", (33,))
    assert check.main(options("nvfp4", "--kernels", "winners")) == 0
    said = capsys.readouterr().out
    assert "1 of 1 configurations right" in said
    assert [line.split(":")[0] for line in said.splitlines() if " checks: " in line] == [
        f"  {n} of 6 checks" for n in range(1, 7)
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "-1"], "check: --steps must be 1 or more, got -1 (see .venv/bin/python -m problems.dsv4"),
        (["extra"], "unexpected argument extra ("),
        (["--device", "tpu"], "check: --device must be cpu, cuda or"),
        (["--config", "huge"], "check: --config must"),
        (["--config", "", "--format", "fp32"], "check: --config must be one of"),
        (["--config", "tiny", "--steps", "5000"], "--steps must be at most 3796 in tiny"),
        (["--kernels", "linear=winner,linear=winner"], "check: --kernels must name linear once, got 'linear=winner,"),
    ],
)
def test_wrong_arguments_get_one_line(words, said, capsys):
    try:
        code = check.main(["--device", "cpu", *words])
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert code == 2 and said in err and err.count("\n") == 1 and not out


def test_a_format_that_no_case_has_is_no_pass(monkeypatch, capsys):
    monkeypatch.setitem(check.CASES, "cpu", (("tiny", "bf16"), ("tiny", "nvfp4")))
    assert check.main(["--device", "cpu", "--format", "released"]) == 2
    assert "--format must be one of bf16, nvfp4 without --config" in capsys.readouterr().err


def test_another_greedy_token_is_a_fault_beyond_the_error_only(capsys):
    logits = torch.zeros(1, 2, 9)
    logits[0, :, 4] = 1.0
    oracle, plain, composed = (passes.Pass(logits.clone(), []) for _ in range(3))
    plain.logits[0, 0, 0] += 0.1
    for off, faults in ((0.05, 0), (0.5, 1)):
        oracle.logits[0, 1, 5] = plain.logits[0, 1, 5] = 1.0 - off
        composed.logits[0, 1, 5] = 1.01
        found = [fault for fault in passes.say_logits(oracle, plain, composed) if "greedy" in fault]
        said = capsys.readouterr().out
        assert len(found) == faults and f"1 of 2 equal, {1 - faults} differ within the error" in said
        where = f"sequence 1, token 0: 5 instead of 4, whose logit is {off:.3g} higher in the oracle; up to "
        assert where in (found[0] if faults else said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def rms_norm(*args, **named):\n    raise ValueError('odd')\n", "2: ValueError: odd"),
        ("def rms_norm(*args, **named):\n    raise SystemExit(0)\n", "2: it would have ended the process: 0"),
        ("def rms_norm(x):\n    pass\n", "layers.0 rms_norm: TypeError: rms_norm() got an unexpected keyword argument"),
        ("import torch\ndef rms_norm(**named):\n    torch.zeros(2) @ torch.zeros(3)\n", "mine.py:3: RuntimeError: "),
        ("import nothing_like_it\ndef rms_norm(): pass\n", "mine.py:1: ModuleNotFoundError: No module named 'nothing_"),
        ("raise SystemExit\ndef rms_norm(): pass\n", "mine.py:1: it would have ended the process"),
    ],
)
def test_a_kernel_that_raises_is_a_fault_in_one_line(text, said, tmp_path, capsys):
    """Exit status 2 is for arguments. The line names the kernel's file, not where in the check it was called."""
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert check.main(options("bf16", "--kernels", f"rms_norm={file}")) == 1
    printed = capsys.readouterr().out
    faults = [line for line in printed.splitlines() if "FAULT: " in line]
    assert len(faults) == 1 and said in faults[0] and "0 of 1 configurations right" in printed


@pytest.mark.parametrize("error", ["torch.OutOfMemoryError('of CUDA')", "RuntimeError('DefaultCPUAllocator: no')"])
def test_too_large_a_model_is_refused(error, tmp_path, monkeypatch, capsys):
    """As an argument, wherever memory gives out, in a kernel too."""
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\ndef rms_norm(**named):\n    raise {error}\n")
    assert check.main(options("bf16", "--kernels", f"rms_norm={file}")) == 2
    monkeypatch.setattr(check.tree, "random", lambda *given, **named: exec(f"raise {error}"))
    assert check.main(options("bf16")) == 2
    said = capsys.readouterr().err
    assert said.count("check: no memory for tiny in bf16 on cpu: give a smaller --config") == 2


def _rows(**given):
    """layer_rows that loses entries of late tokens, and writes to a row of the window's next page."""
    rows.layer_rows(**given)
    for one in given["compressed"]:
        late = one["index"][one["position"][one["emit"]] >= 200]
        one["pages"].write(late, torch.zeros(len(late), one["pages"].width))
    pages, index = given["key"]["pages"], given["key"]["index"]
    pages.data.view(torch.uint8).flatten(1)[(int(index[0]) // pages.per_page + 1) % len(pages.data), :4] = 0


def _angles_that_end(**given):
    ops.REFERENCE.start(**given)
    given["cos"][:, given["given"].views(given["numbers"], given["lists"]).position >= 400] = 1


def _few_scores(**given):
    ops.REFERENCE.choose(**given | {"weights": given["weights"] * (given["entries"] <= 110)})


def _nothing_alone(**given):
    ops.REFERENCE.fmha(**given)
    if given["q"].shape[:2] == (1, 1):
        given["out"].zero_()


def _holes_read(**given):
    """Adds 0 times the first entry, which a hole's index reads, as a kernel does that masks probabilities only."""
    ops.REFERENCE.fmha(**given)
    if given["cache"] is not None and bool((given["index"] < 0).any()):
        given["out"] += 0 * given["cache"].read(torch.zeros(1, dtype=torch.int64)).to(given["out"].dtype)


def _input_spoilt(**given):
    ops.REFERENCE.rms_norm(**given)
    given["x"].zero_()


@pytest.mark.parametrize("fmt", ["bf16", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_what_the_prompts_do_not_reach_is_reached_behind_random_contexts(fmt, capsys):
    wrong = {"layer_rows": _rows, "start": _angles_that_end, "choose": _few_scores}
    wrong |= {"fmha": _nothing_alone, "rms_norm": _input_spoilt}
    case = check.make(SLICE, fmt, "cpu")

    def faults(changed: dict) -> list[str]:
        recorder = Recorder(dataclasses.replace(ops.REFERENCE, **changed), torch.bfloat16)
        with torch.inference_mode():
            case.late(recorder.ops(), recorder)
        return passes.say_kernels(recorder)

    found = faults(wrong)
    for op in wrong:
        assert any(re.match(rf"\S+( \S+)? {op}[:,]", fault) for fault in found), f"{op} passes"
    assert any(" layer_rows, entries: pages" in fault for fault in found)
    assert any("a row of pages that it must not write is off" in fault for fault in found)
    assert any("rms_norm: x, its input, is off" in fault for fault in found)
    assert any(" fmha: " in fault for fault in faults({"fmha": _holes_read}))


def test_the_check_asks_for_edges_and_fails_by_a_layer(capsys, monkeypatch):
    monkeypatch.setattr(check, "PROMPTS", (9, 5))
    monkeypatch.setattr(passes, "WIDE", (2,))
    late, asked = passes.Case.late, []

    def seen(self, table, probe):
        asked.append(probe.edges)
        late(self, table, probe)

    monkeypatch.setattr(passes.Case, "late", seen)
    past = passes.Layer("layers.1", 1.0, 1.0, 0.5, 0.1, 0.0, 1.0, 1.0)
    monkeypatch.setattr(passes, "layers", lambda *given: [past])
    assert not check.check(check.make(SLICE, "fp32", "cpu", steps=1), "reference", "cpu")
    assert asked == [True] and "FAULT: alone: copies after layers.1 are off" in capsys.readouterr().out


@pytest.mark.parametrize("fmt", ["fp32", pytest.param("released", marks=pytest.mark.slow)])
def test_the_reference_is_right(fmt, capsys, monkeypatch):
    monkeypatch.setattr(check, "PROMPTS", (70, 9))
    assert check.check(check.make(SLICE, fmt, "cpu", steps=2), "reference", "cpu")
    said = capsys.readouterr().out
    if fmt == "fp32":
        assert "greedy tokens: 6 of 6 equal, 0 differ within the error" in said and "relative error 0.00e+00" in said


def test_drift_is_named_where_it_begins(case, capsys):
    """A kernel within its own budget whose errors all point one way is found by what a layer makes of its copies."""

    def biased(x, weight, eps, out):
        ops.REFERENCE.rms_norm(x, weight, eps, out)
        out.mul_(1.5)

    table = dataclasses.replace(ops.REFERENCE, rms_norm=biased, mhc_site=ops.apart)
    _, recorder, oracle = told(case, None)
    with torch.inference_mode():
        forced = oracle.logits.argmax(-1)
        tables = (ops.REFERENCE, table)
        free = [passes.follow(case, Follower(t, recorder.decisions), forced) for t in tables]
        alone = [passes.follow(case, Follower(t, recorder.decisions, recorder.residuals), forced) for t in tables]
    faults = passes.say_layers(passes.layers(oracle, alone, free))
    assert faults and faults[0].startswith("alone: copies after layers.0 are off") and passes.say_logits(oracle, *free)


def test_a_follower_decides_as_the_oracle(case):
    _, recorder, oracle = told(case, None)
    with torch.inference_mode():
        follower = Follower(ops.REFERENCE, recorder.decisions)
        case.run(follower.ops(), None, follower, oracle.logits.argmax(-1))
    assert follower.done == len(recorder.decisions) > 0 and {d.op for d in recorder.decisions} == {"route", "choose"}
    assert sum(d.op == "route" for d in recorder.decisions) % TINY.num_hidden_layers == 0
    assert {d.layer for d in recorder.decisions if d.op == "choose"} == {
        f"layers.{i}" for i, ratio in enumerate(TINY.ratios) if ratio == CSA
    }
    follower.done = 0
    follower.layer = "layers.5"
    with pytest.raises(ValueError, match=r"decides route in layers\.5, the oracle route in layers\.0"):
        follower._next("route")


def test_margins():
    scores = torch.tensor([[5.0, 4.0, 3.999, 1.0], [1.0, 2.0, 3.0, -torch.inf]])
    same = torch.tensor([[0, 1], [2, 1]], dtype=torch.int32)
    assert margins(same, same.flip(1), scores) == 0.0, "order does not matter"
    for other, margin in (([[0, 2], [1, 2]], 0.001 / 5), ([[0, 3], [1, 2]], 3 / 5)):
        assert margins(same, torch.tensor(other, dtype=torch.int32), scores) == pytest.approx(margin, rel=1e-2)
    assert margins(same, torch.tensor([[0, 1], [1, 3]], dtype=torch.int32), scores) == float("inf"), "not visible"
    for bad in ([[0, 0], [2, 1]], [[0, 4], [2, 1]], [[0, -1], [2, 1]]):
        assert margins(same, torch.tensor(bad, dtype=torch.int32), scores) == float("inf")


def test_errors_are_measured_by_row():
    want = torch.ones(3, 64)
    got = want.clone()
    got[1] *= 1.01
    error, _ = trace._apart(got, want)
    assert error == pytest.approx(0.01, rel=1e-3)
    got[2, 5] = float("nan")
    assert trace._apart(got, want)[0] == float("inf") and trace._apart(want, got)[0] == float("inf")
    assert trace._apart(torch.full((2, 3), torch.inf), torch.full((2, 3), torch.inf))[0] == 0.0
    worst = trace.Worst("layer", "op", 1.0)
    worst.take(float("nan"), 1.0, "out")
    assert not worst.ok
    assert bool(trace._fresh(want, want.dtype).isnan().all()) and int(trace._fresh(want, torch.int32).max()) < 0
    tiny = torch.cat([want, torch.full((1, 64), 1e-9)])
    assert trace._apart(torch.cat([want, torch.zeros(1, 64)]), tiny)[0] < 1e-3, "rows of nothing do not count"
