"""The table of ops: what fills an op and why; nvfp4_gemv in the linear ops; winners as operators of torch."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from problems.common import load, nvfp4
from problems.dsv4_forward import ops
from problems.dsv4_forward.adapters import gemv, operators
from problems.dsv4_forward.torch_ops import linear
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.config import TINY
from problems.dsv4_forward.weights.linear import Linear

TASK = load.module(load.PROBLEMS / gemv.PROBLEM, "task")
REFERENCE = load.module(load.PROBLEMS / gemv.PROBLEM, "reference")
VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
# One layer of each kind, a prediction layer, and few experts: every matrix that the linear ops receive.
SMALL = dataclasses.replace(
    TINY, name="small", hidden_size=384, num_attention_heads=6, q_lora_rank=64, o_groups=3, o_lora_rank=128,
    n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=128, vocab_size=64, num_hash_layers=1,
    compress_ratios=(0, 4, 128, 0), index_n_heads=8, num_nextn_predict_layers=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return {fmt: tree.random(SMALL, fmt, seed=3) for fmt in ("bf16", "released", "nvfp4_experts", "nvfp4")}


def published(n: int, k: int, seed: int = 0, lead: tuple[int, ...] = (), name: str = "w") -> Linear:
    """Gaussian matrices as calibrated checkpoints have them: scale_2 = amax / (6 * 448), so scales reach 448."""
    gen = torch.Generator().manual_seed(seed)
    real = torch.randn(*lead, n, k, generator=gen) * torch.rand(*lead, n, 1, generator=gen).add(0.5) / k**0.5
    scale_2 = real.abs().amax((-2, -1)) / 2688
    codes, scale = nvfp4.quantise((real / scale_2[..., None, None]).clamp(-2688, 2688))
    input_scale = torch.rand(lead, generator=gen).add(0.5) * 6 / 2688
    return Linear("nvfp4", codes, scale, scale_2, input_scale, name=name)


def made(codes: torch.Tensor, scale: torch.Tensor, **fields: object) -> Linear:
    """codes: uint8 (n, k), unpacked; scale: fp32 (n, k // 16)."""
    one = {"scale_2": torch.tensor(1e-4), "input_scale": torch.tensor(6 / 2688), "name": "odd"}
    return Linear("nvfp4", nvfp4.pack(codes), scale.to(torch.float8_e4m3fn), **(one | fields))


def adapted(*matrices: Linear, variant: str = "cpu_portable") -> gemv.Gemv:
    kernel = load.variant(gemv.PROBLEM, variant).custom_kernel
    prepared = [gemv.make_matrix(w, TASK.Data) for w in matrices]
    return gemv.Gemv(kernel, {id(m.linear): m for m in prepared}, ops.REFERENCE)


def values64(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp64 values of codes (low nibble first) times scales, by the format's table."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return torch.tensor(VALUES, dtype=torch.float64)[codes] * scale.double().repeat_interleave(16, -1)


def exact(x: torch.Tensor, w: Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """x: (N, k), within the calibrated range -> x w^T in fp64, (N, n), and a bound of what the kernel may be off by."""
    codes, scale = nvfp4.quantise((x.float() / w.input_scale).clamp(-2688, 2688))
    a, b = values64(w.weight, w.scale), values64(codes, scale)
    both = w.scale_2.double() * w.input_scale.double()
    terms = (b.abs() @ a.abs().T) * both
    want = (b @ a.T) * both
    # One rounding to fp16, fp32 sums, the product with two fp32 scales.
    return want, want.abs() * 2.0**-11 * 1.01 + terms * 8 * 2.0**-24 + 1e-12


def product(x: torch.Tensor, w: Linear, run, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((*x.shape[:-1], w.n), math.nan, dtype=dtype)
    run(x, w, out)
    return out


def inputs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal rows of different size, each within 6."""
    gen = torch.Generator().manual_seed(seed + 100)
    x = torch.randn(*shape, generator=gen).clamp_(-3, 3)
    return (x * torch.linspace(0.3, 1.0, shape[0]).view(-1, *[1] * (len(shape) - 1))).to(dtype)


# ---------------------------------------------------------------- scales that move


@pytest.mark.parametrize(("n", "k"), [(129, 320), (33, 64), (520, 2048)])
def test_published_scales_overflow_fp16_as_they_are_and_fit_once_moved(n, k):
    w = published(n, k)
    assert float(w.scale.float().max()) == 448
    data = REFERENCE.generate_input(n, k, 1, 5, "cpu")
    x, sx = nvfp4.quantise(inputs(1, k) / w.input_scale)
    data.b.view(torch.uint8)[0, :, 0], data.sfb.view(torch.uint8)[0, :, 0] = x[0], sx.view(torch.uint8)[0]
    plain = data._replace(
        a=w.weight.view(torch.float4_e2m1fn_x2).unsqueeze(2), sfa=w.scale.unsqueeze(2),
        sfa_permuted=nvfp4.permute_scales(w.scale.unsqueeze(2)),
    )  # fmt: skip
    raw = load.variant(gemv.PROBLEM, "cpu_portable").custom_kernel(plain)
    assert float(raw.isinf().float().mean()) > 0.85
    found = gemv.fit(w.weight.unsqueeze(0), w.scale.unsqueeze(0))
    assert found.fits and found.weight_shift >= 5
    moved = gemv.shifted(w.scale, found.weight_shift)
    assert torch.equal(moved.float() * 2.0**found.weight_shift, w.scale.float())
    assert moved.float().max() <= 1
    # The least that will do: half as much would not, and the activations give only what the weights cannot.
    assert 2 * found.reach > gemv.FP16_MAX
    if found.input_shift:
        more = w.scale.double() * 2.0 ** -(found.weight_shift + 1)
        assert not torch.equal(more.to(torch.float8_e4m3fn).double(), more)


def test_reach_is_six_deviations_of_the_largest_output(monkeypatch):
    monkeypatch.setattr(gemv, "CHUNK", 5 * 40)  # rows in several parts, the last a short one
    w = published(23, 80)
    deviation = []
    for row in values64(w.weight, w.scale):
        deviation.append(math.sqrt(sum((float(v) * 6 * 448) ** 2 for v in row)))
    found = gemv.fit(w.weight.unsqueeze(0), w.scale.unsqueeze(0))
    shift = 2.0 ** (found.weight_shift + found.input_shift)
    assert found.reach * shift == pytest.approx(6 * max(deviation), rel=1e-5)


@pytest.mark.parametrize(
    ("scales", "most", "want"),
    [
        ([448.0], 20, 15),  # 7 * 2^6, and steps end at 2^-9
        ([256.0], 20, 17),
        ([448.0], 3, 3),
        ([448.0, 2.0**-9], 9, 0),
        ([448.0, 2.0**-8], 9, 1),
        ([448.0, 2.0**-6 * 1.125], 9, 0),  # nine steps of 2^-9
        ([448.0, 2.0**-6], 9, 3),
        ([0.0, 8.0, 9.0], 9, 9),  # a scale of 0 holds nothing up
        ([0.0], 9, 9),
    ],
)
def test_weights_move_as_far_as_is_exact(scales, most, want):
    assert gemv.exact_shift(torch.tensor(scales).to(torch.float8_e4m3fn), most) == want


def test_small_matrices_do_not_move_and_share_their_scales():
    w = made(torch.ones(5, 64, dtype=torch.uint8), torch.full((5, 4), 0.5))
    matrix = gemv.make_matrix(w, TASK.Data)
    assert (matrix.fit.weight_shift, matrix.fit.input_shift) == (0, 0)
    assert matrix.calls[0].sfa.data_ptr() == w.scale.data_ptr()


def wide_range(n: int = 40, k: int = 640) -> Linear:
    """Scales from 2^-9 to 448: no power of two leaves them exactly."""
    gen = torch.Generator().manual_seed(4)
    scale = torch.full((n, k // 16), 448.0)
    scale[::3, 5] = 2.0**-9
    return made(torch.randint(0, 16, (n, k), generator=gen, dtype=torch.uint8), scale)


def test_a_matrix_that_cannot_fit_goes_through_the_reference_and_is_named():
    w, good = wide_range(), published(40, 640, name="good")
    run = adapted(w, good)
    matrix = run.matrices[id(w)]
    assert not matrix.fit.fits and not matrix.calls
    assert (matrix.fit.weight_shift, matrix.fit.input_shift) == (0, gemv.MOST_INPUT_SHIFT)
    x = inputs(2, 640)
    assert torch.equal(product(x, w, run.linear), product(x, w, linear.linear))
    first, second = gemv.report(list(run.matrices.values()))
    assert "1 of 2 NVFP4 matrices" in first
    assert second.startswith("odd: reference (6 standard deviations of an output reach ") and "65504" in second


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: dataclasses.replace(w, quantise_input=False), "not quantised"),
        (lambda w: published(9, 80), "k must be a multiple of 64, is 80"),
        (lambda w: dataclasses.replace(w, weight=torch.cat([w.weight] * 2, 1)[:, : w.k // 2]), "not contiguous"),
        (lambda w: dataclasses.replace(w, weight=off_by_one(w.weight)), "multiple of 16 bytes"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_with_the_reason(change, reason):
    w = change(published(9, 128))
    run = adapted(w)
    assert reason in run.matrices[id(w)].reason
    x = inputs(3, w.k)
    assert torch.equal(product(x, w, run.linear), product(x, w, linear.linear))


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return room.copy_(tensor)


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_scales_that_are_none_are_an_error_that_names_the_matrix(byte):
    w = published(9, 128, name="layers.0.attn.wkv")
    w.scale.view(torch.uint8)[3, 5] = byte
    with pytest.raises(ValueError, match=rf"layers\.0\.attn\.wkv: scale bytes .* 0x{byte:02X} at \(0, 3, 5\)"):
        gemv.make_matrix(w, TASK.Data)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("tokens", [1, 2, 3, gemv.TOKENS])
@pytest.mark.parametrize(("n", "k"), [(129, 320), (7, 64), (517, 832)])
def test_linear_is_the_product_of_the_formats_values(n, k, tokens):
    w = published(n, k, seed=tokens)
    x = inputs(tokens, k, seed=tokens)
    got = product(x, w, adapted(w).linear)
    want, bound = exact(x, w)
    assert bool(((got.double() - want).abs() <= bound).all())
    assert float(want.std()) > 0.1  # and the bound means something


def test_outputs_are_rounded_once_to_their_dtype():
    w, x = published(200, 256), inputs(3, 256, dtype=torch.bfloat16)
    run = adapted(w).linear
    assert torch.equal(product(x, w, run, torch.bfloat16), product(x.float(), w, run).bfloat16())


def test_grouped_linear_has_a_group_for_each_l():
    w = published(70, 192, lead=(3,))
    assert len(set(w.scale_2.tolist())) == len(set(w.input_scale.tolist())) == 3
    x = inputs(5, 3, 192)
    got = product(x, w, adapted(w).grouped_linear)
    for group in range(3):
        want, bound = exact(x[:, group], w.select(group))
        assert bool(((got[:, group].double() - want).abs() <= bound).all()), group
    assert gemv.make_matrix(w, TASK.Data).calls[0].a.shape == (70, 96, 3)


def test_slices_of_wider_tensors_go_in_and_out():
    w, wide = published(70, 192, lead=(2,)), published(33, 64)
    run = adapted(w, wide)
    x = inputs(3, 2, 400)[..., 7:199]
    out = torch.full((3, 2, 90), math.nan)
    run.grouped_linear(x, w, out[..., 10:80])
    assert torch.equal(out[..., 10:80], product(x.contiguous(), w, run.grouped_linear))
    assert bool(out[..., :10].isnan().all()) and bool(out[..., 80:].isnan().all())


def test_a_token_does_not_depend_on_its_neighbours_or_on_earlier_calls():
    w, x = published(45, 320, lead=(2,)), inputs(6, 2, 320)
    run = adapted(w).grouped_linear
    together = product(x, w, run)
    for token in (5, 0, 3):
        assert torch.equal(product(x[token : token + 1], w, run), together[token : token + 1])
    assert torch.equal(product(x, w, run), together)


def test_matrices_share_their_buffers_and_not_their_results(model):
    prepared = gemv.prepare(model["nvfp4"])
    by_shape = {}
    for matrix in prepared:
        shape = (matrix.linear.k, matrix.products.shape[1])
        assert by_shape.setdefault(shape, matrix.vectors) is matrix.vectors
    first, second = (m for m in prepared if m.linear.name in ("layers.0.attn.wq_a", "layers.1.attn.wq_a"))
    assert first.products is second.products
    run = gemv.Gemv(load.variant(gemv.PROBLEM, "cpu_portable").custom_kernel, {id(m.linear): m for m in prepared}, None)
    x = inputs(2, SMALL.hidden_size)
    alone = [product(x, m.linear, run.linear) for m in (first, second, first)]
    assert torch.equal(alone[0], alone[2]) and not torch.equal(alone[0], alone[1])


@pytest.mark.parametrize("scale_of_input", [1.0, 3.0, 0.02])
def test_activations_are_encoded_as_without_a_shift(scale_of_input):
    """Beyond the calibrated range they saturate where the format does, and small blocks keep all bits of their scales
    as far as e4m3 has them: down to 2^-6 behind the shift.
    """
    w = published(64, 4096)
    matrix = gemv.make_matrix(w, TASK.Data)
    shift = matrix.fit.input_shift
    assert 1 <= shift <= 3
    x = inputs(2, 4096) * scale_of_input * torch.logspace(-4, 0, 256).repeat_interleave(16)
    run = gemv.Gemv(lambda data: data.c.zero_(), {id(w): matrix}, ops.REFERENCE)
    product(x, w, run.linear)
    codes, scales = nvfp4.encode(x, w.input_scale)
    for token in range(2):
        data = matrix.calls[token]
        got = data.sfb[0, :, 0].double() * 2.0**shift
        whole = scales[token].double() >= 2.0 ** (shift - 6)
        assert bool(whole.any())
        assert torch.equal(got[whole], scales[token].double()[whole])
        bytes_ = data.b.view(torch.uint8)[0, :, 0].view(-1, 8)
        assert torch.equal(bytes_[whole], codes[token].view(-1, 8)[whole])
        assert bool(((got - scales[token].double()).abs() <= 2.0 ** (shift - 10)).all())
        assert float(data.sfb[0].float().max()) <= 448 * 2.0**-shift
    if scale_of_input == 3:
        assert float(scales.float().max()) == 448


def test_both_copies_of_a_vectors_scales_agree_and_lie_as_the_problem_says():
    w, x = published(40, 192, lead=(3,)), inputs(gemv.TOKENS, 3, 192)
    run = adapted(w)
    product(x, w, run.grouped_linear)
    for data in run.matrices[id(w)].calls:
        assert TASK.unpack(data) == (40, 192, 3)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in (data.b, data.sfb, data.sfb_permuted))
        permuted = nvfp4.permute_scales(data.sfb)
        assert torch.equal(data.sfb_permuted[0, 0, 0].view(torch.uint8), permuted[0, 0, 0].view(torch.uint8))
        assert torch.equal(data.sfa_permuted.view(torch.uint8), nvfp4.permute_scales(data.sfa).view(torch.uint8))


@pytest.mark.parametrize("variant", ["torch_dequant", "cpu_avx2", "cpu_avx512"])
def test_variants_that_this_cpu_has_agree(variant):
    if load.missing_cpu_flags(load.PROBLEMS / gemv.PROBLEM / f"variants/{variant}.py"):
        pytest.skip(f"this CPU has no {variant}")
    w, x = published(130, 448), inputs(2, 448)
    want, bound = exact(x, w)
    assert bool(((product(x, w, adapted(w, variant=variant).linear).double() - want).abs() <= bound).all())


def test_other_kinds_and_many_tokens_go_through_the_reference(model):
    seen = []
    spy = SimpleNamespace(
        linear=lambda x, w, out: seen.append((len(x), w.kind)),
        grouped_linear=lambda x, w, out: seen.append((len(x), w.kind)),
    )
    run = adapted(published(8, 64))
    run = dataclasses.replace(run, fallback=spy)
    for fmt in ("bf16", "released"):
        attn = model[fmt].layers[0].attn
        product(inputs(2, attn.wq_a.k), attn.wq_a, run.linear)
        product(inputs(1, 3, attn.wo_a.k), attn.wo_a, run.grouped_linear)
    w = next(iter(run.matrices.values())).linear
    product(inputs(gemv.TOKENS + 1, 64), w, run.linear)
    product(inputs(gemv.TOKENS, 64), w, run.linear)
    assert seen == [(2, "plain"), (1, "plain"), (2, "fp8"), (1, "fp8"), (gemv.TOKENS + 1, "nvfp4")]


def test_no_tokens_are_no_work():
    w = published(8, 64)
    assert product(inputs(0, 64), w, adapted(w).linear).shape == (0, 8)


def test_a_matrix_that_was_not_prepared_is_an_error():
    w, other = published(8, 64), published(8, 64, name="stranger")
    with pytest.raises(ValueError, match=r"stranger.* must be one of the weights"):
        product(inputs(1, 64), other, adapted(w).linear)


@pytest.mark.parametrize(("x", "out"), [((2, 128), (2, 8)), ((2, 64), (2, 9)), ((2, 64), (1, 8))])
def test_other_shapes_are_errors(x, out):
    w = published(8, 64)
    with pytest.raises(ValueError, match="do not fit w"):
        adapted(w).linear(torch.zeros(x), w, torch.zeros(out))


def test_a_call_neither_waits_for_the_device_nor_copies_the_matrix():
    w = published(640, 1024, lead=(2,))
    run = adapted(w)
    assert all(data.a.data_ptr() == w.weight.data_ptr() for data in run.matrices[id(w)].calls)
    x, out = inputs(2, 2, 1024), torch.empty(2, 2, 640)
    with torch.autograd.profiler.profile(use_kineto=False, profile_memory=True) as seen:
        run.grouped_linear(x, w, out)
    names = {event.name for event in seen.function_events}
    waits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select"}
    assert {"aten::mul", "aten::copy_"} < names and not names & waits
    largest = max(event.cpu_memory_usage for event in seen.function_events)
    assert x.nbytes <= largest <= 4 * x.nbytes < w.scale.nbytes


def test_kernels_chosen_in_inference_mode_work_outside(model):
    with torch.inference_mode():
        chosen = ops.choose("winners", "cpu", model["nvfp4"])
    w = model["nvfp4"].layers[0].attn.wkv
    with torch.no_grad():
        assert bool(product(inputs(1, w.k), w, chosen.ops.linear).isfinite().all())


# ---------------------------------------------------------------- the table


def lines(chosen: ops.Chosen) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in chosen.report[: len(ops.NAMES)])


def test_the_reference_is_frozen_and_has_a_spec_for_every_op():
    assert len(ops.NAMES) == 15 and all(callable(value) for value in vars(ops.REFERENCE).values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.REFERENCE.linear = None
    assert tuple(spec.name for spec in ops.SPECS) == ops.NAMES


def test_reference_is_the_reference(model):
    chosen = ops.choose("reference", "cpu", model["nvfp4"])
    assert chosen.ops == ops.REFERENCE
    assert set(chosen.names.values()) == {"reference"} and len(chosen.report) == 15


def test_winners_in_nvfp4(model):
    chosen = ops.choose("winners", "cpu", model["nvfp4"])
    submission = load.module(load.PROBLEMS / gemv.PROBLEM, "submission")
    winner = load.winner(load.PROBLEMS / gemv.PROBLEM, submission.WINNERS, "cpu")
    for op in ("linear", "grouped_linear"):
        assert chosen.names[op] == f"nvfp4_gemv/{winner}"
        assert lines(chosen)[op] == f"nvfp4_gemv/{winner} (NVFP4, at most 16 tokens)"
    assert chosen.ops.rms_norm is ops.REFERENCE.rms_norm
    assert lines(chosen)["rms_norm"] == "reference (no problem for it)"
    assert "NVFP4 matrices" in chosen.report[15]


@pytest.mark.parametrize("fmt", ["bf16", "released", "nvfp4_experts"])
def test_winners_say_what_a_format_has_nothing_for(model, fmt):
    chosen = ops.choose("winners", "cpu", model[fmt])
    assert lines(chosen)["linear"] == f"reference (no NVFP4 linears in {fmt})"
    assert chosen.ops.linear is ops.REFERENCE.linear and len(chosen.report) == 15


def test_providers_say_what_they_will_serve():
    first = {spec.name: spec.providers[0] for spec in ops.SPECS if spec.providers}
    flash = dataclasses.replace(SMALL, head_dim=512, swiglu_limit=10.0)
    assert first["fmha"].serves(flash, "nvfp4") == first["fmha"].serves(flash, "released") == ""
    assert "head_dim must be 512, is 128" in first["fmha"].serves(SMALL, "nvfp4")
    assert "584-byte" in first["fmha"].serves(flash, "bf16")
    served = {(op, fmt) for op in ("experts", "shared") for fmt in ("released", "nvfp4_experts", "nvfp4")
              if not first[op].serves(flash, fmt)}  # fmt: skip
    assert served == {("experts", "nvfp4_experts"), ("experts", "nvfp4"), ("shared", "nvfp4")}


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """A folder of problems with two of its own; `half` has no submission."""
    for name in ("norms", "half"):
        (tmp_path / name / "variants").mkdir(parents=True)
        (tmp_path / name / "task.py").write_text("input_t = output_t = tuple\n")
    winners = 'WINNERS = {"cpu": ("quick", "plain"), "sm90": ("plain",)}\n'
    (tmp_path / "norms/submission.py").write_text(winners)
    for name, flags in (("quick", '("no_such_flag",)'), ("plain", "()")):
        text = f'TARGETS = ("cpu",)\nCPU_FLAGS = {flags}\n\n\ndef custom_kernel(data):\n    data.append("{name}")\n'
        (tmp_path / f"norms/variants/{name}.py").write_text(text)
    monkeypatch.setattr(load, "PROBLEMS", tmp_path)
    return tmp_path


def adapt_norm(module, model_weights, fallback):
    def rms_norm(x, weight, eps, out):
        fallback.ops.rms_norm(x, weight, eps, out)
        module.custom_kernel(x.calls)

    return {"rms_norm": rms_norm}, (f"norms for {model_weights.config.name} before {fallback.name}",)


def spec(name: str, *providers: ops.Provider) -> ops.OpSpec:
    return ops.OpSpec(name, vars(ops.REFERENCE)[name], providers)


def test_a_further_problem_is_a_further_provider(problems, monkeypatch, model):
    norms = ops.Provider("norms", "all of them", lambda cfg, fmt: "", adapt_norm)
    specs = (
        spec("rms_norm", norms),
        spec("rotate", dataclasses.replace(norms, serves=lambda cfg, fmt: f"not for {cfg.name} in {fmt}")),
        spec("route", dataclasses.replace(norms, adapt=None)),
        spec("select", dataclasses.replace(norms, problem="half")),
        spec("fmha", dataclasses.replace(norms, problem="absent")),
    )
    monkeypatch.setattr(ops, "SPECS", specs)
    chosen = ops.choose("winners", "cpu", model["bf16"])
    assert {op: line for op, line in lines(chosen).items() if "no problem" not in line} == {
        "rms_norm": "norms/plain (all of them)",
        "rotate": "reference (not for small in bf16)",
        "route": "reference (no adapter for norms yet)",
        "select": "reference (no folder problems/half yet)",
        "fmha": "reference (no folder problems/absent yet)",
    }
    assert chosen.report[15:] == ("norms for small before reference",)
    x = torch.ones(2, 3).as_subclass(type("Told", (torch.Tensor,), {"calls": []}))
    chosen.ops.rms_norm(x, None, 1e-6, torch.empty(2, 3))
    assert x.calls == ["plain"]
    sm100 = ops.choose("winners", "sm100", model["bf16"])
    assert lines(sm100)["rms_norm"] == "reference (norms has no winner for sm100)"


def test_a_call_that_a_provider_does_not_serve_is_passed_down_the_list_in_order(monkeypatch, model):
    """Three providers, none of which serves the call, and of which the second has no variant in use."""
    calls: list[str] = []

    def provider(name: str) -> ops.Provider:
        def adapt(module, model_weights, fallback):
            def rms_norm(x, weight, eps, out):
                calls.append(name)
                fallback.ops.rms_norm(x, weight, eps, out)

            return {"rms_norm": rms_norm, "rotate": rms_norm}, (f"{name} before {fallback.name}",)

        return ops.Provider(name, "nothing", lambda cfg, fmt: "", adapt)

    first, unused, last = (provider(name) for name in "abc")
    monkeypatch.setattr(ops, "SPECS", (spec("rms_norm", first, unused, last), spec("rotate", last)))
    choices = [
        ops.Choice("rms_norm", "", "a/x", first, SimpleNamespace(__name__="x")),
        ops.Choice("rotate", "", "c/z", last, SimpleNamespace(__name__="z")),
    ]
    filled, fallbacks, report = ops._fitted(choices, model["bf16"])
    assert fallbacks == {"rms_norm": ("c/z", "reference"), "rotate": ("reference",)}
    assert report == ("a before c/z", "c before reference", "c before reference")
    out = torch.empty(1, 4)
    filled.rms_norm(torch.ones(1, 4), None, 0.0, out)
    assert calls == ["a", "c"] and bool((out == 1).all())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("nvfp4_gemv=cpu_portable", {"linear": "nvfp4_gemv/cpu_portable", "grouped_linear": "nvfp4_gemv/cpu_portable"}),
        ("linear=torch_dequant", {"linear": "nvfp4_gemv/torch_dequant"}),
        ("grouped_linear=zeros", {"grouped_linear": "nvfp4_gemv/zeros"}),
        ("nvfp4_gemv=cpu_portable, linear=reference", {"grouped_linear": "nvfp4_gemv/cpu_portable"}),
        ("winners,nvfp4_gemv=zeros,linear=torch_dequant",
         {"linear": "nvfp4_gemv/torch_dequant", "grouped_linear": "nvfp4_gemv/zeros"}),
        ("winners,reference", {}),
        ("rms_norm=reference", {}),
        ("rms_norm=winner", {}),
    ],
)  # fmt: skip
def test_names_fill_ops_and_later_ones_count(text, names, model):
    chosen = ops.choose(text, "cpu", model["nvfp4"])
    assert {op: name for op, name in chosen.names.items() if name != "reference"} == names
    plain = vars(ops.REFERENCE)
    assert {op for op, function in vars(chosen.ops).items() if function is not plain[op]} == set(names)


@pytest.mark.parametrize(
    "wrong", ["high_nibble_first", "zeros", "skips_last_rows", "ignores_sfb", "b_row_from_padding"]
)
def test_a_wrong_variant_in_an_op_gives_wrong_products(wrong, model):
    w = model["nvfp4"].layers[1].attn
    x, grouped = inputs(2, w.wkv.k), inputs(2, 3, w.wo_a.k)
    right, bad = (ops.choose(f"nvfp4_gemv={name}", "cpu", model["nvfp4"]).ops for name in ("winner", wrong))

    def error(table: ops.Ops, op: str) -> float:
        x_, w_ = (x, w.wkv) if op == "linear" else (grouped, w.wo_a)
        want = product(x_, w_, vars(ops.REFERENCE)[op])
        return float((product(x_, w_, vars(table)[op]) - want).norm() / want.norm())

    for op in ("linear", "grouped_linear"):
        assert error(right, op) < 1e-3 and not error(bad, op) < 1e-2  # NaN where it leaves outputs unwritten


def test_an_op_takes_a_file_with_the_interface_of_the_op_or_of_its_problem(tmp_path, model):
    own = tmp_path / "mine.py"
    own.write_text("def rms_norm(x, weight, eps, out):\n    out.fill_(3)\n\n\nlinear = None\n")
    submission = tmp_path / "entry.py"
    submission.write_text(
        "from task import unpack\n\nTARGETS = ('cpu',)\n\n\ndef custom_kernel(data):\n    unpack(data)\n"
        "    return data.c.fill_(2)\n"
    )
    chosen = ops.choose(f"rms_norm={own},linear={submission}", "cpu", model["nvfp4"])
    assert lines(chosen)["rms_norm"] == f"{own} (a function with the op's interface)"
    assert chosen.names["linear"] == "nvfp4_gemv/entry"
    out = torch.empty(2, 3)
    chosen.ops.rms_norm(out, None, 1e-6, out)
    assert bool((out == 3).all())
    w = model["nvfp4"].layers[0].attn.wq_a
    got = product(inputs(2, w.k), w, chosen.ops.linear)
    assert len(got.unique()) == 1 and float(got[0, 0]) > 0


@pytest.mark.parametrize(
    ("text", "target", "fmt", "message"),
    [
        ("", "cpu", "nvfp4", "kernels must be reference, winners or NAME=VARIANT .*rms_norm.*moe_gemm; got ''"),
        ("winner", "cpu", "nvfp4", "got 'winner'"),
        ("linear=", "cpu", "nvfp4", "got 'linear='"),
        ("gemv=cpu_avx2", "cpu", "nvfp4", "got 'gemv=cpu_avx2'"),
        ("linear=cpu_avx3", "cpu", "nvfp4", "linear=cpu_avx3: no file cpu_avx3, nor one of nvfp4_gemv's .*cpu_avx2"),
        ("rms_norm=fast", "cpu", "nvfp4", "rms_norm=fast: no file fast$"),
        ("rms_norm=tests/conftest.py", "cpu", "nvfp4", "conftest.py must define rms_norm, .*: no problem is for it"),
        ("linear=sm90_plain", "cpu", "nvfp4", "linear=sm90_plain: sm90_plain is for sm90, not cpu"),
        ("linear=cpu_avx2", "sm90", "nvfp4", "linear=cpu_avx2: cpu_avx2 is for cpu, not sm90"),
        ("linear=tests/conftest.py", "cpu", "nvfp4", "conftest is for no target, not cpu"),
        ("linear=peer_torch_fp16", "cpu", "nvfp4", "a baseline is there to be compared with"),
        ("nvfp4_gemv=cpu_avx2", "cpu", "bf16", "linear=cpu_avx2: no NVFP4 linears in bf16"),
    ],
)
def test_what_cannot_be_had_is_an_error_that_says_why(text, target, fmt, message, model):
    with pytest.raises(ValueError, match=message):
        ops.choose(text, target, model[fmt])


def test_every_matrix_of_the_linear_ops_is_prepared(model):
    found = [w.name for w in model["nvfp4"].linears()]
    names = {unit.removesuffix(".input_scale") for unit in model["nvfp4"].tensors if unit.endswith(".input_scale")}
    assert len(found) == len(set(found)) and set(found) == {n for n in names if ".ffn." not in n}


# ---------------------------------------------------------------- operators


def gemv_arguments(m: int = 33, k: int = 64, l: int = 3, device: str = "cpu") -> list[torch.Tensor]:
    data = REFERENCE.generate_input(m, k, l, 1, device)
    return [*(tensor.view(torch.uint8) for tensor in data[:6]), data.c.zero_()]


def test_winners_that_fill_ops_are_operators():
    exported = {name for name in vars(operators) if isinstance(vars(operators)[name], torch.library.CustomOpDef)}
    assert {provider.problem for spec in ops.SPECS for provider in spec.providers if provider.adapt} == exported


def test_the_gemv_operator_passes_torchs_own_checks():
    torch.library.opcheck(operators.nvfp4_gemv, gemv_arguments())


def test_the_gemv_operator_writes_the_product():
    data = REFERENCE.generate_input(129, 320, 2, 7, "cpu")
    torch.ops.dsv4.nvfp4_gemv(*(tensor.view(torch.uint8) for tensor in data[:6]), data.c)
    assert REFERENCE.compare(data, REFERENCE.ref_kernel(data), data.c).ok


def test_tracing_refuses_what_the_winner_would_refuse():
    arguments = gemv_arguments()
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in arguments]
        operators.nvfp4_gemv(*fake)
        with pytest.raises(ValueError, match="sfb must be"):
            operators.nvfp4_gemv(*fake[:3], fake[2], *fake[4:])
    with pytest.raises(ValueError, match=r"a must be uint8, .*got torch\.float4_e2m1fn_x2"):
        operators.nvfp4_gemv(arguments[0].view(torch.float4_e2m1fn_x2), *arguments[1:])


# ---------------------------------------------------------------- with a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (517, 832)])
def test_linear_on_the_gpu_is_the_same_product_and_never_waits(n, k):
    w, x = published(n, k), inputs(3, k)
    want, bound = exact(x, w)
    there = dataclasses.replace(
        w, weight=w.weight.cuda(), scale=w.scale.cuda(), scale_2=w.scale_2.cuda(), input_scale=w.input_scale.cuda()
    )
    target = load.device_target("cuda")
    winners = load.constants(load.PROBLEMS / gemv.PROBLEM / "submission.py", "WINNERS")["WINNERS"]
    run = adapted(there, variant=load.winner(load.PROBLEMS / gemv.PROBLEM, winners, target))
    x, out = x.cuda(), torch.full((3, n), math.nan, device="cuda")
    run.linear(x, there, out)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.linear(x, there, out.zero_())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(((out.cpu().double() - want).abs() <= bound).all())


@pytest.mark.gpu
def test_the_gemv_operator_passes_torchs_own_checks_on_the_gpu():
    torch.library.opcheck(operators.nvfp4_gemv, gemv_arguments(device="cuda"))
