"""Make inputs for mhc_site, compute the answer in fp64, and check outputs. Slow and obvious on purpose."""

import torch
from task import (
    COPIES,
    HALF_ULP,
    HC_EPS,
    ITERATIONS,
    KINDS,
    LEAN_DEVIATIONS,
    NORM_EPS,
    NORM_SUM,
    OUT_RTOL,
    OUTPUTS,
    PEER_TOL,
    ROWS,
    SINKHORN,
    SUM,
    Z_RTOL,
    Z_TERMS,
    Data,
    input_t,
    output_t,
    summed,
)

from problems.common import check

Answer = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
PRE, POST, COMB = slice(COPIES), slice(COPIES, 2 * COPIES), slice(2 * COPIES, ROWS)
TILE = {"cpu": 2**22, "cuda": 2**28}  # values of the copies to treat at a time: 32 MiB, 2 GiB in fp64
LEAST = 2.0**-126  # a value of an output below it may be 0


# ---------------------------------------------------------------- inputs


def generate_input(tokens: int, hidden: int, addends: str, content: str, seed: int, device: str) -> input_t:
    """Every token with its own sizes and mixing weights; z, and what a sigmoid sees, of about 1.

    plain       copies without relation to each other
    alike       copies of one vector with a fifth of noise, as after many layers
    magnitudes  tokens of sizes 2^-14 to 2^9, in no order: the epsilons act, and a token's sums swallow its neighbour's;
                every third one 2^26 times as large
    cancelling  copies in pairs of opposite sign, but for a hundredth: u is small against its terms; so are two addends
    saturated   scales of 8, 12 and 16: sigmoids near 0 and 1, combinations near permutations; bases of up to +-160 that
                leave some rows so, whose exponentials no fp32 holds
    tiny_pre    a base of -25 for pre, so that HC_EPS is most of it and NORM_EPS acts in the norm
    zeros       y zero in a third of the tokens, copies in another third, both in the first token
    positive    y, copies and the first half of the rows of fn all positive: sums grow as long as they run
    Outputs are NaN: an element that a kernel skips is caught.
    """
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=device)

    y, copies = normal(tokens, hidden), normal(tokens, COPIES, hidden)
    if content == "alike":
        copies = normal(tokens, 1, hidden) + 0.2 * copies
    elif content == "cancelling":
        copies[:, 2:] = -copies[:, :2] + 0.01 * copies[:, 2:]
    elif content == "positive":
        y, copies = y.abs_(), copies.abs_()
    if content == "magnitudes":
        size = torch.randint(-14, 10, (tokens, 1), generator=gen, device=device).exp2()
        size[2::3] *= 2.0**26
        y, copies = y * size, copies * size.unsqueeze(2)
    elif content == "zeros":
        kind = torch.randint(3, (tokens,), generator=gen, device=device)
        y[kind == 1], copies[kind == 2] = 0, 0
        y[0], copies[0] = 0, 0
    y, second = _addends(y, normal(tokens, hidden), addends, content)
    post = 2 * torch.sigmoid(normal(tokens, COPIES))
    comb = sinkhorn(normal(tokens, COPIES, COPIES).double()).float()
    fn = normal(ROWS, COPIES * hidden) / (COPIES * hidden) ** 0.5
    if content == "positive":
        fn[::2] = fn[::2].abs_() / 8
    base, scale = (
        normal(ROWS),
        torch.tensor([0.7, 1.1, 1.6], device=device) * (1 + 0.3 * torch.rand(3, generator=gen, device=device)),
    )
    if content == "saturated":
        scale *= 10
        base[PRE] += torch.tensor([0, 160, 0, -160], device=device)
        base[POST] += torch.tensor([160, 0, -160, 0], device=device)
        base[COMB] += torch.tensor([0, 120, -120, 60], device=device).repeat_interleave(COPIES)  # softmax undoes it
    elif content == "tiny_pre":
        base[PRE] -= 25
    norm = 1 + 0.3 * normal(hidden)
    data = Data(
        y,
        second,
        copies.bfloat16(),
        post,
        comb,
        fn,
        base,
        scale,
        norm.bfloat16(),
        *(torch.empty(0, device=device),) * len(OUTPUTS),
    )
    return data._replace(
        new_copies=torch.full_like(data.copies, torch.nan),
        out=torch.full_like(copies[:, 0].bfloat16(), torch.nan),
        new_post=torch.full_like(post, torch.nan),
        new_comb=torch.full_like(comb, torch.nan),
    )


