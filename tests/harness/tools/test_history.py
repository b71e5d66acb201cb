"""Sources of earlier commits: which commit has them, and that a renamed kernel has the machine code that it had."""

import shutil
import subprocess

import pytest

from harness.tools import history
from problems.common import build, load
from tests.support import ROOT

VARIANT = """from pathlib import Path
from problems.common import build
TARGETS = ("sm90",)
def compile_for(target):
    return [build.cuda(Path(__file__).with_suffix(".cu"), target)]
"""
KERNEL = "__global__ void {name}(float* x) {{ x[threadIdx.x] *= {factor}; }}\n"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """-> a function that commits a version of the variant `v` of the problem `p`, and gives its hash as recorded."""
    common, variants = tmp_path / "problems" / "common", tmp_path / "problems" / "p" / "variants"
    variants.mkdir(parents=True)
    shutil.copytree(ROOT / "problems" / "common", common, ignore=shutil.ignore_patterns("__pycache__"))
    (variants.parent / "task.py").write_text("x = 1\n")
    (variants / "v.py").write_text(VARIANT)
    monkeypatch.setattr(history, "ROOT", tmp_path)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)

    def commit(**kernel: object) -> history.Source:
        (variants / "v.cu").write_text(KERNEL.format(**kernel))
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", "a version"], check=True)
        found = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        blank = history.Source("p", "v", "sm90", "", found, True)
        return history.Source("p", "v", "sm90", history.hashes(blank, tmp_path)[0], found, True)

    return commit


def test_the_commit_is_the_records_or_the_one_whose_files_have_its_hash(repository):
    first, second = repository(name="k", factor=2), repository(name="k", factor=3)
    assert first.hash != second.hash and history.commit_of(first) == first.commit
    elsewhere = history.Source("p", "v", "sm90", first.hash, second.commit, True)  # a checkout with changes
    assert history.commit_of(elsewhere) == first.commit
    with pytest.raises(history.UnknownSourceError, match="no commit of this clone"):
        history.commit_of(history.Source("p", "v", "sm90", "0" * 16, second.commit, True))
    with pytest.raises(history.CodeError, match="git archive"):
        history.commit_of(history.Source("p", "v", "sm90", first.hash, "f" * 40, True))


def test_what_is_shared_is_that_of_the_commit(repository, tmp_path):
    before = build.COMMON, load.PROBLEMS
    first = repository(name="k", factor=2)
    (tmp_path / "problems" / "common" / "build.py").write_text("# changed\n")
    second = repository(name="k", factor=2)
    assert first.hash != second.hash and before == (build.COMMON, load.PROBLEMS)
    with history.exported(first.commit) as root:
        assert history.hashes(first, root)[0] == first.hash


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_a_renamed_kernel_has_the_code_that_it_had(repository, tmp_path):
    codes = []
    for kernel in ({"name": "k", "factor": 2}, {"name": "renamed_kernel", "factor": 2}, {"name": "k", "factor": 3}):
        source = repository(**kernel)
        code, compiler = history.compiled(source, tmp_path)
        assert compiler.startswith("nvcc ")
        codes.append(code)
    assert codes[0] == codes[1] != codes[2] and all(codes)
    (tmp_path / "problems" / "p" / "variants" / "v.cu").write_text("no code")
    with pytest.raises(history.CodeError, match="it does not compile"):
        history.compiled(source, tmp_path)


def test_a_variant_that_cannot_have_a_cubin_here_has_no_code(repository, tmp_path):
    source = repository(name="k", factor=2)
    cpu = history.Source("p", "v", "cpu", source.hash, source.commit, True)
    assert history.compiled(cpu, tmp_path) == (None, None)
    file = tmp_path / source.file
    file.write_text(VARIANT + 'REQUIRES = ("no_such_package",)\n')
    assert history.compiled(source, tmp_path) == (None, None)
    file.write_text("def custom_kernel(data): pass\n")
    assert history.compiled(source, tmp_path) == (None, None)
