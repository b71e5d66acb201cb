"""The linker: one text of a file and what it uses of task.py and problems/common."""

import pytest

from leaderboard import bundle, inline
from leaderboard.bundle import Bundle, BundleError
from problems.common import load


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "problems" / "common").mkdir(parents=True)
    monkeypatch.setattr(load, "PROBLEMS", tmp_path / "problems")
    return tmp_path


def linked(folder, main: str, task: str = "", **common: str) -> dict:
    """What the linked text of these modules defines."""
    for name, text in common.items():
        (folder / "problems" / "common" / f"{name}.py").write_text(text)
    (folder / "task.py").write_text(task)
    (folder / "main.py").write_text(main)
    made = Bundle(folder / "main.py", {"task": folder / "task.py"})
    text = "\n".join(made.import_lines()) + "\n" + made.text()
    defined: dict = {"_text": text}
    exec(compile(text, "bundle", "exec"), defined)
    return defined


def test_only_what_is_reached_is_taken_and_unchanged_statements_keep_their_comments(folder):
    found = linked(
        folder,
        "from task import double\nfrom problems.common import helper\n\n\n# Above.\ndef f(x):\n    # Within.\n"
        "    return double(x)\n\n\ndef g(x):\n    return helper.used(x)\n",
        task="import os\n\n\ndef double(x):  # twice\n    return 2 * x\n\n\ndef unused():\n    return os.name\n",
        helper="K = 3\nM = 4\n\n\ndef used(x):\n    return K * x\n",
    )
    assert found["f"](2) == 4 and found["g"](2) == 6
    text = found["_text"]
    assert "# Above.\ndef f(x):\n    # Within.\n" in text and "def double(x):  # twice" in text
    assert "unused" not in text and "M = 4" not in text and "import os" not in text and "helper" not in text


def test_equal_names_of_two_modules_stay_apart(folder):
    found = linked(
        folder,
        "from problems.common import a, b\nfrom task import size\n\n\ndef run():\n    size_ = a.value(1)\n"
        "    return size_, b.value(1), size(), a.now()\n",
        task="def size():\n    return 5\n",
        a="N = 10\n\n\ndef value(x):\n    return x + N\n\n\ndef size():\n    return 0\n\n\ndef now():\n"
        "    return size()\n",
        b="N = 20\n\n\ndef value(N2, K=N):\n    def inner(N):\n        return N\n    return inner(N2) + N + K\n",
    )
    assert found["run"]() == (11, 41, 5, 0)


def test_a_local_name_does_not_capture_what_an_attribute_meant(folder):
    found = linked(
        folder,
        "from problems.common import a\n\n\ndef run(check):\n    values = [check for check in (1, 2)]\n"
        "    return a.check(3), check, values, (lambda check: check)(7)\n",
        a="def check(x):\n    return -x\n",
    )
    assert found["run"](9) == (-3, 9, [1, 2], 7)


def test_imports_of_packages_are_shared_or_renamed(folder):
    found = linked(
        folder,
        "import math\nfrom os import path as p\nfrom problems.common import a\n\n\ndef run():\n"
        "    return math.sqrt(4), p.basename('x/y'), a.both()\n",
        a="import math\nimport os.path\nfrom pathlib import Path as p\n\n\ndef both():\n"
        "    return math.floor(2.5), os.path.sep, p('z').name\n",
    )
    assert found["run"]() == (2.0, "y", (2, "/", "z"))
    assert found["_text"].count("import math\n") == 1


def test_imports_within_functions_and_globals_that_change(folder):
    found = linked(
        folder,
        "from problems.common import a\n\n\ndef run():\n    from problems.common.a import count as now\n"
        "    from task import K as here\n    a.more()\n    return now(), here\n",
        task="K = 6\n",
        a="K = 0\n\n\ndef more():\n    global K\n    K += 1\n\n\ndef count():\n    return K\n",
    )
    assert found["run"]() == (1, 6)