def _addends(y: torch.Tensor, noise: torch.Tensor, addends: str, content: str) -> tuple[torch.Tensor, torch.Tensor]:
    """y and second in the dtypes of `addends`, of y, fp32 (T, d), and a second one of noise of y's size."""
    first, *more = (KINDS[kind] for kind in addends.split("+"))
    if not more:
        return y.to(first), y.new_empty(0, y.shape[1], dtype=torch.bfloat16)
    second = noise * y.square().mean(1, keepdim=True).sqrt()
    if content == "positive":
        second = second.abs_()
    elif content == "cancelling":
        second *= 100
        y = y - second
    return y.to(first), second.to(more[0])


def rows(data: input_t, index: torch.Tensor) -> input_t:
    """The call of these tokens alone. index: int64 (n,)."""
    shared = {name: getattr(data, name) for name in ("fn", "base", "scale", "norm")}
    shared |= {} if len(data.second) else {"second": data.second}
    return Data(**({name: part[index] for name, part in data._asdict().items() if name not in shared} | shared))


# ---------------------------------------------------------------- oracle


def ref_kernel(data: input_t) -> Answer:
    """The four outputs before rounding, fp64; what follows from new_copies is of these rounded to bf16."""
    parts = []
    for some in _tiles(data):
        new = spread(data, some)
        z, _ = mixed(data, new.bfloat16())
        parts.append((new, *read(data, new.bfloat16(), z)))
    return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))


