"""nvfp4_gemv: the oracle against exact arithmetic, the generator's corners, the checker against wrong answers."""

import functools
from fractions import Fraction

import pytest
import torch

from problems.common import load, nvfp4

FOLDER = load.PROBLEMS / "nvfp4_gemv"
task = load.module(FOLDER, "task")
reference = load.module(FOLDER, "reference")

BY_SIZE = sorted(task.TESTS, key=lambda case: case.m * case.k * case.l)
SMALL = [case for case in BY_SIZE if case.m * case.k * case.l < 1_000_000]


def shape(case: object) -> str:
    return f"{case.m}x{case.k}x{case.l}"


@functools.cache
def solved(case: object) -> tuple[object, torch.Tensor]:
    """Inputs and exact product of a test case, on the CPU. Whoever writes to c takes a copy of it first."""
    data = reference.generate_input(**vars(case), device="cpu")
    return data, reference.ref_kernel(data)


def poisoned(data: object) -> object:
    return data._replace(c=torch.full_like(data.c, float("nan")))


def answered(data: object, values: torch.Tensor) -> torch.Tensor:
    """A copy of data.c that holds `values`."""
    return data.c.clone().copy_(values)


def e4m3(byte: int) -> Fraction:
    """Value of an e4m3 byte from its definition: bias 7, 3 mantissa bits, subnormals in steps of 2^-9."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    return -size if byte & 128 else size


def e2m1(code: int) -> Fraction:
    """Value of an e2m1 code from its definition: bias 1, 1 mantissa bit, subnormal 0.5."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = Fraction(mantissa, 2) if exponent == 0 else Fraction(2 + mantissa, 2) * 2 ** (exponent - 1)
    return -size if code & 8 else size


def plain_offset(row: int, block: int, batch: int, rows: int, blocks: int) -> int:
    return (batch * rows + row) * blocks + block