def test_classes_decorators_and_annotations(folder):
    found = linked(
        folder,
        "import functools\nfrom task import Point, area\n\n\n@functools.cache\ndef run(x: Point = Point(2)) -> int:\n"
        "    return area(x) + x.x\n",
        task="from dataclasses import dataclass\nfrom problems.common import a\n\n\n@dataclass(frozen=True)\n"
        "class Point:\n    x: int\n    scale: int = a.SCALE\n\n\ndef area(p: Point) -> int:\n"
        "    return p.x * p.scale\n",
        a="SCALE = 10\n",
    )
    assert found["run"]() == 22


def test_the_place_of_a_file_becomes_that_of_the_written_sources(folder):
    (folder / "main.py").write_text("from pathlib import Path\nSOURCE = Path(__file__).with_suffix('.cu')\n")
    made = Bundle(folder / "main.py", {})
    assert made.text() == f"SOURCE = Path(str({bundle.FOLDER} / 'main.py')).with_suffix('.cu')"


@pytest.mark.parametrize(
    ("main", "message"),
    [
        ("import problems.common.a\n", "main.py:1: import problems.common.a: write `from ... import ...`"),
        ("from problems.common import a\nx = a\n", "main.py:2: a is used as a value"),
        ("from problems.common import a\nx = a.lost\n", "main.py:2: problems.common.a has no lost"),
        ("from problems.common.a import lost\n", "main.py:1: problems.common.a has no lost"),
        ("from problems.common import lost\n", "problems.common.lost is imported, but there is no .*lost.py"),
        ("from problems.moe.weights import x\n", "main.py:1: problems.moe.weights cannot be linked"),
        ("def f():\n    from problems.common import a\n", "main.py:2: move this import to the top of the file"),
        ("from .task import x\n", "main.py:1: a relative import cannot be linked"),
        ("import sys\nif sys:\n    import task as t\nX = t.unpack\n", "main.py:3: import task: write "),
    ],
)
def test_what_cannot_be_linked_is_named_with_its_line(folder, main, message):
    with pytest.raises(BundleError, match=message):
        linked(folder, main, a="K = 1\n")


def test_headers_stand_where_they_are_included_each_once(folder):
    (folder / "problems" / "common" / "shared.h").write_text("#pragma once\nint shared;\n")
    (folder / "table.inc").write_text("row,\n")
    (folder / "b.h").write_text('#pragma once\n#include "shared.h"\nint b;\n')
    (folder / "a.cu").write_text(
        '#include <vector>\n#include "b.h"\n#include "shared.h"\nint t[] = {\n#include "table.inc"\n'
        '#include "table.inc"\n};\n'
    )
    text = inline.text_of(folder / "a.cu")
    assert text.count("int shared;") == text.count("int b;") == 1 and text.count("row,") == 2
    assert "#include <vector>" in text and "pragma" not in text and '#include "' not in text
    (folder / "c.cu").write_text('#include "lost.h"\n')
    with pytest.raises(inline.InlineError, match=r'c\.cu: there is no "lost\.h" beside it'):
        inline.text_of(folder / "c.cu")


def test_the_word_is_refused_but_for_what_problems_common_names_otherwise(folder):
    (folder / "a.cu").write_text("int x;\n// up" + "stream\n")
    with pytest.raises(inline.InlineError, match=r"a\.cu:2: contains the word"):
        inline.text_of(folder / "a.cu")
    header = folder / "problems" / "common" / "launch.cuh"
    header.write_text(
        "// the default-str" + "eam\nattribute.id = cudaLaunchAttributeProgrammaticStr" + "eamSerialization;\n"
        "attribute.val.programmaticStr" + "eamSerializationAllowed = 1;\n"
    )
    (folder / "a.cu").write_text('#include "launch.cuh"\n')
    text = inline.text_of(folder / "a.cu")
    assert "attribute.id = static_cast<cudaLaunchAttributeID>(6);" in text
    assert "*reinterpret_cast<int*>(&attribute.val) = 1;" in text and "Attribute 6 is programmatic" in text


def test_a_source_is_quoted_as_it_is():
    for text in ("a\\n\n", "it's '''\n", 'say """\n', "tail'", "tail\\"):
        try:
            assert eval(inline.quoted(text)) == text
        except inline.InlineError:
            assert text == "tail\\"
    with pytest.raises(inline.InlineError, match="both"):
        inline.quoted("'''" + '"""\n')
