"""Kernels without a constant of their op, or with another one, fail the check: eps, floors, clamps, sinks, ties."""

import dataclasses
import functools
import math
import re
from itertools import chain

import pytest
import torch

from problems.common import fp8, nvfp4
from problems.dsv4_forward import check, ops, passes
from problems.dsv4_forward.edges import edges, together
from problems.dsv4_forward.torch_ops import compressor, mhc, norm
from problems.dsv4_forward.trace import Recorder
from problems.dsv4_forward.weights.config import FORMATS
from tests.support.marks import first

# As they are before something is put in their place.
_round_trip, compress = nvfp4.round_trip, compressor.compress
SLICE = "tiny-3l8e"  # a layer of each kind; the first two choose experts by a table, the last one by score


@functools.cache
def _case(fmt: str) -> passes.Case:
    return check.make(SLICE, fmt, "cpu", steps=1)


def _faults(fmt: str, changed: dict, unusual: bool = True) -> list[str]:
    """What the check says of calls behind random contexts. changed: functions by op."""
    table = dataclasses.replace(ops.REFERENCE, **dict.fromkeys(ops.FUSED, ops.apart) | changed)
    recorder = Recorder(table, torch.float32 if fmt == "fp32" else torch.bfloat16, edges=unusual)
    with torch.inference_mode():
        _case(fmt).late(recorder.ops(), recorder)
    return passes.say_kernels(recorder)


def _norm(divide):
    """rms_norm by divide(mean square, eps)."""

    def rms_norm(x, weight, eps, out):
        y = x.float()
        y = y / divide(y.square().mean(-1, keepdim=True), eps)
        out.copy_(y if weight is None else y * weight.float())

    return rms_norm


def _configured(**values):
    """mhc_pre with other constants."""

    def mhc_pre(copies, fn, base, scale, cfg, out, post, comb):
        mhc.pre(copies, fn, base, scale, dataclasses.replace(cfg, **values), out, post, comb)

    return mhc_pre


def _combined(eps):
    """mhc_pre whose combination has another hc_eps."""

    def mhc_pre(copies, fn, base, scale, cfg, out, post, comb):
        other = dataclasses.replace(cfg, hc_eps=eps)
        mhc.pre(copies, fn, base, scale, other, torch.empty_like(out), post, comb)
        mhc.pre(copies, fn, base, scale, cfg, out, post, torch.empty_like(comb))

    return mhc_pre


def _inside(op, where, **values):
    """The reference's op with other functions inside."""

    def run(*args, **named):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in values.items():
                patch.setattr(where, name, value)
            vars(ops.REFERENCE)[op](*args, **named)

    return run


def _floor(value):
    """An FP8 quantiser with another least amax."""
    trip, groups = fp8.round_trip, fp8.quantise_groups
    return {
        "round_trip": lambda x, group, floor=None, out=None: trip(x, group, value, out),
        "quantise_groups": lambda x, group, floor=None: groups(x, group, value),
    }


def _unsaturated(x, input_scale):
    """An NVFP4 quantiser whose scales are NaN beyond 448 and a half step."""
    blocks = (x / input_scale.unsqueeze(-1)).unflatten(-1, (-1, 16))
    over = blocks.abs().amax(-1, keepdim=True) > 6 * 464
    return _round_trip(x, input_scale).unflatten(-1, (-1, 16)).where(~over, torch.nan).flatten(-2)


def _changed(op, name, change):
    return lambda **given: vars(ops.REFERENCE)[op](**given | {name: change(given[name])})


def _spoilt(op, where):
    """The reference's op whose output is NaN where `where` of its arguments holds."""

    def run(**given):
        vars(ops.REFERENCE)[op](**given)
        given["out"].masked_fill_(where(given), torch.nan)

    return run


def _compress(*given):
    """compressor.compress whose exponentials overflow where something in the ring is beyond 88."""
    compress(*given)
    given[-1].masked_fill_(given[5].nan_to_num().abs().max() > 88, torch.nan)


def _softplus(logits):
    return logits.exp().add(1).log()


def _bias(factor):
    return lambda bias: None if bias is None else bias * factor


TINY_FLOOR = fp8.E4M3_MAX * 2.0**-120
ROWS = ("layer_rows, keys", "layer_rows, entries")


