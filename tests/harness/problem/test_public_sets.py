"""The tool that tries other people's folders: derived submissions are right and wrong, differences are named."""

from tests.support import SUPPORT, public_sets

FOLDER = SUPPORT / "gpu_mode" / "vectoradd"


def test_a_folder_is_tried():
    found = {r["submission"]: r for r in public_sets.tried(FOLDER, "set/vectoradd", "cpu", {"submission.py": "pass"})}
    assert {name: r["verdict"] for name, r in found.items()} == {
        "submission.py": "PASSED",
        "(reference, same)": "PASSED",
        "(reference, scaled)": "INCORRECT",
        "(reference, half)": "INCORRECT",
    }
    assert found["submission.py"]["right"] and not found["(reference, half)"]["right"]
    assert found["submission.py"]["upstream"] == "pass"


def test_each_difference_is_counted_and_named_with_its_reason():
    def one(submission, upstream, verdict, reason=""):
        return {"folder": "set/a", "submission": submission, "upstream": upstream, "verdict": verdict, "reason": reason}

    said = public_sets.render(
        [
            one("good.py", "pass", "PASSED"),
            one("graph.py", "pass", "RULE_BROKEN", "graph.py:3: rule 1"),
            one("odd.py", "pass", "REFUSED", "no room"),
            one("bad.py", "fail", "INCORRECT"),
            one("taken.py", "fail", "PASSED"),
            one("gone.py", "exit 1: ImportError", "RUNTIME_ERROR"),
        ]
    )
    assert "Of 3 submissions that an eval.py accepts, 1 are accepted here, 1 break a rule" in said
    assert "Of 2 that it finds wrong, 1 are accepted here" in said
    assert said.splitlines()[2:] == [
        "* PASSED: its eval.py: fail: set/a taken.py",
        "* REFUSED: no room: set/a odd.py",
        "* RULE_BROKEN: rule 1: set/a graph.py",
    ]
