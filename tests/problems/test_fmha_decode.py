"""fmha_decode: the oracle against bytes and loops, the generator's contents, what its check admits."""

import functools
import itertools
import math

import pytest
import torch

from problems.common import kv_pages
from tests.problems import cases
from tests.problems.cases import named
from tests.problems.exact import check_attended, kv_entry

NAME = "fmha_decode"
task, reference = cases.task(NAME), cases.reference(NAME)
made, solved, rounded = (functools.partial(function, NAME) for function in (cases.made, cases.solved, cases.rounded))


def solved_of(content: str) -> tuple:
    return solved(next(case for case in task.TESTS if case.content == content))


@pytest.mark.parametrize("entries", [1, 2, 32, 64, 128, 256])
def test_page_entries_inverts_page_bytes(entries):
    stride = kv_pages.page_bytes(entries, task.NOPE, task.ROPE)
    assert task.page_entries(stride) == entries
    for other in (stride - 1, stride + 8, stride * 3 + 1152, 0, -576):
        with pytest.raises(ValueError, match="a page must be"):
            task.page_entries(other)


def test_cases_say_what_they_move_and_compute():
    flash, two = task.BENCHMARKS[0], next(case for case in task.BENCHMARKS if case.queries == 2)
    quarter = next(case for case in task.BENCHMARKS if (case.batch, case.heads, case.compressed) == (1, 16, 512))
    assert flash.flops() == 4 * 64 * 640 * 512
    assert flash.bytes_moved() == 584 * 640 + 4 * 640 + 8 + 256 + 64 * (2 * 1024 + 4)
    assert 4 * quarter.flops() == flash.flops()
    assert flash.bytes_moved() - quarter.bytes_moved() == 48 * (4 + 2 * 1024 + 4)  # sinks, q, out and lse; no entries
    assert two.queries == 2 and 2 * flash.flops() * 32 == two.flops()
    # Two queries share 127 entries of the window, and of 512 out of 4096 chosen at random 64 as expected.
    assert two.bytes_moved() - two.batch * 584 * (129 + 960) < two.batch * 2 * 64 * 2100


