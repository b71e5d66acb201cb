"""The sampler: published Philox words, frequencies against probabilities, limits token by token, reproducibility."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from problems.dsv4_forward.generate import sampler
from problems.dsv4_forward.generate.sampler import Sampler

PROBABILITIES = [0.36, 0.0, 0.24, 0.02, 0.16, 0.12, 0.1]  # of 7 tokens: no multiple of the generator's 4


def logits_of(probabilities: list[float], rows: int = 1) -> torch.Tensor:
    """Their logarithms, but for a constant."""
    return (torch.tensor(probabilities).log() + 3.7).repeat(rows, 1)


def draw(chosen: Sampler, logits: torch.Tensor, sequence: int = 0, start: int = 0) -> torch.Tensor:
    """A token a row, the rows at successive positions of one sequence."""
    rows = len(logits)
    return chosen.sample(logits, torch.full((rows,), sequence), torch.arange(start, start + rows))


def chi_square(tokens: torch.Tensor, probabilities: list[float]) -> float:
    """In standard deviations from its expectation (the Wilson-Hilferty approximation)."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).tolist()
    assert all(p > 0 or c == 0 for p, c in zip(probabilities, counts, strict=True))
    pairs = [(c, p * len(tokens)) for c, p in zip(counts, probabilities, strict=True) if p > 0]
    free = len(pairs) - 1
    value = sum((c - e) ** 2 / e for c, e in pairs)
    return ((value / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers of Random123, kat_vectors: philox4x32 10
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_words_are_the_published_ones(counter, key, words):
    given = tuple(torch.tensor([int(word, 16)]) for word in counter.split())
    got = sampler.philox(given, tuple(int(word, 16) for word in key.split()))
    assert " ".join(f"{int(word):08x}" for word in got) == words


def test_uniforms_are_spread_evenly_within_0_and_1():
    noise = sampler.uniforms(5, torch.arange(40), torch.arange(40) * 7, 1001)
    assert noise.shape == (40, 1001) and noise.dtype == torch.float64
    assert 0 < noise.min() < 1e-3 and 1 - 1e-3 < noise.max() < 1
    assert abs(chi_square((noise.flatten() * 50).long(), [1 / 50] * 50)) < 4
    pairs = (noise[:, 1:] * 7).long() * 7 + (noise[:, :-1] * 7).long()  # neighbouring tokens
    assert abs(chi_square(pairs.flatten(), [1 / 49] * 49)) < 4


def test_every_part_of_the_key_changes_the_noise():
    def noise(seed: int, sequence: int, position: int) -> tuple[float, ...]:
        return tuple(sampler.uniforms(seed, torch.tensor([sequence]), torch.tensor([position]), 9)[0].tolist())

    keys = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 2**32, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 0)]
    assert len({noise(*key) for key in keys}) == len(keys) and noise(3, 4, 5) == noise(3, 4, 5)


@pytest.mark.parametrize(
    "chosen", [Sampler(), Sampler(0.0, top_k=3, top_p=0.1, seed=9), Sampler(1e-30), Sampler(1e-5)], ids=str
)
def test_no_or_almost_no_temperature_is_the_largest_logit(chosen):
    logits = torch.randn(50, 301, generator=torch.Generator().manual_seed(0))
    tokens = draw(chosen, logits)
    assert tokens.tolist() == [max(range(301), key=row.__getitem__) for row in logits.tolist()]
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_are_the_probabilities(temperature, seed):
    """Of positions, of pairs of successive ones, and of sequences."""
    chosen, logits, rows = Sampler(temperature, seed=seed), logits_of(PROBABILITIES, 20_000), torch.arange(20_000)
    powers = [p ** (1 / temperature) for p in PROBABILITIES]
    wanted = [p / sum(powers) for p in powers]
    tokens = draw(chosen, logits)
    assert abs(chi_square(tokens, wanted)) < 4
    assert abs(chi_square(tokens[1:] * 7 + tokens[:-1], [a * b for a in wanted for b in wanted])) < 4
    assert abs(chi_square(chosen.sample(logits, rows, torch.full_like(rows, 17)), wanted)) < 4


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 2, 4]),
        ({"top_k": 100}, [0, 2, 3, 4, 5, 6]),
        ({"top_p": 0.3}, [0]),
        ({"top_p": 0.37}, [0, 2]),
        ({"top_p": 0.75}, [0, 2, 4]),  # 0.36 + 0.24 + 0.16 = 0.76
        ({"top_p": 0.77}, [0, 2, 4, 5]),
        ({"top_k": 3, "top_p": 0.75}, [0, 2]),  # of 0.76 that are left, 0.60 are 0.79
        ({"top_k": 3, "top_p": 0.8}, [0, 2, 4]),
        ({"top_k": 2, "top_p": 0.99}, [0, 2]),
    ],
    ids=str,
)
def test_limits_keep_the_right_tokens_in_proportion(limits, kept):
    tokens = draw(Sampler(1.0, seed=4, **limits), logits_of(PROBABILITIES, 6000))
    total = sum(PROBABILITIES[t] for t in kept)
    wanted = [p / total if t in kept else 0.0 for t, p in enumerate(PROBABILITIES)]
    assert sorted(set(tokens.tolist())) == kept
    assert len(kept) == 1 or abs(chi_square(tokens, wanted)) < 4


