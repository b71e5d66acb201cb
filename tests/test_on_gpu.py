"""tools/on_gpu.py: its parts name what exists and every GPU test; limits, exit codes and logs."""

import re

from tests.support import ROOT
from tools import on_gpu

WORDS = [word for part in on_gpu.PARTS.values() for command in part.commands for word in command.split()]


def test_parts_name_files_that_exist_and_every_gpu_test():
    places = [ROOT / word for word in WORDS if "/" in word]
    assert all(place.exists() for place in places)
    files = [file for folder in ("tests", "ptx_model") for file in (ROOT / folder).rglob("test_*.py")]
    marked = [file for file in files if re.search(r"pytest\.mark\.gpu\b", file.read_text())]
    assert len(marked) > 20
    assert [file for file in marked if not any(file.is_relative_to(place) for place in places)] == []


def test_run_returns_the_exit_code_of_each_command_and_interrupts_what_takes_too_long(tmp_path, capsys):
    commands = ("-c print(1)", "-c raise(SystemExit(3))", "-c import(nothing)", "-c __import__('time').sleep(600)")
    assert on_gpu.run("some", on_gpu.Part(commands, 8, ""), 8, tmp_path) == [0, 3, 1, 124]
    assert (tmp_path / "some.0.log").read_text() == "1\n"
    assert "== some.1: exit 3" in (said := capsys.readouterr().out) and "SyntaxError" in said
