"""moe_gemm's tcgen05 variant: layouts byte by byte, limits, ids that are no experts. See also test_in_model.py."""

import functools
import json
import os

import pytest
import torch

from problems.common import load
from tests.problems import cases
from tests.support import ROOT, forked

pytest.importorskip("cutlass")

FOLDER = load.PROBLEMS / "moe_gemm"
# In a process of its own, since the model takes CUDA's place in the whole process. Ids of -1, of neighbours too, and
# one that is neither that nor an expert: what its token gets is free; nothing is written out of bounds, and the others
# are right. What no kernel has written is NaN.
BAD_IDS = """
import json, torch
from ptx_model import driver

model = driver.install("sm100")
from problems.common import load
from tests.problems import cases

variant = load.variant("moe_gemm", "sm100_cute")
model.multiprocessors = 2
data = cases.made("moe_gemm", tokens=5, experts=6, hidden=128, inner=256, activation="nvfp4", seed=7)
data.inputs.topk_ids[1, 0] = data.inputs.topk_ids[2:4] = -1
data.inputs.topk_ids[0, 1] = len(data.weights.w13)
want = cases.reference("moe_gemm").ref_kernel(data)
torch.use_deterministic_algorithms(True)
out = variant.custom_kernel(data._replace(weights=variant.prepare(data.weights)))
model.check()
print(json.dumps([float((out[1:].double() - want[1:]).norm() / want[1:].norm()), bool(out[2:4].any())]))
"""


@functools.cache
def variant():
    return load.module(FOLDER, "variants/sm100_cute")


# A product of core matrices without a swizzle, 8 rows 256 bytes apart and halves of K 128, as CuTe DSL makes it.
DESCRIPTOR = """
import json, re, sys
import cutlass
from cutlass import Float16, Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05


@cute.kernel
def multiply():
    k = OperandMajorMode.K
    op = tcgen05.MmaF16BF16Op(
        Float16, Float32, (128, 64, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM, k, k
    )
    mma = cute.make_tiled_mma(op)
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_INTER, Float16)
    memory = cutlass.memory.SmemAllocator()
    parts = []
    for shape, make in (
        (mma.partition_shape_A((128, 16)), mma.make_fragment_A), (mma.partition_shape_B((64, 16)), mma.make_fragment_B)
    ):
        layout = tcgen05.tile_to_mma_shape(atom, cute.append(shape, 1), order=(2, 1, 3))
        tile = memory.allocate_tensor(Float16, layout.outer, byte_alignment=128, swizzle=layout.inner)
        parts.append(make(tile)[None, None, 0, 0])
    at = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
    sums = cute.make_tensor(at, mma.make_fragment_C(mma.partition_shape_C((128, 64))).layout)
    cute.gemm(mma, sums, *parts, sums)


@cute.jit
def launch():
    multiply().launch(grid=(1, 1, 1), block=(32, 1, 1))


text = cute.compile(launch, options=f"--keep-ptx --dump-dir {sys.argv[1]}").artifacts.PTX
text = text if isinstance(text, str) else text.decode()
print(json.dumps(sorted({int(n) for n in re.findall("or.b64 .*, ([0-9]{12,});", text)})))
"""


@pytest.mark.slow
def test_ids_that_are_no_experts_spoil_no_other_token():
    ran = forked.run(["-c", BAD_IDS])
    assert ran.returncode == 0, ran.stderr
    error, written = json.loads(ran.stdout.splitlines()[-1])
    assert error < 2e-2 and not written


@pytest.mark.slow
def test_descriptors_are_those_of_cute_dsl(tmp_path):
    script = tmp_path / "descriptor.py"
    script.write_text(DESCRIPTOR)
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_100a", "PYTHONPATH": str(ROOT)}
    ran = forked.run([script, tmp_path], env=environment)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == [variant().descriptor(256)]


def weights(hidden: int, inner: int, activation: str = "nvfp4"):
    case = {"experts": 2, "topk": 1, "hidden": hidden, "inner": inner, "activation": activation}
    return cases.made("moe_gemm", **case).weights


@pytest.mark.parametrize(("hidden", "inner"), [(192, 64), (64, 192), (320, 128)])
def test_units_hold_every_code_and_scale_where_the_comment_says(hidden, inner):
    given = weights(hidden, inner)
    state = variant().prepare(given)

    def row13(tile: int, row: int) -> int:
        return row % 32 // 16 * inner + 64 * tile + 16 * (row // 32) + row % 16

    second = state.units2, given.w2, given.s2, lambda tile, row: 128 * tile + row
    for units, codes, scales, row_of in ((state.units13, given.w13, given.s13, row13), second):
        experts, tiles, steps, size = units.shape
        assert size == 4608 and (experts, steps) == (2, codes.shape[2] // 32)
        for tile, step, row in ((t, s, r) for t in range(tiles) for s in range(steps) for r in range(128)):
            at, unit = row_of(tile, row), units[:, tile, step]
            first = [256 * (row // 8) + 128 * half + 16 * (row % 8) for half in range(2)]
            here = torch.cat([unit[:, i : i + 16] for i in first], 1)
            assert torch.equal(here, codes[:, at, 32 * step :][:, :32] if at < codes.shape[1] else here * 0)
            here = unit[:, 4096 + 16 * (row % 32) + 4 * (row // 32) :][:, :4]
            there = scales.view(torch.uint8)[:, at, 4 * step : 4 * step + 4] if at < scales.shape[1] else here * 0
            assert torch.equal(here, there)


def test_prepared_weights_are_hardly_larger_and_only_for_fp4_tokens():
    given = weights(448, 64)
    state = variant().prepare(given)
    before, after = (sum(tensor.nbytes for tensor in some) for some in (given[:-1], state))
    assert after <= 1.05 * before + 64 * 2**20
    with pytest.raises(ValueError, match="activation must be 'nvfp4' for products of FP4 with FP4, got 'bf16'"):
        variant().prepare(weights(64, 64, "bf16"))


@pytest.mark.parametrize("tokens", [0, 8, 24, 144, 256])
def test_a_tile_that_the_hardware_does_not_have_is_refused(tokens):
    with pytest.raises(ValueError, match=f"tokens must be a multiple of 16 from 16 to 128, got {tokens}"):
        variant().Plan(tokens)


def test_plans_fill_shared_and_tensor_memory_and_follow_the_load():
    plans = variant().PLANS
    assert [plan.columns for plan in plans] == [64, 128, 256, 512]
    assert all(plan.stages >= 2 and plan.stages * plan.stage_bytes <= 232_448 - 8_192 for plan in plans)
    chosen = [variant().plan_for(6 * t, 256).tokens for t in (1, 8, 64, 256, 1024, 4096)]
    assert chosen == [16, 16, 16, 16, 64, 128] and variant().plan_for(64, 1).tokens == 64
