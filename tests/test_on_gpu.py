"""tools/on_gpu.py: parts that exist, limits, exit codes and logs."""

import re

import pytest

from tests.support import ROOT
from tools import on_gpu


@pytest.mark.parametrize("name", on_gpu.PARTS)
def test_what_a_part_names_exists(name):
    for command in on_gpu.PARTS[name].commands:
        words = command.split()
        assert all((ROOT / word).exists() for word in words if "/" in word), command
        if words[0] == on_gpu.RUN:
            assert (ROOT / "problems" / words[1]).is_dir()
        if words[:2] == on_gpu.LOOP.split()[:2] and len(words) > 3:
            assert list((ROOT / "problems" / words[3] / "variants").glob(f"{words[4]}.py"))


def test_every_gpu_test_is_in_a_part():
    asked = [word for part in on_gpu.PARTS.values() for command in part.commands for word in command.split()]
    places = [ROOT / word for word in asked if word.startswith(("tests/", "ptx_model/"))]
    files = [file for folder in ("tests", "ptx_model") for file in (ROOT / folder).rglob("test_*.py")]
    marked = [file for file in files if re.search(r"pytest\.mark\.gpu\b", file.read_text())]
    assert len(marked) > 20
    missing = [file for file in marked if not any(file.is_relative_to(place) for place in places)]
    assert missing == [], "no part runs these"


def test_commands_run_beside_each_other_and_each_has_its_exit_code(tmp_path, capsys):
    part = on_gpu.Part(("-c print(1)", "-c raise(SystemExit(3))", "-c import(nothing)"), 60, "")
    codes = on_gpu.run("some", part, 60, tmp_path)
    assert codes == [0, 3, 1]
    assert (tmp_path / "some.0.log").read_text() == "1\n"
    said = capsys.readouterr().out
    assert "== some.1: exit 3" in said and "SyntaxError" in said


def test_what_takes_too_long_is_interrupted(tmp_path):
    (tmp_path / "wait.py").write_text("import time\ntime.sleep(600)\n")
    assert on_gpu.run("slow", on_gpu.Part((str(tmp_path / "wait.py"),), 1, ""), 1, tmp_path) == [124]


@pytest.mark.parametrize("word", ["nothing", "judge=x", "judge=0"])
def test_an_unknown_part_is_named(word, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["on_gpu.py", word])
    with pytest.raises(SystemExit) as stopped:
        on_gpu.main()
    assert stopped.value.code == 2 and "PART" in capsys.readouterr().err
