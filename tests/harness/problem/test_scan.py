"""The text side of the default-queue rule."""

import time
from pathlib import Path

import pytest

from harness.judge import scanning
from harness.problem import folders, scan, sources

WORD = "str" + "eam"  # this file is no submission, but is to be searchable for the word's uses


@pytest.mark.parametrize(
    "text",
    [
        f"x = torch.cuda.{WORD.capitalize()}()",
        f"# in the up{WORD} direction",
        f'"""{WORD.upper()}ING loads."""',
        f"launch(cuda_{WORD}=0)",
        "torch.cuda.CUDAGraph()",
        "torch.cuda.graph(g)",
        "exec('x = 1')",
        "eval('1')",
        "getattr(torch.cuda, 'Str' + 'eam')",
        "import base64",
        "from codecs import decode",
        "__import__('torch')",
        "from builtins import eval as f",
        "import runpy",
    ],
)
def test_found_in_python(tmp_path, text):
    file = tmp_path / "submission.py"
    file.write_text(f'"""A submission."""\nimport torch\n\n{text}\n')
    found = scanning.findings([file])
    assert found and found[0].line == 4
    assert str(found[0]).startswith("submission.py:4: ")


@pytest.mark.parametrize(
    "text",
    [
        "x = torch.cuda.\uff33tream",
        "x = getattr(torch.cuda, '\\x53tream')",
        "x = vars(torch.cuda)['Str' 'eam']",
        "x = vars(torch.cuda)['Str' + 'eam']",
        "x = {b'str' + b'eam': 1}",
        "def f(*, up\uff53tream=0):\n    return f(up\uff53tream=1)",
        "x = f'{1}Str\\x65am'",
    ],
)
@pytest.mark.parametrize("ours", [True, False])
def test_found_as_python_reads_it(tmp_path, text, ours):
    file = tmp_path / "submission.py"
    file.write_text(f"import torch\n{text}\n", encoding="utf-8-sig")
    found = scanning.findings([file], ours=ours)
    assert found and not found[0].warns and "put together" in str(found[-1]), text


@pytest.mark.parametrize(
    "text",
    [
        "cudaStr\\\neamCreate(&q);",
        "cudaStr\\u0065amCreate(&q);",
        'int f() __asm__("cudaStr"\n "eamCreate");',
        'dlsym(h, "cuStr\\x65" "amCreate");',
        "#define NAME cudaStr ## eamCreate",
        "cudaStr\\U00000065am_t q;",
    ],
)
@pytest.mark.parametrize("ours", [True, False])
def test_found_as_cpp_reads_it(tmp_path, text, ours):
    file, source = tmp_path / "sm90_x.py", tmp_path / "sm90_x.cu"
    file.write_text('"""A submission."""\nTARGETS = ("sm90",)\n')
    source.write_text(f"// A comment.\n{text}\n")
    found = scanning.findings(sources.closure(file), ours=ours)
    assert found and not found[0].warns and found[0].file == source


def test_a_word_in_a_comment_hides_no_disguised_one(tmp_path):
    file = tmp_path / "submission.py"
    file.write_text("import torch\nx = torch.cuda.\uff33tream  # no Stream\n", encoding="utf-8")
    assert [finding.warns for finding in scanning.findings([file], ours=False)] == [True, False]


@pytest.mark.parametrize(
    "text",
    [
        "x = model.eval()",
        "import re\nx = re.compile('a')",
        "import importlib.util",
        "x = 'largest reams'",
        "y = '#define JOIN(a, b) a##b'",
        "x = ('str', 'eam')",
        "größe = f'{1}str{2}eam'",
        "x = 1 is 1",
    ],
)
def test_honest_text_is_let_through(tmp_path, text):
    file = tmp_path / "submission.py"
    file.write_text(f'"""A submission."""\n{text}\n', encoding="utf-8")
    assert not scanning.findings([file])


