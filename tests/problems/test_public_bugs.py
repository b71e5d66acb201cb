"""Bugs of public threads (public_bugs.jsonl), each planted in a right variant: some test case refuses it."""

import json
from pathlib import Path

import pytest

from harness.checker import inputs
from harness.runner import tree
from problems.common import load
from tests.problems import cases

BUGS = [json.loads(line) for line in Path(__file__).with_name("public_bugs.jsonl").read_text().splitlines()]
LARGE = "flashinfer-ai/flashinfer#3136"  # wrong in caches above 4 GiB, which no test has
SHOWN = [bug for bug in BUGS if bug["source"] != LARGE]


@pytest.mark.parametrize("bug", SHOWN, ids=lambda bug: bug["source"])
def test_planted_bug_is_refused(bug, tmp_path):
    folder = load.PROBLEMS / bug["problem"]
    text = (folder / "variants" / bug["variant"]).read_text()
    assert text.count(bug["find"]) == 1
    file = tmp_path / "planted.py"
    file.write_text(text.replace(bug["find"], bug["replace"]))
    variant, reference = load.from_file(folder, file), cases.reference(bug["problem"])
    for case in sorted(cases.task(bug["problem"]).TESTS, key=lambda case: case.bytes_moved()):
        data, want = cases.solved(bug["problem"], case)
        mine = tree.clone(data)
        if not inputs.compared(reference, mine, want, variant.custom_kernel(mine), False).ok:
            return
    pytest.fail(f"{bug['what']}: no test case shows it")
