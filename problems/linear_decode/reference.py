"""Make weights and inputs for linear_decode, compute the answer in fp64, and check outputs. Slow and obvious."""

import torch
from task import (
    BLOCK,
    LEAST,
    PEER_TOL,
    RTOL,
    Inputs,
    Matrix,
    Outputs,
    Sizes,
    Weights,
    input_t,
    input_values,
    links_of,
    matrices,
    output_t,
    parts,
    sum_rtol,
    unpack,
)
from torch.utils import weak

from problems.common import check, fp8, nvfp4

CODE_RMS = (sum(code * code for code in nvfp4.E2M1) / 16) ** 0.5  # of random e2m1 codes, 2.93
HUGE, HUGE_NVFP4 = 2.0**40, 2.0**75  # factors of x in "extreme", beyond fp16; of an input that nvfp4 quantises
LITTLE = 2.0**-110  # and of every other token's x there, unless it is quantised: near the least normal number
HALF = 12  # binades between the halves of a group of x in "magnitudes"
# Of nvfp4, halves more or less, by content: of x about 1 in "plain", of tokens over 30 binades in "magnitudes".
INPUT_SCALES = {"plain": 2.0**-8, "magnitudes": 2.0**6, "subnormal": 2.0**-64, "extreme": 2.0**64}
FACTORS = {"subnormal": 2.0**-32, "extreme": 2.0**32}  # of nvfp4's factor, by content
SMALL_NVFP4 = 2.0**-69  # factor of an x in "subnormal" that nvfp4 quantises: its groups' scales are below 2^-6
SCALE_BYTES = (63, 191)  # of fp8, what task.py admits
TINY = 2.0**-28  # factor of the first token in "subnormal": below the floor of the quantiser's scales


# ---------------------------------------------------------------- weights and inputs


def generate_weights(format: str, tokens: int, shape: str, content: str, seed: int, device: str) -> Weights:
    """Weights such that outputs are about as large as their inputs, all of a matrix's codes random. content:

    plain       e4m3 codes of all bytes but NaN, block scales 2^-1 to 2^1; e2m1 codes of all kinds, scales 2^U(-4, 2);
                bf16 Gaussian
    magnitudes  blocks of 128 columns (nvfp4: of 16) over 17 binades (9), which x undoes; in fp8 rows of blocks over 9,
                and x in the second half of each group of 128 is 2^-12 of the first, so that its codes are subnormal
    subnormal   e4m3 codes below 2^-6, and every other block row with the least scale; nvfp4: scales below 2^-6; bf16:
                weights around 2^-130 in even columns, x in odd ones, and the other factor as large as that one is
                small. In fp8 and nvfp4 the first token is 2^-28 times as large
    extreme     the largest codes and scales of the format in an eighth of the places; x is 2^40 times as large, in
                nvfp4 2^75 times; where it is not quantised every other token is 2^-110 times as large; in fp8 every
                other block row has the largest scale
    zeros       an eighth of the weights' blocks of 16, a quarter of x's blocks of 16, two tokens

    Input scales of nvfp4 are such that groups have scales around 100; in "magnitudes" some tokens are below the least
    scale and some above the largest, in "subnormal" scales are below 2^-6, in "extreme" a third of x is too large.
    Half of them are powers of two, which make quotients that are ties; "subnormal" and "extreme" have the ends of what
    they may be.
    """
    gen = torch.Generator(device).manual_seed(seed)
    make = {"fp8": _fp8, "nvfp4": _nvfp4, "bf16": _bf16, "nvfp4_a16": _nvfp4_a16}[format]
    links = []
    for number, link in enumerate(links_of(shape)):
        # Behind the first link the input is an output, which has no profile along k.
        kind = content if number == 0 or content != "magnitudes" else "plain"
        links.append(tuple(make(*sizes, kind, gen) for sizes in link))
    return Weights(format.removesuffix("_a16"), tuple(links))


