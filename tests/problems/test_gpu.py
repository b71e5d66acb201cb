"""Our kernels on a GPU beyond the test cases: more sizes, tokens by themselves, graphs, bad ids, bad reads, a wait."""

import dataclasses
import shutil
import subprocess
import sys

import pytest
import torch

from harness.judge.verdict import Result
from harness.problem import folders
from harness.tools import modes
from problems.common import load
from tests.problems import cases
from tests.problems.cases import SMALL, made, made_for, outputs, poison, prepared, skip_unless_it_runs

pytestmark = pytest.mark.gpu
LINEAR, MHC, MOE, INDEXER = (cases.task(name) for name in ("linear_decode", "mhc_site", "moe_gemm", "indexer"))
OURS = {
    name: [file.stem for file in made_for(load.PROBLEMS / name, "sm90") if file.stem.startswith("sm90_")]
    for name in cases.NAMES
}
PER_THREAD = 2  # cudaStreamPerThread: the default one of code that problems.common.build makes
FLASH, PRO, CHAIN = LINEAR.FLASH, LINEAR.PRO, LINEAR.CHAIN


def file_of(name: str, variant: str) -> object:
    file = load.PROBLEMS / name / "variants" / f"{variant}.py"
    skip_unless_it_runs(file, "cuda")
    return file


def linear(fmt: str, tokens: int, shape: str) -> object:
    return dataclasses.replace(SMALL["linear_decode"], format=fmt, tokens=tokens, shape=shape)


def moe(tokens: int, experts: int, topk: int, hidden: int, inner: int, activation: str) -> object:
    return MOE.Case(tokens, experts, topk, hidden, inner, activation, "uniform", "plain", 3)


# (problem, variant, case, calls): chains and matrices of both models; every number of tokens of a site, around what a
# block, a cluster and a launch take; calls of experts longer than a launch, and many tokens of few experts.
LARGER = [
    *(
        ("linear_decode", variant, linear(fmt, tokens, CHAIN), 201)
        for variant in OURS["linear_decode"]
        for fmt in LINEAR.KINDS
        for tokens in (1, 8, 32)
    ),
    *(
        ("linear_decode", "sm90_mma", linear("fp8", tokens, shape), 1)
        for shape in (*PRO.values(), "128x16384", "129280x256")
        for tokens in (1, 2, 8, 16, 32)
    ),
    *(
        ("mhc_site", variant, MHC.Case(tokens, hidden, MHC.ADDENDS[tokens % 5], content, tokens), 21)
        for variant in OURS["mhc_site"]
        for hidden, content in ((64, "alike"), (1088, "alike"), (4096, "magnitudes"), (7168, "alike"))
        for tokens in (1, 2, 4, 5, 8, 16, 17, 33, 64, 127, 128, 129, 300, 1024, 1025)
    ),
    *(
        ("moe_gemm", "sm90_grouped", moe(tokens, 17, 3, hidden, inner, activation), 1)
        for tokens, hidden, inner in ((300, 64, 448), (513, 1088, 576), (2050, 192, 64))
        for activation in MOE.ACTIVATIONS
    ),
    *(
        ("moe_gemm", "sm90_grouped", moe(tokens, experts, topk, hidden, inner, "bf16"), 1)
        for tokens, topk, experts in ((40, 1, 1), (64, 1, 1), (129, 1, 1), (257, 1, 1), (200, 2, 2))
        for hidden, inner in ((576, 704), (4096, 2048))
    ),
    *(("indexer", load.winner(load.PROBLEMS / "indexer", "sm90"), case, 1) for case in INDEXER.BENCHMARKS),
]


@pytest.mark.parametrize(("name", "variant", "case", "calls"), LARGER, ids=str)
def test_larger_calls_are_right_and_repeat_bit_by_bit(name, variant, case, calls):
    cases.solved.cache_clear()  # of which some fill much of a GPU's memory
    cases.check(name, file_of(name, variant), case, "cuda", calls)