@pytest.mark.parametrize("content", ["ragged", "empty", "magnitudes", "duplicates"])
def test_reference_is_the_sum_over_the_bytes_in_memory(content):
    data = made(content=content)
    out, lse = reference.ref_kernel(data)
    caches = [
        (data.window, 2, data.window_index, data.window_length),
        (data.compressed, 4, data.compressed_index, data.compressed_length),
    ]
    for b, s in itertools.product(range(2), range(2)):
        found = []
        for pages, per_page, index, length in caches:
            ids = [i for i in index[b, s].tolist()[: int(length[b])] if i != -1]
            found += [kv_entry(bytes(pages[i // per_page].tolist()), per_page, i % per_page) for i in ids]
        for h in range(3):
            check_attended(out[b, s, h], lse[b, s, h], data.q[b, s, h].tolist(), found, float(data.sink[h]))


@pytest.mark.parametrize("case", task.TESTS, ids=named)
def test_generated_data_is_what_the_task_says(case):
    data, want = solved(case)
    assert bool(torch.isfinite(want[0]).all()) and not bool(torch.isnan(want[1]).any())
    owners: dict[tuple[str, int], int] = {}
    for cache, per_page in (("window", case.page_window), ("compressed", case.page_compressed)):
        pages, index, length = (getattr(data, cache + part) for part in ("", "_index", "_length"))
        assert int(length.min()) >= 0 and int(length.max()) <= index.shape[2]
        counts = torch.arange(index.shape[2]) < length.view(-1, 1, 1)
        ids = index[counts & (index != -1)]
        assert not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < len(pages) * per_page)
        codes, scales, rope = kv_pages.read(pages, per_page, ids.unique(), task.NOPE, task.ROPE)
        assert not bool(codes.float().isnan().any()) and bool(torch.isfinite(rope.float()).all())
        assert not len(ids) or (int(scales.min()) >= 3 and int(scales.max()) <= 134)
        free = torch.ones(len(pages) * per_page, dtype=torch.bool)
        free[ids.long()] = False
        codes, _, rope = kv_pages.read(pages, per_page, free.nonzero()[:, 0], task.NOPE, task.ROPE)
        assert bool(codes.float().isnan().any()) and (len(rope) < 40 or bool(rope.isnan().any()))
        for b in range(case.batch):  # sequences share no page
            for page in (index[b][(counts & (index != -1))[b]] // per_page).unique().tolist():
                assert owners.setdefault((cache, page), b) == b
        if case.content in ("plain", "maxima", "sinks", "drowned", "cancelling", "magnitudes"):
            assert bool(counts.all()) and bool((index != -1).all())
            assert all(len(row.unique()) == len(row) for row in index.flatten(0, 1))


def test_sequential_lists_go_through_the_pool_in_order_and_windows_move_on_by_one():
    data = made(order="sequential", compressed=40, pool=40, page_compressed=2)
    index = data.compressed_index[:, 0]
    assert bool((index[:, 1::2] == index[:, ::2] + 1).all())  # slots 0 and 1 of a page of 2
    pages = (index[:, ::2] // 2).flatten()
    assert len(pages.unique()) == len(pages) and not bool((pages.diff() > 0).all())  # shuffled
    window = made(queries=3, order="sequential").window_index
    assert torch.equal(window[:, :2, 1:], window[:, 1:, :-1])


def test_contents_hold_what_they_promise():
    data, want = solved_of("ragged")
    assert len(data.window_length.unique()) > 1 and int((data.window_index == -1).sum()) > 0
    place = torch.arange(data.window_index.shape[2]).expand_as(data.window_index)
    behind = data.window_index[place >= data.window_length.view(-1, 1, 1)]
    assert int(behind.min()) < -(2**28) and int(behind.max()) > 2**28
    ragged = [case for case in task.TESTS if case.content == "ragged" and case.compressed]
    assert any(not solved(case)[0].compressed_length.all() for case in ragged)
    for case in (c for c in task.TESTS if c.content == "empty"):
        data, want = solved(case)
        none = torch.isposinf(want[1]).all(2)
        assert bool(none.any()) and bool((~none).any()) and not bool(want[0][none].any())
        assert bool((data.window_length == 0).any() and ((data.window_length == 0) & ~none.all(1)).any())
    maxima = solved_of("maxima")[1][1]
    assert float(maxima.max() - maxima.min()) > 80
    sinks = solved_of("sinks")[0].sink
    assert {-math.inf, 0.0, 80.0, 40.0} < set(sinks.tolist())
    for case in task.TESTS:
        data, want = solved(case)
        above = (data.sink - want[1])[torch.isfinite(want[1])]
        assert case.content.startswith("drowned") or bool((above <= 85).all())
    drowned = solved_of("drowned")[1][0].norm(dim=3)
    assert float(drowned[..., ::2].max()) < 1e-70 < float(drowned[..., 1::2].min())
    data, want = solved_of("cancelling")
    size, _ = reference.admitted(data, want)
    assert float((want[0].norm(dim=3) / size).max()) < 0.5
    data, _ = solved_of("duplicates")
    assert len(data.compressed_index[0, 0].unique()) <= data.compressed_index.shape[2] // 4


def emulated(data: object, sink_inside: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What an honest kernel computes: p to bf16 relative to the maximum, its sum before that, one output rounding."""
    entries, score = reference._scores(data, slice(None))
    top = score.amax(3, keepdim=True).clamp(min=-1e30)
    if sink_inside:
        top = torch.maximum(top, data.sink.double().view(-1, 1))
    p = (score - top).exp().float()
    total = p.sum(3, keepdim=True)
    out = (p.bfloat16().double() @ entries) / (total + (data.sink.view(-1, 1) - top).exp())
    lse = (top + total.double().log()).squeeze(3)
    if sink_inside:  # the sum may have underflowed
        lse = score.logsumexp(3)
    none = score.isneginf().all(3)
    return out.masked_fill(none.unsqueeze(3), 0).bfloat16(), torch.where(none, torch.inf, lse).float()


@pytest.mark.parametrize("case", task.TESTS, ids=named)
def test_honest_rounding_passes_with_room(case):
    data, want = solved(case)
    for sink_inside in (False, True):
        if case.content == "drowned" and sink_inside:
            continue
        result = reference.compare(data, want, emulated(data, sink_inside))
        assert result.ok, result.message
        assert result.rel < 2.7e-3 and result.worst_abs <= 0.9 * result.worst_tol, result


def test_a_row_beyond_its_bound_is_refused_and_one_within_is_not():
    data, want = solved_of("empty")
    size, _ = reference.admitted(data, want)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(512, generator=generator, dtype=torch.float64)
    b, s, h = (torch.isfinite(want[1])).nonzero()[7].tolist()
    for share, ok in ((0.8, True), (1.3, False)):
        out, lse = rounded(data, want)
        moved = want[0][b, s, h] + noise / noise.norm() * share * task.ROW_RTOL * size[b, s, h]
        out[b, s, h] = moved.bfloat16()
        assert reference.compare(data, want, (out, lse)).ok is ok, share


def test_nothing_of_what_a_sink_drowned_is_asked_for():
    data, want = solved_of("drowned")
    out, lse = rounded(data, want)
    for rows, ok in ((slice(None, None, 2), True), (1, False)):
        out[:, :, rows] = 0
        assert reference.compare(data, want, (out, lse)).ok is ok


def test_lse_of_no_entries_is_infinity_and_nothing_else():
    data, want = solved_of("empty")
    row = tuple(want[1].isposinf().nonzero()[0].tolist())
    finite = tuple(want[1].isfinite().nonzero()[0].tolist())
    near = [(finite, float(want[1][finite]) + off, off > 0) for off in (9e-5, -1.1e-4)]
    far = [(row, value, False) for value in (-torch.inf, torch.nan, 0.0, 3e38)]
    for at, value, ok in (*near, *far, (finite, torch.inf, False)):
        out, lse = rounded(data, want)
        lse[at] = value
        result = reference.compare(data, want, (out, lse))
        assert result.ok is ok and (ok or "(of lse)" in result.message), value


def test_the_report_says_where():
    data, want = solved(next(c for c in task.TESTS if c.content == "ragged" and c.batch == 3 and c.queries == 2))
    out, lse = rounded(data, want)
    out[1:3, 1, 2:4, 128:192] = 0
    message = reference.compare(data, want, (out, lse)).message
    assert "Number of mismatched rows: 4 of" in message
    assert "ERROR AT (1, 1, 2, 1" in message  # a dim of 128 to 191
    assert "wrong sequences: 1-2 of" in message and "wrong queries: 1 of" in message
    assert "wrong heads: 2-3 of" in message
    parts = [float(x) for x in message.rpartition("in wrong rows: ")[2].split()]
    assert len(parts) == 8 and max(parts) == parts[2] > 0.1 and sum(parts) - parts[2] < 0.02


def test_many_rows_at_their_bound_are_refused_as_a_whole_and_a_peer_may_be_a_little_coarser():
    data, want = solved_of("ragged")
    result = reference.compare(data, want, ((want[0] * (1 + 0.7 * task.ROW_RTOL)).bfloat16(), want[1].float()))
    assert not result.ok and "in all" in result.message
    out, lse = (want[0] * (1 + 0.8 * reference.PEER_TOL)).bfloat16(), want[1].float()
    assert reference.compare(data, want, (out, lse), peer=True).ok
    assert not reference.compare(data, want, (out, lse)).ok
    assert not reference.compare(data, want, (out, lse + 1), peer=True).ok
