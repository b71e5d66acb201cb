"""Problems, variants of one and words that a shell completes; and new ones, which work before they are changed."""

import argparse
import keyword
import re
import shutil
from pathlib import Path

from harness.problem import folders, scan, task_yml
from harness.problem.folders import Problem, Submission, UsageError
from harness.results import output, text
from problems import wrong
from problems.common import load

TEMPLATE = Path(__file__).resolve().parents[2] / "tools" / "new_problem"
SOURCES = (".cu", ".cpp")
PLAIN = ("_plain", "_portable")  # ends of names: the variants that are there to be read


def listed(problem: str | None) -> int:
    """Print the problems, or the variants of one. Nothing of a problem is run. Return the exit code."""
    if problem is None:
        for name in folders.problem_names():
            with folders.reading(name):
                about = load.summary(load.PROBLEMS / name / "task.py")
            output.say(f"{name:<20} {text.line(about)}")
        return 0
    folder = folders.place(problem)
    with folders.reading(problem):
        folders.is_own(folder)
    listed = list(folders.listing(folder))
    if not listed:
        output.say(text.line(f"{folder} has no variants/*.py: judge a file with --submission FILE"))
    for name, targets, summary in listed:
        output.say(text.line(f"{name:<24} {','.join(targets):<12} {summary}"))
    return 0


def completion(parsers: list[argparse.ArgumentParser], shell: str) -> int:
    """Print a script that completes the words of commands, each a parser by the name that the shell knows."""
    import shtab

    def fill(parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for below in action.choices.values():
                    fill(below)
            elif action.dest == "problem":
                action.choices = folders.problem_names()
            elif action.metavar in ("FILE", "OTHER"):
                vars(action)["complete"] = shtab.FILE

    for parser in parsers:
        fill(parser)
        output.say(shtab.complete(parser, shell))
    return 0


def run(problem: str, variant: str | None) -> int:
    """Write a new problem, or a variant of one, print what was written and how to go on. Return the exit code."""
    if variant is None:
        files, how = new_problem(problem), f"{problem} --mode test"
    else:
        parent = folders.find(problem)
        files, how = new_variant(parent, variant), f"{parent.name} --variant {variant} --mode test"
    for file in files:
        output.say(f"wrote {file.relative_to(load.PROBLEMS.parent)}")
    output.say(f"next: .venv/bin/python harness/run.py {how}")
    return 0


def wrong_kernels(problem: str, name: str | None) -> int:
    """Write the kernels that the problem's check must refuse, and print the file of one, or all. -> exit code."""
    files = {file.stem: file for own in [folders.find(problem)] if own.ours for file in wrong.write(own.folder)}
    if name and name not in files:
        raise UsageError(f"NAME must be one of {', '.join(files) or 'none'}, got {name!r}")
    for file in [files[name]] if name else files.values():
        output.say(text.line(f"{file}  {load.summary(file)}"))
    return 0


def new_problem(name: str) -> list[Path]:
    """Write problems/NAME/ from the template. Return its files. UsageError: the name cannot be used."""
    _see_name("PROBLEM", name, r"[a-z][a-z0-9_]*", "have small letters, digits and _, a letter first")
    folder = load.PROBLEMS / name
    if folder.exists():
        raise UsageError(f"{folder} is there already, nothing was written; a variant of it: new {name} VARIANT")
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        path.write_text(path.read_text().replace(TEMPLATE.name, name))
    spec = folder / "task.yml"
    spec.write_text(task_yml.render(folders.find(name)))
    return [*files, spec]


def new_variant(problem: Problem, name: str) -> list[Path]:
    """Write variants/NAME.py, and its source, as a copy of `plainest`. Return the files. UsageError: it cannot be."""
    pattern = rf"({'|'.join(folders.TARGETS)})_[a-z0-9_]+"
    _see_name("VARIANT", name, pattern, "begin with cpu_, sm90_ or sm100_, for example cpu_mine")
    if not problem.ours or problem.folder.parent != load.PROBLEMS:
        raise UsageError(f"{problem.name} is none of problems/: write a file, and name it --submission")
    target = name.partition("_")[0]
    first = plainest(problem, target)
    pairs = [(path, path.with_name(name + path.suffix)) for path in files_of(first)]
    if there := [new for new in problem.folder.glob(f"variants/{name}.*") if new.suffix in (".py", *SOURCES)]:
        raise UsageError(f"{there[0]} is there already, nothing was written")
    for old, new in pairs:
        text = old.read_text()
        if new.suffix == ".py":
            text = _renamed(text, first, target, name)
        new.write_text(text)
    return [new for _, new in pairs]


def plainest(problem: Problem, target: str) -> Submission:
    """The variant that a new one for `target` begins as: for every CPU, plain, short. UsageError: there is none."""
    candidates = [variant for variant in problem.submissions() if target in variant.targets and not variant.baseline]
    candidates = [sub for sub in candidates if sub.name.partition("_")[0] not in {*folders.TARGETS} - {target}]
    if not candidates:
        raise UsageError(f"{problem.name} has no variant for {target} to begin with")

    def order(variant: Submission) -> tuple:
        size = sum(path.stat().st_size for path in files_of(variant))
        flags = bool(load.constants(variant.file, "CPU_FLAGS"))
        return flags, len(files_of(variant)) == 1, not variant.name.endswith(PLAIN), size, variant.name

    return min(candidates, key=order)


def files_of(submission: Submission) -> list[Path]:
    """Return the variant's Python file, and its source of the same stem."""
    sources = [submission.file.with_suffix(suffix) for suffix in SOURCES]
    return [submission.file, *(path for path in sources if path.is_file())]


def _renamed(text: str, first: Submission, target: str, name: str) -> str:
    """Return the text of a variant with a first line that says what it is, and its target as the only one."""
    head = f'"""{name}: {first.name} as it was; say here what you change and what it does.'
    text = re.sub(r'\A"""[^\n]*?("""\n|\n)', lambda end: head + end[1], text)
    return re.sub(r"^TARGETS = \(.*?\).*$", f'TARGETS = ("{target}",)', text, count=1, flags=re.MULTILINE)


def _see_name(argument: str, name: str, pattern: str, wanted: str) -> None:
    if not (len(name) <= 40 and text.can_name(name) and not keyword.iskeyword(name) and re.fullmatch(pattern, name)):
        raise UsageError(f"{argument} must {wanted}, have at most 40 characters and be no word of Python, got {name!r}")
    if scan.WORD.search(name):
        raise UsageError(f"{argument} must not hold the reserved word of rule 1, {scan.WORD.pattern!r}, got {name!r}")