@pytest.mark.parametrize("shape", [FLASH["wq_a+wkv"], FLASH["wo_b"], "3x192x576", "64x2112_128x64", "2x192x8256"])
@pytest.mark.parametrize("fmt", LINEAR.KINDS)
def test_a_token_has_the_same_bits_alone_and_with_any_others(fmt, shape):
    data = made("linear_decode", "cuda", **vars(linear(fmt, 32, shape)))
    indices = [torch.arange(32 - count, 32, device="cuda") for count in (1, 7, 8, 9, 16, 17, 24, 31)]
    cases.check_alone("linear_decode", load.variant("linear_decode", "sm90_mma"), data, indices)


@pytest.mark.parametrize("tokens", [3, 12, 100])
@pytest.mark.parametrize("variant", OURS["mhc_site"])
def test_a_tokens_bits_do_not_depend_on_what_the_others_hold(variant, tokens):
    module = load.variant("mhc_site", file_of("mhc_site", variant).stem)
    case = {"tokens": tokens, "hidden": 4096, "addends": "bf16+bf16"}
    kinds = ("plain", 3), ("magnitudes", 4)
    data, other = (made("mhc_site", "cuda", **case, content=content, seed=seed) for content, seed in kinds)
    mine = tokens // 2
    mixed = other._replace(fn=data.fn, base=data.base, scale=data.scale, norm=data.norm)
    for field in ("y", "second", "copies", "post", "comb"):
        getattr(mixed, field)[mine] = getattr(data, field)[mine]
    for got, want in zip(module.custom_kernel(mixed), module.custom_kernel(data), strict=True):
        assert torch.equal(got[mine], want[mine])


@pytest.mark.parametrize(
    ("name", "variant", "case"),
    [
        *(("linear_decode", "sm90_mma", linear(fmt, t, CHAIN)) for fmt, t in (("fp8", 1), ("nvfp4", 1), ("fp8", 32))),
        *(("linear_decode", "sm90_mma", linear(fmt, 32, FLASH["wo_b"])) for fmt in ("fp8", "bf16")),
        ("linear_decode", "sm90_mma", linear("nvfp4", 9, PRO["wo_b"])),
        *(("mhc_site", "sm90_columns", MHC.Case(tokens, 4096, "bf16", "alike", tokens)) for tokens in (1, 8, 700)),
    ],
    ids=str,
)
def test_a_graph_replays_a_thousand_times(name, variant, case):
    """Of early launches, and of cooperative ones, whose blocks tell each other sums; between eager calls of another
    size, whose tags go on from those of the replays.
    """
    module = load.variant(name, file_of(name, variant).stem)
    arguments, others = (
        prepared(module, made(name, "cuda", **vars(one))) for one in (case, dataclasses.replace(case, tokens=31))
    )
    found = outputs(name, arguments[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(PER_THREAD)):
        module.custom_kernel(*arguments)
        want, graph = [output.clone() for output in found], torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            module.custom_kernel(*arguments)
        for turn in range(1000):
            if turn % 100 == 0:
                module.custom_kernel(*others)
            poison(found)
            graph.replay()
            assert all(map(torch.equal, want, found)), turn


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 32])
@pytest.mark.parametrize("fmt", LINEAR.KINDS)
def test_an_expert_is_both_products(fmt, tokens):
    """Of the sizes of Flash's shared expert."""
    cases.check_expert(fmt, tokens, ("4096x4096", "4096x2048"), "cuda")


def called_with_bad_ids(variant: str, tokens: int, activation: str) -> tuple[object, torch.Tensor]:
    module = load.variant("moe_gemm", file_of("moe_gemm", variant).stem)
    data = made("moe_gemm", "cuda", **vars(moe(tokens, 17, 3, 320, 192, activation)))
    for i, bad in enumerate((-1, 17, 2**31 - 1, -(2**31))):
        data.inputs.topk_ids[i::7, i % 3] = bad
    data.inputs.topk_ids[3:5] = -1
    return data, module.custom_kernel(*prepared(module, data))


