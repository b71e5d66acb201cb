"""The comparison of the model with a GPU: what counts as equal, exact inputs, and the tables of ptx_model/README.md."""

import json

import pytest
import torch

from harness.problem import folders
from problems.common import load
from ptx_model.tools import check, mutants, outputs

ATTENTION = load.PROBLEMS / "fmha_decode"
CASE = {
    "batch": 2,
    "queries": 2,
    "heads": 4,
    "window": 24,
    "compressed": 8,
    "page_window": 4,
    "page_compressed": 2,
    "pool": 16,
    "order": "random",
    "content": "plain",
    "seed": 5,
}


def attention(case):
    task, reference = load.module(ATTENTION, "task"), load.module(ATTENTION, "reference")
    return check.make_inputs(task, reference, case), reference


def test_a_difference_is_counted_in_last_places_of_what_is_not_nearly_zero():
    want = torch.tensor([[1.0, 2.0, -0.0, torch.inf, 1e-3], [0.0, 1e-3, 0.0, torch.nan, 0.0]])
    got = want.clone()
    assert outputs.differences(want, got) == (10, 0)
    got[0, 1], got[0, 2], got[0, 4] = 2 + 2**-22, 2**-31, 1.5e-3  # 1 unit; 2^-30 is that of 2^-7, so half; a million
    assert outputs.differences(got[:, :4], want[:, :4]) == (6, 1)
    assert outputs.differences(got[:, 2:3], want[:, 2:3])[1] > 1e6  # a row of zeros
    assert outputs.differences(got, want)[1] > 1e5
    assert outputs.differences(torch.zeros_like(want), want)[1] is None
    half = torch.tensor([[1.0, 1.0 - 2**-8]]).bfloat16()
    assert outputs.differences(half.flip(1), half) == (0, 1)
    with pytest.raises(ValueError, match=r"want torch\.float32 \(2, 5\), got torch\.float32 \(1, 5\)"):
        outputs.differences(got[:1], want)


def test_exact_attention_is_the_mean_of_all_entries_or_one_entry():
    data, reference = attention(CASE)
    data = outputs._exact_attention(data, 5)
    out, lse = reference.ref_kernel(data)
    entries, scores = reference._scores(data, slice(None))
    ranked = (scores / torch.tensor(2.0).log()).sort(dim=-1, descending=True).values
    assert torch.allclose(out[:, :, ::2], entries.mean(2, keepdim=True).expand_as(out[:, :, ::2]), rtol=0, atol=1e-12)
    assert torch.allclose(lse[:, :, ::2], torch.tensor(32.0, dtype=torch.float64).log())
    assert float((ranked[:, :, 1::2, 0] - ranked[:, :, 1::2, 1]).min()) > 150  # less than the least fp32
    # The largest score times what turns it into a power of two needs no rounding.
    assert torch.equal(ranked[:, :, 1::2, 0], torch.full_like(ranked[:, :, 1::2, 0], float(ranked[0, 0, 1, 0])))


def test_exact_attention_needs_full_lists_of_a_power_of_two():
    for case in ({**CASE, "compressed": 9}, {**CASE, "content": "ragged"}):
        with pytest.raises(folders.UsageError, match="full lists"):
            outputs._exact_attention(attention(case)[0], 5)


def test_every_case_of_the_list_names_one_test_case():
    problems = {problem: folders.find(problem) for problem in {case[0] for case in outputs.CASES}}
    for problem, variant, words in outputs.CASES:
        found = problems[problem]
        assert outputs.TARGET in found.variant(variant).targets
        words = " ".join(word for word in words.split() if word != "exact")
        assert sum(folders.has_words(str(case), words) for case in found.tests) == 1, words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nvfp4_gemv", "sm100_native", "m=33"), "VARIANT must be for sm90"),
        (("nvfp4_gemv", "sm90_plain", "m=33 exact"), "exact sums are made for fmha_decode"),
        (("nvfp4_gemv", "sm90_plain", "m=34"), "no test case of nvfp4_gemv has the words 'm=34'"),
    ],
)
def test_a_wrong_write_says_what_was_wanted(words, said, tmp_path, capsys):
    assert outputs.main(["write", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_file_of_other_sources_is_not_compared(tmp_path, capsys):
    kept = {
        "problem": "nvfp4_gemv",
        "variant": "sm90_plain",
        "target": "sm90",
        "case": {},
        "exact": False,
        "outputs": [],
        "sources": "0",
    }
    torch.save(kept, tmp_path / "a.pt")
    out = tmp_path / "lines"
    assert outputs.main(["compare", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--out", str(out)]) == 1
    said = capsys.readouterr().out
    assert "have changed since it was written" in said and "b.pt: FileNotFoundError" in said
    assert not out.exists()


def test_the_page_has_the_tables_of_the_files():
    page = outputs.PAGE.read_text()
    assert outputs.rendered(page) == page
    results = [json.loads(line) for line in mutants.RESULTS.read_text().splitlines()]
    assert mutants.table(results) in page
    assert all({*one["said"].values()} == {"right"} for one in results if one["mutant"].startswith("none"))


def test_a_later_line_takes_the_place_of_an_earlier_one():
    one = {
        "problem": "nvfp4_gemv",
        "variant": "sm90_plain",
        "case": {"m": 1, "seed": 3},
        "exact": False,
        "output": "c",
        "elements": 2000,
        "equal": 1000,
        "max_ulp": 1,
        "device": "nvidia-h200",
    }
    other = {**one, "case": {"m": 2, "seed": 3}, "max_ulp": 2}
    rows = outputs.table([one, other, {**one, "equal": 2000, "max_ulp": 0}]).splitlines()[2:]
    assert rows == ["| nvfp4_gemv/sm90_plain | c | 2 | 3,000 of 4,000 | 2 ulp | nvidia-h200 |"]
