"""mhc_site's kernels on a GPU beyond the cases: graphs, repeated bits, tokens by themselves, a wait that is in vain."""

import shutil
import subprocess
import sys

import pytest
import torch

from problems.common import load

FOLDER = load.PROBLEMS / "mhc_site"
task = load.module(FOLDER, "task")
reference = load.module(FOLDER, "reference")
OURS = [file.stem for file in sorted((FOLDER / "variants").glob("sm90_*.py"))]
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
PER_THREAD = 2  # cudaStreamPerThread: the default one of code that problems.common.build makes
pytestmark = pytest.mark.gpu


def variant(name: str) -> object:
    for package in load.constants(FOLDER / "variants" / f"{name}.py", "REQUIRES").get("REQUIRES", ()):
        pytest.importorskip(package)
    return load.variant("mhc_site", name)


def outputs(data: object) -> list[torch.Tensor]:
    return [getattr(data, name).clone() for name in task.OUTPUTS]


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 16, 17, 33, 64, 127, 129, 300, 1025])
@pytest.mark.parametrize("hidden", [64, 832, 4096, 7168])
@pytest.mark.parametrize("name", OURS)
def test_every_number_of_tokens_is_right(name, tokens, hidden):
    kinds = task.ADDENDS[tokens % len(task.ADDENDS)]
    data = reference.generate_input(tokens, hidden, kinds, "alike", tokens, "cuda")
    result = reference.compare(data, reference.ref_kernel(data), variant(name).custom_kernel(data))
    assert result.ok, result.message


@pytest.mark.parametrize("tokens", [1, 8, 128, 1024])
@pytest.mark.parametrize("name", OURS)
def test_a_call_repeats_bit_for_bit(name, tokens):
    data, module = reference.generate_input(tokens, 4096, "bf16+bf16", "magnitudes", 3, "cuda"), variant(name)
    module.custom_kernel(data)
    first = outputs(data)
    for _ in range(20):
        for output in (data.new_copies, data.out, data.new_post, data.new_comb):
            output.fill_(torch.nan)
        module.custom_kernel(data)
        assert all(torch.equal(a, b) for a, b in zip(first, outputs(data), strict=True))


@pytest.mark.parametrize("tokens", [3, 12, 100])
@pytest.mark.parametrize("name", OURS)
def test_a_tokens_bits_do_not_depend_on_what_the_others_hold(name, tokens):
    data, module = reference.generate_input(tokens, 4096, "bf16+bf16", "plain", 3, "cuda"), variant(name)
    other = reference.generate_input(tokens, 4096, "bf16+bf16", "magnitudes", 4, "cuda")
    mine = tokens // 2
    mixed = other._replace(fn=data.fn, base=data.base, scale=data.scale, norm=data.norm)
    for field in ("y", "second", "copies", "post", "comb"):
        getattr(mixed, field)[mine] = getattr(data, field)[mine]
    for got, want in zip(module.custom_kernel(mixed), module.custom_kernel(data), strict=True):
        assert torch.equal(got[mine], want[mine])


@pytest.mark.parametrize("tokens", [1, 8, 200])
def test_a_graph_replays_a_thousand_times(tokens):
    """Between eager calls of another size, whose tags go on from those of the replays."""
    module, graph = variant("sm90_columns"), torch.cuda.CUDAGraph()
    data, other = (reference.generate_input(t, 4096, "bf16", "alike", t, "cuda") for t in (tokens, 33))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(PER_THREAD)):
        module.custom_kernel(data)
        want = outputs(data)
        queue = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=queue, capture_error_mode="thread_local"):
            module.custom_kernel(data)
        for turn in range(1000):
            if turn % 100 == 0:
                module.custom_kernel(other)
            for output in (data.new_copies, data.out, data.new_post, data.new_comb):
                output.fill_(torch.nan)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(want, outputs(data), strict=True)), turn


@pytest.mark.parametrize("tokens", [12, 64])
def test_a_block_that_waits_for_ever_ends_with_a_line_that_says_so(tokens, tmp_path):
    """One block of the launch never tells its sums; the process is another one, since its device context is lost."""
    for each in (FOLDER / "variants").glob("sm90_columns*"):
        shutil.copy(each, tmp_path)
    source = tmp_path / "sm90_columns.cu"
    text, told = source.read_text(), "publish_sums<S>(g, shared, tile, thread);"
    broken = text.replace(told, f"if (blockIdx.x) {told}")
    assert broken != text
    source.write_text(broken)
    program = [sys.executable, "-c", IN_VAIN, str(tmp_path / "sm90_columns.py"), str(tokens)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, cwd=FOLDER.parent.parent)
    assert done.returncode and "time-out, a block waited for the sums of another" in done.stdout + done.stderr