def permuted_offset(row: int, block: int, batch: int, rows: int, blocks: int) -> int:
    """Byte of a scale in the 128 x 4 block layout: 512-byte blocks, in one the 32 rows r % 32 of 4 x 4 bytes."""
    tile = (batch * -(-rows // 128) + row // 128) * -(-blocks // 4) + block // 4
    return 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


# ---------------------------------------------------------------- oracle


@pytest.mark.parametrize("scale_offset", [plain_offset, permuted_offset])
@pytest.mark.parametrize(("m", "k", "l"), [(1, 64, 1), (3, 128, 2), (131, 64, 1), (5, 192, 3)])
def test_reference_is_the_exact_sum_over_the_bytes_in_memory(m, k, l, scale_offset):
    data = reference.generate_input(m=m, k=k, l=l, seed=7, device="cpu")
    memory = [tensor.untyped_storage().tolist() for tensor in data[:6]]
    a, b = memory[:2]
    sfa, sfb = memory[2:4] if scale_offset is plain_offset else memory[4:6]

    def element(codes, scales, rows, row, column, batch):
        byte = codes[(batch * rows + row) * (k // 2) + column // 2]
        code = byte >> 4 if column % 2 else byte & 15
        return e2m1(code) * e4m3(scales[scale_offset(row, column // 16, batch, rows, k // 16)])

    want = reference.ref_kernel(data)
    assert want.dtype == torch.float64 and want.shape == (m, 1, l)
    for batch in range(l):
        x = [element(b, sfb, 128, 0, column, batch) for column in range(k)]
        for row in range(m):
            exact = sum(element(a, sfa, m, row, column, batch) * x[column] for column in range(k))
            assert Fraction(float(want[row, 0, batch])) == exact, (row, batch)


def test_reference_does_not_depend_on_its_block_of_rows(monkeypatch):
    data, want = solved(SMALL[4])
    monkeypatch.setattr(reference, "ROWS", {"cpu": 5})
    assert torch.equal(reference.ref_kernel(data), want) or torch.allclose(reference.ref_kernel(data), want, rtol=1e-14)


# ---------------------------------------------------------------- generator


@pytest.mark.parametrize("case", SMALL, ids=shape)
def test_generated_data_is_what_the_task_says(case):
    data, want = solved(case)
    assert task.unpack(data) == (case.m, case.k, case.l)
    assert float(want.abs().max()) < 65504
    assert bool(torch.isnan(data.c).all())
    for scales, permuted in ((data.sfa, data.sfa_permuted), (data.sfb, data.sfb_permuted)):
        raw = scales.view(torch.uint8)
        assert int(raw.max()) == 0x7E
        rows, blocks, _ = raw.shape
        memory = torch.tensor(permuted.untyped_storage().tolist(), dtype=torch.uint8)
        row, block, batch = torch.meshgrid(*map(torch.arange, raw.shape), indexing="ij")
        tile = (batch * -(-rows // 128) + row // 128) * (blocks // 4) + block // 4
        offset = 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        assert torch.equal(memory[offset], raw)
        memory[offset] = 0
        assert int(memory.sum()) == 0, "padding of the permuted copy is not 0"


@pytest.mark.parametrize("case", SMALL, ids=shape)
def test_one_column_block_each_way_is_extreme(case):
    data, _ = solved(case)
    a, b = data.sfa.view(torch.uint8).int(), data.sfb.view(torch.uint8).int()
    largest_a = (a == 0x7E).all(2).all(0).nonzero().flatten().tolist()
    largest_b = (b == 0x7E).all(2).all(0).nonzero().flatten().tolist()
    assert len(largest_a) == len(largest_b) == 1 and largest_a != largest_b
    assert bool((b[:, largest_a] >= 1).all()) and bool((b[:, largest_a] <= 8).all())
    assert bool((a[:, largest_b] >= 1).all()) and bool((a[:, largest_b] <= 8).all())


def test_generator_reaches_every_corner_of_the_format():
    data = reference.generate_input(m=256, k=16384, l=1, seed=3, device="cpu")
    for packed in (data.a, data.b[:1]):
        raw = packed.view(torch.uint8)
        assert raw.unique().numel() == 256  # every code in either nibble, beside every other
    for scales in (data.sfa, data.sfb):
        raw = scales.view(torch.uint8)
        share = float((raw == 0).float().mean())
        assert 0.8 / 64 < share < 1.2 / 64
        present = set(raw.unique().tolist())
        # 0, subnormals and 2^-6, every byte from 2^-5 to 2, 448; nothing negative, no NaN
        assert present == {*range(9), *range(0x10, 0x41), 0x7E}
        assert 0.15 < float(((raw >= 1) & (raw <= 7)).sum() / raw.shape[0]) < 0.35


def test_output_fits_fp16_with_room():
    values = torch.cat(
        [
            reference.ref_kernel(reference.generate_input(m=128, k=16384, l=2, seed=seed, device="cpu")).flatten()
            for seed in range(2)
        ]
    )
    assert 550 < float(values.std()) < 670
    assert float(values.abs().max()) < 5 * 620


def test_generator_is_a_function_of_its_seed():
    first, again, other = (reference.generate_input(m=33, k=128, l=2, seed=s, device="cpu") for s in (5, 5, 6))
    for name, x, y, z in zip(first._fields[:6], first, again, other, strict=False):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name
        assert not torch.equal(x.view(torch.uint8), z.view(torch.uint8)), name


@pytest.mark.parametrize("bad", [{"k": 96}, {"k": 0}, {"m": 0}, {"l": 0}])
def test_generator_refuses_other_shapes(bad):
    with pytest.raises(ValueError, match="multiple of 64"):
        reference.generate_input(**{"m": 2, "k": 64, "l": 1, "seed": 0, **bad}, device="cpu")


# ---------------------------------------------------------------- wrong answers


@pytest.mark.parametrize("case", SMALL, ids=shape)
def test_checker_takes_the_rounded_product_and_no_trivial_answer(case):
    data, want = solved(case)
    right = answered(data, want)
    assert reference.check_implementation(data, right) == (True, "")
    other = reference.generate_input(**(vars(case) | {"seed": case.seed + 100}), device="cpu")
    size = right.numel()
    inputs = {
        "a": nvfp4.dequantise(data.a.permute(2, 0, 1), data.sfa.permute(2, 0, 1), torch.float16).flatten()[:size],
        "b": nvfp4.dequantise(data.b[0].T, data.sfb[0].T, torch.float16).flatten().repeat(-(-size // case.k))[:size],
        "sfa": data.sfa.half().flatten()[:size],
    }
    trivial = {
        "zeros": torch.zeros_like(right),
        "constant": torch.full_like(right, 620.0),
        "the mean": torch.full_like(right, float(want.mean()) + 1),
        "the previous output": answered(data, reference.ref_kernel(other)),
        **{f"copy of {name}": values.view(right.shape) for name, values in inputs.items()},
    }
    for name, output in trivial.items():
        ok, message = reference.check_implementation(data, output)
        assert not ok and message.startswith("mismatch found! custom implementation doesn't match reference"), name


@pytest.mark.parametrize("case", SMALL, ids=shape)
def test_checker_refuses_broken_forms(case):
    data, want = solved(case)
    right = answered(data, want)

    class Tensor(torch.Tensor):
        pass

    last = (case.m - 1, 0, case.l - 1)
    for value in (float("nan"), float("inf"), float("-inf")):
        output = right.clone()
        output[last] = value
        result = reference.compare(data, want, output)
        assert not result.ok, value
        assert f"Number of mismatched elements: 1 of {right.numel()}\nERROR AT {last}: {value:g} " in result.message
    for output in (
        right.float(),
        right.double(),
        right.bfloat16(),
        right[:, 0],
        right.flatten(),
        right.permute(1, 0, 2)[:, :-1],
        right.as_subclass(Tensor),
        torch.nn.Parameter(right),
        None,
        [right],
        right.tolist(),
    ):
        result = reference.compare(data, want, output)
        assert not result.ok and result.message.startswith("mismatch found! want ")
        assert result.rel != result.rel


# ---------------------------------------------------------------- tolerance


@pytest.fixture(scope="module")
def long_rows():
    """k = 16384: inputs, exact product and the fp32 block terms s_a s_b dot, (m, k / 16, l); dots are exact."""
    data = reference.generate_input(m=48, k=16384, l=2, seed=11, device="cpu")
    a = nvfp4.dequantise(data.a.permute(2, 0, 1), data.sfa.permute(2, 0, 1)).unflatten(-1, (-1, 16))
    b = nvfp4.dequantise(data.b[0].T, data.sfb[0].T).unflatten(-1, (-1, 16))
    terms = torch.einsum("lmjs,ljs->mjl", a.double(), b.double()).float()
    return data, reference.ref_kernel(data), terms


def sequential(terms: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(terms[:, 0])
    for j in range(terms.shape[1]):
        total += terms[:, j]
    return total


def tree(terms: torch.Tensor) -> torch.Tensor:
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half : 2 * half]
    return terms[:, 0]


ORDERS = {
    "sequential": sequential,
    "backwards": lambda terms: sequential(terms.flip(1)),
    "ascending": lambda terms: sequential(terms.gather(1, terms.abs().argsort(1))),
    "descending": lambda terms: sequential(terms.gather(1, terms.abs().argsort(1, descending=True))),
    "positive first": lambda terms: sequential(terms.sort(1, descending=True)[0]),
    "tree": tree,
    "32 lanes, then a tree": lambda terms: tree(
        torch.stack([sequential(terms[:, lane::32]) for lane in range(32)], dim=1)
    ),
    "16 parts of k": lambda terms: sequential(torch.stack([sequential(p) for p in terms.chunk(16, dim=1)], dim=1)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_fp32_sums_pass_in_any_order(long_rows, order):
    data, want, terms = long_rows
    result = reference.compare(data, want, answered(data, ORDERS[order](terms).unsqueeze(1)))
    assert result.ok, result.message


def test_two_tolerances_at_one_element_fail(long_rows):
    data, want, _ = long_rows
    right = answered(data, want)
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
    off = answered(data, want * (1 + 0.8 * task.PEER_TOL))
    assert not reference.compare(data, want, off).ok
    assert reference.compare(data, want, off, peer=True).ok
    one_batch = answered(data, want)
    one_batch[..., 1] *= 1 + 1.5 * task.PEER_TOL
    result = reference.compare(data, want, one_batch, peer=True)
    assert not result.ok and result.rel == pytest.approx(1.5 * task.PEER_TOL, rel=0.2)


# ---------------------------------------------------------------- task, peer, submission

SPOILT = {
    "a": lambda d: d.a.view(torch.uint8),
    "b": lambda d: d.b[:1],
    "sfa": lambda d: d.sfa.contiguous(),
    "sfb": lambda d: d.sfb.view(torch.uint8).view(torch.float8_e5m2),
    "sfa_permuted": lambda d: d.sfa_permuted.contiguous(),
    "sfb_permuted": lambda d: d.sfb_permuted[..., :1],
    "c": lambda d: d.c.contiguous(),
}


@pytest.mark.parametrize("name", SPOILT)
def test_unpack_names_the_tensor_what_it_wants_and_what_came(name):
    data = reference.generate_input(m=130, k=128, l=2, seed=1, device="cpu")
    bad = SPOILT[name](data)
    with pytest.raises(ValueError, match=rf"^{name} must be torch\.\w+ \(.*\) with strides .* on cpu, got ") as caught:
        task.unpack(data._replace(**{name: bad}))
    assert str(tuple(bad.shape)) in str(caught.value) and str(bad.dtype) in str(caught.value)


def test_unpack_refuses_other_k():
    data = reference.generate_input(m=2, k=64, l=1, seed=1, device="cpu")
    with pytest.raises(ValueError, match=r"k must be a multiple of 64 .* got 32"):
        task.unpack(data._replace(a=data.a[:, :16]))


def test_a_batch_of_one_may_have_any_stride_there():
    data = reference.generate_input(m=2, k=64, l=1, seed=1, device="cpu")
    data = data._replace(c=torch.empty(2, dtype=torch.float16).as_strided((2, 1, 1), (1, 9, 5)))
    assert task.unpack(data) == (2, 64, 1)


def test_benchmark_bytes_are_those_of_the_published_bounds():
    """Bytes over 7.68 TB/s are GPU MODE's bounds of 8.622, 17.275 and 4.317 us, to 0.5 %."""
    for case, bound in zip(task.BENCHMARKS, (8.622, 17.275, 4.317), strict=True):
        assert case.bytes_moved() / 7.68e6 == pytest.approx(bound, rel=5e-3)
    benchmarked = {(case.m, case.k, case.l) for case in task.BENCHMARKS}
    assert benchmarked <= {(case.m, case.k, case.l) for case in task.TESTS}


@pytest.mark.parametrize("case", [SMALL[0], SMALL[2], SMALL[-1]], ids=shape)
def test_peer_torch_fp16_computes_the_product(case):
    peer = load.variant("nvfp4_gemv", "peer_torch_fp16")
    data, want = solved(case)
    data = poisoned(data)
    state = peer.setup(data)
    assert peer.custom_kernel(data, state) is data.c
    result = reference.compare(data, want, data.c, peer=True)
    assert result.ok, result.message
