"""What --against says on a GPU of pairs whose ratio is known: equal kernels, and one that takes 1 % longer.

python -m tests.attacks.honest_pairs run [--out FILE] [--same N] [--slowed N]
python -m tests.attacks.honest_pairs render [--out FILE]

run appends a line for each pair to FILE (docs/honest_pairs.jsonl). render writes the table of those that the present
clock timed to docs/rules.md.
"""

import argparse
import json
import shutil
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import torch

from harness import run
from harness.player import player
from harness.problem import folders
from harness.results import output
from tests.support import ROOT

DOC = ROOT / "docs" / "rules.md"
OUT = ROOT / "docs" / "honest_pairs.jsonl"
MARKS = "<!-- pairs:begin -->", "<!-- pairs:end -->"
# (problem, words of a case, processes): levels of processes differ by 0.2 and 1 %.
SAME = (("fmha_decode", "batch=128 heads=128", 12), ("nvfp4_gemv", "m=7168 k=16384", 20))
SLOWED = SAME[0]
CLOCKS = 1, 2000  # that the kernel behind the call waits: 1 us more on an H100 or H200
WAITS = """

_plain = custom_kernel


def custom_kernel(data):
    out = _plain(data)
    torch.cuda._sleep({clocks})
    return out
"""
KINDS = {
    "same": "with itself",
    "slowed": "with a copy that a kernel of 2.3 us follows",
    "longer": "as two copies, one of which waits 1 us longer",
}
WORDS = ("SAME", "FASTER", "SLOWER", "UNDECIDED")


def judged(arguments: list[str]) -> list[dict]:
    """Return the records of a call of harness/run.py."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "records.jsonl")
        run.main([*arguments, "--mode", "benchmark", "--quiet", "--json", str(file)])
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def line_of(kind: str, processes: int, record: dict) -> dict:
    """Return what counts of the record of a pair."""
    line = {"kind": kind, **{name: record.get(name) for name in ("time", "problem", "variant", "case", "status")}}
    line |= {"reason": record.get("reason"), "us": record.get("median_us"), "calls": record.get("n")}
    line |= {"gpu": record["environment"]["gpu"], "commit": record["commit"], "processes": processes}
    line["clock"] = record["clock"]["name"]
    return line | {name: (record.get("against") or {}).get(name) for name in ("ratio", "ci95", "ci99", "word")}


def compare(out: Path, kind: str, processes: int, arguments: list[str]) -> None:
    """Run harness/run.py with a pair, and append its line to `out`."""
    found = judged([*arguments, "--processes", str(processes)])
    for record in [record for record in found if record.get("against")] or found:
        line = line_of(kind, processes, record)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(kind, line["problem"], line["status"], line["ratio"], line["ci95"], line["word"], flush=True)


def waiting_copy(winner: Path, place: Path, clocks: int) -> str:
    """Copy a winner's folder to `place`, with a kernel behind its call that waits. Return the file."""
    shutil.copytree(winner.parent, place)
    for source in place.glob(f"{winner.stem}.*"):  # a variant's name is taken
        source.rename(source.with_stem(place.name))
    file = (place / place.name).with_suffix(".py")
    file.write_text(file.read_text() + WAITS.format(clocks=clocks))
    return str(file)


def pairs(same: int, slowed: int, out: Path) -> None:
    """Compare winners with themselves, and two copies of one that wait for unlike times, so many times in turn."""
    with tempfile.TemporaryDirectory() as place:
        problem, words, count = SLOWED
        winner = folders.find(problem).winner("sm90").file
        base, slow = (waiting_copy(winner, Path(place, f"waits_{clocks}"), clocks) for clocks in CLOCKS)
        longer = [problem, "--submission", slow, "--against", base, "--case", words]
        for n in range(max(same, slowed)):
            if n < same:
                problem, words, processes = SAME[n % len(SAME)]
                name = folders.find(problem).winner("sm90").name
                compare(out, "same", processes, [problem, "--variant", name, "--against", name, "--case", words])
            if n < slowed:
                compare(out, "longer", count, longer)


def render(lines: list[dict]) -> str:
    """Return the table of all pairs, and where they were measured."""
    table = [f"| a winner | problem | processes | pairs | {' | '.join(WORDS)} | failed | ratios |"]
    table.append(f"| --- | --- |{' ---: |' * 7} ---: |")
    grouped = defaultdict(list)
    for line in lines:
        grouped[list(KINDS).index(line["kind"]), line["problem"], line["processes"]].append(line)
    for (_, problem, processes), own in sorted(grouped.items()):
        count, ratios = Counter(line["word"] for line in own), [line["ratio"] for line in own if line["ratio"]]
        each = " | ".join(str(n) for n in (processes, len(own), *(count[word] for word in (*WORDS, None))))
        table.append(f"| {KINDS[own[0]['kind']]} | {problem} | {each} | {min(ratios):.4f} to {max(ratios):.4f} |")
    sources = sorted({f"{line['gpu']} at {line['commit'][:9]}" for line in lines})
    return "\n".join([*table, "", f"Measured on {', '.join(sources)}."])


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how, allow_abbrev=False)
    parser.add_argument("what", choices=("run", "render"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--same", type=int, default=11)
    parser.add_argument("--slowed", type=int, default=10)
    args = parser.parse_args()
    if args.what == "render":
        lines = [json.loads(text) for text in args.out.read_text().splitlines()]
        shown = [line for line in lines if line.get("clock") == player.CLOCK and line["kind"] in KINDS]
        output.splice(DOC, MARKS, render(shown))
    elif torch.cuda.is_available():
        pairs(args.same, args.slowed, args.out)
    else:
        parser.error("pairs are compared on a GPU, and torch sees none")


if __name__ == "__main__":
    main()
