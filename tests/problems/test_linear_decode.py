"""linear_decode: the oracle against bytes and loops, the generator, its check, how sm90_mma is launched."""

import ctypes
import functools
import itertools
import math

import pytest
import torch

from problems.common import build, fp8, load, nvfp4
from tests.problems import cases
from tests.problems.cases import named
from tests.problems.exact import FP8, cut, dot, e4m3, nvfp4_row, quantised
from tests.support.formats import NVFP4
from tests.support.marks import first, needs_nvcc

NAME = "linear_decode"
task, reference = cases.task(NAME), cases.reference(NAME)
made, solved = functools.partial(cases.made, NAME), functools.partial(cases.solved, NAME)
baseline, mma = (load.variant(NAME, variant) for variant in ("torch_dequant", "sm90_mma"))
QUICKEST_FIRST = sorted(task.TESTS, key=lambda case: case.flops())


def of_content(content: str, fmt: str) -> object:
    return next(solved(c)[0] for c in task.TESTS if (c.content, c.format) == (content, fmt))


def test_shapes_are_matrices_by_link():
    links = (((1, 128, 64), (1, 64, 64)), ((2, 64, 64),), ((1, 192, 128),))
    assert task.links_of("128x64+64x64_2x64x64_192x128") == links and task.links_of("64x128") == (((1, 64, 128),),)
    chain = task.links_of(task.CHAIN)
    assert [len(link) for link in chain] == [2, 1, 1, 1] and chain[2] == ((8, 1024, 4096),)
    weights = sum(g * n * k for link in chain for g, n, k in link)
    assert 106e6 < weights < 108e6


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ("64 64x0 axb 1x2x3x4", "shape must be"),
        ("96x64", "multiples of 64"),
        ("64x64+64x128 2x64x64+64x64", "one k and no groups"),
        ("64x64_64x128", "must take the 64 values"),
        ("2x64x64_3x64x64", "must take the 128 values"),
    ],
)
def test_shapes_that_are_none_are_refused(shapes, message):
    for shape in shapes.split():
        with pytest.raises(ValueError, match=message):
            made(shape=shape)


def test_unpack_says_the_sizes_and_parts_where_outputs_are():
    data = made()
    sizes = task.unpack(data)
    assert sizes == (2, "fp8", (((1, 64, 192), (1, 128, 192)), ((1, 64, 64),)))
    out = torch.arange(2 * 256)
    (first, second), (third,) = task.parts(out, sizes)
    assert first.shape == (2, 64) and second.shape == (2, 128) and third.shape == (2, 64)
    assert torch.equal(torch.cat([t.flatten() for t in (first, second, third)]), out) and second[0, 0] == 128


def test_tests_have_the_sizes_that_kernels_fail_at():
    assert {case.tokens for case in task.TESTS} >= {1, 2, 7, 8, 9, 16, 17, 31, 32}
    assert {case.content for case in task.TESTS} == set(task.CONTENTS)
    matrices = [m for case in task.TESTS for link in task.links_of(case.shape) for m in link]
    assert sum(n % 128 == 64 for _, n, _ in matrices) > 20 and sum(k % 128 == 64 for *_, k in matrices) > 20
    chains = [task.links_of(case.shape) for case in task.TESTS]
    assert {len(link) for links in chains for link in links} == {1, 2, 3, 4}
    assert {len(links) for links in chains} == {1, 2, 4, 5}
    chains = [links for links in chains if len(links) > 1]
    assert {len(link) for _, *later in chains for link in later} == {1, 2, 3}
    assert all(any(links[place][0][0] > 1 for links in chains) for place in (0, 2, -1))
    assert {g for g, *_ in matrices} >= {1, 2, 3, 5, 8}


def test_cases_say_what_they_move_and_compute():
    wq_b = task.Case("fp8", 1, "32768x1024", "plain", 1)
    assert wq_b.bytes_moved() == 32768 * 1024 + 256 * 8 + 2 * (1024 + 32768)
    assert wq_b.flops() == 2 * 32768 * 1024 and wq_b.weight_bytes() == 32768 * 1024 + 256 * 8
    codes, values = (task.Case("fp8", 1024, shape, "plain", 1) for shape in ("64x128", "2x64x64"))  # e4m3 and bf16
    assert codes.flops() * 2 == values.flops() == 1024 * 2 * 128 * 64


