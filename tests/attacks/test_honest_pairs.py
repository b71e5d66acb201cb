"""The table of pairs whose ratio is known."""

from tests.attacks import honest_pairs

RECORD = {"problem": "p", "variant": "a", "status": "PASSED", "commit": "c" * 40, "environment": {"gpu": "NVIDIA H200"}}
RECORD |= {"clock": {"name": "event pair in the player"}}


def test_pairs_are_counted_by_their_verdict():
    lines = []
    for kind, word, ratio in (("same", "SAME", 1.001), ("same", "SLOWER", 1.01), ("longer", "SLOWER", 1.02)):
        against = {"ratio": ratio, "ci95": [0.99, 1.03], "ci99": [0.98, 1.04], "word": word}
        lines.append(honest_pairs.line_of(kind, 8, RECORD | {"against": against}))
    lines.append(honest_pairs.line_of("longer", 8, RECORD | {"status": "RUNTIME_ERROR"}))
    rows = honest_pairs.render(lines).splitlines()
    assert "| with itself | p | 8 | 2 | 1 | 0 | 1 | 0 | 0 | 1.0010 to 1.0100 |" in rows
    assert f"| {honest_pairs.KINDS['longer']} | p | 8 | 2 | 0 | 0 | 1 | 0 | 1 | 1.0200 to 1.0200 |" in rows
    assert rows[-1] == "Measured on NVIDIA H200 at ccccccccc."