@pytest.mark.parametrize("activation", MOE.ACTIVATIONS)
@pytest.mark.parametrize("tokens", [5, 40, 700])
@pytest.mark.parametrize("variant", OURS["moe_gemm"])
def test_ids_that_are_no_experts_leave_the_other_tokens_right(variant, tokens, activation):
    data, out = called_with_bad_ids(variant, tokens, activation)
    good = ((data.inputs.topk_ids >= -1) & (data.inputs.topk_ids < 17)).all(1)
    assert good.any() and not good.all()
    reference = cases.reference("moe_gemm")
    some = reference.rows(data, good.nonzero()[:, 0])
    assert reference.check_implementation(some, out[good]) == (True, "")


@pytest.mark.slow
@pytest.mark.parametrize("variant", OURS["moe_gemm"])
def test_ids_that_are_no_experts_are_no_access_out_of_bounds(variant):
    file_of("moe_gemm", variant)
    tool = shutil.which("compute-sanitizer")
    if not tool:
        pytest.skip("needs compute-sanitizer")
    calls = [(variant, tokens, activation) for tokens in (5, 40, 700) for activation in MOE.ACTIVATIONS]
    code = f"from tests.problems import test_gpu as t\nfor call in {calls}: t.called_with_bad_ids(*call)"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "66", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=load.PROBLEMS.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


IN_VAIN = """
import sys
from pathlib import Path
import torch
from problems.common import load
folder = load.PROBLEMS / "mhc_site"
module, reference = load.from_file(folder, Path(sys.argv[1])), load.module(folder, "reference")
module.custom_kernel(reference.generate_input(int(sys.argv[2]), 4096, "bf16", "alike", 1, "cuda"))
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("tokens", [12, 64])
def test_a_block_that_waits_for_ever_ends_with_a_line_that_says_so(tokens, tmp_path):
    """One block of the launch never tells its sums; the process is another one, since its device context is lost."""
    for each in (load.PROBLEMS / "mhc_site" / "variants").glob("sm90_columns*"):
        shutil.copy(each, tmp_path)
    source = tmp_path / "sm90_columns_blocks.cuh"
    text, told = source.read_text(), "publish_sums<S>(g, shared, tile, thread);"
    broken = text.replace(told, f"if (blockIdx.x) {told}")
    assert broken != text
    source.write_text(broken)
    program = [sys.executable, "-c", IN_VAIN, str(tmp_path / "sm90_columns.py"), str(tokens)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, cwd=load.PROBLEMS.parent)
    assert done.returncode and "time-out, a block waited for the sums of another" in done.stdout + done.stderr


PAST = """__global__ void read(const char* from, size_t at, char* to) { *to = from[at]; }
extern "C" int past(const char* from, size_t at, char* to) {
    read<<<1, 1>>>(from, at, to);
    return cudaGetLastError();
}
"""
CALL = """from ctypes import c_size_t, c_void_p
from pathlib import Path
from problems.common import build
from harness.runner import tree
def custom_kernel(data):
    past = build.cuda(Path(__file__).with_suffix(".cu"), "sm90").function("past", c_void_p, c_size_t, c_void_p)
    *tensors, last = [tensor for tensor in tree.tensors(data) if tensor.numel()]
    build.check(past(tensors[{i}].data_ptr(), tree.raw(tensors[{i}]).numel() - {back}, last.data_ptr()), "past")
"""


@pytest.mark.parametrize(("name", "i", "back"), [*((n, i, 0) for n in cases.NAMES for i in (0, -1)), ("indexer", 0, 1)])
def test_a_read_of_the_byte_behind_a_tensor_is_found_by_sanitize(tmp_path, monkeypatch, name, i, back):
    monkeypatch.setattr(modes, "SANITIZE_TOOLS", ("memcheck",))
    found, file = folders.find(name), tmp_path / "mine.py"
    file.write_text(CALL.format(i=i, back=back))
    file.with_suffix(".cu").write_text(PAST)
    judged = [Result(folders.submission(found, file), "sm90")]
    smallest = min(found.tests, key=lambda case: case.bytes)
    faults = modes.sanitize(found, judged, [smallest], "sm90", lambda _: None)
    assert faults == ([] if back else ["mine memcheck: the tool found errors"])
