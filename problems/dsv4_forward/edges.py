"""Repeat the calls of ops with other inputs, so that their constants matter: eps, floors, clamps, sinks, ties.

What a model's random weights and tokens give has values near 1. There an eps of 1e-6, the least amax of a quantiser or
a clamp changes nothing that a bound would see, and a kernel without it passes.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

# Powers of two, which change no rounding. Inputs have mean squares of about 1 in most calls.
ZERO = 0.0  # an eps or a floor is all that divides
NEAR = 2.0**-10  # mean squares are about an eps of 1e-6
FAR = 2.0**-30  # eps is all that counts; an amax is below an FP8 group's least, so far that codes have few bits left
# As FAR behind a norm, which multiplies by 2^10. Where sums may differ in their last bits, codes must have some bits
# left, so that a code on the other side of a rounding is not much of a row.
FAINT = 2.0**-38
STEEP = 2.0**5  # of scores and logits: their exponentials are beyond what fp32 holds
LARGE = 2.0**6  # values are beyond a SwiGLU's limit, and beyond the amax that an NVFP4 input scale is for
NORM = (ZERO, NEAR, FAR)
NORM_QUANTISED = (*NORM, FAINT)
QUANTISED = (ZERO, FAR, LARGE)
# Of mHC's combination entry (j, k) of the logits is -j k of these: entries behind the softmax are 1 to e^-45, so that
# hc_eps counts beside some, and others are nothing but it. (Balancing takes most of what it adds to a sum back.)
STEP = 5.0
CLOSED = 30.0  # a sigmoid of minus that is nothing beside an hc_eps of 1e-6


@dataclass(frozen=True)
class Scaled:
    """Arguments of an op that are scaled together, by each of the factors."""

    names: tuple[str, ...]
    factors: tuple[float, ...]

    def __call__(self, given: dict) -> Iterator[tuple[str, dict]]:
        tensors = {name: given[name] for name in self.names if given.get(name) is not None}
        for factor in self.factors:
            changed = {name: tensor * factor for name, tensor in tensors.items()}
            yield f"{' and '.join(tensors)} times {factor:g}", given | changed


def _mhc(*names: str) -> Callable[[dict], Iterator[tuple[str, dict]]]:
    """Of ops that mix hc copies: `names` scaled, and biases with which hc_eps counts in pre and in the combination."""

    def run(given: dict) -> Iterator[tuple[str, dict]]:
        yield from Scaled(names, NORM)(given)
        n = given["cfg"].hc_mult
        base, number = given["base"].clone(), torch.arange(n, device=given["base"].device)
        base[:n] -= CLOSED
        base[2 * n :] = -STEP * torch.outer(number, number).flatten()
        yield "base of small weights", given | {"base": base}

    return run


def _attention(given: dict) -> Iterator[tuple[str, dict]]:
    yield from Scaled(("q",), (ZERO, STEEP))(given)
    yield "no sink", given | {"sink": torch.full_like(given["sink"], -torch.inf)}
    none = {name: torch.full_like(given[name], -1) for name in ("window_index", "index") if given[name] is not None}
    if chunk := given.get("chunk"):
        none["chunk"] = dataclasses.replace(chunk, window_index=torch.full_like(chunk.window_index, -1))
    yield "no entry", given | none


def _route(given: dict) -> Iterator[tuple[str, dict]]:
    # In a table's choice all scores of a token may be next to nothing, and their quotient uncertain.
    yield from Scaled(("u",), (ZERO, 2.0**3) if given["bias"] is None else (ZERO, STEEP))(given)


EDGES: dict[str, Callable[[dict], Iterator[tuple[str, dict]]]] = {
    "rms_norm": Scaled(("x",), NORM),
    "mhc_pre": _mhc("copies"),
    "mhc_site": _mhc("y", "second", "copies"),
    "linear": Scaled(("x",), QUANTISED),
    "grouped_linear": Scaled(("x",), QUANTISED),
    "two_linears": Scaled(("x",), QUANTISED),
    "norm_linears": Scaled(("x",), NORM_QUANTISED),
    "norm_rotate": Scaled(("x",), NORM),
    "write_key": Scaled(("x",), NORM_QUANTISED),
    "write_entry": Scaled(("projected", "tail"), (*NORM_QUANTISED, STEEP)),
    "index_query": Scaled(("x",), (ZERO, FAR)),
    "fmha": _attention,
    "route": _route,
    "experts": Scaled(("x",), QUANTISED),
    "shared": Scaled(("x",), QUANTISED),
    "all_experts": Scaled(("x",), QUANTISED),
}


def edges(name: str, given: dict) -> Iterator[tuple[str, dict]]:
    """Yield what is unusual in the inputs, and the arguments, of each such call of an op. given: those of a call."""
    yield from EDGES[name](given) if name in EDGES else ()


def together(calls: list[tuple[str, dict]]) -> Iterator[tuple[str, list[dict]]]:
    """Do as `edges` for calls (op, arguments) that are made at once. Yield as often as the one with most of them has;
    the others repeat their last one.
    """
    every = [list(edges(*call)) for call in calls]
    longest = max(every, key=len)
    for number, (said, _) in enumerate(longest):
        yield said, [one[min(number, len(one) - 1)][1] for one in every]
