"""torch_ops/compressor.py against whole-sequence fp64 loops, in every way of cutting a sequence."""

import pytest
import torch

from problems.dsv4_forward.torch_ops import compressor

D, R, EPS = 24, 8, 1e-6  # 16 plain channels and 4 rotated pairs
KINDS = {"csa": (4, True), "hca": (128, False)}
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


class Case:
    """Weights of one compressor and the projected rows of `tokens` tokens; generated, so equal for equal seeds."""

    def __init__(self, kind: str, tokens: int, seed: int = 0):
        gen = torch.Generator().manual_seed(seed)
        self.ratio, self.overlap = KINDS[kind]
        self.halves = 2 if self.overlap else 1
        self.rows = self.halves * self.ratio  # that one entry pools
        wide = self.halves * D
        self.projected = torch.randn(tokens, 2 * wide, generator=gen)
        self.projected += torch.arange(tokens).unsqueeze(1) * 0.01  # rows that differ, and drift
        self.ape = torch.randn(self.ratio, wide, generator=gen) * 2
        self.weight = torch.rand(D, generator=gen) + 0.5
        self.freqs = 1.0 / 100 ** (torch.arange(R // 2) / (R // 2))

    def ring(self, sequences: int, chunk: int, fill: float = 0.0) -> torch.Tensor:
        """The smallest ring that the docstring allows."""
        return torch.full((sequences, chunk + self.rows - 1, 2, self.halves * D), fill)

    def arguments(self, tail, start, end, emit, dtype=F32) -> dict:
        """Tokens start..end-1 of one sequence in one call."""
        return {
            "projected": self.projected[start:end],
            "ape": self.ape,
            "norm_weight": self.weight,
            "tail": tail,
            "position": torch.arange(start, end),
            "sequence": torch.zeros(end - start, dtype=torch.int64),
            "emit": torch.tensor(emit, dtype=torch.int64),
            "ratio": self.ratio,
            "overlap": self.overlap,
            "freqs": self.freqs,
            "eps": EPS,
            "dtype": dtype,
            "out": torch.full((len(emit), D), torch.nan, dtype=dtype),
        }

    def call(self, *given) -> torch.Tensor:
        arguments = self.arguments(*given)
        compressor.compress(**arguments)
        return arguments["out"]

    def feed(self, tail, start, end, dtype=F32) -> list[torch.Tensor]:
        """The same -> the entries that they complete."""
        emit = [t - start for t in range(start, end) if (t + 1) % self.ratio == 0]
        return list(self.call(tail, start, end, emit, dtype))

    def cut(self, lengths, fill=0.0) -> torch.Tensor:
        """The whole sequence in calls of these lengths -> all entries (n, D)."""
        tail, start, found = self.ring(1, max(lengths), fill), 0, []
        for length in lengths:
            found += self.feed(tail, start, start + length)
            start += length
        assert start == len(self.projected)
        return torch.stack(found) if found else torch.empty(0, D)

    def want(self, dtype=F32) -> torch.Tensor:
        """Every entry from the whole sequence, fp64 -> (n, D)."""
        rows = self.projected.double()
        found, gate = [], rows[:, self.halves * D :] + self.ape.double()[torch.arange(len(rows)) % self.ratio]
        for first in range(0, len(rows) - self.ratio + 1, self.ratio):
            parts = [(slice(first, first + self.ratio), slice(D * self.overlap, None))]
            if self.overlap and first:  # the first half of the channels, of the window before
                parts.append((slice(first - self.ratio, first), slice(0, D)))
            gates, values = (torch.cat([of[t, c] for t, c in parts]) for of in (gate, rows[:, : self.halves * D]))
            found.append(self._finish((gates.softmax(0) * values).sum(0), first, dtype))
        return torch.stack(found) if found else torch.empty(0, D, dtype=F64)

    def _finish(self, pooled: torch.Tensor, position: int, dtype: torch.dtype) -> torch.Tensor:
        """Norm and rotation at `position`; each of the three results is rounded to bf16 if that is the dtype."""

        def rounded(x):
            return x.to(dtype).double() if dtype == BF16 else x

        x = rounded(pooled)
        x = rounded(x / (x.pow(2).mean() + EPS).sqrt() * self.weight.double())
        angle = (torch.tensor(float(position)) * self.freqs).double()  # of fp32
        pairs = torch.view_as_complex(x[D - R :].view(-1, 2)) * torch.polar(torch.ones_like(angle), angle)
        x[D - R :] = torch.view_as_real(pairs).flatten()
        return rounded(x)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 5e-6) -> None:
    """fp32 within: 128 terms of size 5 at most, after the norm of size 3."""
    assert got.shape == want.shape and (got.double() - want.double()).abs().max() <= tolerance


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


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_rounds_pool_norm_and_rotation(kind):
    """Near a tie fp32 and fp64 may round apart, and a rounding carries on: at most two bf16 steps, seldom."""
    case = Case(kind, 512, seed=11)
    tail = case.ring(1, 512)
    got, want = torch.stack(case.feed(tail, 0, 512, dtype=BF16)), case.want(BF16)
    assert got.dtype == BF16
    off = (got.double() - want).abs()
    assert (off <= 2 * 2**-7 * want.abs() + 1e-6).all() and (off > 0).double().mean() < 0.02
    once = case.want()  # one rounding at the end is another result: the roundings between are there
    assert (got != once.to(BF16)).double().mean() > 0.05


def test_gates_of_any_size_do_not_overflow():
    case = Case("csa", 64, seed=12)
    gen = torch.Generator().manual_seed(12)
    case.projected[:, 2 * D :] = torch.randn(64, 2 * D, generator=gen) * 10 ** (torch.rand(64, 1, generator=gen) * 4)
    case.projected[:, : 2 * D] *= 10 ** (torch.rand(64, 1, generator=gen) * 6 - 3)
    close(case.cut([5, 59]), case.want(), 1e-3)  # gates of 1e4 have steps of 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_end_no_window_disturb_nothing(kind):
    """Every token in emit, as a captured step has it: rows that end a window are right, the others finite."""
    case = Case(kind, 300, seed=15)
    tail, got = case.ring(1, 1, fill=float("nan")), []
    for token in range(300):
        row = case.call(tail, token, token + 1, [0])[0]
        assert row.isfinite().all()
        got += [row] * (token % case.ratio == case.ratio - 1)
    close(torch.stack(got), case.want())


def test_wrong_arguments_are_named():
    case = Case("csa", 4)
    good = case.arguments(case.ring(1, 4), 0, 4, [3])
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
