"""The tool that tries other people's folders: derived submissions are right and wrong, the table tells them apart."""

from tests.support import SUPPORT, public_sets

FOLDER = SUPPORT / "gpu_mode" / "vectoradd"


def test_a_folder_is_tried():
    found = {r["submission"]: r for r in public_sets.tried(FOLDER, "set/vectoradd", "cpu", False, {"x": "pass"})}
    assert {name: r["verdict"] for name, r in found.items()} == {
        "submission.py": "PASSED",
        "(reference, same)": "PASSED",
        "(reference, scaled)": "INCORRECT",
        "(reference, half)": "INCORRECT",
    }
    assert found["submission.py"]["right"] and not found["(reference, half)"]["right"]


def test_the_table_counts_and_names_each_difference():
    def one(submission, upstream, verdict, reason=""):
        return {
            "folder": "set/a",
            "submission": submission,
            "right": True,
            "upstream": upstream,
            "verdict": verdict,
            "reason": reason,
            "timed": False,
            "machine": "m",
        }

    said = public_sets.render(
        [
            one("good.py", "pass", "PASSED"),
            one("graph.py", "pass", "RULE_BROKEN", "rule 1"),
            one("odd.py", "pass", "REFUSED", "no room"),
            one("bad.py", "fail", "INCORRECT"),
            one("taken.py", "fail", "PASSED"),
            one("gone.py", "exit 1: ImportError", "RUNTIME_ERROR"),
        ]
    )
    assert "Of 3 submissions that an eval.py accepts, 1 are accepted here and 1 break a rule" in said
    assert "Of 2 that it finds wrong, 1 are accepted here" in said
    assert "| set/a | 3 | 1 | 2 | 1 |" in said
    assert [name in said for name in ("graph.py", "odd.py", "taken.py")] == [True] * 3 and "bad.py" not in said
