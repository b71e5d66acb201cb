"""task.yml of our problems: their cases in GPU MODE's format, generated from task.py. A service of that format does not
run our folders as they are, since task.py and reference.py import problems.common. Compositions have none.

`.venv/bin/python -m harness.problem.task_yml` writes every problem's; `--check` says which are stale, exit status 1.
"""

import argparse
import ast
import sys

from problems.common import venv

if __name__ == "__main__":
    venv.enter("harness.problem.task_yml")

import yaml

from harness.problem.folders import Problem, find, problem_names

_FILES = ("task.py", "reference.py")


def render(problem: Problem) -> str:
    """The text of task.yml. Benchmarks are those for a GPU."""
    docstring = ast.get_docstring(ast.parse((problem.folder / "task.py").read_text()))
    spec = {
        "files": [{"name": "submission.py", "source": "@SUBMISSION@"}, *({"name": n, "source": n} for n in _FILES)],
        "lang": "py",
        "description": f"{docstring}\n",
        "ranking_by": problem.ranking_by,
        "tests": [{**case.params, "seed": case.seed} for case in problem.tests],
        "benchmarks": [{**case.params, "seed": case.seed} for case in problem.benchmarks["cuda"]],
    }
    head = "# Generated from task.py by `python -m harness.problem.task_yml`; edit that.\n"
    return head + yaml.safe_dump(spec, sort_keys=False, width=120, default_flow_style=None)


def is_stale(problem: Problem) -> bool:
    """Whether a problem of ours should have another task.yml than it has."""
    file = problem.folder / "task.yml"
    return problem.ours and not problem.composition and not (file.is_file() and file.read_text() == render(problem))


def main() -> int:
    parser = argparse.ArgumentParser(description="Write task.yml of every problem.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where one is stale")
    check, stale = parser.parse_args().check, [problem for problem in map(find, problem_names()) if is_stale(problem)]
    if stale and check:
        print(f"stale task.yml: {', '.join(p.name for p in stale)}; run .venv/bin/python -m harness.problem.task_yml")
        return 1
    for problem in stale:
        (problem.folder / "task.yml").write_text(render(problem))
        print(f"wrote {problem.folder / 'task.yml'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
