"""indexer: the oracle against loops, the generator's contents, the check, how sm90_join is launched, its baseline."""

import functools
import sys
import types

import pytest
import torch

from problems.common import index_pages, load
from tests.problems import cases, variants

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


def test_an_mxfp4_key_is_what_its_bytes_say():
    pages = torch.randint(256, (3, index_pages.page_bytes(16, "mxfp4")), dtype=torch.uint8)
    pages[1, 64 * 5 : 64 * 6] = torch.arange(64) * 3 % 256
    pages[1, 64 * 16 + 4 * 5 : 64 * 16 + 4 * 6] = torch.tensor([127, 120, 130, 127])
    key = task.read_keys(pages, torch.tensor(16 + 5))
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    for d in range(128):
        code = (d // 2 * 3 % 256) >> 4 * (d % 2) & 15
        assert float(key[d]) == levels[code] * 2.0 ** ([0, -7, 3, 0][d // 32])


def test_an_fp8_key_is_what_its_bytes_say():
    pages = torch.randint(256, (2, index_pages.page_bytes(32, "fp8")), dtype=torch.uint8)
    codes = torch.arange(128).byte() % 127
    pages[1, 128 * 7 : 128 * 8] = codes
    pages[1, 128 * 32 + 28 : 128 * 32 + 32] = torch.tensor([0.3]).view(torch.uint8)
    want = codes.view(torch.float8_e4m3fn).float() * torch.tensor(0.3)
    assert torch.equal(task.read_keys(pages, torch.tensor([32 + 7]))[0], want)


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


def test_least_bit_is_the_power_of_two_that_divides():
    x = torch.tensor([0.75, -3.0, 8.0, 0.0, 2.0**-30, 1 + 2.0**-20], dtype=torch.float64)
    want = [0.25, 1.0, 8.0, float("inf"), 2.0**-30, 2.0**-20]
    assert reference._least_bit(x).tolist() == want


def test_any_order_is_right():
    data, want = small()
    turned = want.flip(2).contiguous()
    assert reference.compare(data, want, turned).ok


def _put(want: torch.Tensor, at: tuple, value: int) -> torch.Tensor:
    changed = want.clone()
    changed[at] = value
    return changed


def test_wrong_forms_are_refused():
    data, want = small(content="ragged", batch=6, entries=60, topk=8)
    short = int((data.visible[:, 1] == 7).nonzero()[0])  # one entry fewer than there is room for
    full = int((data.visible[:, 1] == 60).nonzero()[0])
    assert reference.compare(data, want, want).ok
    other = int(want[(full + 1) % 6].max())
    for output, word in (
        (_put(want, (full, 1, 0), -1), "then -1"),
        (_put(want, (full, 1, 0), int(want[full, 1, 1])), "different"),
        (_put(want, (short, 1, 7), int(want[short, 1, 0])), "then -1"),
        (_put(want, (short, 1, 7), -2), "then -1"),
        (_put(want, (full, 1, 0), 2**30), "different"),
        (_put(want, (full, 1, 0), other), "visible"),
        (want.long(), "torch.int32"),
        (want[:, :1], "mismatch"),
        ((want,), "torch.Tensor"),
    ):
        result = reference.compare(data, want, output)
        assert not result.ok and word in result.message, (word, result.message)


def _scores(data: object, want: torch.Tensor) -> torch.Tensor:
    return reference.answer(data, want).score


def test_equal_scores_count_in_exact_rows_and_not_for_baselines():
    data, want = small(content="ties", batch=1, queries=1, entries=200, topk=20)
    score = _scores(data, want)[0]
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


def cut(terms: torch.Tensor) -> torch.Tensor:
    """fp64, without the bits that FP8 tensor cores do not add of terms along the last axis."""
    unit = torch.exp2(torch.frexp(terms.abs().amax(-1, keepdim=True)).exponent - 14.0)
    return (terms / unit).trunc() * unit


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
    variants.skip_unless_it_runs(FOLDER / "variants" / f"{name}.py", "cpu")
    for entries, topk in ((37, 5), (4, 5)):
        data, _ = small(entries=entries, topk=topk)
        for page in (-1, len(data.keys)):
            bad = data._replace(table=torch.full_like(data.table, page))
            with pytest.raises(RuntimeError, match="outside the pages"):
                load.variant("indexer", name).custom_kernel(bad)


@pytest.mark.parametrize(
    ("topk", "entries", "runs", "levels"),
    [
        (512, 4160, 1, 1),
        (512, 8192, 2, 0),
        (512, 8256, 2, 1),
        (512, 9000, 1, 1),
        (512, 32832, 1, 2),
        (512, 36000, 2, 1),
        (512, 70000, 1, 2),
        (512, 262144, 1, 2),
        (512, 262208, 1, 3),
        (512, 300000, 2, 2),
        (1024, 32768, 2, 1),
        (1024, 524288, 2, 2),
        (1024, 1 << 20, 2, 3),
        (2048, 1 << 20, 4, 2),
        (2048, 1 << 24, 4, 4),
        (5000, 16384, 4, 0),
        (3000, 8192, 2, 0),
    ],
)
def test_sm90_join_takes_rows_of_any_length(topk, entries, runs, levels):
    """levels: of a row that sees all entries of its table. A row that sees 1/16 less takes the fewest that can be."""
    module = load.module(FOLDER, "variants/sm90_join")
    assert module.runs_for(topk, entries) == runs
    assert module.levels(entries, module.EACH * runs) == levels


@pytest.fixture
def baseline(monkeypatch, tmp_path):
    """The baseline on packages that are not there. `.specs`: of FlashInfer's top k, those that were built."""

    class Spec:
        jit_library_path = tmp_path / "built.so"

        def __init__(self):
            self.extra_cuda_cflags = None

        aot_path = property(lambda _: env.FLASHINFER_AOT_DIR / "topk.so")
        is_aot = property(lambda self: self.aot_path.exists())

        def build(self):
            self.jit_library_path.write_bytes(b"library")
            specs.append(self)

    specs: list[Spec] = []
    env = types.SimpleNamespace(FLASHINFER_AOT_DIR=tmp_path / "installed")
    made = {
        "deep_gemm": {},
        "flashinfer": {},
        "flashinfer.jit": {"env": env},
        "flashinfer.jit.topk": {"gen_topk_module": Spec},
    }
    for name, has in made.items():
        module = types.ModuleType(name)
        vars(module).update(has)
        monkeypatch.setitem(sys.modules, name, module)
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


def test_sm90_join_refuses_places_that_no_thread_has_room_for():
    with pytest.raises(ValueError, match="k must be at most 2048"):
        load.module(FOLDER, "variants/sm90_join").runs_for(2049, 16385)


# ---------------------------------------------------------------- on a GPU


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
    variants.skip_unless_it_runs(file, "cuda")
    module = load.module(FOLDER, "variants/sm90_join")
    data, want = solved(task.Case(3, 2, 64, entries, topk, kind, 32, content, 99), "cuda")
    launch = module.shared_out(task.unpack(data), parts)
    monkeypatch.setattr(module, "launch_for", lambda _: launch)
    for _ in range(2):  # the first call leaves its counters at zero
        result = reference.compare(data, want, module.custom_kernel(data._replace(out=torch.empty_like(data.out))))
        assert result.ok, f"{launch}: {result.message}"
