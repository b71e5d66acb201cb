"""mhc_site: the oracle against loops over scalars, and its check. The model's ops: tests/dsv4/test_mhc_site.py."""

import functools
import math

import numpy as np
import pytest
import torch

from problems.common import load
from tests.problems import cases
from tests.problems.cases import named
from tests.problems.exact import bf16

NAME = "mhc_site"
task, reference = cases.task(NAME), cases.reference(NAME)
made, solved, rounded, poisoned = (
    functools.partial(function, NAME) for function in (cases.made, cases.solved, cases.rounded, cases.poisoned)
)
SMALL = [case for case in task.TESTS if case.tokens * case.hidden <= 12_000]
N, EPS = 4, 1e-6


def test_cases_have_the_sizes_of_the_models_and_those_that_kernels_fail_at():
    assert {c.content for c in task.TESTS} == set(task.CONTENTS)
    assert {c.addends for c in task.TESTS} == set(task.ADDENDS)
    assert sum(c.hidden % 128 == 64 for c in task.TESTS) > 8 and {4096, 7168} < {c.hidden for c in task.TESTS}
    assert {c.tokens % 16 for c in task.TESTS} > {0, 1, 2, 3, 15} and {c.tokens % 32 for c in task.TESTS} > {0, 1, 31}
    one = task.BENCHMARKS[0]
    assert one.bytes_moved() == 2 * 10 * 4096 + 160 + 4 * (24 * 4 * 4096 + 27) + 2 * 4096
    one, two = (task.Case(3, 64, addends, "plain", 1).bytes_moved() for addends in ("bf16", "bf16+fp32"))
    assert two - one == 3 * 64 * 4


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def balanced(rows: list[list[float]]) -> list[list[float]]:
    m = []
    for row in rows:
        powers = [math.exp(a - max(row)) for a in row]
        m.append([p / sum(powers) + EPS for p in powers])
    for turn in range(20):
        if turn:
            m = [[v / (sum(row) + EPS) for v in row] for row in m]
        sums = [sum(row[k] for row in m) + EPS for k in range(N)]
        m = [[v / sums[k] for k, v in enumerate(row)] for row in m]
    return m


def site_of(data: object, t: int) -> tuple[list, list, list, list]:
    """The four outputs of token t, from the definition, in Python's numbers."""
    x, y, d = data.copies[t].tolist(), data.y[t].tolist(), data.y.shape[1]
    if len(data.second):
        y = [bf16(float(np.float32(a) + np.float32(b))) for a, b in zip(y, data.second[t].tolist(), strict=True)]
    post, comb = data.post[t].tolist(), data.comb[t].tolist()
    new = [[post[k] * y[i] + sum(comb[j][k] * x[j][i] for j in range(N)) for i in range(d)] for k in range(N)]
    taken = [[bf16(v) for v in row] for row in new]
    v = [value for row in taken for value in row]
    inverse = 1 / math.sqrt(math.fsum(a * a for a in v) / len(v) + EPS)
    z = [math.fsum(a * b for a, b in zip(row, v, strict=True)) * inverse for row in data.fn.double().tolist()]
    scale = [data.scale[0 if r < N else 1 if r < 2 * N else 2].item() for r in range(24)]
    logit = [a * s + b for a, s, b in zip(z, scale, data.base.tolist(), strict=True)]
    pre = [sigmoid(a) + EPS for a in logit[:N]]
    u = [sum(p * row[i] for p, row in zip(pre, taken, strict=True)) for i in range(d)]
    rms = math.sqrt(math.fsum(a * a for a in u) / d + EPS)
    out = [w * a / rms for w, a in zip(data.norm.tolist(), u, strict=True)]
    made = balanced([logit[2 * N + N * j : 3 * N + N * j] for j in range(N)])
    return new, out, [2 * sigmoid(a) for a in logit[N : 2 * N]], made


