"""The tools of this folder: clock_table.py, slowly with three files of its table, honest_pairs.py and bare_loop.py."""

import json

import pytest
import torch

from harness.problem import folders
from problems.common import load
from tests.attacks import bare_loop, honest_pairs
from tests.attacks import clock_table as table
from tests.attacks import test_attacks as suite

FILE = suite.BY_NAME["late_done_at_2"]


@suite.each(table.files())
def test_every_file_has_forms(file, tmp_path):
    for number in (*table.FORMS, table.HONEST):
        assert f"HONEST_OF_FOUR = {number}" in table.form(file, number, tmp_path).read_text()


def test_a_form_brings_its_sources(tmp_path):
    names = {path.name for path in table.form(FILE, 4, tmp_path).parent.iterdir()}
    assert names == {FILE.name, f"{FILE.stem}.cpp", "attack.h", "rounds.h"}


def test_the_page_names_what_is_below_the_bound(tmp_path):
    out = tmp_path / "found.jsonl"
    lines = [
        {"file": FILE.stem, "form": 0, "verdict": "INCORRECT"},
        {"file": FILE.stem, "form": 1, "verdict": "PASSED", "ratio": 0.99, "low": 0.97, "high": 1.01},
        {"file": FILE.stem, "form": 2, "verdict": "PASSED", "ratio": 0.9, "low": 0.89, "high": 0.91},
    ]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = table.read(out)
    page = table.render(found)
    assert [one.outcome == table.BELOW for one in found] == [False, False, True]
    assert f"Below the bound: {FILE.stem}." in page and "0.900 (0.890 to 0.910)" in page
    assert "No form that passes is below the bound." in table.render(found[:2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clock_patched", "host_load_thread", "memory_pages_locks"])
def test_no_form_passes_with_a_false_time(name, tmp_path):  # of all files, which takes hours: clock_table.py itself
    out = tmp_path / "found.jsonl"
    table.run(out, [suite.BY_NAME[name]], processes=6, pairs=6)
    assert not [one for one in table.read(out) if one.outcome == table.BELOW]


RECORD = {"problem": "p", "variant": "a", "status": "PASSED", "commit": "c" * 40, "environment": {"gpu": "NVIDIA H200"}}
RECORD |= {"clock": {"name": "event pair in the player"}}


def test_pairs_are_counted_by_their_verdict():
    lines = []
    for kind, word, ratio in (("same", "SAME", 1.001), ("same", "SLOWER", 1.01), ("longer", "SLOWER", 1.02)):
        against = {"ratio": ratio, "ci95": [0.99, 1.03], "ci99": [0.98, 1.04], "word": word}
        lines.append(honest_pairs.line_of(kind, 8, RECORD | {"against": against}))
    lines.append(honest_pairs.line_of("longer", 8, RECORD | {"status": "RUNTIME_ERROR"}))
    rows = honest_pairs.render(lines).splitlines()
    assert "| with itself | p | 8 | 2 | 1 | 0 | 1 | 0 | 0 | 1.0010 to 1.0100 |" in rows
    assert f"| {honest_pairs.KINDS['longer']} | p | 8 | 2 | 0 | 0 | 1 | 0 | 1 | 1.0200 to 1.0200 |" in rows
    assert rows[-1] == "Measured on NVIDIA H200 at ccccccccc."


@pytest.mark.slow
def test_calls_share_prepared_weights_and_have_inputs_of_their_own():
    variant = load.variant("moe_gemm", "torch_grouped")
    case = next(case for case in folders.find("moe_gemm").timed("cpu") if case.params["tokens"] == 1)
    data = bare_loop.contents("moe_gemm", variant, case, "cpu")
    assert len(data) == bare_loop.BUFFERS
    assert data[0].weights is data[1].weights
    assert not torch.equal(data[0].inputs.x, data[1].inputs.x)
    variant.custom_kernel(data[1])
    assert data[1].outputs.out.isfinite().all() and data[0].outputs.out.isnan().all()


def test_contents_of_a_problem_without_weights_are_its_own():
    case = folders.find("nvfp4_gemv").timed("cpu")[0]
    data = bare_loop.contents("nvfp4_gemv", load.variant("nvfp4_gemv", "torch_dequant"), case, "cpu")
    assert not torch.equal(data[0][0].view(torch.uint8), data[1][0].view(torch.uint8))
