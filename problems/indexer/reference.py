"""Make inputs for indexer, compute the answer in fp64, and check outputs. Slow and obvious on purpose."""

from dataclasses import dataclass

import torch
from task import CUT, DIM, DOT_BITS, RATIO, RTOL, SUM_BITS, Data, Sizes, dequantise, input_t, kinds, output_t, unpack
from torch.utils.weak import WeakIdKeyDictionary

from problems.common import check, fp8, index_pages, nvfp4

TILE = {"cpu": 2**23, "cuda": 2**27}  # products of heads and entries held at a time, in fp64
PROTOTYPES = 7  # different keys of a sequence in "ties"
WHOLE = ("exact", "dense", "near", "sparse", "ties", "zeros", "outlier")  # contents of small whole numbers
TIGHT = ("near", "ties", "magnitudes", "rising")  # contents whose tables have no block more than entries


# ---------------------------------------------------------------- inputs


def generate_input(
    batch: int,
    queries: int,
    heads: int,
    entries: int,
    topk: int,
    kind: str,
    per_page: int,
    content: str,
    seed: int,
    device: str,
) -> input_t:
    """Gaussian queries, keys and weights, rounded as the format says. A query sees one entry more for every 4 tokens of
    its sequence, the last one of the sequence `entries`. Pages of all sequences are shuffled together; what no query
    sees is random bytes, and the table behind it random numbers. A table has a block more than a query sees, but in
    TIGHT contents. Besides:

    spread      groups of a key up to 2^14 apart, some of them zero; fp8: any scales
    magnitudes  the same; each sequence at one end of the magnitudes that queries, weights and keys may have
    exact       small whole numbers, whose scores are exact in fp32
    dense       the same, all queries and keys positive: products of a query and a key take 11 bits
    near        the same, weights that differ from 1 in their last bits only, so that many scores do
    sparse      the same, two values of a key 2^8 above the others
    ties        the same, of PROTOTYPES different keys a sequence
    zeros       the same, most scores 0 or -0, some above and some below
    negative    all weights below 0
    outlier     exact, a few scores 2^12 times as large as the others, of either sign
    rising      scores that rise with the entry; falling: that fall. Sequences have their first page in common

    Of lengths, where each query sees 3 entries more than the one before:
    ragged      each sequence sees another number of entries: all, none, 1, k - 1, k, k + 1
    none        no sequence sees any; one: every second sequence sees one, the others none
    neighbours  two neighbouring sequences see none, the next one entry, the next all
    """
    content, lengths = kinds(content)
    gen = torch.Generator(device).manual_seed(seed)
    blocks = -(-entries // per_page) + (content not in TIGHT)
    sizes = Sizes(batch, queries, heads, topk, blocks, per_page, kind)
    q, weights = _query(sizes, content, gen)
    visible = _visible(sizes, entries, lengths, gen)
    pages, last = batch * sizes.blocks + 1, visible.amax(1, keepdim=True)
    named = torch.randperm(pages, generator=gen, device=device)[: pages - 1].view(batch, sizes.blocks)
    keys = _garbage((pages, index_pages.page_bytes(per_page, kind)), gen)
    entry = torch.arange(max(last.flatten().tolist()), device=device)
    place = named[:, entry // per_page] * per_page + entry % per_page
    index_pages.write(keys, place[entry < last], *_keys(last.flatten().tolist(), kind, content, gen))
    if content in ("rising", "falling"):
        named[:, 0] = named[last.argmax(), 0].clone()  # of the others nobody sees what they have written
    blocks = -(-last // per_page)
    garbage = torch.randint(-(2**31), 2**31, named.shape, generator=gen, device=device)
    table = torch.where(torch.arange(sizes.blocks, device=device) < blocks, named, garbage)
    out = torch.full((batch, queries, topk), -(2**31), dtype=torch.int32, device=device)
    return Data(q.bfloat16(), weights, keys, table.int(), visible.int(), out)


def _query(sizes: Sizes, content: str, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """-> q fp32 (B, S, H, 128), which bf16 holds exactly, and weights fp32 (B, S, H)."""
    shape = (sizes.batch, sizes.queries, sizes.heads)
    if content in WHOLE:
        return _whole_query((*shape, DIM), content, gen)
    q, weights = (torch.randn(part, generator=gen, device=gen.device) for part in ((*shape, DIM), shape))
    if content == "magnitudes":
        q = q * _powers((*shape, 1), 0, 5, gen) * _ends(sizes.batch, "q", sizes.kind, gen).view(-1, 1, 1, 1)
        weights = weights * _powers(shape, 0, 5, gen) * _ends(sizes.batch, "weights", sizes.kind, gen).view(-1, 1, 1)
        return dequantise(*quantised(q, sizes.kind)), weights.sign() * weights.abs().clamp(2.0**-30, 2.0**20)
    elif content == "negative":
        weights = -weights.abs()
    elif content in ("rising", "falling"):
        q, weights = q.abs(), weights.abs()
    q = dequantise(*quantised(q, sizes.kind))
    return q, (weights * (DIM * sizes.heads) ** -0.5).clamp(-1, 1)


def _whole_query(shape: tuple[int, ...], content: str, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Of whole numbers: q fp32 (B, S, H, 128) and weights fp32 (B, S, H)."""
    heads = shape[:3]
    if content == "near":
        return _integers(shape, -1, 1, gen), 1 + (2 * _integers(heads, 0, 31, gen) + 1) / 2**13
    least = content == "sparse"  # of which keys take all the bits
    q = _integers(shape, -1, 1, gen) if least else _integers(shape, -2, 2, gen) * _powers((*heads, 1), 0, 1, gen)
    large = torch.rand(heads, generator=gen, device=gen.device) < 1 / 4
    weights = torch.where(large, _integers(heads, 1, 511, gen), _integers(heads, 1, 15, gen)) / 32
    weights *= 2 * _integers(heads, 0, 1, gen) - 1
    return q.abs() if content in ("zeros", "dense") else q, weights


def _visible(sizes: Sizes, entries: int, lengths: str, gen: torch.Generator) -> torch.Tensor:
    """int64 (B, S). Without `lengths` tokens fill a sequence's last entry and, of some, up to 3 places of the next."""
    behind = torch.arange(sizes.queries - 1, -1, -1, device=gen.device)  # queries behind each
    k = sizes.topk
    every = {"ragged": [entries, 0, k + 1, k, 1, k - 1], "none": [0], "one": [1, 0], "neighbours": [entries, 0, 0, 1]}
    if lengths:
        choice = torch.tensor(every[lengths], device=gen.device).clamp(max=entries)
        first = torch.randint(len(choice), (), generator=gen, device=gen.device)
        if lengths in ("one", "neighbours"):  # so that a few sequences have what the name says
            first = first % 2 if sizes.batch > 2 else len(choice) // 2 - 1
        last = choice[(first + torch.arange(sizes.batch, device=gen.device)) % len(choice)]
        return (last.unsqueeze(1) - 3 * behind).clamp(min=0)
    more = torch.randint(RATIO, (sizes.batch, 1), generator=gen, device=gen.device)
    return ((RATIO * entries + more - behind) // RATIO).clamp(min=0)


def _keys(counts: list[int], kind: str, content: str, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """-> codes and scales of as many keys of each sequence, one sequence behind the other."""
    if content == "spread":
        return _spread(sum(counts), kind, 0, 0, gen)
    if content == "magnitudes":
        ends = _ends(len(counts), "keys", kind, gen).log2().long().tolist()
        made = [_spread(count, kind, end, end + 8, gen) for count, end in zip(counts, ends, strict=True)]
        return tuple(torch.cat(parts) for parts in zip(*made, strict=True))
    if content == "ties":  # each sequence has separate prototypes
        x = torch.cat([_whole_keys(count, content, gen) for count in counts])
    elif content in WHOLE:
        x = _whole_keys(sum(counts), content, gen)
    else:
        x = torch.randn(sum(counts), DIM, generator=gen, device=gen.device)
    if content in ("rising", "falling"):
        slopes = [torch.linspace(1, 4, count, device=gen.device) for count in counts]
        x = x.abs() * torch.cat([slope if content == "rising" else slope.flip(0) for slope in slopes]).unsqueeze(1)
    return quantised(x, kind)


def _whole_keys(count: int, content: str, gen: torch.Generator) -> torch.Tensor:
    """fp32 (count, 128), which either format holds exactly."""
    device = gen.device
    if content == "near":
        some = torch.rand(count, DIM, generator=gen, device=device) < 1 / 8
        return _integers((count, DIM), -2, 2, gen) * some
    made = min(count, PROTOTYPES) if content == "ties" else count
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
    x = levels[_integers((made, DIM), 0, 7, gen).long()] * (2 * _integers((made, DIM), 0, 1, gen) - 1)
    x = x.unflatten(1, (-1, index_pages.GROUP))
    if content == "sparse":
        far, two = 2.0 ** -_integers((made, 1, 1), 7, 8, gen), torch.arange(index_pages.GROUP, device=device) < 2
        group = _integers((made, 1, 1), 0, 3, gen) == torch.arange(4, device=device).view(1, 4, 1)
        return torch.where(group, _integers((made, 1, index_pages.GROUP), 1, 2, gen) / 2 * two, x * far / 2).flatten(1)
    x = x * _powers((made, DIM // index_pages.GROUP, 1), 0, 1, gen)
    x = x.flatten(1) * _powers((made, 1), -1, 1, gen)
    if content == "dense":
        return x.abs()
    if content == "zeros":
        return torch.where(torch.rand(made, 1, generator=gen, device=device) < 0.8, -x.abs(), x)
    if content == "outlier":
        return x * torch.where(torch.rand(made, 1, generator=gen, device=device) < 0.02, 2.0**12, 1.0)
    return x[torch.randint(made, (count,), generator=gen, device=device)] if content == "ties" and made else x


def quantised(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x: fp32 (..., 128) -> (codes uint8 (..., 64 or 128), scales uint8 (..., 4)), to nearest, ties to even.

    Scales are the least powers of two with which no value saturates, of a group or in fp8 of a key.
    """
    if kind == "fp8":
        codes, exponents = fp8.quantise_groups(x, DIM, fp8.E4M3_MAX * 2.0**-126)
        return codes.view(torch.uint8), fp8.decode_ue8m0(exponents).view(torch.uint8)
    groups = x.float().unflatten(-1, (-1, index_pages.GROUP))
    scales = fp8.ue8m0_scale(groups.abs().amax(-1), nvfp4.E2M1_MAX, nvfp4.E2M1_MAX * 2.0**-126)
    values = nvfp4.nearest_e2m1(groups / fp8.decode_ue8m0(scales).unsqueeze(-1))
    return nvfp4.pack_nearest(values.flatten(-2)), scales


def _ends(batch: int, of: str, kind: str, gen: torch.Generator) -> torch.Tensor:
    """fp32 (B,): by how much values of about 1 are multiplied in "magnitudes": with up to 2^8 more they are near the
    least magnitude that task.py admits, or the largest one.
    """
    low = {"q": {"mxfp4": -26, "fp8": -12}[kind], "weights": -24, "keys": -25}[of]
    high = 28 if of == "keys" else 10
    number = torch.arange(batch, device=gen.device)
    large = number % 2 == 1 if of == "q" else number > 0
    return torch.where(large, high, low).float().exp2()


def _spread(count: int, kind: str, low: int, high: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code; an eighth of the groups is zero. A key's largest scale is 2^low to 2^high."""
    if kind == "fp8":
        codes, scales = quantised(torch.randn(count, DIM, generator=gen, device=gen.device), kind)
        factor = torch.rand(count, 1, generator=gen, device=gen.device).add_(1) * _powers((count, 1), low, high, gen)
        return codes, (scales.view(torch.float32) * factor).view(torch.uint8)
    groups = DIM // index_pages.GROUP
    codes = torch.randint(256, (count, groups, index_pages.GROUP // 2), generator=gen, device=gen.device)
    below = torch.randint(15, (count, groups), generator=gen, device=gen.device)
    first = torch.randint(groups, (count, 1), generator=gen, device=gen.device)
    below.scatter_(1, first, 0)
    zero = torch.rand(count, groups, generator=gen, device=gen.device) < 1 / 8
    zero.scatter_(1, first, False)
    codes[zero] &= 0x88  # zeros of either sign
    codes[..., :1].masked_fill_(~zero.unsqueeze(2), 0x5A)  # a live group is not all zeros
    byte = torch.randint(127 + low, 128 + high, (count, 1), generator=gen, device=gen.device) - below
    return codes.flatten(1).byte(), torch.where(zero, byte - 100, byte).clamp(min=0).byte()


def _garbage(shape: tuple[int, int], gen: torch.Generator) -> torch.Tensor:
    """uint8 of any bytes, NaN of either format among them."""
    words = torch.randint(-(2**63), 2**63 - 1, (shape[0] * shape[1] // 8,), generator=gen, device=gen.device)
    return words.view(torch.uint8).view(shape)


def _integers(shape: tuple[int, ...], low: int, high: int, gen: torch.Generator) -> torch.Tensor:
    """fp32, low to high, both included."""
    return torch.randint(low, high + 1, shape, generator=gen, device=gen.device).float()


def _powers(shape: tuple[int, ...], low: int, high: int, gen: torch.Generator) -> torch.Tensor:
    """fp32, 2^low to 2^high."""
    return _integers(shape, low, high, gen).exp2()


def rows(data: input_t, index: torch.Tensor) -> input_t:
    """The call of these sequences alone, from the same pages; out, whose order is free, in order. index: int64 (n,)."""
    q, weights, keys, *others, out = data
    return Data(q[index], weights[index], keys, *(part[index] for part in others), out[index].sort(2).values)


# ---------------------------------------------------------------- oracle


def ref_kernel(data: input_t) -> torch.Tensor:
    """int32 (B, S, k): the chosen places in the order of their entries, then -1."""
    sizes = unpack(data)
    out = torch.full(data.out.shape, -1, dtype=torch.int32, device=data.q.device)
    for at in _tiles(data):
        place, hidden = _places(data, at[0]), _hidden(data, at)
        n = place.shape[1]
        order = _scores(*_operands(data, at)).masked_fill_(hidden, -torch.inf).sort(dim=2, descending=True, stable=True)
        order = order.indices[..., : sizes.topk]
        rank = torch.arange(order.shape[2], device=order.device)
        order = order.masked_fill_(rank >= data.visible[at].unsqueeze(2), n).sort(dim=2).values  # no entry comes last
        place = torch.nn.functional.pad(place, (0, 1), value=-1).unsqueeze(1).expand(-1, order.shape[1], -1)
        out[at][..., : order.shape[2]] = place.gather(2, order).int()
    return out


Tile = tuple[slice, slice]  # sequences, and queries of each


def _tiles(data: input_t) -> list[Tile]:
    """What to treat together: sequences with all their queries, or some queries of one."""
    sizes = unpack(data)
    most = max(1, TILE[data.q.device.type] // (sizes.heads * max(1, int(data.visible.max()))))  # queries
    if most < sizes.queries:
        parts = [slice(first, min(first + most, sizes.queries)) for first in range(0, sizes.queries, most)]
        return [(slice(b, b + 1), part) for b in range(sizes.batch) for part in parts]
    step = most // sizes.queries
    every = slice(0, sizes.queries)
    return [(slice(first, min(first + step, sizes.batch)), every) for first in range(0, sizes.batch, step)]


def _places(data: input_t, some: slice) -> torch.Tensor:
    """int64 (b, n): places of these sequences' entries, up to the most that a query sees; anything behind its own."""
    per_page = unpack(data).per_page
    entry = torch.arange(int(data.visible.max()), device=data.q.device)
    return data.table[some, entry // per_page].long() * per_page + entry % per_page


def _hidden(data: input_t, at: Tile) -> torch.Tensor:
    """bool (b, s, n): entries that these queries do not see."""
    return torch.arange(int(data.visible.max()), device=data.q.device) >= data.visible[at].unsqueeze(2)


def _operands(data: input_t, at: Tile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64: q (b, s, H, 128), weights (b, s, H), keys (b, n, 128); of what a sequence does not see, zeros."""
    codes, scales = index_pages.read(data.keys, _places(data, at[0]))
    if unpack(data).kind == "fp8":  # fp32 would round the product
        key = codes.view(torch.float8_e4m3fn).double() * scales.contiguous().view(torch.float32).double()
    else:
        key = dequantise(codes, scales).double()
    return data.q[at].double(), data.weights[at].double(), key.masked_fill_(_hidden(data, at).all(1).unsqueeze(2), 0)


def _scores(q: torch.Tensor, weights: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """fp64 (b, s, n), of hidden entries too."""
    return (weights.unsqueeze(2) @ _dots(q, key).relu_()).squeeze(2)


def _dots(q: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(b, s, H, n)."""
    return (q.flatten(1, 2) @ key.mT).unflatten(1, q.shape[1:3])


# ---------------------------------------------------------------- checker


@dataclass(frozen=True)
class Answer:
    """score, and error that it may have, fp64 (B * S, n), -inf and 0 where hidden; exact: are sums, bool (B * S,)."""

    score: torch.Tensor
    error: torch.Tensor
    exact: torch.Tensor


_answers = WeakIdKeyDictionary()  # by what ref_kernel returned: many outputs are compared with one


def answer(data: input_t, want: torch.Tensor) -> Answer:
    """Scores, their admitted errors and which rows are exact. Computed once for `want`, for as long as it lives."""
    if want in _answers:
        return _answers[want]
    n = max(1, int(data.visible.max()))
    score = torch.full((*data.visible.shape, n), -torch.inf, dtype=torch.float64, device=want.device)
    error = torch.zeros_like(score)
    exact = torch.ones(data.visible.shape, dtype=torch.bool, device=want.device)
    for at in _tiles(data):
        hidden = _hidden(data, at)
        q, weights, key = _operands(data, at)
        seen = hidden.shape[2]
        score[at][..., :seen] = _scores(q, weights, key).masked_fill_(hidden, -torch.inf)
        size = (weights.square() * q.square().sum(3)).sum(2, keepdim=True).sqrt()
        admitted = RTOL * size * key.norm(dim=2).unsqueeze(1) + CUT * score[at][..., :seen].abs()
        error[at][..., :seen] = admitted.masked_fill_(hidden, 0)
        exact[at] = (_sums_are_exact(q, weights, key) | hidden).all(2)
    _answers[want] = found = Answer(score.flatten(0, 1), error.flatten(0, 1), exact.flatten())
    return found


def _sums_are_exact(q: torch.Tensor, weights: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """bool (b, s, n), by the rule in task.py."""
    terms = _dots(q.abs(), key.abs())  # (b, s, H, n)
    unit = _least_bit(q).amin(3).unsqueeze(3) * _least_bit(key).amin(2).unsqueeze(1).unsqueeze(1)
    dots = (terms <= 2.0**DOT_BITS * unit).all(2)
    unit = unit.mul_(_least_bit(weights).unsqueeze(3)).masked_fill_((weights.unsqueeze(3) * terms) == 0, torch.inf)
    sums = (weights.abs().unsqueeze(2) @ terms).squeeze(2) <= 2.0**SUM_BITS * unit.amin(2)
    return dots & sums


def _least_bit(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two that x, fp64, is a multiple of; of 0 infinity."""
    significand, exponent = torch.frexp(x)
    whole = torch.ldexp(significand, torch.full_like(exponent, 53)).long()
    return torch.ldexp((whole & -whole).double(), exponent - 53).masked_fill_(x == 0, torch.inf)


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """(True, "") if `output` is a choice that task.py admits, else (False, report)."""
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(data: input_t, want: torch.Tensor, output: output_t, baseline: bool = False) -> check.Result:
    """`output` against `want` = ref_kernel(data), as task.py derives it. A baseline may choose any of equal scores, and
    may be off by the tolerance in exact rows too. rel is the share of chosen places that are not the reference's;
    worst_abs the most that a chosen score falls short of one left out, worst_tol what was admitted there.
    """
    if fault := check.form_error(output, want.shape, torch.int32):
        return check.Result(False, fault)
    known = answer(data, want)
    got, wanted = output.flatten(0, 1), want.flatten(0, 1)
    entry, form = _entries(data, got)
    taken = torch.zeros_like(known.score, dtype=torch.bool)
    taken.scatter_(1, entry.clamp(min=0), entry >= 0)
    taken[:, 0] = (entry == 0).any(1)  # whatever clamped holes wrote there
    right = torch.zeros_like(taken)
    theirs = _entries(data, wanted)[0]
    right.scatter_(1, theirs.clamp(min=0), theirs >= 0)
    right[:, 0] = (theirs == 0).any(1)
    # The most that any chosen score falls short of any left out, beyond what errors explain.
    low, high = torch.where(taken, known.score + known.error, torch.inf).min(1), _left(taken, known).max(1)
    short = (high.values - low.values).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    differs = (taken != right).any(1)
    bad = ~form | torch.where(known.exact & (not baseline), differs, short > 0)
    rel = float((taken & ~right).sum()) / max(1, int(right.sum()))
    row = int(short.argmax())
    pair = torch.stack([low.indices[row], high.indices[row]])
    gap = known.score[row, pair].diff().nan_to_num(0, 0, 0).clamp(min=0)
    numbers = rel, float(gap), float(known.error[row, pair].sum())
    if not bool(bad.any()):
        return check.Result(True, "", *numbers)
    return check.Result(False, _report(data, got, entry, taken, right, known, bad, form), *numbers)


def _left(taken: torch.Tensor, known: Answer) -> torch.Tensor:
    """fp64 (rows, n): at least how large the scores of entries left out are; -inf of others."""
    return torch.where(taken, -torch.inf, known.score - known.error)


def _entries(data: input_t, got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """got: int32 (B * S, k) -> the entries that these places are, int64, -1 of what is none that the row sees; and
    whether each row has the right form, bool (B * S,): as many different visible entries as there are to choose, then
    only -1.
    """
    sizes = unpack(data)
    total = len(data.keys) * sizes.per_page
    inside = (got >= 0) & (got < total)
    page = torch.where(inside, got, 0).long() // sizes.per_page
    block = torch.full((sizes.batch, len(data.keys)), -1, dtype=torch.int64, device=got.device)
    numbers = torch.arange(sizes.blocks, device=got.device).expand(sizes.batch, -1)
    used = numbers < -(-data.visible.amax(1, keepdim=True) // sizes.per_page)
    block[used.nonzero()[:, 0], data.table[used].long()] = numbers[used]
    row = torch.arange(len(got), device=got.device).unsqueeze(1)
    found = block[row // sizes.queries, page]
    entry = found * sizes.per_page + got % sizes.per_page
    visible = data.visible.flatten().unsqueeze(1)
    entry = torch.where(inside & (found >= 0) & (entry < visible), entry, -1)
    wanted = torch.arange(got.shape[1], device=got.device) < visible
    ordered = entry.sort(1).values
    twice = ((ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)).any(1)
    return entry, ((entry >= 0) == wanted).all(1) & ((got == -1) | wanted).all(1) & ~twice


def _report(
    data: input_t,
    got: torch.Tensor,
    entry: torch.Tensor,
    taken: torch.Tensor,
    right: torch.Tensor,
    known: Answer,
    bad: torch.Tensor,
    form: torch.Tensor,
) -> str:
    """How many rows are wrong; of the first few a place that is wrong, beside one that is missing; which sequences."""
    sizes = unpack(data)
    lines = [
        "mismatch found! custom implementation doesn't match reference: "
        f"Number of mismatched rows: {int(bad.sum())} of {bad.numel()}"
    ]
    for row in bad.nonzero()[: check.SHOWN, 0].tolist():
        b, s = divmod(row, sizes.queries)
        count = min(sizes.topk, int(data.visible[b, s]))
        wrong = entry[row] < 0
        wrong[: len(wrong)] |= ~right[row, entry[row].clamp(min=0)]
        wrong[count:] = got[row, count:] != -1
        at = int(wrong.int().argmax())
        if not bool(wrong.any()):  # right places, one of them more than once
            ordered = entry[row].sort()
            at = int(ordered.indices[1:][ordered.values.diff() == 0].min())
        missing = (right[row] & ~taken[row]).nonzero()[:, 0]
        if at >= count or not len(missing):
            best = -1
        else:
            entry_left = int(missing[known.score[row, missing].argmax()])
            best = int(_places(data, slice(b, b + 1))[0, entry_left])
        lines.append(f"ERROR AT ({b}, {s}, {at}): {int(got[row, at])} {best}")
        if bool(form[row]) and best >= 0:
            mine = int(entry[row, at])
            exact = ", whose sums are exact" if bool(known.exact[row]) else ""
            lines.append(
                f"  chosen: entry {mine}, score {float(known.score[row, mine]):.9g}; left out: entry {entry_left}, "
                f"score {float(known.score[row, entry_left]):.9g}{exact}"
            )
        elif not bool(form[row]):
            lines.append(f"  want {count} different visible entries of sequence {b}, then -1")
    for name, axis in (("sequences", 1), ("queries", 0)):
        wrong = bad.view(sizes.batch, sizes.queries).any(dim=axis).nonzero()[:, 0].tolist()
        lines.append(f"wrong {name}: {_ranges(wrong)} of {(sizes.batch, sizes.queries)[1 - axis]}")
    return "\n".join(lines)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"; at most five ranges."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    said = [f"{a}-{b}" if b > a else f"{a}" for a, b in found[: check.SHOWN]]
    return ", ".join(said) + (" and more" if len(found) > check.SHOWN else "")
