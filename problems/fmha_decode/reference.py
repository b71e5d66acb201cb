"""Make inputs for fmha_decode, compute the answer in fp64, and check outputs. Slow and obvious on purpose."""

import math

import torch
from task import CASE_RTOL, HEAD_DIM, LSE_ATOL, NOPE, ROPE, ROW_RTOL, SCALE, Data, input_t, kinds, output_t, unpack
from torch.utils.weak import WeakIdKeyDictionary

from problems.common import check, fp8, kv_pages

WRITTEN = 2**15  # entries quantised at a time: 64 MiB of fp32
TILE = {"cpu": 2**22, "cuda": 2**26}  # values of gathered entries held at a time, in fp64
HOLES = 1 / 8  # share of a list, where it has holes
SLICE = 64  # dims whose error is reported together
ROW_FLOOR = 2**-100  # of the largest |c_j| besides, where a sink drowns everything
PEER_TOL = 5e-3  # of peers, in the same measure, for all rows of a sequence as one


# ---------------------------------------------------------------- inputs


def generate_input(
    batch: int,
    queries: int,
    heads: int,
    window: int,
    compressed: int,
    page_window: int,
    page_compressed: int,
    pool: int,
    order: str,
    content: str,
    seed: int,
    device: str,
) -> input_t:
    """Gaussian queries and entries, so that scores have a standard deviation of 1; sinks about as large as the whole
    rest of the denominator. Pages of all sequences are shuffled together. What no list names is random bytes. Besides:

    maxima      scores of some heads 40 to 44 higher, of the others as much lower, so that one's maximum leaves nothing
                of the other, every fourth head's 60 times that; all rise or fall by up to 10 along the entries
    magnitudes  groups of 2^-20 to 2, some of them only subnormal codes, some with the least scales there are
    cancelling  every second entry is minus the one before, under nearly equal probabilities
    sinks       -inf, 0, 40, 80, and around 0
    drowned     every second sink 200, beside which nothing is left of the result
    duplicates  lists drawn from a quarter as many entries

    Of lengths, with garbage behind them and holes in front:
    ragged      lengths of each sequence its own; a first tile of only holes
    empty       the same, but sequences without any entry, with none in the window, and a query of only holes
    none        no sequence has any entry
    neighbours  two neighbouring sequences have none
    first       all have all, but the first query of each has only holes
    """
    content, lengths_of = kinds(content)
    gen = torch.Generator(device).manual_seed(seed)
    ring = -(-(window + queries - 1) // page_window) * page_window
    lists = _ring(batch, queries, window, ring, gen), _chosen(batch, queries, compressed, pool, order, gen)
    if order == "random":
        lists = lists[0].gather(2, _permutation((batch, queries, window), gen)), lists[1]
    if content == "duplicates":
        lists = tuple(part % max(1, part.shape[2] // 4) for part in lists)
    lengths = torch.full((batch,), window), torch.full((batch,), compressed)
    if lengths_of:
        lengths = _lengths(batch, window, compressed, lengths_of, gen)
    q = torch.randn(batch, queries, heads, HEAD_DIM, generator=gen, device=device)
    sink = torch.randn(heads, generator=gen, device=device)
    if content == "maxima":
        sink += _maxima(q, gen)
    elif content == "sinks":
        _put(sink, (-torch.inf, 0.0, 80.0, 40.0, None))
    elif content == "drowned":
        _put(sink, (200.0, None))
    else:
        sink += math.log(window + compressed) + 0.5  # of n Gaussian scores, the expected lse
    q *= {"cancelling": 0.15, "magnitudes": 4.0}.get(content, 1.0)
    caches = []
    for entries, length, per_page, size in zip(
        lists, lengths, (page_window, page_compressed), (ring, max(pool, 1)), strict=True
    ):
        caches += _cache(entries, length.to(device), per_page, -(-size // per_page), content, lengths_of, gen)
    nan = torch.full((batch, queries, heads, HEAD_DIM), torch.nan, dtype=torch.bfloat16, device=device)
    return Data(q.bfloat16(), *caches, sink, nan, nan[..., 0].float().contiguous())


def _ring(batch: int, queries: int, window: int, ring: int, gen: torch.Generator) -> torch.Tensor:
    """int64 (B, S, nw): a ring's positions of the `window` entries up to each query, from the oldest on."""
    start = torch.randint(ring, (batch, 1, 1), generator=gen, device=gen.device)
    return (start + torch.arange(queries, device=gen.device)[:, None] + torch.arange(window, device=gen.device)) % ring


def _chosen(batch: int, queries: int, n: int, pool: int, order: str, gen: torch.Generator) -> torch.Tensor:
    """int64 (B, S, n): positions in a sequence's pool, all different."""
    if order == "sequential":
        return torch.arange(n, device=gen.device).expand(batch, queries, n)
    return _permutation((batch, queries, pool), gen)[..., :n]


def _permutation(shape: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
    """int64: a random order of each row of the last axis."""
    return torch.rand(shape, generator=gen, device=gen.device).argsort(stable=True, dim=-1)


def _lengths(
    batch: int, window: int, compressed: int, kind: str, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int64 (B,) on the CPU: as many entries of the window and of the compressed as `kind` of LENGTHS says; what
    follows below stands from a random sequence on.
    """
    shorter = window // 2 + 1, -(-compressed // 3)
    less, none, every = (window - 1, max(compressed - 1, 0)), (0, 0), (window, compressed)
    pattern = {
        "ragged": (every, (1, 0), shorter, less),
        "empty": (every, none, (0, shorter[1]), less),
        "none": (none,),
        "neighbours": (none, none, every, less),
        "first": (every,),
    }[kind]
    first = int(torch.randint(batch, (), generator=gen, device=gen.device))
    chosen = [pattern[(i - first) % batch % len(pattern)] for i in range(batch)]
    return torch.tensor([n for n, _ in chosen]), torch.tensor([n for _, n in chosen])


def _maxima(q: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    """Gives q, fp32 (B, S, H, 512), what the entries' dims 448 to 450 (see _values) take. -> fp32 (H,), how much
    higher each head's scores are, plus what its sink may be more, or -inf.
    """
    heads = q.shape[2]
    higher = torch.rand(heads, generator=gen, device=q.device).mul_(4).add_(40)
    higher *= torch.randint(2, (heads,), generator=gen, device=q.device).mul_(2).sub_(1)
    higher[3::4] *= 60
    q *= torch.rand(heads, 1, generator=gen, device=q.device).mul_(3).sub_(2).exp2_()
    q[..., NOPE] = higher / SCALE
    slope = torch.rand(heads, generator=gen, device=q.device).sub_(0.5).mul_(20 / SCALE)
    q[..., NOPE + 1], q[..., NOPE + 2] = slope.clamp(max=0), slope.clamp(min=0)
    more = torch.tensor([0.0, 4.0, 20.0, -torch.inf], device=q.device)
    return higher + more[torch.arange(heads, device=q.device) % 4]


def _put(sink: torch.Tensor, values: tuple[float | None, ...]) -> None:
    """Every len(values)-th element from each on is that value, or stays where it is None."""
    for i, value in enumerate(values):
        if value is not None:
            sink[i :: len(values)] = value


def _cache(
    entries: torch.Tensor,
    length: torch.Tensor,
    per_page: int,
    pages_each: int,
    content: str,
    lengths: str,
    gen: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """entries: int64 (B, S, n), positions within the sequence; length: int64 (B,); pages_each: of a sequence
    -> pages, indices and lengths as in Data. One page more than needed is there, and belongs to no sequence.
    """
    batch, queries, n = entries.shape
    device = entries.device
    count = batch * pages_each + 1
    table = torch.randperm(count, generator=gen, device=device)[: count - 1]
    first = torch.arange(batch, device=device).view(-1, 1, 1) * pages_each
    index = table[first + entries // per_page] * per_page + entries % per_page
    counts = torch.arange(n, device=device) < length.view(-1, 1, 1)
    if lengths:
        index = _holes(index, length, lengths, gen)
        garbage = torch.randint(-(2**31), 2**31, index.shape, generator=gen, device=device)
        index = torch.where(counts, index, garbage)
    named = torch.zeros(count * per_page, dtype=torch.bool, device=device)
    named[index[counts.expand_as(index) & (index >= 0)]] = True
    pages = _garbage(count, kv_pages.page_bytes(per_page, NOPE, ROPE), gen)
    page_of = torch.zeros(count, dtype=torch.int64, device=device)
    page_of[table] = torch.arange(count - 1, device=device) % pages_each
    for ids in named.nonzero()[:, 0].split(WRITTEN):
        where = (page_of[ids // per_page] * per_page + ids % per_page) / (pages_each * per_page)
        kv_pages.write(pages, per_page, ids, *_values(where, content, gen))
    return pages, index.int(), length.int()


def _holes(index: torch.Tensor, length: torch.Tensor, lengths: str, gen: torch.Generator) -> torch.Tensor:
    """index with holes: some anywhere but in the last place that counts; of the first query of every full sequence all
    of a first tile of 64, where more follow; of "empty" all of each sequence's last query, of "first" of its first.
    """
    batch, queries, n = index.shape
    hole = torch.rand(index.shape, generator=gen, device=index.device) < HOLES
    full = length == n
    if n > 64:
        hole[full, 0, :64] = True
    place = torch.arange(n, device=index.device)
    hole &= place != length.view(-1, 1, 1) - 1
    if lengths in ("empty", "first"):
        hole[:, -1 if lengths == "empty" else 0] = True
    return index.masked_fill(hole, -1)


def _garbage(count: int, stride: int, gen: torch.Generator) -> torch.Tensor:
    """uint8 (count, stride) of any bytes, NaN of either format among them."""
    words = torch.randint(-(2**63), 2**63 - 1, (count * stride // 8,), generator=gen, device=gen.device)
    return words.view(torch.uint8).view(count, stride)


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
    """The call of these sequences alone, from the same pages. index: int64 (n,)."""
    return Data(*(p if name in ("window", "compressed", "sink") else p[index] for name, p in data._asdict().items()))


# ---------------------------------------------------------------- oracle


def ref_kernel(data: input_t) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse before rounding, fp64. The sums are off by less than 2^-40 of their terms."""
    unpack(data)
    out = torch.empty(data.out.shape, dtype=torch.float64, device=data.q.device)
    lse = torch.empty(data.lse.shape, dtype=torch.float64, device=data.q.device)
    for some in _tiles(data):
        entries, score = _scores(data, some)
        lse[some] = score.logsumexp(3)
        out[some] = _probabilities(data, score, lse[some]) @ entries
    return out, lse.masked_fill_(lse == -torch.inf, torch.inf)


def _tiles(data: input_t) -> list[slice]:
    """Sequences to treat together."""
    batch, queries, _, window, compressed, *_ = unpack(data)
    step = max(1, TILE[data.q.device.type] // (queries * (window + compressed) * HEAD_DIM))
    return [slice(first, first + step) for first in range(0, batch, step)]


def _scores(data: input_t, some: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the sequences `some`: entries, fp64 (b, S, n, 512), 0 where there is none, and scores, (b, S, H, n), -inf."""
    sizes = unpack(data)
    found = []
    for pages, per_page, index, length in (
        (data.window, sizes.page_window, data.window_index[some], data.window_length[some]),
        (data.compressed, sizes.page_compressed, data.compressed_index[some], data.compressed_length[some]),
    ):
        counts = torch.arange(index.shape[2], device=index.device) < length.view(-1, 1, 1)
        found.append((decoded(pages, per_page, index.masked_fill(~counts, -1)), counts & (index >= 0)))
    entries, counts = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    entries.masked_fill_(~counts.unsqueeze(3), 0)  # a garbage entry may be NaN
    score = SCALE * (data.q[some].double() @ entries.mT)
    return entries, score.masked_fill_(~counts.unsqueeze(2), -torch.inf)


def decoded(pages: torch.Tensor, per_page: int, index: torch.Tensor) -> torch.Tensor:
    """pages, index: as in Data -> fp64 (..., 512), exactly. A negative index gives entry 0."""
    if not index.numel():
        return torch.empty(*index.shape, HEAD_DIM, dtype=torch.float64, device=pages.device)
    codes, scales, rope = kv_pages.read(pages, per_page, index, NOPE, ROPE)
    nope = fp8.dequantise_groups(codes, scales, kv_pages.GROUP, torch.float64)
    return torch.cat([nope, rope.double()], -1)


def _probabilities(data: input_t, score: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """p_j, fp64 (b, S, H, n), 0 where there is no entry. lse: fp64 (b, S, H); of a row without entries any infinity."""
    total = torch.logaddexp(lse, data.sink.double())
    return (score - total.unsqueeze(3)).exp_().masked_fill_(score == -torch.inf, 0)


# ---------------------------------------------------------------- checker


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """(True, "") if `output`, out and lse, is the attention of `data` within the tolerance, else (False, report)."""
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(
    data: input_t, want: tuple[torch.Tensor, torch.Tensor], output: output_t, peer: bool = False
) -> check.Result:
    """`output` against `want` = ref_kernel(data), as task.py derives it; a peer's out is held to PEER_TOL, each
    sequence as one, instead. rel is out's, in the norm of the case.
    """
    if type(output) is not tuple or len(output) != 2:
        return check.Result(False, "mismatch found! want two tensors, out and lse")
    out, lse = output
    fault = check.form_error(out, want[0].shape, torch.bfloat16)
    fault = fault or check.form_error(lse, want[1].shape, torch.float32)
    if fault:
        return check.Result(False, fault)
    result = _sequences(data, want, out) if peer else _rows(data, want, out)
    if result.ok and (fault := _lse_fault(lse, want[1])):
        return check.Result(False, fault, result.rel, result.worst_abs, result.worst_tol)
    return result


_admitted = WeakIdKeyDictionary()  # by the answer's out: many outputs are compared with one


def admitted(data: input_t, want: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What errors are measured by, and the floor under them, both fp64 (B, S, H): the larger of |out| and
    sqrt(sum_j p_j^2 |c_j|^2); ROW_FLOOR of the largest |c_j|. Computed once for an answer, for as long as it lives.
    """
    if want[0] in _admitted:
        return _admitted[want[0]]
    size, floor = want[0].norm(dim=3), torch.empty_like(want[1])
    for some in _tiles(data):
        entries, score = _scores(data, some)
        square = entries.square().sum(3)
        p = _probabilities(data, score, want[1][some])
        size[some] = torch.maximum(size[some], (p.square_() @ square.unsqueeze(3)).squeeze(3).sqrt_())
        floor[some] = ROW_FLOOR * square.amax(2, keepdim=True).sqrt()
    _admitted[want[0]] = size, floor
    return size, floor


def _rows(data: input_t, want: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> check.Result:
    """out, bf16 (B, S, H, 512), row by row and as one."""
    size, floor = admitted(data, want)
    each = (out.double() - want[0]).abs()
    error, limit = each.norm(dim=3), ROW_RTOL * size + floor
    good = error <= limit  # not ~(error > limit), which NaN would pass
    excess = error / limit.clamp_min(torch.finfo(torch.float64).tiny)
    worst = int(excess.nan_to_num(torch.inf, torch.inf).argmax())
    whole, whole_limit = float(error.norm()), float(CASE_RTOL * size.norm() + floor.norm())
    rel = whole / float(size.norm()) if float(size.norm()) else whole
    numbers = rel, float(error.flatten()[worst]), float(limit.flatten()[worst])
    if not bool(good.all()):
        return check.Result(False, _report(out, want[0], each, size, ~good), *numbers)
    if not whole <= whole_limit:
        return check.Result(False, f"mismatch found! relative error {rel:.3g} over {CASE_RTOL:g} in all", *numbers)
    return check.Result(True, "", *numbers)


def _sequences(data: input_t, want: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> check.Result:
    """out, bf16 (B, S, H, 512), a sequence's rows as one: in the measure of _rows, to PEER_TOL."""
    size, floor = admitted(data, want)
    error = (out.double() - want[0]).norm(dim=3)
    each, limit = error.norm(dim=(1, 2)), PEER_TOL * size.norm(dim=(1, 2)) + floor.norm(dim=(1, 2))
    good = each <= limit  # not ~(each > limit), which NaN would pass
    rel = float(error.norm()) / float(size.norm()) if float(size.norm()) else float(error.norm())
    worst = int((each / limit.clamp_min(torch.finfo(torch.float64).tiny)).nan_to_num(torch.inf, torch.inf).argmax())
    numbers = rel, float(each[worst]), float(limit[worst])
    if bool(good.all()):
        return check.Result(True, "", *numbers)
    wrong = _ranges((~good).nonzero()[:, 0].tolist())
    return check.Result(False, f"mismatch found! relative error over {PEER_TOL:g} in sequences {wrong}", *numbers)


def _report(out: torch.Tensor, want: torch.Tensor, each: torch.Tensor, size: torch.Tensor, bad: torch.Tensor) -> str:
    """Wrong rows, errors of the first, and where in heads, queries, sequences and dims: a right part says much."""
    lines = [
        "mismatch found! custom implementation doesn't match reference: "
        f"Number of mismatched rows: {int(bad.sum())} of {bad.numel()}"
    ]
    for b, s, h in bad.nonzero()[: check.SHOWN].tolist():
        d = int(each[b, s, h].nan_to_num(torch.inf, torch.inf).argmax())
        lines.append(f"ERROR AT ({b}, {s}, {h}, {d}): {float(out[b, s, h, d]):.6g} {float(want[b, s, h, d]):.6g}")
    for name, axes in (("sequences", (1, 2)), ("queries", (0, 2)), ("heads", (0, 1))):
        wrong = bad.any(dim=axes[1]).any(dim=axes[0])
        lines.append(f"wrong {name}: {_ranges(wrong.nonzero()[:, 0].tolist())} of {len(wrong)}")
    relative = each.unflatten(3, (-1, SLICE)).norm(dim=4)[bad] / size[bad].unsqueeze(1)
    # Median over the wrong rows, each relative to its whole row.
    parts = relative.nan_to_num(torch.inf, torch.inf).median(0).values.tolist()
    lines.append(f"error by {SLICE} dims, in wrong rows: {' '.join(f'{part:.2g}' for part in parts)}")
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


def _lse_fault(lse: torch.Tensor, want: torch.Tensor) -> str:
    """What is wrong unless lse, fp32 (B, S, H), is as near `want` as LSE_ATOL says, and +inf just where that is."""
    both = torch.isposinf(lse) & torch.isposinf(want)
    limit = LSE_ATOL * want.nan_to_num(posinf=0, neginf=0).abs().div(100).clamp(min=1)
    result = check.elementwise(lse.masked_fill(both, 0), want.masked_fill(both, 0), limit, torch.float32)
    return result.message and f"{result.message}\n(of lse)"
