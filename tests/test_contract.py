"""docs/adding_a_kernel.md lists the names of problems' and variants' files that the harness reads, and no others."""

import ast
import re

from tests.support import ROOT

PAGE = ROOT / "docs" / "adding_a_kernel.md"
ELSE = ROOT / "harness" / "problem" / "gpu_mode.py"  # reads GPU MODE's folders, whose form is not ours
FILES = [*sorted({*(ROOT / "harness").rglob("*.py")} - {ELSE}), ROOT / "problems" / "common" / "load.py"]
# What holds a module of a problem where the harness reads it; in single files also a case, and the class of cases.
HOLDERS = {"task", "reference", "module", "hook"}
MORE = {"harness/problem/folders.py": {"spec"}, "harness/checker/checker.py": {"kind"}}
# Of other things that go by these names: paths, a dict, a field that every case has.
OTHERS = {
    "harness/problem/sources.py": {"is_file"},
    "harness/problem/folders.py": {"seed"},
}
BY_HAND = {"main"}  # of check.py, which runs as a program


def last(node: ast.AST) -> str:
    """The last name of an expression: "task" of self.task, "module" of load.module(...)."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def words(nodes: list[ast.expr]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def read_by_the_code() -> set[str]:
    found = set(BY_HAND)
    for file in FILES:
        name = file.relative_to(ROOT).as_posix()
        holders, seen = HOLDERS | MORE.get(name, set()), set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and last(node.value) in holders:
                seen.add(node.attr)
            elif isinstance(node, ast.Call) and last(node) in ("getattr", "hasattr") and last(node.args[0]) in holders:
                seen |= words(node.args[1:2])
            elif isinstance(node, ast.Call) and last(node) == "constants":
                seen |= words(node.args[1:])
        found |= {one for one in seen - OTHERS.get(name, set()) if not one.startswith("__")}
    return found


def listed_on_the_page() -> set[str]:
    cells = re.findall(r"^\| (`.+?`) \|", PAGE.read_text(), re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([\w.]+)", cell)]
    return {name.removeprefix("Case.") for name in names}


def test_the_page_lists_what_the_code_reads():
    assert listed_on_the_page() == read_by_the_code()
