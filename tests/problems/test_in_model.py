"""Our GPU variants in the model of their GPU, on small cases under every order of asynchronous work.

The cases are not square, end inside of tiles, leave experts without tokens, have holes, and turn rings more than once.
"""

import importlib.util
import json
import shutil

import pytest

from ptx_model.tools.check import ORDERS
from tests.dsv4 import in_model
from tests.problems.cases import task
from tests.support import ROOT, forked
from tests.support.marks import first


def gemv(m, k, l):
    return {"m": m, "k": k, "l": l, "seed": 5}


def moe(tokens, experts, topk, hidden, inner, activation="bf16", content="plain", router="uniform"):
    return vars(task("moe_gemm").Case(tokens, experts, topk, hidden, inner, activation, router, content, 5))


def fmha(queries, heads, window, compressed, content="plain"):
    pool = max(128, compressed)
    return vars(task("fmha_decode").Case(2, queries, heads, window, compressed, 64, 2, pool, "random", content, 5))


def linear(format, tokens, shape, content="plain"):
    return vars(task("linear_decode").Case(format, tokens, shape, content, 5))


def mhc(tokens, hidden, addends):
    return vars(task("mhc_site").Case(tokens, hidden, addends, "plain", 5))


EVERY = [  # the first one is in every run
    ("mhc_site", "sm90_columns", "sm90", [mhc(9, 64, "bf16")]),
    ("nvfp4_gemv", "sm100_cute", "sm100", [gemv(33, 64, 3)]),
    ("nvfp4_gemv", "sm100_native", "sm100", [gemv(33, 64, 3)]),
]
# Under most orders the host side is told of few multiprocessors, so that a block has several tiles of 128.
TILED = [
    # Two blocks of heads, the second of 8; a last tile of 94 entries; lengths of each sequence, holes.
    {**fmha(1, 72, 100, 250, "ragged"), "batch": 3, "pool": 300},
    # Scores rise along the list, so that tiles rescale what others have added.
    {**fmha(1, 128, 1, 511, "maxima"), "batch": 4, "order": "sequential"},
    # Shares that are joined; two queries.
    {**fmha(2, 24, 128, 450, "duplicates"), "batch": 1},
    # Lists without an entry, and shares without one.
    fmha(2, 20, 64, 300, "empty"),
]
PREFILL, CHOSEN = task("fmha_prefill"), ("chosen", 64, 3)  # each token's list, of 64 of 67 entries
EMPTY = {**fmha(1, 24, 64, 300, "empty"), "order": "sequential"}
EVERY += [
    ("fmha_decode", "sm100_cute", "sm100", [{**fmha(1, 8, 1, 0), "batch": 1}]),
    ("nvfp4_gemv", "sm100_native", "sm100", [gemv(5, 5184, 1), gemv(40, 17472, 1), gemv(130, 1088, 2)]),
    ("nvfp4_gemv", "sm100_cute", "sm100", [gemv(5, 1088, 2), gemv(23, 17408, 1), gemv(130, 1088, 2)]),
    ("nvfp4_gemv", "sm90_classic_tma", "sm90", [gemv(40, 17472, 2), gemv(33, 64, 3)]),
    ("nvfp4_gemv", "sm90_dp4a", "sm90", [gemv(33, 1088, 2)]),
    ("nvfp4_gemv", "sm90_plain", "sm90", [gemv(5, 8256, 1)]),  # two tiles of x
    (
        "moe_gemm",
        "sm90_grouped",
        "sm100",
        [moe(3, 8, 2, 192, 320), moe(2, 3, 2, 64, 192, "nvfp4"), moe(1, 7, 5, 1088, 192, "nvfp4")],
    ),
    (
        "moe_gemm",
        "sm90_grouped",
        "sm90",
        [
            moe(1, 5, 4, 576, 128, "nvfp4"),
            moe(3, 5, 2, 192, 320, "nvfp4"),
            moe(9, 2, 2, 320, 192, "nvfp4", "zeros"),
            *(moe(t, 3, 2, 576, 64, format, router="none") for t, format in ((1, "nvfp4"), (2, "bf16"))),
            moe(5, 3, 2, 64, 192, router="part"),
        ],
    ),
    # Units that end early, chunks of unequal length, clusters, links that take and that do not.
    (
        "linear_decode",
        "sm90_mma",
        "sm90",
        [
            *(linear("fp8", tokens, shape) for tokens, shape in ((9, "64x2112_128x64"), (1, "64x2112"))),
            linear("fp8", 3, "320x192", "magnitudes"),
            # Chains in one launch, whose first input is more than a piece of 8 values for each thread that multiplies.
            linear("nvfp4", 8, "64x576_64x64"),
            linear("nvfp4", 7, "128x1088+64x1088_64x128_64x64", "magnitudes"),
        ],
    ),
    # Blocks that tell each other sums through memory: 4 and 8 of them, several passes, a group more, a link ahead.
    (
        "linear_decode",
        "sm90_mma",
        "sm90",
        [
            linear("fp8", 24, "128x5504", "magnitudes"),
            linear("nvfp4", 17, "64x8256", "magnitudes"),
            linear("bf16", 32, "192x4160"),
            linear("fp8", 32, "2x64x4160"),
            linear("nvfp4", 18, "4160x64_64x4160"),
        ],
    ),
    # Prefill: tiles of 128 and of 256 tokens that end early, several a block, a last one without rows; scales' tails.
    (
        "linear_decode",
        "sm90_mma",
        "sm90",
        [
            linear("fp8", 65, "192x320", "magnitudes"),
            linear("fp8", 500, "1024x320"),
            linear("nvfp4", 129, "2x128x192_448x256+64x256+128x256", "magnitudes"),
            linear("fp8", 127, "5x64x192", "magnitudes"),
        ],
    ),
    # A cluster for two tokens; twelve tiles of a block, so that stages of shared memory are used again.
    ("mhc_site", "sm90_columns", "sm90", [mhc(5, 128, "bf16"), mhc(705, 64, "bf16+bf16"), mhc(40, 64, "fp32+fp32")]),
    ("fmha_decode", "sm90_wgmma", "sm90", [fmha(1, heads, 37, 91, "ragged") for heads in (8, 20, 64)] + [EMPTY]),
    ("fmha_prefill", "sm90_cute", "sm90", [vars(case) for case in PREFILL.TESTS[:2]]),
    # A block has two tokens, which share the window's tiles but for a row; six tiles turn the two stages.
    ("fmha_prefill", "sm90_wgmma", "sm90", [vars(PREFILL.Case(2, 1, 20, 200, *CHOSEN, 64, 2, "heads", "maxima", 5))]),
    ("fmha_decode", "sm100_cute", "sm100", TILED),
    # A few tokens of 12 experts, of which some have none; units along K that are no whole step, rows no whole tile.
    (
        "moe_gemm",
        "sm100_cute",
        "sm100",
        [
            moe(3, 12, 2, 192, 256, "nvfp4"),
            moe(7, 17, 6, 448, 576, "nvfp4", "magnitudes"),
            moe(1, 8, 6, 512, 320, "nvfp4"),
            moe(60, 2, 1, 192, 512, "nvfp4", "clamped"),  # 64 tokens a tile, nearly full
            # 32 a tile: 2 whole ones and two tokens, of 2 experts; 6 have none.
            moe(66, 8, 2, 64, 256, "nvfp4", "zeros", "one"),
            moe(70, 1, 1, 320, 448, "nvfp4", "extreme"),  # 128 a tile
        ],
    ),
]