def _quantising(*names, **functions):
    return {op: _inside(op, fp8 if "quantise_groups" in functions else nvfp4, **functions) for op in names}


def _normed(divide):
    rms_norm = _norm(divide)
    return {"rms_norm": rms_norm, "layer_rows": _inside("layer_rows", norm, rms_norm=rms_norm)}


def _limit(factor):
    return {op: _changed(op, "limit", lambda limit: factor * limit) for op in ("experts", "shared")}


# What is wrong: the format in which it is found, functions by op, parts of layer_rows that are found too.
MUTANTS = {
    "norm without eps": ("bf16", _normed(lambda square, eps: square.sqrt()), ROWS),
    "norm with ten eps": ("bf16", _normed(lambda square, eps: (square + 10 * eps).sqrt()), ROWS),
    "norm with eps behind the root": ("released", _normed(lambda square, eps: square.sqrt() + eps), ROWS),
    "norm with eps as the least": ("fp32", _normed(lambda square, eps: square.clamp(min=eps).sqrt()), ROWS),
    "mhc without the norm's eps, other sinks": (
        "bf16",
        {
            "mhc_pre": _configured(rms_norm_eps=0.0),
            **_limit(1e6),
            "fmha": _changed("fmha", "sink", lambda sink: sink - math.inf),
            "route": _changed("route", "bias", _bias(0.0)),
        },
    ),
    "mhc with ten of the norm's eps, more sink": (
        "bf16",
        {
            "mhc_pre": _configured(rms_norm_eps=1e-5),
            **_limit(10),
            "fmha": _changed("fmha", "sink", lambda sink: sink + math.log(10)),
            "route": _changed("route", "bias", _bias(10.0)),
        },
    ),
    "mhc without hc_eps, exponentials without a maximum": (
        "bf16",
        {
            "mhc_pre": _configured(hc_eps=0.0),
            "fmha": _spoilt("fmha", lambda given: (given["lse"] > 88).unsqueeze(-1)),
            "layer_rows": _inside("layer_rows", compressor, compress=_compress),
            "route": _inside("route", torch.nn.functional, softplus=_softplus),
        },
    ),
    "mhc with ten hc_eps": ("bf16", {"mhc_pre": _configured(hc_eps=1e-5)}),
    "mhc whose combination has no hc_eps": ("bf16", {"mhc_pre": _combined(0.0)}),
    "mhc whose combination has ten hc_eps": ("bf16", {"mhc_pre": _combined(1e-5)}),
    "no FP8 floor": ("released", _quantising("linear", "experts", "shared", "layer_rows", **_floor(TINY_FLOOR)), ROWS),
    "ten FP8 floors": ("released", _quantising("linear", "layer_rows", **_floor(1e-3)), ROWS),
    "NVFP4 without saturation": (
        "nvfp4",
        _quantising("linear", "grouped_linear", "experts", "shared", round_trip=_unsaturated),
    ),
}

QUICK = ("norm without eps", "mhc without hc_eps, exponentials without a maximum", "no FP8 floor")


@pytest.mark.parametrize("what", first(sorted(MUTANTS, key=lambda what: what not in QUICK), len(QUICK)))
def test_a_kernel_with_another_constant_fails(what, capsys):
    fmt, changed, *also = MUTANTS[what]
    faults = _faults(fmt, changed)
    for op in (*changed, *chain.from_iterable(also)):
        assert any(re.match(rf"\S+ {op}[:,]", fault) for fault in faults), f"{op} passes"


@pytest.mark.parametrize("fmt", first(FORMATS))
def test_the_reference_passes(fmt, capsys):
    assert not _faults(fmt, {})


def test_inputs_are_left_alone():
    x = torch.ones(2, 4)
    found = list(edges("rms_norm", {"x": x, "weight": None}))
    assert [float(given["x"][0, 0]) for _, given in found] == [0.0, 2.0**-10, 2.0**-30] and bool((x == 1).all())
    assert [said for said, _ in found] == ["x times 0", "x times 0.000976562", "x times 9.31323e-10"]
    assert not list(edges("embed", {}))
    calls = [("norm_rotate", {"x": x}), ("index_query", {"x": x})]
    assert [[float(one["x"][0, 0]) for one in given] for _, given in together(calls)] == [
        [0.0, 0.0],
        [2.0**-10, 2.0**-30],
        [2.0**-30, 2.0**-30],
    ]