def test_the_message_names_the_rule_the_line_and_what_to_do(tmp_path):
    file = tmp_path / "submission.py"
    file.write_text(f"import torch\nup{WORD} = 3\n")
    (found,) = scanning.findings([file])
    assert str(found).startswith(f'submission.py:2: "up{WORD}" contains the reserved word "{WORD}" (rule 1: default ')
    assert "inside other words" in str(found) and "Rename it" in str(found) and str(found).endswith(f": up{WORD} = 3")


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        (f"x = 1  # the {WORD}", True),
        (f"x = 1  # the {WORD}\ny_{WORD} = 1", False),
        (f'"""The {WORD}."""', False),
        (f'SOURCE = """\nint x;  // the {WORD}\n/* a\n {WORD} */\n"""', True),
        (f"{WORD} = 2  # the {WORD}", False),
        (f'SOURCE = """\nf<<<1, 1, 0, {WORD}>>>();  // {WORD}\n"""', False),
        (f"x = '// {WORD}'", False),
        (f'x = """\n/* {WORD} */ y /* z\n// {WORD}"""', True),
        (f'x = """\n/* a */ y /* z\n{WORD} /* z"""', False),
    ],
)
def test_a_comment_is_only_a_warning_in_a_folder_from_elsewhere(tmp_path, text, warns):
    file = tmp_path / "submission.py"
    file.write_text(text)
    assert all(not finding.warns for finding in scanning.findings([file]))
    found = scanning.findings([file], ours=False)
    assert found and all(finding.warns for finding in found) is warns


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("torch.compile(f, mode='reduce-overhead')", "leave the mode out"),
        ("torch.compile(f, mode='max-autotune')", "max-autotune-no-cudagraphs"),
        ("torch.compile(f, options={'triton.cudagraphs': True})", "leave the option out"),
        ("torch.compile(f, backend='cudagraphs')", "use the default backend"),
        ("torch.compile(f, options={'triton.cudagraphs': False})", ""),
        ("torch.compile(f)", ""),
        ("torch.compile(f, mode='max-autotune-no-cudagraphs')", ""),
        ("names = ['cudagraphs']", ""),
    ],
)
def test_graph_modes_of_torch_compile(tmp_path, text, said):
    file = tmp_path / "submission.py"
    file.write_text(f"import torch\n{text}\n")
    found = scanning.findings([file])
    assert [said in str(f) and "rule 1" in str(f) for f in found] == ([True] if said else [])


def test_found_in_the_sources_beside_it(tmp_path):
    """The closure holds the CUDA file of the same name and the headers that it includes."""
    (tmp_path / "v.py").write_text('"""v."""\n')
    (tmp_path / "v.cu").write_text('#include "v_tools.cuh"\n')
    (tmp_path / "v_tools.cuh").write_text(f"// an evict-first {WORD}ing load\n")
    (tmp_path / "other.cu").write_text(f"cuda{WORD.capitalize()}_t s;\n")
    files = sources.closure(tmp_path / "v.py")
    assert sorted(file.name for file in files) == ["v.cu", "v.py", "v_tools.cuh"]
    assert [str(f).partition(": ")[0] for f in scanning.findings(files)] == ["v_tools.cuh:1"]


@pytest.mark.parametrize("filler", ["a", " ", '"', "/* ", f"// {WORD}\n", f"/* {WORD} */"])
@pytest.mark.parametrize(("name", "before", "behind"), [("long.py", "x = r'''\n", "'''"), ("long.cpp", "int x; ", "")])
def test_a_long_text_takes_time_in_proportion(tmp_path, name, before, behind, filler):
    """Read again from each letter, or from each open comment, a million would take hours."""
    file = tmp_path / name
    file.write_text(f"{before}{filler * (1_000_000 // len(filler))}\n{WORD}\n{behind}")
    begun = time.monotonic()
    assert 0 < len(scanning.findings([file], ours=False)) <= scan.MOST
    assert time.monotonic() - begun < 60


def test_headers_of_problems_common_are_exempt(tmp_path):
    (tmp_path / "v.py").write_text('"""v."""\n')
    (tmp_path / "v.cu").write_text('#include "nvfp4.cuh"\n')
    assert sorted(file.name for file in sources.closure(tmp_path / "v.py")) == ["v.cu", "v.py"]


@pytest.mark.parametrize("name", folders.problem_names())
def test_our_own_submissions_keep_the_rule(name):
    found = folders.find(name)
    places = ("submission.py", "variants/*.py", "wrong/*.py")
    files = [found.folder / "task.py", *(file for place in places for file in sorted(found.folder.glob(place)))]
    assert len(files) > 2
    closures: dict[bool, set[Path]] = {True: set(), False: set()}  # each file of them once: they share most of a model
    for file in files:
        closures[file.stem.startswith("peer_")].update(sources.closure(file, found.folder))
    for baseline, closure in closures.items():
        assert scanning.findings(sorted(closure), baseline) == []
