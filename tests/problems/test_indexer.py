"""indexer: the oracle against loops, the generator's contents, the check, how sm90_join is launched, its baseline."""

import functools
import sys
import types

import pytest
import torch

from problems.common import index_pages, load, nvfp4
from tests.problems import cases
from tests.problems.exact import cut

NAME = "indexer"
task, reference = cases.task(NAME), cases.reference(NAME)
solved = functools.partial(cases.solved, NAME)
FOLDER = load.PROBLEMS / NAME
SEEDS = range(5)
CASES = [case for case in task.TESTS if case.entries <= 1600]


def small(**changes: object) -> tuple[object, torch.Tensor]:
    data = cases.made(NAME, **changes)
    return data, reference.ref_kernel(data)


def by_hand(data: object, b: int, s: int) -> list[int]:
    """The chosen places of a row, in the order of the entries, by loops over Python numbers."""
    per_page = task.unpack(data).per_page
    seen = int(data.visible[b, s])
    places = [int(data.table[b, i // per_page]) * per_page + i % per_page for i in range(seen)]
    scores = []
    for place in places:
        key = task.read_keys(data.keys, torch.tensor(place)).double()
        dots = [max(0.0, float(head.double() @ key)) for head in data.q[b, s]]
        scores.append(sum(float(w) * dot for w, dot in zip(data.weights[b, s], dots, strict=True)))
    best = sorted(range(seen), key=lambda i: (-scores[i], i))[: data.out.shape[2]]
    return [places[i] for i in sorted(best)]


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
@pytest.mark.parametrize("content", ["exact", "ties", "ragged", "spread"])
def test_the_oracle_is_what_the_formula_says(content, kind):
    data, want = small(content=content, kind=kind)
    for b in range(2):
        for s in range(2):
            chosen = by_hand(data, b, s)
            assert want[b, s].tolist() == chosen + [-1] * (data.out.shape[2] - len(chosen))


def test_a_key_is_what_its_bytes_say():
    """That they lie in the page as index_pages reads them is in tests/common/test_pages.py."""
    pages = torch.zeros(1, index_pages.page_bytes(16, "mxfp4"), dtype=torch.uint8)
    codes, scale_bytes = torch.arange(64).byte() * 3, torch.tensor([[127, 120, 130, 127]]).byte()
    index_pages.write(pages, torch.tensor([5]), codes[None], scale_bytes)
    values = torch.tensor(nvfp4.E2M1)[nvfp4.unpack(codes).int()] * torch.tensor([1, 2**-7, 8, 1]).repeat_interleave(32)
    assert torch.equal(task.read_keys(pages, torch.tensor(5)), values)
    pages = torch.zeros(1, index_pages.page_bytes(16, "fp8"), dtype=torch.uint8)
    codes, scale = torch.arange(128).byte() % 127, torch.tensor([0.3])
    index_pages.write(pages, torch.tensor([7]), codes[None], scale.view(1, 1).view(torch.uint8))
    assert torch.equal(task.read_keys(pages, torch.tensor(7)), codes.view(torch.float8_e4m3fn).float() * scale)


@pytest.mark.parametrize(("kind", "rel"), [("mxfp4", 0.15), ("fp8", 0.04)])
def test_quantised_keys_are_near(kind, rel):
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(3)) * 2.0 ** torch.arange(-4, 5).unsqueeze(1)
    got = task.dequantise(*reference.quantised(x, kind))
    assert float((got - x).norm() / x.norm()) < rel
    assert torch.equal(task.dequantise(*reference.quantised(got, kind)), got)


@pytest.mark.parametrize("case", [c for c in CASES if c.content in reference.WHOLE], ids=str)
def test_whole_numbers_make_exact_rows(case):
    for more in range(2):
        data, want = small(**{**vars(case), "seed": case.seed + 1000 * more})
        assert bool(reference.answer(data, want).exact.all())


@pytest.mark.parametrize("content", ["plain", "magnitudes", "spread", "rising"])
def test_other_rows_are_not_exact(content):
    case = next(case for case in CASES if case.content == content and case.entries > case.topk)
    assert not bool(reference.answer(*solved(case)).exact.any())


def test_any_order_is_right_and_wrong_forms_are_refused():
    data, want = small(content="ragged", batch=6, entries=60, topk=8)
    short = int((data.visible[:, 1] == 7).nonzero()[0])  # one entry fewer than there is room for
    full = int((data.visible[:, 1] == 60).nonzero()[0])
    assert reference.compare(data, want, want).ok
    assert reference.compare(data, want, torch.where(want[..., -1:] >= 0, want.flip(2), want)).ok
    other = int(want[(full + 1) % 6].max())
    for b, at, value, word in (
        *((full, 0, value, word) for value, word in ((-1, "then -1"), (2**30, "different"), (other, "visible"))),
        (full, 0, int(want[full, 1, 1]), "different"),
        *((short, 7, value, "then -1") for value in (int(want[short, 1, 0]), -2)),
    ):
        output = want.clone()
        output[b, 1, at] = value
        result = reference.compare(data, want, output)
        assert not result.ok and word in result.message, (word, result.message)


def test_equal_scores_count_in_exact_rows_and_not_for_baselines():
    data, want = small(content="ties", batch=1, queries=1, entries=200, topk=20)
    score = reference.answer(data, want).score[0]
    place = reference._places(data, slice(0, 1))[0]
    chosen = [int((place == p).nonzero()) for p in want[0, 0]]
    worst = min(chosen, key=lambda i: float(score[i]))
    equal = [i for i in range(200) if float(score[i]) == float(score[worst]) and i not in chosen]
    assert equal
    swapped = torch.where(want == place[worst], place[equal[-1]].int(), want)
    assert not reference.compare(data, want, swapped).ok
    assert reference.compare(data, want, swapped, baseline=True).ok


def test_the_margin_admits_what_errors_explain_and_no_more():
    data, want = small(content="plain", batch=1, queries=1, entries=900, topk=100)
    known = reference.answer(data, want)
    place, score = reference._places(data, slice(0, 1))[0], known.score[0]
    order = score.argsort(descending=True)
    last = order[99]
    for other in order[100:140].tolist():
        swapped = torch.where(want == place[last], place[other].int(), want)
        gap, admitted = float(score[last] - score[other]), float(known.error[0, last] + known.error[0, other])
        low = min(float(score[i] + known.error[0, i]) for i in [*order[:99].tolist(), other])
        explained = low >= max(float(score[i] - known.error[0, i]) for i in order[99:].tolist() if i != other)
        assert reference.compare(data, want, swapped).ok == explained
        assert explained or gap > 0
        if gap > 2 * admitted:
            assert not explained


def cut_dots(q: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """reference._dots as FP8 tensor cores add: 32 products and the sum so far in a step."""
    total = torch.zeros(*q.shape[:3], key.shape[1], 1, dtype=torch.float64)
    for part in (slice(first, first + 32) for first in range(0, task.DIM, 32)):
        terms = q[:, :, :, None, part] * key[:, None, None, :, part]
        total = cut(cut(torch.cat([terms, total], -1)).sum(-1, keepdim=True))
    return total.squeeze(-1)


@pytest.mark.parametrize("content", ["plain", "rising", "falling"])
def test_what_fp8_tensor_cores_cut_is_admitted(content, monkeypatch):
    for seed in SEEDS:
        data, want = small(content=content, kind="fp8", entries=300, topk=129, seed=seed)
        known, every = reference.answer(data, want), (slice(None), slice(None))
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_dots", cut_dots)
            scores = reference._scores(*reference._operands(data, every)).flatten(0, 1)
        seen = known.score.isfinite()
        common = (scores / known.score).nanmedian(1, keepdim=True).values  # what all lose changes no order
        assert ((scores / common - known.score).abs() <= 2 * known.error)[seen].all()


@pytest.mark.parametrize("name", ["cpu_portable", "cpu_avx512"])
def test_a_table_that_names_no_page_is_an_error(name):
    cases.skip_unless_it_runs(FOLDER / "variants" / f"{name}.py", "cpu")
    for entries, topk in ((37, 5), (4, 5)):
        data, _ = small(entries=entries, topk=topk)
        for page in (-1, len(data.keys)):
            bad = data._replace(table=torch.full_like(data.table, page))
            with pytest.raises(RuntimeError, match="outside the pages"):
                load.variant("indexer", name).custom_kernel(bad)


# Of k and the entries of a row's table: runs, and levels of a row that sees all of them.
ROWS = {
    512: {4160: (1, 1), 8192: (2, 0), 8256: (2, 1), 9000: (1, 1), 32832: (1, 2), 36000: (2, 1), 70000: (1, 2)}
    | {262144: (1, 2), 262208: (1, 3), 300000: (2, 2)},
    1024: {32768: (2, 1), 524288: (2, 2), 1 << 20: (2, 3)},
    2048: {1 << 20: (4, 2), 1 << 24: (4, 4)},
    5000: {16384: (4, 0)},
    3000: {8192: (2, 0)},
}


@pytest.mark.parametrize(("topk", "entries"), [(topk, entries) for topk, rows in ROWS.items() for entries in rows])
def test_sm90_join_takes_rows_of_any_length(topk, entries):
    """A row that sees 1/16 less takes the fewest that can be."""
    module = load.module(FOLDER, "variants/sm90_join")
    runs = module.runs_for(topk, entries)
    assert (runs, module.levels(entries, module.EACH * runs)) == ROWS[topk][entries]
    with pytest.raises(ValueError, match="k must be at most 2048"):
        module.runs_for(2049, 16385)


@pytest.fixture
def baseline(monkeypatch, tmp_path):
    """The baseline on packages that are not there. `.specs`: of FlashInfer's top k, those that were built."""

    class Spec:
        jit_library_path, extra_cuda_cflags = tmp_path / "built.so", None
        aot_path = property(lambda _: env.FLASHINFER_AOT_DIR / "topk.so")
        is_aot = property(lambda self: self.aot_path.exists())

        def build(self):
            self.jit_library_path.write_bytes(b"library")
            specs.append(self)

    specs: list[Spec] = []
    env = types.SimpleNamespace(FLASHINFER_AOT_DIR=tmp_path / "installed")
    for name in ("deep_gemm", "flashinfer", "flashinfer.jit", "flashinfer.jit.topk"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(env=env, gen_topk_module=Spec))
    monkeypatch.setenv("KERNEL_BUILD_DIR", str(tmp_path / "build"))
    module = load.variant("indexer", "peer_deepgemm_flashinfer")
    return types.SimpleNamespace(module=module, specs=specs, new=Spec)


def test_the_baselines_top_k_is_compiled_once_for_all_processes(baseline):
    for _ in range(2):
        baseline.module._top_k_is_built()
        baseline.module._top_k_is_built.cache_clear()  # as in another process
    assert [spec.extra_cuda_cflags for spec in baseline.specs] == [["--split-compile=0"]]
    assert baseline.new().aot_path.read_bytes() == b"library"


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_the_baselines_pages_hold_the_same_keys(kind, baseline):
    """Its conversion rounds nothing, whatever the scales are: of FP8 keys they are no powers of two."""
    pages_of = baseline.module._fp8_pages
    data, _ = small(kind=kind, per_page=32, content="magnitudes", entries=100)
    sizes, entry = task.unpack(data), torch.arange(100)
    table = torch.where(torch.arange(sizes.blocks) * sizes.per_page < data.visible.amax(1, keepdim=True), data.table, 0)
    pages, own = pages_of(data.keys, table, sizes.per_page)
    for b in range(sizes.batch):
        before = task.read_keys(data.keys, table[b, entry // 32].long() * 32 + entry % 32)
        assert torch.equal(task.read_keys(pages, own[b, entry // 64].long() * 64 + entry % 64), before)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2, 7, 64])
@pytest.mark.parametrize(
    ("content", "kind", "entries", "topk"),
    [
        ("ties", "mxfp4", 1300, 200),
        ("ragged", "mxfp4", 1300, 200),
        ("near", "fp8", 1300, 200),
        ("rising", "mxfp4", 9001, 512),
        ("zeros", "mxfp4", 9001, 1024),
        ("sparse", "mxfp4", 70001, 512),
        ("plain", "mxfp4", 20000, 2048),
        ("near", "mxfp4", 300001, 512),
    ],
)
def test_every_number_of_blocks_a_row_is_right(parts, content, kind, entries, topk, monkeypatch):
    """Blocks with and without entries, rows of one to three levels, 1 to 4 runs a thread, pages at hand or not."""
    file = FOLDER / "variants" / "sm90_join.py"
    cases.skip_unless_it_runs(file, "cuda")
    module = load.module(FOLDER, "variants/sm90_join")
    data, want = solved(task.Case(3, 2, 64, entries, topk, kind, 32, content, 99), "cuda")
    launch = module.shared_out(task.unpack(data), parts)
    monkeypatch.setattr(module, "launch_for", lambda _: launch)
    for _ in range(2):  # the first call leaves its counters at zero
        result = reference.compare(data, want, module.custom_kernel(data._replace(out=torch.empty_like(data.out))))
        assert result.ok, f"{launch}: {result.message}"