def test_top_p_counts_after_the_temperature():
    """At temperature 2 the largest of 0.8, 0.2 has probability 2/3, below top_p."""
    for temperature, kept in ((1.0, {0}), (2.0, {0, 1})):
        tokens = draw(Sampler(temperature, top_p=0.7), logits_of([0.8, 0.2], 200))
        assert set(tokens.tolist()) == kept


def kept(probabilities: list[list[float]], **limits: object) -> list[list[bool]]:
    return torch.isfinite(Sampler(1.0, **limits).limit(torch.tensor(probabilities).log().double())).tolist()


def test_limits_are_a_rows_own_and_of_equal_logits_the_lower_tokens_stay():
    rows = [[0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.2, 0.6], [0.97, 0.01, 0.01, 0.01]]
    assert kept(rows, top_p=0.75) == [[True, True, False, False], [False, False, True, True], [True, *[False] * 3]]
    assert kept([[1.0] * 700] * 2, top_k=3) == [[True] * 3 + [False] * 697] * 2
    assert kept([[1.0] * 5] * 2, top_p=1e-9) == [[True] + [False] * 4] * 2


@pytest.mark.parametrize(
    ("top_p", "count"), [(0.25, 1), (0.5, 2), (0.75, 3), (math.nextafter(0.5, 1), 3), (math.nextafter(0.5, 0), 2)]
)
def test_probabilities_that_are_exactly_top_p_reach_it(top_p, count):
    """Those of two or four equal logits are exact."""
    assert kept([[2.5] * 4], top_p=top_p) == [[token < count for token in range(4)]]
    assert kept([[0.25, 0.0, 0.25]], top_p=top_p) == [[True, False, top_p > 0.5]]


def test_a_draw_does_not_depend_on_the_batch():
    gen = torch.Generator().manual_seed(1)
    logits = torch.randn(12, 1003, generator=gen)
    sequence, position = torch.randperm(12, generator=gen), torch.randint(2**20, (12,), generator=gen)
    for chosen in (Sampler(1.0, seed=7), Sampler(0.8, 40, 0.9, seed=7)):
        whole = chosen.sample(logits, sequence, position)
        order = torch.randperm(12, generator=gen)
        assert torch.equal(chosen.sample(logits[order], sequence[order], position[order]), whole[order])
        for row in range(12):
            one = slice(row, row + 1)
            assert torch.equal(chosen.sample(logits[one], sequence[one], position[one]), whole[one])


def test_nothing_else_is_read_or_changed():
    """The global generator, and the logits."""
    state, logits = torch.get_rng_state(), logits_of(PROBABILITIES, 50)
    held = logits.clone()
    first = draw(Sampler(0.7, top_k=3, top_p=0.9), logits)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(logits, held)
    torch.manual_seed(123)
    assert torch.equal(draw(Sampler(0.7, top_k=3, top_p=0.9), logits), first)
    torch.set_rng_state(state)


def test_nothing_reads_a_tensor_on_the_host():
    with FakeTensorMode():  # raises where the host needs a value
        row = torch.zeros(3, dtype=torch.int64)
        for chosen in (Sampler(), Sampler(1.0), Sampler(0.5, 20, 0.9)):
            assert chosen.sample(torch.empty(3, 301), row, row).shape == (3,)


def test_wrong_fields_and_shapes_are_named():
    wrong = {"temperature": (-0.1, math.nan, math.inf), "top_k": (-1,), "top_p": (0.0, 1.5, math.nan)}
    for field, values in (wrong | {"seed": (-1, 2**64)}).items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{field} must be"):
                Sampler(**{field: value})
    row = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^logits, sequence, position must have shapes"):
        Sampler().sample(torch.zeros(3, 5), row, row)