def generate_input(
    format: str, tokens: int, shape: str, content: str, seed: int, device: str
) -> tuple[Inputs, Outputs]:
    """x Gaussian, in blocks as generate_weights says; in "magnitudes" tokens 2^U(-10, 20) times that; out NaN."""
    gen = torch.Generator(device).manual_seed(seed)
    links = links_of(shape)
    groups, _, k = links[0][0]
    x = torch.randn(tokens, groups, k, generator=gen, device=device)
    if content == "magnitudes":
        x *= _profile(k, format, device).exp2()
        x *= torch.rand(tokens, 1, 1, generator=gen, device=device).mul_(30).sub_(10).exp2_()
    elif content == "extreme" and format == "nvfp4":
        x *= HUGE_NVFP4
    elif content == "extreme":
        x[0::2] *= HUGE
        x[1::2] *= LITTLE
    elif content == "subnormal" and format == "bf16":
        x[..., 0::2] *= 2.0**100  # what the weights lack, but for 2^-26
        x[..., 1::2] *= 2.0**-126
    elif content == "subnormal":
        x[0] *= TINY
        x *= SMALL_NVFP4 if format == "nvfp4" else 1
    elif content == "zeros":
        x *= (torch.rand(tokens, groups, k // 16, generator=gen, device=device) >= 1 / 4).repeat_interleave(16, 2)
        x[: min(2, tokens - 1)] = 0
    out = torch.full((tokens * sum(g * n for link in links for g, n, _ in link),), torch.nan, dtype=torch.bfloat16)
    return Inputs(x.bfloat16().view(tokens, groups * k)), Outputs(out.to(device))


def rows(data: input_t, index: torch.Tensor) -> input_t:
    """The call of these tokens alone. index: int64 (n,)."""
    out = [part[index].flatten() for link in parts(data.outputs.out, unpack(data)) for part in link]
    return data._replace(inputs=Inputs(data.inputs.x[index]), outputs=Outputs(torch.cat(out)))


def _profile(k: int, format: str, device: str | torch.device) -> torch.Tensor:
    """Exponents fp32 (k,) of x's blocks of 128, in nvfp4 of 16, which weights undo. Only shapes decide."""
    width = 16 if format.startswith("nvfp4") else BLOCK
    block = torch.arange(-(-k // width), device=device)
    span = 9 if width == 16 else 17
    profile = (block * 5 % span - span // 2).float().repeat_interleave(width)[:k]
    return profile - HALF * _second_half(k, device) if format == "fp8" else profile


def _second_half(k: int, device: str | torch.device) -> torch.Tensor:
    """bool (k,): the columns in the second half of a block of 128."""
    return torch.arange(k, device=device) % BLOCK >= BLOCK // 2


def _fp8(groups: int, n: int, k: int, content: str, gen: torch.Generator) -> Matrix:
    device = gen.device
    shape, blocks = (groups, n, k), (groups, -(-n // BLOCK), -(-k // BLOCK))
    byte = torch.randint(0, 254, shape, dtype=torch.uint8, generator=gen, device=device)
    byte += byte >= 0x7F  # 0 to 0x7E and 0x80 to 0xFE: no NaN
    step = torch.randint(0, 3, blocks, generator=gen, device=device) - 1
    odd = torch.arange(blocks[1], device=device).remainder(2).view(-1, 1)  # block rows
    if content == "subnormal":
        byte &= 0x87
        step -= 80 * odd
    elif content == "extreme":
        step += 80 * odd
        large = torch.rand(shape, generator=gen, device=device) < 1 / 8
        byte = torch.where(large, byte & 0x80 | 0x7E, byte)
    elif content == "zeros":
        byte *= _kept(groups, n, k, 7 / 8, gen)
    if content == "magnitudes":  # exponents 1 to 4 of 15, in the second halves HALF - 1 higher
        byte = byte & 0x9F | _second_half(k, device).to(torch.uint8) * 0x60
        byte = torch.where(byte & 0x7F == 0x7F, byte - 1, byte)  # no NaN
    codes = byte.view(torch.float8_e4m3fn)
    if content == "magnitudes":
        # Neighbouring rows of blocks differ, whatever the seed.
        step = torch.randint(1, 9, (groups, blocks[1], 1), generator=gen, device=device).cumsum(1) % 9 - 4
        step = step - _profile(k, "fp8", device)[::BLOCK].long()
    # A power of two: outputs become about as large as inputs.
    size = codes.float().square().mean().mul(k).sqrt().log2().round().long()
    scales = (127 + step - size).clamp(*SCALE_BYTES).to(torch.uint8)
    return Matrix(codes, scales, None, quantise=groups == 1 and content != "extreme")


def _nvfp4(groups: int, n: int, k: int, content: str, gen: torch.Generator) -> Matrix:
    device = gen.device
    codes = torch.randint(0, 256, (groups, n, k // 2), dtype=torch.uint8, generator=gen, device=device)
    blocks = (groups, n, k // 16)
    rand = torch.rand(blocks, generator=gen, device=device)
    undo = torch.zeros(k // 16, device=device)
    if content == "subnormal":
        scales = rand.mul_(8).to(torch.uint8).view(torch.float8_e4m3fn)
    elif content == "magnitudes":
        undo = _profile(k, "nvfp4", device)[::16]
        row = torch.arange(n // 16, device=device).remainder(3).repeat_interleave(16)
        scales = rand.sub_(0.5).sub_(undo).add_(row.unsqueeze(1)).exp2_().to(torch.float8_e4m3fn)
    else:
        value = rand.mul_(6).sub_(4).exp2_()
        if content == "extreme":
            which = torch.randint(0, 4, codes.shape, dtype=torch.uint8, generator=gen, device=device)
            codes |= (which & 1) * 0x07 | (which >> 1) * 0x70  # the largest magnitude, in either nibble
            value = torch.where(torch.rand(blocks, generator=gen, device=device) < 1 / 8, 448.0, value)
        elif content == "zeros":
            value *= torch.rand(blocks, generator=gen, device=device) >= 1 / 8
        scales = value.to(torch.float8_e4m3fn)
    rms = (scales.float() * undo.exp2()).square().mean((1, 2)).mul(k).sqrt()
    factor = torch.rand(groups, generator=gen, device=device).add_(0.5) / (CODE_RMS * rms) * FACTORS.get(content, 1)
    size = INPUT_SCALES.get(content, INPUT_SCALES["plain"])
    input_scale = torch.rand(groups, generator=gen, device=device).add_(0.5)
    power = torch.rand(groups, generator=gen, device=device) < 1 / 2
    input_scale = torch.where(power, (input_scale > 1) / 2 + 0.5, input_scale).mul_(size).clamp_(2.0**-64, 2.0**64)
    return Matrix(codes, scales, factor, quantise=True, input_scale=input_scale)


def _nvfp4_a16(groups: int, n: int, k: int, content: str, gen: torch.Generator) -> Matrix:
    return _nvfp4(groups, n, k, content, gen)._replace(quantise=False, input_scale=None)


def _bf16(groups: int, n: int, k: int, content: str, gen: torch.Generator) -> Matrix:
    device = gen.device
    w = torch.randn(groups, n, k, generator=gen, device=device).mul_(k**-0.5)
    if content == "magnitudes":
        w *= (-_profile(k, "bf16", device)).exp2()
    elif content == "subnormal":
        w[..., 0::2] *= 2.0**-126  # a standard deviation of less than the least normal bf16
        w[..., 1::2] *= 2.0**100  # x lacks it there
    elif content == "extreme":
        w = torch.where(torch.rand(w.shape, generator=gen, device=device) < 1 / 8, w * 2.0**60, w)
    elif content == "zeros":
        w *= _kept(groups, n, k, 7 / 8, gen)
    return Matrix(w.bfloat16(), None, None, quantise=False)


def _kept(groups: int, n: int, k: int, share: float, gen: torch.Generator) -> torch.Tensor:
    """bool (groups, n, k): blocks of 16 along k that stay."""
    return (torch.rand(groups, n, k // 16, generator=gen, device=gen.device) < share).repeat_interleave(16, 2)


# ---------------------------------------------------------------- oracle


# Sizes of the first link's sums, by the answer that ref_kernel returned: all calls on a content are checked with them.
_SIZES = weak.WeakIdKeyDictionary()


def ref_kernel(data: input_t) -> torch.Tensor:
    """out before rounding, fp64, flat as task.Outputs. A link takes the rounded output of the one before."""
    answers, sizes, v = [], [], data.inputs.x
    for link in data.weights.links:
        found = [products(data.weights.format, matrix, v) for matrix in link]
        answers += [exact for exact, _ in found]
        sizes.append([size for _, size in found])
        v = found[0][0].bfloat16()
    want = torch.cat([answer.flatten() for answer in answers])
    _SIZES[want] = sizes[0]
    return want


def products(fmt: str, matrix: Matrix, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (out before rounding, the size of its sum: sqrt(sum of (w v)^2)), both fp64 (T, G n). v: bf16 (T, G k)."""
    groups = len(matrix.codes)
    taken = input_values(fmt, matrix, v).double().unflatten(1, (groups, -1))
    out, size = [], []
    for g in range(groups):
        w = values(fmt, matrix, g)
        out.append(taken[:, g] @ w.T)
        size.append((taken[:, g].square() @ w.square_().T).sqrt_())
    return torch.cat(out, 1), torch.cat(size, 1)


def values(fmt: str, matrix: Matrix, g: int) -> torch.Tensor:
    """Weights of group g, fp64 (n, k), exactly: fp32 has room for every one of fp8, the factor comes in fp64."""
    if fmt == "bf16":
        return matrix.codes[g].double()
    if fmt == "fp8":
        return _fp8_values(matrix.codes[g], matrix.scales[g])
    blocks = nvfp4.decode(matrix.codes[g]).unflatten(-1, (-1, nvfp4.BLOCK))
    return blocks.mul_(matrix.scales[g].float().unsqueeze(-1)).flatten(-2).double().mul_(matrix.factor[g].double())


def _fp8_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    n, k = codes.shape
    factors = torch.ldexp(torch.ones_like(scales, dtype=torch.float64), scales.to(torch.int64) - 127)
    wide = factors.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return fp8.decode_e4m3(codes).double().mul_(wide)


# ---------------------------------------------------------------- checker


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """(True, "") if `output`, bf16 and flat, is the products of `data` within the tolerance, else (False, report)."""
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(data: input_t, want: torch.Tensor, output: output_t, peer: bool = False) -> check.Result:
    """`output` against `want` = ref_kernel(data), element by element, as task.py derives it; a peer is held to
    PEER_TOL in the norm of each matrix.

    A link behind the first one is compared with what it should make of the output before it as it came, and not as it
    should be: a bf16 that is rounded to the other side would move codes of the next link by steps.
    """
    if fault := check.form_error(output, want.shape, torch.bfloat16):
        return check.Result(False, fault)
    sizes = unpack(data._replace(outputs=Outputs(output)))
    exact, off = _answers(data, want, output, sizes)
    if peer:
        return _in_norm(output, exact, sizes)
    result = check.elementwise(output, exact, RTOL * exact.abs() + off + LEAST, torch.bfloat16)
    return result if result.ok else check.Result(False, _placed(result.message, sizes), *_numbers(result))


def _answers(
    data: input_t, want: torch.Tensor, output: torch.Tensor, sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact outputs, and by how much their sums may be off, fp64, flat as task.Outputs. want: of the first link."""
    first, fmt = data.weights.links[0], data.weights.format
    size = _SIZES.get(want) or [products(fmt, matrix, data.inputs.x)[1] for matrix in first]
    exact = list(parts(want, sizes)[0])
    for link, got in zip(data.weights.links[1:], parts(output, sizes), strict=False):
        found = [products(fmt, matrix, got[0]) for matrix in link]
        exact += [one for one, _ in found]
        size = [*size, *(its for _, its in found)]
    off = [sum_rtol(fmt, m, sizes.tokens) * its for m, its in zip(matrices(data.weights), size, strict=True)]
    return tuple(torch.cat([part.flatten() for part in some]) for some in (exact, off))


def _in_norm(output: torch.Tensor, exact: torch.Tensor, sizes: Sizes) -> check.Result:
    """The worst matrix's result, else that of all."""
    pairs = zip(parts(output, sizes), parts(exact, sizes), strict=True)
    found = [
        check.norm(got, want, PEER_TOL, torch.bfloat16, batch=1) if want.numel() == 0 else _matrix_norm(got, want)
        for gots, wants in pairs
        for got, want in zip(gots, wants, strict=True)
    ]
    return next((result for result in found if not result.ok), max(found, key=lambda result: result.rel))


def _matrix_norm(got: torch.Tensor, want: torch.Tensor) -> check.Result:
    return check.norm(got.unsqueeze(0), want.unsqueeze(0), PEER_TOL, torch.bfloat16, batch=0)


def _placed(message: str, sizes: Sizes) -> str:
    """The report, with a line that says how to read its indices."""
    start, lines = 0, []
    for number, link in enumerate(sizes.links):
        for groups, n, k in link:
            end = start + sizes.tokens * groups * n
            lines.append(f"link {number}: {groups} x {n} x {k} at {start} to {end - 1}, {groups * n} a token")
            start = end
    return "\n".join((message, *lines))


def _numbers(result: check.Result) -> tuple[float, float, float]:
    return result.rel, result.worst_abs, result.worst_tol
