"""nvfp4_gemv: the oracle against exact arithmetic, the generator's corners, the check's tolerance."""

import functools
from fractions import Fraction

import pytest
import torch

from problems.common import load, nvfp4
from tests.problems import cases
from tests.problems.cases import named, poisoned, rounded, solved
from tests.support.formats import NVFP4

NAME = "nvfp4_gemv"
task, reference = cases.task(NAME), cases.reference(NAME)
BY_SIZE = sorted(task.TESTS, key=lambda case: case.m * case.k * case.l)
SMALL = [case for case in BY_SIZE if case.m * case.k * case.l < 200_000]


def plain_offset(row: int, block: int, batch: int, rows: int, blocks: int) -> int:
    return (batch * rows + row) * blocks + block


def permuted_offset(row: int, block: int, batch: int, rows: int, blocks: int) -> int:
    """Byte of a scale in the 128 x 4 block layout: 512-byte blocks, in one the 32 rows r % 32 of 4 x 4 bytes."""
    tile = (batch * -(-rows // 128) + row // 128) * -(-blocks // 4) + block // 4
    return 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@pytest.mark.parametrize("scale_offset", [plain_offset, permuted_offset])
@pytest.mark.parametrize(("m", "k", "l"), [(1, 64, 1), (3, 128, 2), (131, 64, 1), (5, 192, 3)])
def test_reference_is_the_exact_sum_over_the_bytes_in_memory(m, k, l, scale_offset):
    data = reference.generate_input(m=m, k=k, l=l, seed=7, device="cpu")
    memory = [tensor.untyped_storage().tolist() for tensor in data[:6]]
    a, b = memory[:2]
    sfa, sfb = memory[2:4] if scale_offset is plain_offset else memory[4:6]

    def element(codes, scales, rows, row, column, batch):
        byte = codes[(batch * rows + row) * (k // 2) + column // 2]
        scale = scales[scale_offset(row, column // 16, batch, rows, k // 16)]
        return Fraction(NVFP4.value(byte >> 4 if column % 2 else byte & 15, scale))

    want = reference.ref_kernel(data)
    assert want.dtype == torch.float64 and want.shape == (m, 1, l)
    for batch in range(l):
        x = [element(b, sfb, 128, 0, column, batch) for column in range(k)]
        for row in range(m):
            exact = sum(element(a, sfa, m, row, column, batch) * x[column] for column in range(k))
            assert Fraction(float(want[row, 0, batch])) == exact, (row, batch)


@pytest.mark.parametrize("case", SMALL, ids=named)
def test_scales_are_what_the_task_says(case):
    """Both layouts hold the same, and one column block each way is extreme."""
    data, want = solved(NAME, case)
    assert float(want.abs().max()) < 65504
    for scales, permuted in ((data.sfa, data.sfa_permuted), (data.sfb, data.sfb_permuted)):
        raw = scales.view(torch.uint8)
        assert int(raw.max()) == 0x7E
        memory = torch.tensor(permuted.untyped_storage().tolist(), dtype=torch.uint8)
        offset = permuted_offset(*torch.meshgrid(*map(torch.arange, raw.shape), indexing="ij"), *raw.shape[:2])
        assert torch.equal(memory[offset], raw)
        memory[offset] = 0
        assert int(memory.sum()) == 0, "padding of the permuted copy is not 0"
    a, b = data.sfa.view(torch.uint8).int(), data.sfb.view(torch.uint8).int()
    (largest_a,), (largest_b,) = ((x == 0x7E).all(2).all(0).nonzero().flatten().tolist() for x in (a, b))
    assert largest_a != largest_b
    for tiny in (b[:, largest_a], a[:, largest_b]):
        assert bool((tiny >= 1).all()) and bool((tiny <= 8).all())


def test_generator_reaches_every_corner_of_the_format():
    data = reference.generate_input(m=256, k=16384, l=1, seed=3, device="cpu")
    for packed in (data.a, data.b[:1]):  # every code in either nibble, beside every other
        assert packed.view(torch.uint8).unique().numel() == 256
    for raw in (data.sfa.view(torch.uint8), data.sfb.view(torch.uint8)):
        assert 0.8 / 64 < float((raw == 0).float().mean()) < 1.2 / 64
        # 0, subnormals and 2^-6, every byte from 2^-5 to 2, 448; nothing negative, no NaN
        assert {*raw.unique().tolist()} == {*range(9), *range(0x10, 0x41), 0x7E}
        assert 0.15 < float(((raw >= 1) & (raw <= 7)).sum() / raw.shape[0]) < 0.35


def test_output_fits_fp16_with_room():
    values = reference.ref_kernel(reference.generate_input(m=128, k=16384, l=4, seed=1, device="cpu"))
    assert 550 < float(values.std()) < 670 and float(values.abs().max()) < 5 * 620


@pytest.fixture(scope="module")
def long_rows():
    """k = 16384: inputs, exact product and the fp32 block terms s_a s_b dot, (m, k / 16, l); dots are exact."""
    data = reference.generate_input(m=48, k=16384, l=2, seed=11, device="cpu")
    a = nvfp4.dequantise(data.a.permute(2, 0, 1), data.sfa.permute(2, 0, 1)).unflatten(-1, (-1, 16))
    b = nvfp4.dequantise(data.b[0].T, data.sfb[0].T).unflatten(-1, (-1, 16))
    terms = torch.einsum("lmjs,ljs->mjl", a.double(), b.double()).float()
    return data, reference.ref_kernel(data), terms


def sequential(terms: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, terms.unbind(1))


def tree(terms: torch.Tensor) -> torch.Tensor:
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half : 2 * half]
    return terms[:, 0]


ORDERS = {
    "sequential": sequential,
    "descending": lambda terms: sequential(terms.gather(1, terms.abs().argsort(1, descending=True))),
    "tree": tree,
    "16 parts of k": lambda terms: sequential(torch.stack([sequential(part) for part in terms.chunk(16, 1)], 1)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_fp32_sums_pass_in_any_order(long_rows, order):
    data, want, terms = long_rows
    result = reference.compare(data, want, rounded(NAME, data, ORDERS[order](terms).unsqueeze(1)))
    assert result.ok, result.message


def test_two_tolerances_at_one_element_fail(long_rows):
    data, want, _ = long_rows
    right = rounded(NAME, data, want)
    limit = reference.tolerance(data, want)
    for at in [(0, 0, 0), (17, 0, 1), (47, 0, 1)]:
        for direction in (-1, 1):
            output = right.clone()
            while abs(float(output[at]) - float(want[at])) < 2 * float(limit[at]):
                output[at] = torch.nextafter(output[at], torch.tensor(direction * torch.inf, dtype=torch.float16))
            result = reference.compare(data, want, output)
            assert not result.ok and f"mismatched elements: 1 of {want.numel()}\nERROR AT {at}:" in result.message
            assert result.worst_abs > result.worst_tol == pytest.approx(float(limit[at]))


def test_tolerance_is_about_one_rounding(long_rows):
    data, want, _ = long_rows
    ulp = torch.exp2(torch.floor(torch.log2(want.abs().clamp(min=2**-14))) - 10)
    big = want.abs() > 256
    assert bool((reference.tolerance(data, want)[big] < 1.6 * ulp[big]).all())
    assert bool((reference.tolerance(data, want) >= 0.5 * ulp).all())


def test_peers_are_held_to_a_norm_in_every_batch(long_rows):
    data, want, _ = long_rows
    off = rounded(NAME, data, want * (1 + 0.8 * task.PEER_TOL))
    assert not reference.compare(data, want, off).ok and reference.compare(data, want, off, peer=True).ok
    one_batch = rounded(NAME, data, want)
    one_batch[..., 1] *= 1 + 1.5 * task.PEER_TOL
    result = reference.compare(data, want, one_batch, peer=True)
    assert not result.ok and result.rel == pytest.approx(1.5 * task.PEER_TOL, rel=0.2)


def test_a_batch_of_one_may_have_any_stride_there():
    data = reference.generate_input(m=2, k=64, l=1, seed=1, device="cpu")
    data = data._replace(c=torch.empty(2, dtype=torch.float16).as_strided((2, 1, 1), (1, 9, 5)))
    assert task.unpack(data) == (2, 64, 1)


def test_benchmark_bytes_are_those_of_the_published_bounds():
    """Bytes over 7.68 TB/s are GPU MODE's bounds of 8.622, 17.275 and 4.317 us, to 0.5 %."""
    for case, bound in zip(task.BENCHMARKS, (8.622, 17.275, 4.317), strict=True):
        assert case.bytes_moved() / 7.68e6 == pytest.approx(bound, rel=5e-3)
    assert {(c.m, c.k, c.l) for c in task.BENCHMARKS} <= {(c.m, c.k, c.l) for c in task.TESTS}


@pytest.mark.parametrize("case", [SMALL[0], SMALL[2], SMALL[-1]], ids=named)
def test_peer_torch_fp16_computes_the_product(case):
    peer = load.variant("nvfp4_gemv", "peer_torch_fp16")
    data, want = solved(NAME, case)
    data = poisoned(NAME, data)
    state = peer.setup(data)
    assert peer.custom_kernel(data, state) is data.c
    result = reference.compare(data, want, data.c, peer=True)
    assert result.ok, result.message
