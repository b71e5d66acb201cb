"""What the records say of a variant, for the head of a packed file: where it ran, and whether with these sources."""

from pathlib import Path

from harness.problem import sources
from harness.problem.folders import Submission
from harness.results import environment, ranking, record
from leaderboard import provenance
from leaderboard.provenance import Provenance

SOURCE = {
    provenance.MATCH: "with these sources",
    provenance.SAME_CODE: "with sources that compile to the same GPU code",
    provenance.CHANGED: "with other sources than these",
}


def of(problem: str, variant: Submission, target: str, results: Path) -> list[str]:
    """Lines of text: what was packed, then one for each machine where the variant ran for that target, or one that says
    that it never did.
    """
    commit, dirty = environment.commit()
    source = sources.source_hash(variant.file, variant.folder)
    where = f"{(commit or 'unknown')[:12]}{' with changes' if dirty else ''}"
    said = [f"{variant.name} of {problem}, for {target}; source hash {source}, commit {where}"]
    by_machine = {folder.name: record.read(folder.name, problem, results) for folder in sorted(results.glob("*"))}
    known = Provenance(one for found in by_machine.values() for one in found)
    wanted = (variant.name, target, "PASSED")
    for machine, found in by_machine.items():
        mine = [one for one in found if (one["variant"], one["target"], one["status"]) == wanted]
        if passed := [one for one in mine if one["kind"] != "compile"]:
            said.append(_ran(machine, passed, known))
    if len(said) == 1:
        said.append(f"IT NEVER RAN ON ITS TARGET, {target}: no record says that it passed there.")
    return said


def _ran(machine: str, found: list[dict], known: Provenance) -> str:
    timed = ranking.timed(found)
    last = [one for one in (timed or found) if one["run_id"] == (timed or found)[-1]["run_id"]]
    how = SOURCE[known.state(last[-1])]
    day = last[-1]["time"][:10]
    if not timed:
        return f"It passed its test cases on {machine} ({day}), {how}; it was not timed there."
    us = ranking.metric("geom", [one["median_us"] for one in last])
    cases = f"{len(last)} case{'s' if len(last) > 1 else ''}"
    return f"It ran on {machine} ({day}), {how}: geomean {us:.2f} us over {cases}, run {last[-1]['run_id']}."
