"""Make weights and inputs for moe_gemm, compute the answer in fp64, and check outputs. Slow and obvious on purpose."""

import torch
from task import (
    FP8_GROUP,
    FP8_ROW_RTOL,
    FP8_RTOL,
    LIMIT,
    MX_BLOCK,
    NVFP4_ROW_RTOL,
    NVFP4_RTOL,
    PEER_TOL,
    ROW_RTOL,
    RTOL,
    SPAN,
    Inputs,
    Outputs,
    Weights,
    input_t,
    output_t,
)

from problems.common import check, fp8, nvfp4

CODE_RMS = (sum(code * code for code in nvfp4.E2M1) / 16) ** 0.5  # of random codes, 2.93
SPREAD = 6.0  # standard deviation of gate and up: a twentieth of the gates is over LIMIT
HUGE, LARGE = 2.0**40, 2.0**18  # factors of x and of out in "extreme", beyond fp16


# ---------------------------------------------------------------- weights and inputs


def generate_weights(
    tokens: int,
    experts: int,
    topk: int,
    hidden: int,
    inner: int,
    activation: str,
    router: str,
    content: str,
    seed: int,
    device: str,
) -> Weights:
    """Random codes, all 16 in both nibbles; g such that gate and up have a standard deviation of about SPREAD and out
    of 1, times 2^U(-1, 1) of each expert's own. in_scale is about what calibration would find: a few values saturate.

    plain       scales 2^U(-4, 2)
    clamped     gate and up 5 times as large
    magnitudes  scales over 15 binades: 2^-4 to 2^4 along H, which x's blocks undo, and of up down to 2^-6 along I,
                which w2 undoes; g2 over 2^-4 to 2^4; rows of x over 2^-8 to 2^2
    subnormal   only scale bytes 0 to 7
    extreme     an eighth of the scales 448, the others 2^U(-6, 0); half of the codes 6 or -6; x and out larger than
                fp16 holds, x 2^40 times what it is elsewhere
    zeros       an eighth of the scales, a quarter of x's blocks of 16, two rows of x (one of 3 to 5, none of fewer), a
                third of the routing weights; of several tokens all the last one's, of several experts the last one's g2

    "fp8": the powers of two next to every second of these scales, times g; for zero, codes are zeros.
    """
    gen = torch.Generator(device).manual_seed(seed)
    column, row = _profiles(hidden, inner, content, activation, device)
    w13 = _codes((experts, 2 * inner, hidden // 2), content, gen)
    w2 = _codes((experts, hidden, inner // 2), content, gen)
    s13 = torch.empty(experts, 2 * inner, hidden // 16, dtype=torch.float8_e4m3fn, device=device)
    s2 = torch.empty(experts, hidden, inner // 16, dtype=torch.float8_e4m3fn, device=device)
    g13, g2 = torch.empty(2, experts, device=device)
    spread = SPREAD * (5 if content == "clamped" else 1)
    for e in range(experts):  # V4-Pro's scales in fp32 would be 6 GB
        s13[e] = _scales(
            s13[e], -column - torch.cat([torch.zeros_like(row), row]).repeat_interleave(16)[:, None], content, gen
        )
        s2[e] = _scales(s2[e], row, content, gen)
        g13[e] = spread / (s13[e, :inner].float() * column.exp2()).square().mean().mul(hidden).sqrt()
        g2[e] = 1 / (s2[e].float() * (-row).exp2()).square().mean().mul(inner).sqrt()
    code = 5.0 if content == "extreme" else CODE_RMS
    g13.div_(code * _size(content)).mul_(_factors(experts, 1, gen))
    g2.div_(code * spread**2 / 3).mul_(_factors(experts, 4 if content == "magnitudes" else 1, gen))
    if content == "extreme":
        g2 *= LARGE
    if content == "zeros":
        g2[1:][-1:] = 0
    if activation == "fp8":
        s13, s2 = (
            torch.stack([_as_mxfp4(*one) for one in zip(*parts, strict=True)])
            for parts in ((w13, s13, g13), (w2, s2, g2))
        )
        g13, g2 = torch.ones(2, experts, device=device)
    full = nvfp4.E2M1_MAX * nvfp4.E4M3_MAX
    in_scale13 = 4.0 * float(column.max().exp2()) * _size(content) / full * _factors(experts, 1, gen)
    in_scale2 = LIMIT**2 / 2 / full * _factors(experts, 1, gen)
    return Weights(w13, s13, g13, w2, s2, g2, in_scale13, in_scale2, activation)


def _as_mxfp4(packed: torch.Tensor, scales: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """NVFP4 codes (n, k / 2), e4m3 scales (n, k / 16), fp32 g () -> ue8m0 scales (n, k / 32): of every second one the
    power of two, times g, within 2^SPAN. Where that is zero, codes become zeros.
    """
    power = scales[:, ::2].float().log2().round()
    live = (power > -torch.inf) & (g > 0)
    packed.unflatten(1, (-1, MX_BLOCK // 2)).mul_(live.unsqueeze(2))
    return (127 + power.clamp(min=power.max() - SPAN) + g.log2().round().clamp(-100, 80)).byte()


def generate_input(
    tokens: int,
    experts: int,
    topk: int,
    hidden: int,
    inner: int,
    activation: str,
    router: str,
    content: str,
    seed: int,
    device: str,
) -> tuple[Inputs, Outputs]:
    """x in blocks as generate_weights says; routing weights U(0.1, 1), "magnitudes" +-2^U(-4, 1), 3e38 for id -1."""
    gen = torch.Generator(device).manual_seed(seed)
    column, _ = _profiles(hidden, inner, content, activation, device)
    x = torch.randn(tokens, hidden, generator=gen, device=device)
    x *= column.exp2().repeat_interleave(16) * _size(content)
    weights = torch.rand(tokens, topk, generator=gen, device=device).mul_(0.9).add_(0.1)
    if content == "magnitudes":
        x *= torch.rand(tokens, 1, generator=gen, device=device).mul_(10).sub_(8).exp2_()
        weights = torch.rand(tokens, topk, generator=gen, device=device).mul_(5).sub_(4).exp2_()
        weights *= torch.randint(0, 2, weights.shape, generator=gen, device=device).mul_(2).sub_(1)
    elif content == "zeros":
        x *= (torch.rand(tokens, hidden // 16, generator=gen, device=device) >= 1 / 4).repeat_interleave(16, 1)
        x[: min(2, tokens // 3)] = 0
        weights *= torch.rand(weights.shape, generator=gen, device=device) >= 1 / 3
        weights[1:][-1:] = 0
    ids = _routed(tokens, experts, topk, router, gen)
    weights[ids < 0] = 3e38  # means nothing, and must not be multiplied with anything
    out = torch.full((tokens, hidden), torch.nan, dtype=torch.bfloat16, device=device)
    return Inputs(x.bfloat16(), ids, weights), Outputs(out)


def rows(data: input_t, index: torch.Tensor) -> input_t:
    """The call of these tokens alone. index: int64 (n,)."""
    inputs, outputs = Inputs(*(part[index] for part in data.inputs)), Outputs(data.outputs.out[index])
    return data._replace(inputs=inputs, outputs=outputs)


def _profiles(hidden: int, inner: int, content: str, activation: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponents fp32 (H / 16,) of x's blocks and (I / 16,) of w2's, which w13 undoes. No values decide."""
    together = MX_BLOCK // 16 if activation == "fp8" else 1
    column, row = (torch.arange(size // 16, device=device) // together for size in (hidden, inner))
    if content != "magnitudes":
        return torch.zeros_like(column).float(), torch.zeros_like(row).float()
    return (column * 5 % 9 - 4).float(), (row * 3 % 7).float()


def _size(content: str) -> float:
    return HUGE if content == "extreme" else 1.0


def _factors(count: int, span: float, gen: torch.Generator) -> torch.Tensor:
    """fp32 (count,), 2^U(-span, span)."""
    return torch.rand(count, generator=gen, device=gen.device).mul_(2 * span).sub_(span).exp2_()


def _codes(shape: tuple[int, ...], content: str, gen: torch.Generator) -> torch.Tensor:
    """Packed codes, uint8 `shape`."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=gen, device=gen.device)
    if content == "extreme":
        which = torch.randint(0, 4, shape, dtype=torch.uint8, generator=gen, device=gen.device)
        codes |= (which & 1) * 0x07 | (which >> 1) * 0x70  # the largest magnitude, in either nibble
    return codes


def _scales(like: torch.Tensor, exponents: torch.Tensor, content: str, gen: torch.Generator) -> torch.Tensor:
    """Scales e4m3 of like's shape (rows, blocks). exponents: fp32, broadcast to that, of "magnitudes"."""
    rand = torch.rand(like.shape, generator=gen, device=gen.device)
    if content == "subnormal":
        return rand.mul_(8).to(torch.uint8).view(torch.float8_e4m3fn)
    if content == "magnitudes":
        # -column runs from -4 to 4 and -row from -6 to 0: w13 from 2^-6 to 2^8; w2 from 2^0 to 2^6.
        middle = 4 if float(exponents.min()) < 0 else 0
        return rand.sub_(0.5).add_(exponents + middle).exp2_().to(torch.float8_e4m3fn)
    value = rand.mul_(6).sub_(4).exp2_()
    if content == "extreme":
        value = torch.where(torch.rand(like.shape, generator=gen, device=gen.device) < 1 / 8, 448.0, value / 4)
    elif content == "zeros":
        value *= torch.rand(like.shape, generator=gen, device=gen.device) >= 1 / 8
    return value.to(torch.float8_e4m3fn)


def _routed(tokens: int, experts: int, topk: int, router: str, gen: torch.Generator) -> torch.Tensor:
    """topk_ids, int32 (T, k), as task.Case describes the routers."""
    ranks = torch.arange(1, experts + 1, device=gen.device)
    rates = 1.0 / ranks if router == "zipf" else torch.ones_like(ranks).float()
    shape = (1 if router == "one" else tokens, experts)
    # The first k of exponential clocks are k draws without replacement.
    rung = torch.empty(shape, device=gen.device).exponential_(generator=gen).div_(rates)
    ids = rung.topk(topk, 1, largest=False).indices
    if router == "one":
        order = torch.rand(tokens, topk, generator=gen, device=gen.device).argsort(1)
        ids = ids.expand(tokens, topk).gather(1, order)
    names = torch.randperm(experts, generator=gen, device=gen.device)
    ids = names[ids].int()
    if router == "part":
        ids[torch.rand(ids.shape, generator=gen, device=gen.device) < 1 / 2] = -1
        ids[1::4] = ids[2::4] = -1
    return ids.fill_(-1) if router == "none" else ids


# ---------------------------------------------------------------- oracle


def ref_kernel(data: input_t) -> torch.Tensor:
    """out before rounding, fp64 (T, H). v is rounded to bf16, and quantised, as task.Data says."""
    weights, (x, ids, routing), _ = data
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in range(len(weights.w13)):
        rows, slots = (ids == e).nonzero(as_tuple=True)
        if len(rows):
            out.index_add_(0, rows, expert(weights, e, x[rows], routing[rows, slots]))
    return out


def expert(weights: Weights, e: int, x: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """fp64 (n, H), what expert e adds to its tokens. x: bf16 (n, H), routing: fp32 (n,)."""
    taken = quantised_as(weights.activation, x, weights.in_scale13[e])
    gate, up = (taken @ values(weights.w13[e], weights.s13[e]).T * weights.g13[e].double()).chunk(2, 1)
    v = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT) * routing.double().unsqueeze(1)
    v = v.bfloat16()
    taken = quantised_as(weights.activation, v, weights.in_scale2[e])
    return taken @ values(weights.w2[e], weights.s2[e]).T * weights.g2[e].double()


def values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """packed uint8 (n, m / 2), scales e4m3 (n, m / 16) or ue8m0 as uint8 (n, m / 32) -> fp64 (n, m), exactly:
    nvfp4.dequantise with a quarter of its memory traffic, which is most of what checking a timed call on a GPU takes.
    """
    if scales.dtype == torch.uint8:
        blocks = nvfp4.decode(packed).unflatten(-1, (-1, MX_BLOCK)).double()
        return blocks.mul_(fp8.decode_ue8m0(scales).double().unsqueeze(-1)).flatten(-2)
    blocks = nvfp4.decode(packed).unflatten(-1, (-1, nvfp4.BLOCK))
    return blocks.mul_(scales.float().unsqueeze(-1)).flatten(-2).double()


def quantised_as(activation: str, x: torch.Tensor, in_scale: torch.Tensor) -> torch.Tensor:
    """x: bf16 (n, m), in_scale: fp32 () -> fp64 (n, m), exactly the values of x as a product takes it."""
    if activation == "bf16":
        return x.double()
    if activation == "fp8":
        return fp8.dequantise_groups(*fp8.quantise_groups(x, FP8_GROUP), FP8_GROUP).double()
    codes, scales = nvfp4.encode(x.float(), in_scale.expand(len(x)))
    return nvfp4.dequantise(codes, scales, torch.float64) * in_scale.double()


# ---------------------------------------------------------------- checker


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """(True, "") if `output`, bf16 (T, H), is out of `data` within the tolerance, else (False, report)."""
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(data: input_t, want: torch.Tensor, output: output_t, peer: bool = False) -> check.Result:
    """`output` against `want`, rows and all as one; a peer all as one. Zero rows must be zeros. rel: of all as one."""
    if fault := check.form_error(output, want.shape, torch.bfloat16):
        return check.Result(False, fault)
    row_limit, whole_limit = _limits(data.weights.activation, peer)
    each = (output.double() - want).abs()
    error, size = each.norm(dim=1), want.norm(dim=1)
    allowed = torch.where(size > 0, row_limit * size, 0)
    good = (error <= allowed) & torch.isfinite(error)  # not ~(error > allowed), which NaN would pass
    excess = (error / allowed.clamp_min(torch.finfo(torch.float64).tiny)).nan_to_num(torch.inf, torch.inf)
    worst = int(excess.argmax())
    whole, whole_size = float(error.norm()), float(size.norm())
    rel = whole / whole_size if whole_size else whole
    numbers = rel, float(error[worst]), float(allowed[worst])
    if not bool(good.all()):
        return check.Result(False, _report(data, output, want, each, ~good), *numbers)
    if not rel <= whole_limit:
        return check.Result(False, f"mismatch found! relative error {rel:.3g} over {whole_limit:g} in all", *numbers)
    return check.Result(True, "", *numbers)


def _limits(activation: str, peer: bool) -> tuple[float, float]:
    """Of a row, and of all as one."""
    row, whole = {
        "bf16": (ROW_RTOL, RTOL),
        "nvfp4": (NVFP4_ROW_RTOL, NVFP4_RTOL),
        "fp8": (FP8_ROW_RTOL, FP8_RTOL),
    }[activation]
    return (torch.inf, max(PEER_TOL, whole)) if peer else (row, whole)


def _report(data: input_t, output: torch.Tensor, want: torch.Tensor, each: torch.Tensor, bad: torch.Tensor) -> str:
    """The rows that are wrong, the largest error of the first ones, and which experts' tokens all are."""
    lines = [
        "mismatch found! custom implementation doesn't match reference: "
        f"Number of mismatched rows: {int(bad.sum())} of {len(bad)}"
    ]
    for t in bad.nonzero()[: check.SHOWN, 0].tolist():
        h = int(each[t].nan_to_num(torch.inf, torch.inf).argmax())
        experts = data.inputs.topk_ids[t].tolist()
        lines.append(
            f"ERROR AT ({t}, {h}): {float(output[t, h]):.6g} {float(want[t, h]):.6g}, row of norm "
            f"{float(want[t].norm()):.3g}, experts {experts}"
        )
    return "\n".join(lines)