def _tiles(data: input_t) -> list[slice]:
    """Tokens to treat together."""
    step = max(1, TILE[data.y.device.type] // (COPIES * data.y.shape[1]))
    return [slice(first, first + step) for first in range(0, len(data.y), step)]


def spread(data: input_t, some: slice) -> torch.Tensor:
    """fp64 (t, 4, d): the copies with the sublayer's output added."""
    x, y = data.copies[some].double(), summed(data)[some].double()
    return data.post[some].double().unsqueeze(2) * y.unsqueeze(1) + data.comb[some].double().mT @ x


def mixed(data: input_t, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """new: bf16 (t, 4, d) -> z, fp64 (t, 24), and the root of the sum of its squared terms, likewise."""
    v, fn = new.double().flatten(1), data.fn.double()
    inverse = (v.square().mean(1, keepdim=True) + NORM_EPS).rsqrt()
    return (v @ fn.T) * inverse, (v.square() @ fn.square().T).sqrt() * inverse


def logits(data: input_t, z: torch.Tensor, which: slice, of: int) -> torch.Tensor:
    """scale z + base, fp64 (t, rows), for the rows `which`; of: their place in scale."""
    return z[:, which] * data.scale[of].double() + data.base[which].double()


def read(data: input_t, new: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, new_post and new_comb, fp64, of new, bf16 (t, 4, d), and z of it."""
    pre = torch.sigmoid(logits(data, z, PRE, 0)) + HC_EPS
    u = (pre.unsqueeze(1) @ new.double()).squeeze(1)
    out = data.norm.double() * u * (u.square().mean(1, keepdim=True) + NORM_EPS).rsqrt()
    post = 2 * torch.sigmoid(logits(data, z, POST, 1))
    return out, post, sinkhorn(logits(data, z, COMB, 2).unflatten(1, (COPIES, COPIES)))


def sinkhorn(a: torch.Tensor) -> torch.Tensor:
    """a: fp64 (..., 4, 4) -> the same shape: softmax over the last axis, then columns and rows in turn."""
    m = torch.softmax(a, -1) + HC_EPS
    m = m / (m.sum(-2, keepdim=True) + HC_EPS)
    for _ in range(ITERATIONS - 1):
        m = m / (m.sum(-1, keepdim=True) + HC_EPS)
        m = m / (m.sum(-2, keepdim=True) + HC_EPS)
    return m


# ---------------------------------------------------------------- checker


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """(True, "") if `output`, the four outputs, is right for `data` within the tolerance, else (False, report)."""
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(data: input_t, want: Answer, output: output_t, peer: bool = False) -> check.Result:
    """`output` against `want` = ref_kernel(data), element by element as task.py derives it: new_copies first, then what
    follows from those that came. A peer is held to PEER_TOL in the norm of each output instead. rel, and the errors of
    a Result, are those of the output whose error is largest against what is admitted.
    """
    if type(output) is not tuple or len(output) != len(OUTPUTS):
        return check.Result(False, f"mismatch found! want {len(OUTPUTS)} tensors: {', '.join(OUTPUTS)}")
    dtypes = [getattr(data, name).dtype for name in OUTPUTS]
    for name, got, right, dtype in zip(OUTPUTS, output, want, dtypes, strict=True):
        if fault := check.form_error(got, right.shape, dtype):
            return check.Result(False, f"{fault} ({name})")
    admitted = copies_tolerance(data, want[0])
    found = [
        _norm(output[0], want[0], dtypes[0]) if peer else check.elementwise(output[0], want[0], admitted, dtypes[0])
    ]
    if found[0].ok:
        rights, tolerances, leans = follow(data, output[0])
        if peer:
            found += map(_norm, output[1:], rights, dtypes[1:])
        else:
            found += map(check.elementwise, output[1:], rights, tolerances, dtypes[1:])
            if found[1].ok:
                found[1] = _straight(found[1], output[1].double(), rights[0], leans)
    for name, result in zip(OUTPUTS, found, strict=False):
        if not result.ok:
            return check.Result(False, f"{result.message}\n(of {name})", *_numbers(result))
    return max(found, key=lambda result: result.worst_abs / max(result.worst_tol, LEAST))


def _norm(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> check.Result:
    return check.norm(got.unsqueeze(0), want.unsqueeze(0), PEER_TOL, dtype, batch=0)


def _numbers(result: check.Result) -> tuple[float, float, float]:
    return result.rel, result.worst_abs, result.worst_tol


def copies_tolerance(data: input_t, want: torch.Tensor) -> torch.Tensor:
    """Admitted |error| of each element of new_copies, fp64 (T, 4, d)."""
    size = data.post.double().unsqueeze(2) * summed(data).double().abs().unsqueeze(1)
    size += data.comb.double().mT @ data.copies.double().abs()
    return HALF_ULP * want.abs() + SUM * size + LEAST


def lean(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """fp64 (t,): by how much of itself each token's got, (t, d), is too large as a whole."""
    return ((got - right) * right).sum(1) / right.square().sum(1).clamp(min=LEAST)


def _straight(found: check.Result, got: torch.Tensor, right: torch.Tensor, admitted: torch.Tensor) -> check.Result:
    """found, of out, unless a token leans by more than admitted."""
    by = lean(got, right)
    worst = int((by.abs() - admitted).argmax())
    if bool(by[worst].abs() <= admitted[worst]):
        return found
    message = (
        "mismatch found! custom implementation doesn't match reference: errors of one sign\n"
        f"of token {worst} all together are {float(by[worst]):.3g} of it, {float(admitted[worst]):.3g} is admitted"
    )
    return check.Result(False, message, *_numbers(found))


def follow(data: input_t, new: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """new: bf16 (T, 4, d) -> out, new_post and new_comb that follow from it, and what errors they may have, fp64; and
    by how much of itself a token's out may lean, fp64 (T,).
    """
    rights, tolerances, leans = [], [], []
    for some in _tiles(data):
        x = new[some]
        z, terms = mixed(data, x)
        error = Z_TERMS * terms + Z_RTOL * z.abs()
        rights.append(read(data, x, z))
        of_out, leaning = _out_tolerance(data, x, z, error, rights[-1][0])
        parts = [of_out, _post_tolerance(data, z, error)]
        tolerances.append((*parts, _comb_tolerance(data, z, error, rights[-1][2])))
        leans.append(leaning)
    joined = [[torch.cat(one) for one in zip(*parts, strict=True)] for parts in (rights, tolerances)]
    return *joined, torch.cat(leans)


def _logit_error(data: input_t, z: torch.Tensor, error: torch.Tensor, which: slice, of: int) -> torch.Tensor:
    """What error a logit may have, fp64 (t, rows): that of z, and its own roundings with those of an exponential."""
    scaled = data.scale[of].double().abs()
    return scaled * error[:, which] + SUM * (scaled * z[:, which].abs() + data.base[which].double().abs() + 1)


def _sigmoid_error(data: input_t, z: torch.Tensor, error: torch.Tensor, which: slice, of: int) -> torch.Tensor:
    s = torch.sigmoid(logits(data, z, which, of))
    return s * (1 - s) * _logit_error(data, z, error, which, of) + SUM * s


def _post_tolerance(data: input_t, z: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    return 2 * _sigmoid_error(data, z, error, POST, 1) + LEAST


def _comb_tolerance(data: input_t, z: torch.Tensor, error: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """What an error of each logit does, each by itself, added up; and Sinkhorn's own."""
    a, moved = logits(data, z, COMB, 2), torch.diag_embed(_logit_error(data, z, error, COMB, 2))
    others = sinkhorn((a.unsqueeze(1) + moved).unflatten(2, (COPIES, COPIES)))
    return (others - right.unsqueeze(1)).abs().sum(1) + SINKHORN * right


def _out_tolerance(
    data: input_t, new: torch.Tensor, z: torch.Tensor, error: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each element: roundings; errors of pre, in u and in its norm; sums of u, and of its norm as NORM_SUM says. Of
    each token together: the same, but of roundings what those to nearest make of it, with and without u's, and what
    LEAN_DEVIATIONS says.
    """
    x = new.double()
    size, d = x.norm(dim=2), x.shape[2]
    pre = torch.sigmoid(logits(data, z, PRE, 0)) + HC_EPS
    off = _sigmoid_error(data, z, error, PRE, 0) + SUM * pre
    u = (pre.unsqueeze(1) @ x).squeeze(1)
    square = u.square().sum(1, keepdim=True) + d * NORM_EPS
    inverse = (square / d).rsqrt()
    terms = (pre * size).sum(1, keepdim=True)
    of_norm = (off * size).sum(1, keepdim=True) * square.rsqrt() + NORM_SUM * terms.square() / square
    of_u = (off.unsqueeze(1) @ x.abs()).squeeze(1) * inverse
    off_by = of_norm * right.abs() + data.norm.double().abs() * of_u
    once = u.bfloat16().double()
    twice = data.norm.double() * once * (once.square().mean(1, keepdim=True) + NORM_EPS).rsqrt()
    squares = right.square()
    whole = squares.sum(1).clamp(min=LEAST)
    deviation = HALF_ULP * (2 / 3) ** 0.5 * squares.square().sum(1).sqrt() / whole
    leaning = LEAN_DEVIATIONS * deviation + (off_by * right.abs()).sum(1) / whole
    leaning += lean(right.bfloat16().double(), right).abs() + lean(twice.bfloat16().double(), right).abs()
    return OUT_RTOL * right.abs() + off_by + LEAST, leaning
