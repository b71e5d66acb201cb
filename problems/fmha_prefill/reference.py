"""Make inputs for fmha_prefill, compute the answer in fp64, and check outputs. Slow and obvious on purpose."""

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import task
import torch
from task import HEAD_DIM, NOPE, ROPE, SCALE, WINDOW, Case, Data, input_t, output_t, sequence_of, unpack
from torch.utils.weak import WeakIdKeyDictionary

from problems.common import check, fp8, kv_pages

TILE = {"cpu": 2**22, "cuda": 2**25}  # values of gathered entries held at a time, in fp64
HOLES = 1 / 8  # share of a list, where it has holes
ROW_FLOOR = 2**-100  # of the largest |c_j| besides, where a sink drowns everything
PEER_TOL = 5e-3  # of peers, in the same measure, for all heads of a token as one
FIRSTS = 300  # positions of first tokens are drawn below it
SINKS = {"sinks": (-math.inf, 0.0, 80.0, 40.0, math.nan), "drowned": (math.nan, 200.0)}  # in turn; NaN: as it was


def generate_input(*, device: str, **sizes: Any) -> input_t:
    """sizes: the fields of Case. Gaussian queries and entries, so that scores have a standard deviation of 1; sinks
    about as large as the rest of the denominator. Pages of all sequences are shuffled together. What no token sees is
    random bytes; behind the length of a chosen list stand later entries. Besides:

    maxima      scores of some heads 40 to 44 higher, of the others as much lower, so that one's maximum leaves nothing
                of the other, every fourth head's 60 times that; all rise or fall by up to 10 along the entries
    magnitudes  groups of 2^-20 to 2, some of them only subnormal codes, some with the least scales there are
    cancelling  every second entry is minus the one before, under nearly equal probabilities
    sinks       -inf, 0, 40, 80, and around 0
    drowned     every second sink 200, beside which nothing is left of the result
    duplicates  lists of a quarter as many entries

    Of lengths, with garbage behind them and holes in the lists:
    ragged      each sequence and list has its own, and a position of its own; a first tile of only holes
    empty       the same, but sequences without tokens, and a last token that sees only holes
    none        no token sees any entry
    neighbours  two neighbouring sequences have no tokens
    first       sequences of equal length, the first token of each sees only holes
    """
    case = Case(**sizes)
    tokens, nc, (content, kind) = case.tokens, case.compressed, task.kinds(case.content)
    gen, rng = torch.Generator(device).manual_seed(case.seed), random.Random(case.seed)
    counts = _counts(tokens, case.batch, kind, rng)
    firsts = [case.position, *(rng.randrange(FIRSTS) if kind else case.position for _ in counts[1:])]
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    first = torch.tensor(firsts, dtype=torch.int32, device=device)
    by_sequence = torch.arange(case.batch, device=device)
    sequence = by_sequence.repeat_interleave(starts.diff())
    token = torch.arange(tokens, device=device)
    visible = (first[sequence] + token - starts[sequence] + 1) // case.ratio
    length = visible.clamp(max=nc)
    # Shapes follow from the case alone, whatever lengths a seed draws.
    most_tokens, furthest = (tokens, max(case.position, FIRSTS)) if kind else (max(counts), case.position)
    places, pool = most_tokens + WINDOW - 1, (furthest + most_tokens) // case.ratio or 1
    owner = sequence if case.lists == "chosen" or case.batch == tokens else by_sequence
    window = _window(starts, first, places, case.page_window)
    entries = torch.arange(nc, device=device).repeat(len(owner), 1)
    if case.lists == "chosen":
        later = torch.arange(max(nc, pool), device=device) >= visible.unsqueeze(1)
        entries = (torch.rand(later.shape, generator=gen, device=device) + later).argsort(stable=True)[:, :nc]
    if content == "duplicates":
        window, entries = window.div(4, rounding_mode="floor"), entries % max(1, nc // 4)
    if kind:
        length = (length * torch.rand(tokens, generator=gen, device=device).mul_(1.5).clamp_(max=1)).long()
        for part in (window, entries):
            part[torch.rand(part.shape, generator=gen, device=device) < HOLES] = -1
            part[:: 2 if kind == "ragged" else len(part) + 1, :64] = -1
        _holes(window, entries, length, starts, kind)
    most = torch.zeros_like(owner).scatter_reduce_(0, sequence if owner is by_sequence else token, length, "amax")
    counted = torch.arange(nc, device=device) < most.unsqueeze(1)
    used = (starts.diff() > 0).unsqueeze(1).expand_as(window)
    pages, index = _cache(
        (window, used, by_sequence), case.batch, case.page_window, places + case.page_window - 1, content, gen
    )
    more, chosen = _cache((entries.fmod(pool), counted, owner), case.batch, case.page_compressed, pool, content, gen)
    if kind:
        garbage = torch.randint(-(2**31), 2**31, chosen.shape, generator=gen, device=device)
        chosen = torch.where(counted, chosen, garbage).int()
    q = torch.randn(tokens, case.heads, HEAD_DIM, generator=gen, device=device)
    q *= {"cancelling": 0.15, "magnitudes": 4.0}.get(content, 1.0)
    sink = torch.randn(case.heads, generator=gen, device=device)
    if content == "maxima":
        sink += _maxima(q, gen)
    elif content in SINKS:
        given = torch.tensor(SINKS[content], device=device).repeat(case.heads)[: case.heads]
        sink = torch.where(given.isnan(), sink, given)
    else:  # of n Gaussian scores, the expected lse
        sink += math.log(min(case.position + max(counts), WINDOW) + float(length.float().mean())) + 0.5
    q = _laid_out(q.bfloat16(), case.order)
    lists, lse = (index, more, chosen, length.int()), torch.full((tokens, case.heads), torch.nan, device=device)
    return Data(q, starts, first, pages, *lists, sink, torch.full_like(q, torch.nan), lse)


def _laid_out(x: torch.Tensor, order: str) -> torch.Tensor:
    """x: (T, H, 512) in this memory order."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if order == "heads" else x.contiguous()


def _counts(tokens: int, batch: int, kind: str, rng: random.Random) -> list[int]:
    """Tokens of each sequence: about equally many, or with `kind` of LENGTHS at random, and for some none."""
    weights = [1.0 if kind in ("", "first") else rng.uniform(0.05, 1) for _ in range(batch)]
    at = rng.randrange(max(1, batch - 1))
    for b in {"neighbours": (at, at + 1), "empty": (0, batch - 1)}.get(kind, ()):
        if batch > 2 or 0 < b < batch:
            weights[b] = 0.0
    ends = [round(tokens * sum(weights[: b + 1]) / sum(weights)) for b in range(batch)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _window(starts: torch.Tensor, first: torch.Tensor, places: int, per_page: int) -> torch.Tensor:
    """int64 (B, places): a sequence's entries by position, counted from the page of the first that is there; or -1."""
    place = torch.arange(places, device=first.device)
    position = first.long().unsqueeze(1) - (WINDOW - 1) + place
    start = (first.long().unsqueeze(1) - (WINDOW - 1)).clamp(min=0) // per_page * per_page
    there = (position >= 0) & (place < starts.diff().unsqueeze(1) + WINDOW - 1)
    return torch.where(there, position - start, -1)


def _holes(window: torch.Tensor, entries: torch.Tensor, length: torch.Tensor, starts: torch.Tensor, kind: str) -> None:
    """Puts holes and lengths of 0 where `kind` of LENGTHS says. Lists of a sequence keep what its other tokens see."""
    for b, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        token = {"first": start, "empty": len(length) - 1}.get(kind, -1)
        if kind == "none":
            window[b], length[start:end] = -1, 0
        elif start <= token < end:
            window[b, token - start : token - start + WINDOW] = -1
            if len(entries) == len(length):  # a list of its own
                entries[token] = -1
            else:
                length[token] = 0


def _maxima(q: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    """Gives q, fp32 (T, H, 512), what the entries' dims 448 to 450 (see _values) take. -> fp32 (H,), how much higher
    each head's scores are, plus what its sink may be more, or -inf.
    """
    heads, device = q.shape[1], q.device
    higher = torch.rand(heads, generator=gen, device=device).mul_(4).add_(40)
    higher *= torch.randint(2, (heads,), generator=gen, device=device).mul_(2).sub_(1)
    higher[3::4] *= 60
    q *= torch.rand(heads, 1, generator=gen, device=device).mul_(3).sub_(2).exp2_()
    slope = torch.rand(heads, generator=gen, device=device).sub_(0.5).mul_(20 / SCALE)
    q[..., NOPE], q[..., NOPE + 1], q[..., NOPE + 2] = higher / SCALE, slope.clamp(max=0), slope.clamp(min=0)
    return higher + torch.tensor([0.0, 4.0, 20.0, -torch.inf], device=device).repeat(heads)[:heads]


def _cache(
    lists: tuple[torch.Tensor, ...], batch: int, per_page: int, pool: int, content: str, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """lists: int64 (lists, n), entries of a sequence by number, 0 to pool - 1, or -1; bool (lists, n), which have
    values; int64 (lists,), the sequence of `batch` -> pages and index as in Data. One page more belongs to no sequence.
    """
    entries, seen, owner = lists
    each = -(-max(pool, 1) // per_page)
    count = batch * each + 1
    table = torch.randperm(count, generator=gen, device=gen.device)
    index = table[owner.unsqueeze(1) * each + entries.clamp(min=0) // per_page] * per_page + entries % per_page
    index = index.masked_fill_(entries < 0, -1)
    named = torch.zeros(count * per_page, dtype=torch.bool, device=gen.device)
    named[index[seen & (index >= 0)]] = True
    shape = (count, kv_pages.page_bytes(per_page, NOPE, ROPE))
    page_of = torch.empty_like(table).scatter_(0, table, torch.arange(count, device=gen.device) % each)
    pages = torch.randint(256, shape, dtype=torch.uint8, generator=gen, device=gen.device)  # NaN of both formats too
    ids = named.nonzero()[:, 0]
    where = (page_of[ids // per_page] * per_page + ids % per_page) / (each * per_page)
    kv_pages.write(pages, per_page, ids, *_values(where, content, gen))
    return pages, index.int()


def _values(where: torch.Tensor, content: str, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """where: fp32 (E,), an entry's place in its sequence, 0 to 1 -> codes, scales and rope of E entries."""
    if content == "magnitudes":
        return kv_pages.magnitudes(len(where), NOPE, ROPE, gen)
    x = torch.randn(len(where), HEAD_DIM, generator=gen, device=where.device)
    if content == "maxima":
        x[:, NOPE], x[:, NOPE + 1], x[:, NOPE + 2] = 1, where, where - 1
    elif content == "cancelling":
        x[1::2] = -x[: len(x) // 2 * 2 : 2]  # where all entries are named, neighbours of the sequence
    return *fp8.quantise_groups(x[:, :NOPE], kv_pages.GROUP), x[:, NOPE:].bfloat16()


def rows(data: input_t, index: torch.Tensor) -> input_t:
    """The call of these tokens alone, each a sequence, on the same pages. index: int64 (n,)."""
    sequence = sequence_of(data)[index]
    place = index - data.starts[sequence]
    seen = place.unsqueeze(1) + torch.arange(WINDOW, device=index.device)
    return data._replace(
        q=_laid_out(data.q[index], task.memory_order(data.q)),
        starts=torch.arange(len(index) + 1, dtype=torch.int32, device=index.device),
        first=data.first[sequence] + place.int(),
        window_index=data.window_index[sequence.unsqueeze(1), seen],
        compressed_index=data.compressed_index[index if unpack(data).each else sequence],
        compressed_length=data.compressed_length[index],
        out=_laid_out(data.out[index], task.memory_order(data.q)),
        lse=data.lse[index],
    )


def ref_kernel(data: input_t) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse before rounding, fp64. The sums are off by less than 2^-40 of their terms."""
    out = torch.empty(data.out.shape, dtype=torch.float64, device=data.q.device)
    lse = torch.empty(data.lse.shape, dtype=torch.float64, device=data.q.device)
    for some, entries, score in scored(data):
        lse[some] = score.logsumexp(2)
        out[some] = _probabilities(data, score, lse[some]) @ entries
    return out, lse.masked_fill_(lse == -torch.inf, torch.inf)


def scored(data: input_t) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield of some tokens at a time: which, the entries that they see, fp64 (n, 128 + nc, 512), 0 where there is
    none, and scores, fp64 (n, H, 128 + nc), -inf there.
    """
    sizes, tokens = unpack(data), torch.arange(len(data.q), device=data.q.device)
    window = decoded(data.window, sizes.page_window)
    pool = torch.cat([window, decoded(data.compressed, sizes.page_compressed)])
    sequence = sequence_of(data)
    place = (tokens - data.starts[sequence]).unsqueeze(1) + torch.arange(WINDOW, device=tokens.device)
    chosen = data.compressed_index[tokens if sizes.each else sequence].long()
    behind = torch.arange(sizes.compressed, device=tokens.device) >= data.compressed_length.unsqueeze(1)
    chosen = torch.where(behind | (chosen < 0), -1, chosen + len(window))
    index = torch.cat([data.window_index[sequence.unsqueeze(1), place].long(), chosen], 1)
    step = max(1, TILE[data.q.device.type] // (index.shape[1] * HEAD_DIM))
    for some in (slice(first, first + step) for first in range(0, len(tokens), step)):
        none = index[some] < 0
        entries = pool[index[some].clamp(min=0)].masked_fill_(none.unsqueeze(2), 0)  # a garbage entry may be NaN
        score = SCALE * (data.q[some].double() @ entries.mT)
        yield some, entries, score.masked_fill_(none.unsqueeze(1), -torch.inf)


def decoded(pages: torch.Tensor, per_page: int) -> torch.Tensor:
    """pages: as in Data -> all entries, fp64 (pages * P, 512), exactly."""
    every = torch.arange(len(pages) * per_page, device=pages.device)
    codes, scales, rope = kv_pages.read(pages, per_page, every, NOPE, ROPE)
    return torch.cat([fp8.dequantise_groups(codes, scales, kv_pages.GROUP, torch.float64), rope.double()], 1)


def _probabilities(data: input_t, score: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """p_j, fp64 (n, H, 128 + nc), 0 where there is no entry. lse: fp64 (n, H), any infinity of a row without one."""
    total = torch.logaddexp(lse, data.sink.double())
    return (score - total.unsqueeze(2)).exp_().masked_fill_(score == -torch.inf, 0)


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """(True, "") if `output`, out and lse, is the attention of `data` within the tolerance, else (False, report)."""
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(data: input_t, want: output_t, output: output_t, peer: bool = False) -> check.Result:
    """`output` against `want` = ref_kernel(data), as task.py derives it; a peer's out is held to PEER_TOL, the heads of
    a token as one, instead. rel is out's, in the norm of the case.
    """
    if type(output) is not tuple or len(output) != 2:
        return check.Result(False, "mismatch found! want two tensors, out and lse")
    out, lse = output
    fault = check.form_error(out, want[0].shape, torch.bfloat16)
    if fault := fault or check.form_error(lse, want[1].shape, torch.float32):
        return check.Result(False, fault)
    size, floor = admitted(data, want)
    error = (out.double() - want[0]).norm(dim=2)
    rel, whole_limit = float(error.norm() / (size.norm() or 1)), float(task.CASE_RTOL * size.norm() + floor.norm())
    whole_good = peer or float(error.norm()) <= whole_limit
    if peer:
        error, size, floor = (part.norm(dim=1, keepdim=True) for part in (error, size, floor))
    limit = (PEER_TOL if peer else task.ROW_RTOL) * size + floor
    good = error <= limit  # not ~(error > limit), which NaN would pass
    excess = error / limit.clamp_min(torch.finfo(torch.float64).tiny)
    worst = int(excess.nan_to_num(torch.inf, torch.inf).argmax())
    numbers = rel, float(error.flatten()[worst]), float(limit.flatten()[worst])
    if not bool(good.all()):
        return check.Result(False, _report(out, want[0], ~good), *numbers)
    if not whole_good:
        return check.Result(False, f"mismatch found! relative error {rel:.3g} over {task.CASE_RTOL:g} in all", *numbers)
    return check.Result(not (fault := _lse_fault(lse, want[1])), fault, *numbers)


_admitted = WeakIdKeyDictionary()  # by the answer's out: many outputs are compared with one


def admitted(data: input_t, want: output_t) -> tuple[torch.Tensor, torch.Tensor]:
    """What errors are measured by, and the floor under them, both fp64 (T, H): the larger of |out| and
    sqrt(sum_j p_j^2 |c_j|^2); ROW_FLOOR of the largest |c_j|. Computed once for an answer, for as long as it lives.
    """
    if want[0] not in _admitted:
        size, floor = want[0].norm(dim=2), torch.empty_like(want[1])
        for some, entries, score in scored(data):
            square, p = entries.square().sum(2), _probabilities(data, score, want[1][some])
            size[some] = torch.maximum(size[some], (p.square_() @ square.unsqueeze(2)).squeeze(2).sqrt_())
            floor[some] = ROW_FLOOR * square.amax(1, keepdim=True).sqrt()
        _admitted[want[0]] = size, floor
    return _admitted[want[0]]


def _report(out: torch.Tensor, want: torch.Tensor, bad: torch.Tensor) -> str:
    """bad: bool (T, H) or (T, 1). Wrong rows, the first errors, and where in tokens and heads."""
    many = f"Number of mismatched rows: {int(bad.sum())} of {bad.numel()}"
    lines = [f"mismatch found! custom implementation doesn't match reference: {many}"]
    for t, h in bad.nonzero()[: check.SHOWN].tolist():
        d = int((out[t, h].double() - want[t, h]).abs().nan_to_num(torch.inf, torch.inf).argmax())
        lines.append(f"ERROR AT ({t}, {h}, {d}): {float(out[t, h, d]):.6g} {float(want[t, h, d]):.6g}")
    for name, axis in (("tokens", 1), ("heads", 0)):
        wrong = bad.any(dim=axis).nonzero()[:, 0].tolist()
        lines.append(f"wrong {name}: {len(wrong)} of {bad.shape[1 - axis]}, {wrong[0]} to {wrong[-1]}")
    return "\n".join(lines)


def _lse_fault(lse: torch.Tensor, want: torch.Tensor) -> str:
    """What is wrong unless lse, fp32 (T, H), is as near `want` as LSE_ATOL says, and +inf just where that is."""
    both = torch.isposinf(lse) & torch.isposinf(want)
    limit = task.LSE_ATOL * want.nan_to_num(posinf=0, neginf=0).abs().div(100).clamp(min=1)
    result = check.elementwise(lse.masked_fill(both, 0), want.masked_fill(both, 0), limit, torch.float32)
    return result.message and f"{result.message}\n(of lse)"
