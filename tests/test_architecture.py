"""docs/architecture.md names functions of one judged call that exist, and say what they do."""

import ast
import re

import pytest

from tests.support import ROOT

PAGE = ROOT / "docs" / "architecture.md"


def steps() -> list[str]:
    """file:name of each row of the page's table, the file from the repository's root."""
    section = PAGE.read_text().partition("\n## One judged call\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| \d+ \| \w+ \| `([\w./]+:[\w.]+)` \| .+ \|$", section, re.MULTILINE)


def test_page_walks_through_a_call():
    assert len(steps()) >= 15


@pytest.mark.parametrize("step", steps())
def test_step_names_a_function_that_says_what_it_does(step):
    file, _, name = step.partition(":")
    node: ast.AST = ast.parse((ROOT / file).read_text())
    for part in name.split("."):
        inner = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef | ast.ClassDef)}
        assert part in inner, f"{file} has no {name}"
        node = inner[part]
    assert ast.get_docstring(node), f"{step} has no docstring"
