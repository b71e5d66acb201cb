"""torch_ops/compressor.py against whole-sequence fp64 loops, in every way of cutting a sequence."""

import math

import pytest
import torch

from problems.dsv4_forward.torch_ops import compressor

D, R, EPS = 24, 8, 1e-6  # 16 plain channels and 4 rotated pairs
KINDS = {"csa": (4, True), "hca": (128, False), "plain4": (4, False), "overlap16": (16, True)}
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


class Case:
    """Weights of one compressor and the projected rows of `tokens` tokens; generated, so equal for equal seeds."""

    def __init__(self, kind: str, tokens: int, seed: int = 0, spread: float = 1.0):
        gen = torch.Generator().manual_seed(seed)
        self.ratio, self.overlap = KINDS[kind]
        self.halves = 2 if self.overlap else 1
        self.rows = self.halves * self.ratio  # that one entry pools
        wide = self.halves * D
        self.projected = torch.randn(tokens, 2 * wide, generator=gen) * spread
        self.projected += torch.arange(tokens).unsqueeze(1) * 0.01  # rows that differ, and drift
        self.ape = torch.randn(self.ratio, wide, generator=gen) * 2
        self.weight = torch.rand(D, generator=gen) + 0.5
        self.freqs = 1.0 / 100 ** (torch.arange(R // 2) / (R // 2))

    def ring(self, sequences: int, chunk: int, fill: float = 0.0) -> torch.Tensor:
        """The smallest ring that the docstring allows."""
        return torch.full((sequences, chunk + self.rows - 1, 2, self.halves * D), fill)

    def call(self, tail, projected, position, sequence, emit, dtype=F32) -> torch.Tensor:
        out = torch.full((len(emit), D), torch.nan, dtype=dtype)
        compressor.compress(
            projected,
            self.ape,
            self.weight,
            torch.tensor(position),
            torch.tensor(sequence),
            tail,
            torch.tensor(emit, dtype=torch.int64),
            self.ratio,
            self.overlap,
            self.freqs,
            EPS,
            dtype,
            out,
        )
        return out

    def feed(self, tail, start, end, sequence=0, dtype=F32, projected=None) -> list[torch.Tensor]:
        """Tokens start..end-1 of one sequence in one call -> the entries that they complete."""
        rows = self.projected if projected is None else projected
        emit = [t - start for t in range(start, end) if (t + 1) % self.ratio == 0]
        return list(self.call(tail, rows[start:end], list(range(start, end)), [sequence] * (end - start), emit, dtype))

    def cut(self, lengths, chunk=None, fill=0.0) -> torch.Tensor:
        """The whole sequence in calls of these lengths -> all entries (n, D)."""
        tail, start, found = self.ring(1, chunk or max(lengths), fill), 0, []
        for length in lengths:
            found += self.feed(tail, start, start + length)
            start += length
        assert start == len(self.projected)
        return torch.stack(found) if found else torch.empty(0, D)

    def want(self, dtype=F32, projected=None) -> torch.Tensor:
        """Every entry from the whole sequence, fp64 -> (n, D)."""
        rows = (self.projected if projected is None else projected).double()
        found, gate = [], rows[:, self.halves * D :] + self.ape.double()[torch.arange(len(rows)) % self.ratio]
        for first in range(0, len(rows) - self.ratio + 1, self.ratio):
            parts = [(slice(first, first + self.ratio), slice(D * self.overlap, None))]
            if self.overlap and first:  # the first half of the channels, of the window before
                parts.append((slice(first - self.ratio, first), slice(0, D)))
            weight = torch.cat([gate[tokens, channels] for tokens, channels in parts]).softmax(0)
            pooled = (
                weight * torch.cat([rows[tokens, : self.halves * D][:, channels] for tokens, channels in parts])
            ).sum(0)
            found.append(self._finish(pooled, first, dtype))
        return torch.stack(found) if found else torch.empty(0, D, dtype=F64)

    def _finish(self, pooled: torch.Tensor, position: int, dtype: torch.dtype) -> torch.Tensor:
        """Norm and rotation at `position`; each of the three results is rounded to bf16 if that is the dtype."""

        def rounded(x):
            return x.to(dtype).double() if dtype == BF16 else x

        x = rounded(pooled)
        x = rounded(x / (x.pow(2).mean() + EPS).sqrt() * self.weight.double())
        for pair in range(R // 2):
            angle = float(torch.tensor(float(position)) * self.freqs[pair])
            a, b = float(x[D - R + 2 * pair]), float(x[D - R + 2 * pair + 1])
            x[D - R + 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
            x[D - R + 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
        return rounded(x)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 5e-6) -> None:
    """fp32 within: 128 terms of size 5 at most, after the norm of size 3."""
    assert got.shape == want.shape
    assert (got.double() - want.double()).abs().max() <= tolerance


UNEVEN = [37, 1, 91, 5, 130, 3, 33, 2, 128, 127, 129, 7, 4, 3]
LENGTHS = [[3, *[64] * 4, 41], [128, 64, 64, 44], [129, 64, 64, 43], [300], [1] * 300, UNEVEN]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["3", "128", "129", "300", "one by one", "uneven"])
def test_calls_of_any_lengths_give_the_entries_of_the_whole_sequence(kind, lengths):
    """A first call may end anywhere. One by one in the smallest ring, and uneven calls that wrap it often."""
    case = Case(kind, sum(lengths), seed=1)
    close(case.cut(lengths), case.want())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", [-1e30, float("nan")])
def test_what_the_ring_held_before_never_counts(kind, garbage):
    case = Case(kind, 300, seed=2)
    lengths = [1, 2, 1, 60, 64, 64, 64, 44]
    assert torch.equal(case.cut(lengths, fill=garbage), case.cut(lengths))


def test_sequences_at_different_positions_share_a_call():
    """Three of four sequences, interleaved in no order, each at its own position; the fourth is left alone."""
    cases = {sequence: Case("csa", 60, seed=10 + sequence) for sequence in (3, 0, 2)}
    ape, weight = cases[3].ape, cases[3].weight
    for case in cases.values():
        case.ape, case.weight = ape, weight
    tail = cases[3].ring(4, 9, fill=1e30)
    at, found = {3: 0, 0: 0, 2: 0}, {3: [], 0: [], 2: []}
    for counts in [(9, 1, 4), (2, 0, 9), (0, 7, 3), (5, 5, 5), (1, 1, 1), (8, 9, 7), (9, 3, 2), (6, 9, 8)]:
        batch = []  # (sequence, position), shuffled across sequences
        for sequence, count in zip(at, counts, strict=True):
            batch += [(sequence, at[sequence] + i) for i in range(count)]
            at[sequence] += count
        batch = [batch[i] for i in torch.randperm(len(batch), generator=torch.Generator().manual_seed(len(batch)))]
        emit = [i for i, (_, t) in enumerate(batch) if t % 4 == 3]
        rows = torch.stack([cases[sequence].projected[t] for sequence, t in batch])
        out = cases[3].call(tail, rows, [t for _, t in batch], [sequence for sequence, _ in batch], emit)
        for row, i in enumerate(emit):
            found[batch[i][0]].append((batch[i][1] // 4, out[row]))
    assert (tail[1] == 1e30).all()
    for sequence, case in cases.items():
        entries = [row for _, row in sorted(found[sequence], key=lambda pair: pair[0])]
        close(torch.stack(entries), case.want()[: at[sequence] // 4])


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_going_back_is_a_change_of_position(kind):
    """Six tokens past a boundary are dropped and others take their place."""
    case, other = Case(kind, 262, seed=8), Case(kind, 262, seed=9)
    mixed = torch.cat((case.projected[:254], other.projected[254:]))
    tail, got = case.ring(1, 64), []
    for start in range(0, 254, 64):
        got += case.feed(tail, start, min(start + 64, 254))
    for token in range(254, 260):
        case.feed(tail, token, token + 1)
    for token in range(254, 262):
        got += case.feed(tail, token, token + 1, projected=mixed)
    close(torch.stack(got), case.want(projected=mixed))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_rounds_pool_norm_and_rotation(kind):
    """Near a tie fp32 and fp64 may round apart, and a rounding carries on: at most two bf16 steps, seldom."""
    case = Case(kind, 512, seed=11)
    tail = case.ring(1, 512)
    got, want = torch.stack(case.feed(tail, 0, 512, dtype=BF16)), case.want(BF16)
    assert got.dtype == BF16
    off = (got.double() - want).abs()
    assert (off <= 2 * 2**-7 * want.abs() + 1e-6).all()
    assert (off > 0).double().mean() < 0.02
    once = case.want()  # one rounding at the end is another result: the roundings between are there
    assert (got != once.to(BF16)).double().mean() > 0.05


def test_gates_of_any_size_do_not_overflow():
    case = Case("csa", 64, seed=12)
    gen = torch.Generator().manual_seed(12)
    case.projected[:, 2 * D :] = torch.randn(64, 2 * D, generator=gen) * 10 ** (torch.rand(64, 1, generator=gen) * 4)
    case.projected[:, : 2 * D] *= 10 ** (torch.rand(64, 1, generator=gen) * 6 - 3)
    close(case.cut([5, 59]), case.want(), 1e-3)  # gates of 1e4 have steps of 1e-3


def test_a_far_entry_is_rotated_by_its_first_token():
    """Only the rotated channels move with the position, by the fp32 product of position and frequency."""
    case = Case("csa", 8, seed=13)
    start = 2**20 - 8
    tail = case.ring(1, 8)
    got = case.call(tail, case.projected, list(range(start, start + 8)), [0] * 8, [7])[0]
    near = case.cut([8])[1]
    assert torch.equal(got[: D - R], near[: D - R])
    for pair in range(R // 2):
        a, b = (complex(float(x[D - R + 2 * pair]), float(x[D - R + 2 * pair + 1])) for x in (near, got))
        turn = float(torch.tensor(float(start + 4)) * case.freqs[pair]) - float(torch.tensor(4.0) * case.freqs[pair])
        assert abs(b - a * complex(math.cos(turn), math.sin(turn))) < 1e-5


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_tokens_that_end_no_window_disturb_nothing(kind):
    """Every token in emit, as a captured step has it: rows that end a window are right, the others finite."""
    case = Case(kind, 300, seed=15)
    tail, got = case.ring(1, 1, fill=float("nan")), []
    for token in range(300):
        row = case.call(tail, case.projected[token : token + 1], [token], [0], [0])[0]
        assert row.isfinite().all()
        got += [row] * (token % case.ratio == case.ratio - 1)
    close(torch.stack(got), case.want())


def test_wrong_arguments_are_named():
    case = Case("csa", 4)
    good = {
        "projected": case.projected,
        "ape": case.ape,
        "norm_weight": case.weight,
        "position": torch.arange(4),
        "sequence": torch.zeros(4, dtype=torch.int64),
        "tail": case.ring(1, 4),
        "emit": torch.tensor([3]),
        "ratio": 4,
        "overlap": True,
        "freqs": case.freqs,
        "eps": EPS,
        "dtype": F32,
        "out": torch.empty(1, D),
    }
    compressor.compress(**good)
    wrong = [
        ("projected", case.projected.double()),
        ("projected", case.projected[:, 1:]),
        ("ape", case.ape[:3]),
        ("tail", case.ring(1, 4)[..., 1:]),
        ("tail", case.ring(1, 4).half()),
        ("tail", case.ring(1, 4)[:, :7]),
        ("out", torch.empty(1, D, dtype=BF16)),
    ]
    for name, value in wrong:
        with pytest.raises(ValueError, match=f"^{name} must"):
            compressor.compress(**{**good, name: value})