@pytest.mark.parametrize("content", task.CONTENTS)
@pytest.mark.parametrize("addends", ["bf16", "bf16+bf16", "fp32+fp32"])
def test_reference_is_the_definition(addends, content):
    data = made(addends=addends, content=content)
    for t in range(2):
        for got, want in zip(reference.ref_kernel(data), site_of(data, t), strict=True):
            torch.testing.assert_close(got[t], torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_contents_hold_what_they_promise():
    def of_content(content: str, addends: str = "bf16") -> object:
        return made(tokens=64, hidden=128, addends=addends, content=content, seed=3)

    size = of_content("magnitudes").copies.float().norm(dim=(1, 2))
    assert float(size.max() / size.min()) > 2**12
    zeros = of_content("zeros")
    assert not zeros.y[0].any() and not zeros.copies[0].any()
    assert 10 < int((zeros.y == 0).all(1).sum()) < 40 and 10 < int((zeros.copies == 0).flatten(1).all(1).sum()) < 40
    data = of_content("cancelling")
    assert float((data.copies[:, 0] + data.copies[:, 2]).float().norm() / data.copies[:, 0].float().norm()) < 0.02
    assert float(of_content("magnitudes").copies.float().abs().max()) > 65504
    z, _ = reference.mixed(of_content("saturated"), reference.ref_kernel(of_content("saturated"))[0].bfloat16())
    for which, of in ((reference.PRE, 0), (reference.POST, 1), (reference.COMB, 2)):
        logits = reference.logits(of_content("saturated"), z, which, of)
        assert float(logits.max()) > 100 and float(logits.min()) < -100
    new = reference.ref_kernel(of_content("saturated"))
    assert float(new[2].min()) < 1e-4 and float(new[2].max()) > 1.999 and float(new[3].max()) > 0.99
    data = of_content("tiny_pre")
    z, _ = reference.mixed(data, reference.ref_kernel(data)[0].bfloat16())
    assert float(torch.sigmoid(reference.logits(data, z, reference.PRE, 0)).max()) < 1e-7
    assert bool((of_content("positive").copies >= 0).all())
    data = of_content("cancelling", "fp32+fp32")
    assert float(task.summed(data).float().norm() / data.second.norm()) < 0.02


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("content", ["plain", "saturated", "cancelling"])
def test_one_element_beyond_its_tolerance_is_refused(content, place):
    data, want = solved(task.Case(3, 192, "bf16", content, 11))
    right = rounded(data, want)
    rights, tolerances, _ = reference.follow(data, right[0])
    wants, admitted = (want[0], *rights), (reference.copies_tolerance(data, want[0]), *tolerances)
    off = wants[place] + 2 * admitted[place]
    flat = int((off.to(right[place].dtype).double() - wants[place]).abs().sub(admitted[place]).argmax())
    bad = [t.clone() for t in right]
    bad[place].view(-1)[flat] = off.view(-1)[flat].to(bad[place].dtype)
    result = reference.compare(data, want, tuple(bad))
    assert not result.ok and task.OUTPUTS[place] in result.message
    bad[place].view(-1)[flat] = torch.nan
    assert not reference.compare(data, want, tuple(bad)).ok


def test_u_may_be_rounded_and_the_norm_summed_from_products():
    """What the reference of the model does, and what a kernel does that has no second look at u."""
    for case in SMALL:
        data, want = solved(case)
        right = rounded(data, want)
        x = right[0].float()
        z, _ = reference.mixed(data, right[0])
        pre = (torch.sigmoid(reference.logits(data, z, reference.PRE, 0)) + EPS).float()
        u = torch.bmm(pre.unsqueeze(1), x).squeeze(1)
        products = torch.bmm(x, x.mT)
        square = torch.einsum("tj,tk,tjk->t", pre, pre, products).unsqueeze(1).clamp_min(0)
        of_products = u * torch.rsqrt(square / u.shape[1] + EPS) * data.norm.float()
        once = u.bfloat16().float()
        of_rounded = torch.nn.functional.rms_norm(once, once.shape[1:], data.norm.float(), EPS)
        for out in (of_products, of_rounded):
            result = reference.compare(data, want, (right[0], out.bfloat16(), *right[2:]))
            assert result.ok, (named(case), result.message)


@pytest.mark.parametrize("content", task.CONTENTS)
def test_out_may_not_lean(content):
    """No element shows it; and what honest kernels make, with u rounded or not, is far from what is refused."""
    data, want = solved(task.Case(3, 1088, "bf16", content, 11))
    right = rounded(data, want)
    (out, *_), _, admitted = reference.follow(data, right[0])
    assert bool((reference.lean(right[1].double(), out).abs() <= admitted / 2).all())
    cut = (out.float().view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()
    assert "errors of one sign" in reference.compare(data, want, (right[0], cut, *right[2:])).message


@pytest.mark.parametrize("seed", [9, 10, 11])
def test_values_below_the_least_normal_one_may_be_zero(seed):
    """Of post: scales as large as task.py admits make sigmoids that an fp32 exponential cannot tell from 0."""
    data = made(tokens=200, content="saturated", seed=seed)
    data = data._replace(scale=torch.full((3,), 300.0))
    want = reference.ref_kernel(data)
    right = load.variant("mhc_site", "torch_eager").custom_kernel(poisoned(data))
    flushed = (right[2] == 0) & (want[2] > 0)
    assert bool(flushed.any()) and reference.compare(data, want, right).ok
    larger = right[2].masked_fill(flushed, 2.0**-120)
    assert not reference.compare(data, want, (*right[:2], larger, right[3])).ok
