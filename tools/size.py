"""How many lines each part of the tree has, beside its limit: `make size`. Exit code 1 if one is above it.

Every tracked text counts, as the formatter leaves it, but for records, JSON data and generated pages. A limit goes down
with the work, and up only where an issue names the new value.
"""

import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h", ".c", ".md", ".html", ".js", ".css", ".sh", ".toml", ".yml"}
GENERATED = ("leaderboard/README.md", "docs/exploits.md", "problems/*/task.yml")
# Part -> (its folders and files, limit in lines). A file belongs to the part that names the longest path above it.
PARTS = {
    "harness": (("harness",), 15000),
    "leaderboard": (("leaderboard",), 3300),
    "problems/common": (("problems/common",), 3500),
    "problems, without the model": (("problems",), 31000),
    "problems/dsv4_forward": (("problems/dsv4_forward",), 16000),
    "ptx_model": (("ptx_model",), 11500),
    "packaging": (("packaging",), 1500),
    "tests of harness, leaderboard": (("tests/harness", "tests/leaderboard", "tests/support"), 13734),
    "tests of attacks": (("tests/attacks",), 5500),
    "other tests": (("tests",), 15266),
    "docs": (("docs",), 1535),
    "tools": (("tools",), 593),
    "root": (("",), 411),
}


def tracked() -> list[str]:
    """Return the paths of all files that git tracks and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]


def part_of(path: str) -> str:
    """Return the part that a file belongs to."""
    parents = [str(parent) for parent in PurePosixPath(path).parents]
    parents[-1] = ""
    places = {place: part for part, (folders, _) in PARTS.items() for place in folders}
    return next(places[place] for place in (path, *parents) if place in places)


def lines(paths: list[str]) -> dict[str, int]:
    """Return the lines of each part."""
    found = dict.fromkeys(PARTS, 0)
    for path in paths:
        if PurePosixPath(path).suffix in SUFFIXES and not any(map(PurePosixPath(path).match, GENERATED)):
            found[part_of(path)] += (ROOT / path).read_bytes().count(b"\n")
    return found


def main() -> int:
    """Print the table. Return the exit code."""
    found = lines(tracked())
    for part, (_, limit) in PARTS.items():
        over = "  above its limit" if found[part] > limit else ""
        print(f"{part:32}{found[part]:8,}{limit:8,}{over}")
    print(f"{'all':32}{sum(found.values()):8,}")
    return int(any(found[part] > limit for part, (_, limit) in PARTS.items()))


if __name__ == "__main__":
    sys.exit(main())
