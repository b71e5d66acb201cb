"""fmha_prefill: the oracle against bytes and loops and against fmha_decode's, and what the generator promises."""

import pytest
import torch

from problems.common import kv_pages
from tests.problems import cases
from tests.problems.exact import check_attended, kv_entry

NAME = "fmha_prefill"
task, reference = cases.task(NAME), cases.reference(NAME)


def test_cases_say_what_they_move_and_compute():
    window, chunk = task.BENCHMARKS[3], task.BENCHMARKS[6]
    assert window.flops() == 4 * 64 * 512 * (128 * 4096 - 127 * 64)
    assert chunk.flops() == 4 * 64 * 512 * 2048 * (128 + 512)
    rows = 64 * (2 * 1024 + 4)  # bytes of a token's q, out and lse
    assert window.bytes_moved() == (584 + 4 + 4 + rows) * 4096 + 4 * (64 + 3)
    entries = 2048 + 127 + (65536 + 2048) // 4
    assert chunk.bytes_moved() == 584 * entries + 4 * (2175 + 512 * 2048 + 2048 + 64 + 3) + rows * 2048


@pytest.mark.parametrize("change", [{"content": "ragged"}, {"content": "empty", "lists": "all"}, {"position": 0}])
def test_reference_is_the_sum_over_the_bytes_in_memory(change):
    data = cases.made(NAME, **change)
    out, lse = reference.ref_kernel(data)
    starts, first = data.starts.tolist(), data.first.tolist()
    for t in range(7):
        b = max(b for b in range(2) if starts[b] <= t)
        p = first[b] + t - starts[b]
        seen = [int(data.window_index[b, at - first[b] + 127]) for at in range(max(0, p - 127), p + 1)]
        chosen = data.compressed_index[t if len(data.compressed_index) == 7 else b, : int(data.compressed_length[t])]
        entries = [kv_entry(bytes(data.window[i // 4].tolist()), 4, i % 4) for i in seen if i != -1]
        entries += [kv_entry(bytes(data.compressed[i // 8].tolist()), 8, i % 8) for i in chosen.tolist() if i != -1]
        for h in range(3):
            check_attended(out[t, h], lse[t, h], data.q[t, h].tolist(), entries, float(data.sink[h]))


@pytest.mark.parametrize("case", task.TESTS[:12], ids=cases.named)
def test_tokens_alone_have_the_same_answer_also_from_fmha_decode(case):
    data, want = cases.solved(NAME, case)
    one = reference.rows(data, torch.arange(case.tokens))
    task.unpack(one)
    length = torch.full((case.tokens,), 128, dtype=torch.int32)
    lists = [part.unsqueeze(1).contiguous() for part in (one.window_index, one.compressed_index)]
    window, compressed = (one.window, lists[0], length), (one.compressed, lists[1], one.compressed_length)
    outputs = (part.unsqueeze(1).contiguous() for part in (one.out, one.lse))
    call = cases.task("fmha_decode").Data(one.q.unsqueeze(1).contiguous(), *window, *compressed, one.sink, *outputs)
    for answer in (reference.ref_kernel(one), cases.reference("fmha_decode").ref_kernel(call)):
        for got, wanted in zip(answer, want, strict=True):
            torch.testing.assert_close(got.view(wanted.shape), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", task.TESTS, ids=cases.named)
def test_generated_data_is_what_the_task_says(case):
    data, want = cases.solved(NAME, case)
    starts, counts = data.starts.long(), data.starts.diff()
    assert int(starts[0]) == 0 and int(starts[-1]) == case.tokens and int(counts.min()) >= 0
    assert task.memory_order(data.q) == task.memory_order(data.out) and bool(torch.isfinite(want[0]).all())
    place = torch.arange(data.window_index.shape[1])
    outside = (data.first.unsqueeze(1) + place < 127) | (place >= counts.unsqueeze(1) + 127)
    assert bool((data.window_index[outside] == -1).all())
    position = data.first[task.sequence_of(data)] + torch.arange(case.tokens) - starts[task.sequence_of(data)]
    assert bool((data.compressed_length <= (position + 1) // case.ratio).all())
    one = reference.rows(data, torch.arange(case.tokens))
    behind = torch.arange(case.compressed) >= one.compressed_length.unsqueeze(1)
    lists = one.window_index, one.compressed_index.masked_fill(behind, -1)
    for pages, per_page, index in zip((data.window, data.compressed), task.unpack(data)[-2:], lists, strict=True):
        ids = index[index != -1]
        assert not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < len(pages) * per_page)
        codes, scales, rope = kv_pages.read(pages, per_page, ids.unique(), task.NOPE, task.ROPE)
        assert not bool(codes.float().isnan().any()) and bool(torch.isfinite(rope.float()).all())
        assert not len(ids) or (int(scales.min()) >= 3 and int(scales.max()) <= 134)
    if "-" not in case.content and case.content in task.CONTENTS:
        assert bool((data.window_index[~outside] >= 0).all())
        assert bool((counts > 0).all()) == (case.tokens >= case.batch)
