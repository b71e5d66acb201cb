"""tests/attacks/clock_table.py: forms of a file, the page, and, slowly, the table itself."""

import json

import pytest

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
def test_no_form_passes_with_a_false_time(tmp_path):
    out = tmp_path / "found.jsonl"
    table.run(out, table.files(), processes=6, pairs=6)
    assert not [one for one in table.read(out) if one.outcome == table.BELOW]
