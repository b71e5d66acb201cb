"""Whether equal calls have equal bits: of vector_add, each element of which is a row, with planted dependences."""

from harness import __main__, run
from harness.results import environment, record
from leaderboard import board, tables
from tests.support import SUPPORT, VECTOR_ADD, copy_of

TASK = {  # what is replaced: 5 elements, and room for an error in their last bit
    "(1024, 1, 1025, 4099)": "(5,)",
    "Case(2**20, ": "Case(100, ",
    "PEER_TOL = 2**-10": "PEER_TOL = 1",
    "RTOL = 2**-11": 'BATCH, INVARIANT = "n", ("call", "batch")\nRTOL = 2**-8',
}
ROWS = "\n\ndef rows(data, index):\n    return Data(*(part[index] for part in data))\n"
KERNEL = """import torch

TARGETS = ("cpu",)
calls = []

def custom_kernel(data):
    torch.add(data.x, data.y, out=data.z)
    calls.append(len(data.z))
    {more}
    return data.z
"""
LAST_BIT = "data.z.view(torch.int16).add_({})"
DRIFTS = "differ in 5 rows, first in row 0: 1 element in call 9, rows [0, 1, 2, 3, 4]"
PLANTED = {  # what it does behind the sum: what is said of it
    "by_batch": (LAST_BIT.format("len(data.z) // 4"), "equal differ in 5 rows, first in row "),
    "by_earlier": (LAST_BIT.format("len(calls) > 3"), DRIFTS),
    "honest": ("pass", "equal equal"),
    "peer_by_earlier": (LAST_BIT.format("len(calls) > 3"), DRIFTS),
    "wrong_later": ("len(calls) > 10 and data.z.zero_()", "- -"),
}
INCORRECT = {
    "by_batch": "a row must have in any batch the same bits (INVARIANT of task.py): they differ in 5 rows, ",
    "by_earlier": f"the same call again must have the same bits (INVARIANT of task.py): they {DRIFTS}",
    "wrong_later": "call 11 of 64 in a process (seed ",
}


def test_what_depends_on_the_batch_or_on_earlier_calls_is_found_recorded_and_shown(tmp_path, results, capsys):
    """What may not depend on them is not timed; a baseline may."""
    task = (VECTOR_ADD / "task.py").read_text()
    for old, new in TASK.items():
        task = task.replace(old, new)
    files = {f"variants/{name}.py": KERNEL.format(more=more) for name, (more, _) in PLANTED.items()}
    files |= {"task.py": task, "reference.py": (VECTOR_ADD / "reference.py").read_text() + ROWS}
    assert run.main([str(copy_of(VECTOR_ADD, tmp_path / "sums", files)), "--all", "--device", "cpu"]) == 1
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {first: " ".join(rest) for first, *rest in filter(None, words) if {*rest[:1]} & {"equal", "differ", "-"}}
    assert all(table[name].startswith(said) for name, (_, said) in PLANTED.items()), table
    lines = record.read(environment.machine("cpu"), "sums")
    bits = {"call": True, "batch": True, "calls": 64, "case": "n=5"}
    found = {one["variant"]: one["bits"] for one in lines if one["kind"] == "benchmark"}
    assert found == {"honest": bits, "peer_by_earlier": bits | {"call": False, "batch": False}}
    failed = {one["variant"]: one["reason"] for one in lines if one["status"] == "INCORRECT"}
    assert failed.keys() == INCORRECT.keys() and all(failed[name].startswith(said) for name, said in INCORRECT.items())
    shown = tables.standing(*board.build(lines, "box", {}))
    at = shown.header.index("bits")
    assert {row[1]: row[at] for row in shown.rows if row[at]} == {"honest": "call, batch", "peer_by_earlier": "-"}


def test_the_verb_repeats_the_call_alone_of_a_folder_without_rows(capsys):
    assert __main__.main(["invariance", str(SUPPORT / "gpu_mode" / "vectoradd"), "--device", "cpu"]) == 0
    assert "submission  equal  -" in capsys.readouterr().out
