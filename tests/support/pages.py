"""The commands in the code blocks of the pages, and a checkout to run them in."""

import re
import shutil
import subprocess
from pathlib import Path

from harness.problem import folders
from harness.tools import scaffold
from tests.support import ROOT, SUPPORT, tiny_checkpoint

PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "leaderboard/README.md", "ptx_model/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("problems/*/README.md")),
]
BEGIN = re.compile(r"(\$ )?((?:make|git|sh|cd|cp|\.venv/bin/[\w.-]+|[\w./-]+\.sh) .*|\.ci/run)")
SHELLS = ("", "sh", "bash", "console", "shell", "text")
SNIPPET = re.compile(r'^\.venv/bin/python -c "$')
# A submission that is right and only for a CPU, for "my.py" on the pages.
MINE = '''"""my: plain torch."""
from task import unpack
from problems.common import nvfp4

TARGETS = ("cpu",)


def custom_kernel(data):
    m, k, l = unpack(data)
    for i in range(l):
        w = nvfp4.dequantise(data.a[:, :, i], data.sfa[:, :, i])
        data.c[:, 0, i] = (w @ nvfp4.dequantise(data.b[0, :, i], data.sfb[0, :, i])).half()
    return data.c
'''


def commands() -> dict[str, str]:
    """Every command in a code block, without its comment: {command: page}. A snippet of Python has several lines."""
    found: dict[str, str] = {}
    for page in PAGES:
        if page.is_file():
            for command in of_text(page.read_text().replace("/tmp/", "drafts/")):
                found.setdefault(command, page.relative_to(ROOT).as_posix())
    return found


def of_text(text: str) -> list[str]:
    found: list[str] = []
    fence, inside = None, False  # the language of a fenced block; in a snippet of several lines
    for line in text.splitlines():
        if line.startswith("```"):
            fence, inside = line.strip("`") if fence is None else None, False
        elif fence in SHELLS or (fence is None and line.startswith("    ")):
            line = line if fence is not None else line[4:]
            if inside:
                found[-1] += "\n" + line
                inside = not line.endswith('"')
            elif command := BEGIN.fullmatch(line):
                inside = bool(SNIPPET.match(command[2]))
                found.append(re.split(r"\s{2,}|\s+# ", command[2])[0])
    return found


def checkout(folder: Path) -> Path:
    """A copy of this checkout without its history, with the environment of this one, and with what the examples of the
    pages name: a submission, a folder in GPU MODE's format, a checkpoint, and the variants sm90_mine and sm90_naive.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    for name in map(Path, filter(None, listed.decode().split("\0"))):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv", target_is_directory=True)
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "drafts").mkdir()  # for /tmp
    for name in ("my.py", "path/to/my.py"):
        (folder / name).write_text(MINE)
    shutil.copytree(SUPPORT / "gpu_mode" / "vectoradd", folder / "path" / "to" / "gpu_mode_problem")
    for helper in ("utils.py", "eval.py"):
        shutil.copy2(SUPPORT / "gpu_mode" / helper, folder / "path" / "to" / helper)
    tiny_checkpoint.write(folder / "path" / "to" / "checkpoint")
    variants = folder / "problems" / "nvfp4_gemv" / "variants"
    page = (ROOT / "docs" / "adding_a_kernel.md").read_text()
    for language, suffix in (("python", "py"), ("cuda", "cu")):
        (code,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        (variants / f"sm90_naive.{suffix}").write_text(code)
    for old in scaffold.files_of(folders.find("nvfp4_gemv").variant("sm90_plain")):
        shutil.copy2(old, variants / f"sm90_mine{old.suffix}")
    return folder