# CUDA C++ for sm100 runs in the model in every run of ptx_model/tests/test_bringup.py too.
@pytest.mark.parametrize(("problem", "variant", "target", "cases"), first(EVERY), ids=lambda one: str(one)[:12])
def test_a_variant_is_right_in_the_model(problem, variant, target, cases):
    """In every case under every order."""
    cute = "cute" in variant
    if not (importlib.util.find_spec("cutlass") if cute else shutil.which("nvcc")):
        pytest.skip("needs CuTe DSL" if cute else "needs nvcc")
    folder = ROOT / "problems" / problem
    file, asked = folder / "variants" / f"{variant}.py", json.dumps(cases)
    ran = forked.run(["-m", "ptx_model.tools.check", folder, file, target, asked])
    replies = [json.loads(line) for line in ran.stdout.splitlines()]
    every = [(case, order.policy) for case in range(len(cases)) for order in ORDERS]
    assert [(one["case"], one["order"]) for one in replies] == every, ran.stderr[-2000:]
    wrong = [one for one in replies if one["status"] != "MODEL_CHECKED"]
    assert not wrong, wrong[0]


@pytest.mark.slow
def test_an_expert_in_one_launch_is_right_in_the_model():
    """It is both products, with SwiGLU between them, and a token's bits are those that it has by itself. Two blocks
    share the first input, 8 tokens of 2112 columns: one takes it to registers, the other copies it.
    """
    calls = [("check_expert", {"fmt": "nvfp4", "tokens": 8, "shapes": ("512x2112", "128x256")})]
    in_model.run("tests.problems.cases", calls, orders=ORDERS)
