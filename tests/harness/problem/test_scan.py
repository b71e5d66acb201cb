"""The word of rule 1 in a submission's text."""

import time

import pytest

from harness.problem import folders, scan, sources
from tests.support import write_files

WORD = "str" + "eam"  # this file is no submission, but is to be searchable for the word's uses


@pytest.mark.parametrize(
    "text",
    [
        f"x = torch.cuda.{WORD.capitalize()}()",
        f"# in the up{WORD} direction",
        f'"""{WORD.upper()}ING loads."""',
        f"launch(cuda_{WORD}=0)",
    ],
)
def test_found_in_python(tmp_path, text):
    file = tmp_path / "submission.py"
    file.write_text(f'"""A submission."""\nimport torch\n\n{text}\n')
    found = scan.findings([file])
    assert found and found[0].line == 4 and str(found[0]).startswith("submission.py:4: ")
    assert "rule 1" in str(found[0]) and "Rename it" in str(found[0]) and str(found[0]).endswith(f": {text}")


@pytest.mark.parametrize(
    "text",
    [
        "x = model.eval()",
        "import base64\nexec('x = 1')",
        "x = 'largest reams'",
        "y = '#define JOIN(a, b) a##b'",
        "größe = f'{1}str{2}eam'",
    ],
)
def test_honest_text_is_let_through(tmp_path, text):
    file = tmp_path / "submission.py"
    file.write_text(f'"""A submission."""\n{text}\n', encoding="utf-8")
    assert not scan.findings([file])


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        (f"x = 1  # the {WORD}", True),
        (f"x = 1  # the {WORD}\ny_{WORD} = 1", False),
        (f'"""The {WORD}."""', False),
        (f'SOURCE = """\nint x;  // the {WORD}\n/* a\n {WORD} */\n"""', True),
        (f"{WORD} = 2  # the {WORD}", False),
        (f'SOURCE = """\nf<<<1, 1, 0, {WORD}>>>();  // {WORD}\n"""', False),
        (f"x = '// {WORD}'", True),  # a text is no more than looked at
        (f'x = """\n/* {WORD} */ y\n{WORD}"""', False),
        (f'x = """\n/* a */ y /* z\n{WORD} */"""', True),
    ],
)
def test_a_comment_is_only_a_warning_in_a_folder_from_elsewhere(tmp_path, text, warns):
    file = tmp_path / "submission.py"
    file.write_text(text)
    assert all(not finding.warns for finding in scan.findings([file]))
    found = scan.findings([file], ours=False)
    assert found and all(finding.warns for finding in found) is warns


def test_found_in_the_sources_beside_it(tmp_path):
    """The closure holds the CUDA file of the same name and the headers that it includes, but for those of the judge."""
    files = {
        "v.py": '"""v."""\n',
        "v.cu": '#include "v_tools.cuh"\n#include "nvfp4.cuh"\n',
        "v_tools.cuh": f"// an evict-first {WORD}ing load\n",
        "other.cu": f"cuda{WORD.capitalize()}_t s;\n",
    }
    found = sources.closure(write_files(tmp_path, files) / "v.py")
    assert sorted(file.name for file in found) == ["v.cu", "v.py", "v_tools.cuh"]
    assert [str(f).partition(": ")[0] for f in scan.findings(found)] == ["v_tools.cuh:1"]


@pytest.mark.parametrize("filler", ["a", " ", '"', "/* ", f"// {WORD}\n", f"/* {WORD} */"])
@pytest.mark.parametrize(("name", "before", "behind"), [("long.py", "x = r'''\n", "'''"), ("long.cpp", "int x; ", "")])
def test_a_long_text_takes_time_in_proportion(tmp_path, name, before, behind, filler):
    """Read again from each letter, or from each open comment, a million would take hours."""
    file = tmp_path / name
    file.write_text(f"{before}{filler * (1_000_000 // len(filler))}\n{WORD}\n{behind}")
    begun = time.monotonic()
    assert 0 < len(scan.findings([file], ours=False)) <= scan.MOST
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("name", folders.problem_names())
def test_our_own_submissions_keep_the_rule(name):
    found = folders.find(name)
    places = ("submission.py", "variants/*.py")
    files = [found.folder / "task.py", *(file for place in places for file in sorted(found.folder.glob(place)))]
    assert len(files) > 2
    assert scan.findings(sorted({source for file in files for source in sources.closure(file, found.folder)})) == []