def weights(fmt: str, matrix: object, g: int, i: int) -> list[float]:
    """Row i of a matrix's group g."""
    if fmt == "bf16":
        return matrix.codes[g, i].tolist()
    codes, scales = (tensor[g].view(torch.uint8).tolist() for tensor in (matrix.codes, matrix.scales))
    if fmt == "nvfp4":
        return nvfp4_row(codes[i], scales[i], float(matrix.factor[g]))
    return [e4m3(code) * 2.0 ** (scales[i // 128][j // 128] - 127) for j, code in enumerate(codes[i])]


@pytest.mark.parametrize("fmt", task.FORMATS)
def test_reference_is_the_sum_over_the_bytes_in_memory(fmt):
    data = made(format=fmt, shape="2x64x192_64x128", content="magnitudes")
    out = task.parts(reference.ref_kernel(data), task.unpack(data))
    (grouped,), (plain,) = data.weights.links
    assert grouped.quantise is (fmt == "nvfp4") and plain.quantise is (fmt != "bf16")
    for t, g, i in ((0, 0, 5), (1, 1, 63)):
        taken = data.inputs.x[t, g * 192 : (g + 1) * 192].tolist()
        taken = quantised(taken, NVFP4, float(grouped.input_scale[g])) if fmt == "nvfp4" else taken
        want = dot(weights(fmt, grouped, g, i), taken)
        assert math.isclose(float(out[0][0][t, g * 64 + i]), want, rel_tol=1e-9 if fmt != "nvfp4" else 1e-6)
    taken = out[0][0][1].bfloat16().tolist()
    if fmt != "bf16":
        taken = quantised(taken, *((NVFP4, float(plain.input_scale[0])) if fmt == "nvfp4" else (FP8,)))
    want = dot(weights(fmt, plain, 0, 40), taken)
    assert math.isclose(float(out[1][0][1, 40]), want, rel_tol=1e-9 if fmt != "nvfp4" else 1e-6)


@pytest.mark.parametrize("case", task.TESTS, ids=named)
def test_generated_data_is_what_the_task_says(case):
    data, want = solved(case)
    sizes = task.unpack(data)
    assert (sizes.tokens, sizes.format, sizes.links) == (case.tokens, case.weight_format, task.links_of(case.shape))
    assert bool(data.outputs.out.isnan().all()) and bool(data.inputs.x.isfinite().all())
    assert bool(want.isfinite().all()) and 0 < float(want.abs().max()) < 2.0**126
    nbytes = 0
    for matrix in task.matrices(data.weights):
        nbytes += matrix.codes.nbytes + (0 if matrix.scales is None else matrix.scales.nbytes)
        if case.format == "fp8":
            assert bool((matrix.scales >= 63).all() & (matrix.scales <= 191).all())
            assert not bool((matrix.codes.view(torch.uint8) & 0x7F == 0x7F).any()), "NaN"
        elif case.weight_format == "nvfp4":
            nvfp4.check_scales(matrix.scales)
            assert matrix.quantise is (case.format == "nvfp4")
            assert bool((matrix.factor >= 2.0**-40).all() & (matrix.factor <= 2.0**40).all())
    assert nbytes == case.weight_bytes()


def test_inputs_of_nvfp4_meet_every_kind_of_scale():
    """Scales of zero and of the largest e4m3, subnormal ones, and codes that saturate."""
    kinds: dict[str, set[int]] = {content: set() for content in task.CONTENTS}
    for case in (case for case in task.TESTS if case.format == "nvfp4"):
        data, matrix = solved(case)[0], solved(case)[0].weights.links[0][0]
        _, scales = nvfp4.encode(data.inputs.x.float().unflatten(1, (len(matrix.codes), -1)), matrix.input_scale)
        kinds[case.content] |= {*scales.view(torch.uint8).flatten().tolist()}
    assert {0, 0x7E} <= kinds["magnitudes"] and 0x7E in kinds["extreme"] and 0 in kinds["zeros"]
    assert kinds["subnormal"] >= {0, 3, 5, 7} and min(kinds["plain"]) > 0x50


def test_contents_hold_what_they_promise():
    assert not bool((of_content("subnormal", "fp8").weights.links[0][0].codes.view(torch.uint8) & 0x78).any())
    assert int(of_content("subnormal", "nvfp4").weights.links[0][0].scales.view(torch.uint8).max()) == 7
    small = of_content("subnormal", "bf16").weights.links[0][0].codes[..., 0::2]
    assert bool((small.abs() < 2.0**-126).all()) and bool((small != 0).float().mean() > 0.9)
    for fmt in task.FORMATS:
        assert float(of_content("extreme", fmt).inputs.x.abs().max()) > 65504
        x = of_content("zeros", fmt).inputs.x
        assert not bool(x[:2].any()) and bool(x[2:].any())
    halves = of_content("magnitudes", "fp8").inputs.x[:, :128].float().abs().view(-1, 2, 64).amax(2)
    assert bool((halves[:, 0] > 2**9 * halves[:, 1]).all())
    scales = [of_content(content, "fp8").weights.links[0][0].scales.int() for content in ("magnitudes", "extreme")]
    assert all(int(s.max() - s.min()) >= 12 for s in scales)


def test_contents_reach_the_ends_of_what_is_admitted():
    """Of scales, input scales and inputs; and half of the input scales are powers of two."""
    for content, byte in (("subnormal", 63), ("extreme", 191)):
        assert byte in of_content(content, "fp8").weights.links[0][0].scales.unique().tolist()
    matrices = [(c.content, m) for c in task.TESTS if c.format == "nvfp4" for m in task.matrices(solved(c)[0].weights)]
    for content, end in (("subnormal", 2.0**-64), ("extreme", 2.0**64)):
        assert end in torch.cat([m.input_scale for its, m in matrices if its == content]).tolist()
    mantissas = torch.cat([m.input_scale for _, m in matrices]).view(torch.int32) & 0x7FFFFF
    assert 0.3 < float((mantissas == 0).float().mean()) < 0.8
    for fmt in ("fp8", "bf16", "nvfp4_a16"):
        data = of_content("extreme", fmt)
        assert float(data.inputs.x[1].abs().max()) < 2.0**-100 and not data.weights.links[0][0].quantise
    small = of_content("subnormal", "bf16").inputs.x[:, 1::2].abs()
    assert bool((small < 2.0**-122).all()) and bool((small > 0).float().mean() > 0.9)


def emulated(data: object, rounds: object = None, order: int = 0) -> torch.Tensor:
    """What honest kernels compute: sums of blocks of 128 columns, each through `rounds`, added from one end."""
    out, v = torch.empty_like(data.outputs.out), data.inputs.x
    for link, given in zip(data.weights.links, task.parts(out, task.unpack(data)), strict=True):
        for matrix, to in zip(link, given, strict=True):
            w = baseline.decoded(data.weights.format, matrix)
            taken = task.input_values(data.weights.format, matrix, v)
            taken = taken.unflatten(1, (len(w), -1)).transpose(0, 1)
            blocks = [torch.bmm(a, b.mT) for a, b in zip(taken.split(128, 2), w.split(128, 2), strict=True)]
            blocks = [rounds(block) if rounds else block for block in blocks]
            total = functools.reduce(torch.add, blocks[::-1] if order else blocks)
            if matrix.factor is not None:
                total *= matrix.factor.view(-1, 1, 1)
            to.copy_(total.transpose(0, 1).flatten(1))
        v = given[0]
    return out


@pytest.mark.parametrize("case", QUICKEST_FIRST[::4], ids=named)
def test_honest_kernels_pass(case):
    data, want = solved(case)
    cut = emulated(data, lambda x: (x.view(torch.int32) & -(1 << 10)).view(torch.float32))  # to 14 bits
    for got in (emulated(data), emulated(data, order=1), cut):
        result = reference.compare(data, want, got)
        assert result.ok and reference.compare(data, want, got, True).ok, result.message


def tensor_core(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b^T as FP8 tensor cores of Hopper add it, 32 columns a step."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for left, right in zip(a.double().split(32, 1), b.double().split(32, 1), strict=True):
        total = cut(torch.cat([total.unsqueeze(2), left.unsqueeze(1) * right], 2)).sum(2)
    return total


@pytest.mark.parametrize("content", first(("plain", "magnitudes")))
def test_fp8_tensor_cores_pass_at_prefill_where_they_add_128_columns(content):
    data, want = solved(task.Case("fp8", 64, "64x8256", content, 5))
    (matrix,), *_ = data.weights.links
    v, w = fp8.round_trip(data.inputs.x.float(), 128), baseline.decoded("fp8", matrix)[0]
    blocks = [tensor_core(a, b).float() for a, b in zip(v.split(128, 1), w.split(128, 1), strict=True)]
    for total, ok in ((sum(blocks), True), (tensor_core(v, w), False)):
        assert reference.compare(data, want, total.bfloat16().flatten()).ok is ok


def test_an_error_of_two_tolerances_in_one_element_fails_and_its_report_says_which_matrix_it_is_of():
    data, want = solved(QUICKEST_FIRST[0])
    for factor, ok in ((1.0, True), (1 + 2.5 * task.RTOL, False)):
        changed = emulated(data)
        changed[want.abs().argmax()] *= factor
        assert reference.compare(data, want, changed).ok is ok
    ok, report = reference.check_implementation(data, torch.zeros_like(data.outputs.out))
    assert not ok and "ERROR AT (" in report and "link 0: 1 x 64 x 64 at 0 to 63" in report


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_outputs_that_are_subnormal_may_be_rounded_or_zero(fmt):
    data, _ = solved(task.Case(fmt, 3, "64x128", "plain", 7))
    (matrix,) = data.weights.links[0]
    if fmt == "bf16":
        matrix = matrix._replace(codes=(matrix.codes.double() * 2.0**-129).bfloat16())
    else:
        matrix = matrix._replace(scales=torch.full_like(matrix.scales, 63), quantise=False)
        data = data._replace(inputs=task.Inputs((data.inputs.x.double() * 2.0**-76).bfloat16()))
    data = data._replace(weights=data.weights._replace(links=((matrix,),)))
    want = reference.ref_kernel(data)
    right = want.bfloat16()
    assert bool(((right.float().abs() < 2.0**-126) & (right != 0)).any())
    assert reference.compare(data, want, right).ok
    assert reference.compare(data, want, torch.where(right.float().abs() < 2.0**-126, 0, right)).ok
    assert not reference.compare(data, want, (right.double() + 2.0**-124).bfloat16()).ok


def test_a_link_is_held_to_what_it_got():
    """A bf16 of the first link on the other side of its rounding is right, and so is what follows from it."""
    case = task.Case("fp8", 6, "256x320_448x256", "magnitudes", 1060)
    data, want = solved(case)
    out = emulated(data)
    (first, *_), (second,) = task.parts(out, task.unpack(data))
    got = first.flatten().double()
    at = ((want[: first.numel()] / got - 1) * (got > 0)).argmax()  # near to the next larger bf16
    first.view(-1).view(torch.int16)[at] += 1
    v = fp8.round_trip(first.float(), 128)
    second.copy_(v @ baseline.decoded("fp8", data.weights.links[1][0])[0].T)
    assert reference.compare(data, want, out).ok


def test_experts_that_are_none_and_weights_without_room_are_refused():
    for shape, message in (("2x128x192", "without groups"), ("128x192+64x192", "groups"), ("64x192", "twice as many")):
        w13, w2 = (made(shape=shape).weights for shape in (shape, "192x64"))
        with pytest.raises(ValueError, match=message):
            task.unpack_expert(w13, w2)
    with pytest.raises(ValueError, match="at most 4 matrices, got 5"):
        mma.prepare(made(shape="+".join(["64x64"] * 5)).weights)


@pytest.mark.parametrize(
    ("n", "k", "sections", "blocks"),
    [
        *((4096, 8192, 4, {8: 2, 9: 4, 32: 4}), (7168, 16384, 8, {8: 2, 9: 8})),
        *((4096, 4096, 1, {32: 2}), (65536, 1536, 1, {32: 1})),
    ],
)
def test_more_than_two_blocks_that_share_a_tile_exchange_sums(n, k, sections, blocks):
    """As many as sums are added up by, since a token's bits must not depend on the others. blocks: by tokens."""
    state = planned("fp8", ((n, k),), 1)
    for tokens, count in blocks.items():
        (to,), *_ = calls(state, tokens)
        assert to.num_splits == count and bool(to.exchange) is (count > 2)
        assert state.links[0].sections == sections and to.section_chunks == to.num_chunks // sections


@pytest.mark.parametrize(("groups", "n", "k"), [(1, 4096, 8192), (3, 320, 4160), (8, 64, 16384), (1, 129280, 7168)])
def test_there_is_room_for_the_sums_that_blocks_exchange(groups, n, k):
    """Of every pass, which is no fewer tiles than blocks have at once; and two words before them."""
    (link,) = planned("fp8", ((n, k),), groups).links
    at_once = mma.WARPS * link.sections // link.chunks
    passes = groups * -(-n // mma.BLOCK_N // at_once)
    assert link.exchanged == 2 + passes * link.sections * at_once * 32 * task.FEW_TOKENS


def planned(kind: str, sizes: tuple[tuple[int, int, int], ...], groups: int) -> object:
    """A State of matrices without contents, one a link; groups: of each."""
    links = []
    for n, k in sizes:
        scales = torch.empty(0) if kind == "fp8" else None
        inputs = torch.ones(groups) if kind == "nvfp4" else None
        quantise = kind == "nvfp4" or (kind == "fp8" and groups == 1)
        chunks = mma.chunks_of(groups * n // mma.BLOCK_N, k)
        links.append(mma.Link(torch.empty(1), scales, None, inputs, quantise, groups, ((groups, n, k),), chunks))
    return mma.State(kind.removesuffix("_a16"), tuple(links), torch.empty(0), torch.empty(1))


def calls(state: object, tokens: int, norm: bool = False) -> tuple[ctypes.Array, bool, int, list]:
    """What mma sends for so many tokens: links, whether they are one launch, and what _arrange returns behind it."""
    made = (mma._Link * len(state.links))()
    for to, link in zip(made, state.links, strict=True):
        ((groups, n, k),) = link.sizes
        x, out = (torch.empty(1).expand(tokens, groups * columns) for columns in (k, n))
        mma._fill(to, link, x, [out])
        to.norm_weights = 1 if norm else None
    return made, *mma._arrange(state, made, torch.device("cpu"))


def taken(state: object, tokens: int, norm: bool = False) -> bool:
    """Whether sm90_mma.cu has every call of a State."""
    takes = build.cuda(mma.SOURCE, "sm90").function("takes", ctypes.c_void_p, *[ctypes.c_int] * 2)
    made, chain, num_prequantised, _rooms = calls(state, tokens, norm)
    assert not (chain and num_prequantised)
    return all(takes(ctypes.addressof(to), task.FORMATS.index(state.format), chain) for to in made)


COLUMNS_OF_X = [*range(64, 1088, 64), 1280, 1536, 2048, 4096, 5120, 7168, 8192, 8256, 16384]
EVERY_COUNT, SOME = range(1, task.FEW_TOKENS + 1), (1, 2, 5, 6, 8, 9, 16, 17, 32)  # of tokens


@needs_nvcc
@pytest.mark.parametrize(
    ("rows", "counts"), first([((64, 4096, 129280), SOME), ((64, 320, 1024, 4096, 32768, 129280), EVERY_COUNT)])
)
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("kind", task.KINDS)
def test_the_kernel_has_every_call_that_it_is_sent(kind, groups, rows, counts):
    """And an input is normed if and only if `norms` says so."""
    normed = set()
    for n, k in itertools.product(rows, COLUMNS_OF_X):
        state = planned(kind, ((n, k),), groups)
        for tokens in counts:
            assert taken(state, tokens), (n, k, tokens)
            says = mma.norms(state, tokens)
            assert taken(state, tokens, norm=True) == says, (n, k, tokens)
            normed |= {(tokens, k)} if says else set()
    if groups > 1 or kind not in ("fp8", "nvfp4"):
        assert not normed
    else:
        assert {(8, 256), (8, 1024), (5, 1536)} <= normed and not normed & {(9, 256), (9, 768), (8, 320), (6, 1536)}


@needs_nvcc
@pytest.mark.parametrize("counts", first([list(SOME), EVERY_COUNT]), ids=["some", "every count"])
@pytest.mark.parametrize("kind", task.KINDS)
@pytest.mark.parametrize("links", [2, 3, 4, 5])
def test_the_kernel_has_every_link_of_a_chain(links, kind, counts):
    for k, other in itertools.product((64, 576, 4096, 16384), (64, 1024, 8192, 16384)):
        state = planned(kind, ((other, k), *[(other, other)] * (links - 1)), 1)
        assert all(taken(state, tokens) for tokens in counts), (k, other)
