"""Compare the machine code of every kernel in this checkout with that of another commit.

    python -m tests.support.code_sections dcba33e
    python -m tests.support.code_sections main --only nvfp4_gemv/sm90_cute

Print one line a variant and target, then "N of N equal"; the exit status is 1 if one differs. Each side is compiled
with its own build code, for all its targets, without a GPU. Compared are the code sections (.text.*) of every kernel,
whatever the kernel is called: symbols and line numbers do not count. Triton kernels are compared as syntax trees in
which docstrings do not count and names are numbered, because .venv need not have triton. What the other commit compiled
to is kept in .build/code_sections/ for the next comparison.
"""

import argparse
import ast
import concurrent.futures
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.problem import sources
from problems.common import build, load
from tests.support import ROOT

# A kernel of dsv4_forward, which is no variant. The later files are those of earlier commits.
COMPOSITION = "dsv4_forward"
FUSED = f"{COMPOSITION}/fused"
FUSED_FILES = tuple(f"problems/dsv4_forward/{name}.py" for name in ("kernels/norm", "kernels/fused", "fused"))
ELF = b"\x7fELF\x02\x01\x01"  # of 64 bits, little endian
# Runs in the checkout that it compiles, with nothing but that checkout's code. Print the path of each build.
COMPILE = """
import sys
from pathlib import Path
from problems.common import load

file, target = Path(sys.argv[1]), sys.argv[2]
module = load.from_file(Path(*file.parts[:2]), file)
print(*(artefact.path for artefact in module.compile_for(target)), sep="\\n")
"""


def jobs(tree: Path) -> Iterator[tuple[str, str]]:
    """(problem/variant, target) of all kernels of `tree`. A composition compiles those of others, torch its own."""
    for file in sorted(tree.glob("problems/*/variants/*.py")):
        problem = file.parent.parent.name
        ours = problem != COMPOSITION and not file.stem.startswith(("peer_", "torch_"))
        if ours and sources.defines(load.parse(file), "compile_for"):
            yield from ((f"{problem}/{file.stem}", target) for target in load.constants(file, "TARGETS")["TARGETS"])
    yield from ((FUSED, target) for target in build.ARCH)


def compile_at(tree: Path, name: str, target: str) -> list[str]:
    """Compile one variant in `tree`. -> the digests of its code sections, sorted. RuntimeError: it does not compile."""
    with tempfile.TemporaryDirectory() as scratch:
        env = os.environ | {"PYTHONPATH": str(tree), "KERNEL_BUILD_DIR": scratch}
        env |= {"NVCC_APPEND_FLAGS": "-no-compress", "CUTE_DSL_ARCH": build.ARCH.get(target, "")}
        command = [sys.executable, "-c", COMPILE, _file(tree, name), target]
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} for {target} does not compile in {tree}:\n{done.stderr}")
        found = [code for path in done.stdout.split() for code in code_sections(Path(path).read_bytes(), target)]
    if not found:
        raise RuntimeError(f"{name} for {target} has no code section in {tree}")
    return sorted(found)


def _file(tree: Path, name: str) -> str:
    """The Python file of a variant, relative to `tree`."""
    if name == FUSED:
        return next(file for file in FUSED_FILES if (tree / file).is_file())
    return "problems/{}/variants/{}.py".format(*name.split("/"))


def code_sections(binary: bytes, target: str) -> Iterator[str]:
    """The digest of each code section: of the cubins that the file holds (of a GPU target), or of the file itself."""
    wanted = 190 if target in build.ARCH else 62  # EM_CUDA, EM_X86_64
    start = binary.find(ELF)
    while start >= 0:
        machine, sections, size, count, names = struct.unpack_from("<18xH20xQ10xHHH", binary, start)
        if machine == wanted:
            # Of a section: name, offset, size.
            headers = [struct.unpack_from("<I20xQQ", binary, start + sections + i * size) for i in range(count)]
            strings = start + headers[names][1]
            for name, offset, length in headers:
                label = binary[strings + name : binary.index(b"\0", strings + name)]
                if label == b".text" or label.startswith(b".text."):
                    yield hashlib.sha256(binary[start + offset : start + offset + length]).hexdigest()
        start = binary.find(ELF, start + 1)


def triton_kernels(file: Path) -> list[str]:
    """The digest of each kernel and constant of a Triton variant, without docstrings and with numbered names."""
    found = []
    for node in load.parse(file).body:
        kernel = isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
        constant = isinstance(node, ast.Assign) and "constexpr" in ast.unparse(node.value)
        if kernel and ast.get_docstring(node):
            node.body = node.body[1:]
        if kernel or constant:
            found.append(hashlib.sha256(ast.dump(_Numbered().visit(node)).encode()).hexdigest())
    return sorted(found)


class _Numbered(ast.NodeTransformer):
    """Each name becomes the number of its first use, also where it is a parameter or a keyword of a call."""

    def __init__(self) -> None:
        self.numbers: dict[str, str] = {}

    def _number(self, name: str) -> str:
        return self.numbers.setdefault(name, str(len(self.numbers)))

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self._number(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self._number(node.arg)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.name = "kernel"
        return self.generic_visit(node)


def digests(tree: Path, name: str, target: str) -> list[str]:
    """What one variant of `tree` is compared by; see the module's docstring."""
    file = tree / _file(tree, name)
    if "triton" in load.constants(file, "REQUIRES").get("REQUIRES", ()):
        return triton_kernels(file)
    return compile_at(tree, name, target)


def digests_of(commit: str, wanted: list[tuple[str, str]], workers: int) -> dict[tuple[str, str], list[str]]:
    """The same for a commit, from .build/code_sections/ where it was compiled before. What it has not is left out."""
    kept = build.directory() / "code_sections" / f"{commit}.json"
    known = json.loads(kept.read_text()) if kept.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
        there = set(jobs(Path(folder)))
        new = [job for job in wanted if job in there and " ".join(job) not in known]
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for job, found in zip(new, pool.map(lambda job: digests(Path(folder), *job), new), strict=True):
                known[" ".join(job)] = found
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(known))
    return {job: known[" ".join(job)] for job in wanted if job in there}


def main() -> int:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how, allow_abbrev=False)
    parser.add_argument("commit", help="the commit to compare this checkout with")
    parser.add_argument("--only", metavar="TEXT", default="", help="only variants whose problem/name holds this")
    parser.add_argument("--workers", type=int, default=1, help="compilations at a time (default: 1)")
    said = parser.parse_args()
    if not shutil.which("nvcc"):
        parser.error("nvcc is needed on PATH")
    command = ["git", "rev-parse", "--verify", f"{said.commit}^{{commit}}"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if not commit:
        parser.error(f"commit must be one of this repository, got {said.commit!r}")
    wanted = [job for job in jobs(ROOT) if said.only in job[0]]
    if not wanted:
        parser.error(f"--only must be a part of a variant's problem/name, got {said.only!r}, which none has")
    before = digests_of(commit, wanted, said.workers)
    equal = 0
    with concurrent.futures.ThreadPoolExecutor(said.workers) as pool:
        for job, after in zip(wanted, pool.map(lambda job: digests(ROOT, *job), wanted), strict=True):
            same = job in before and after == before[job]
            verdict = "equal" if same else "differs" if job in before else "new"
            print(f"{verdict:8}{len(after):4} sections  {job[1]:6} {job[0]}", flush=True)
            equal += same
    print(f"{equal} of {len(wanted)} equal to {commit[:12]}")
    return 0 if equal == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
