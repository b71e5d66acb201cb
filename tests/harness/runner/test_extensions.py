"""What a compile step built with torch.utils.cpp_extension is loaded at another path, and only if it is of the same
text.
"""

import shutil

import pytest
from torch.utils import cpp_extension

from harness.runner import extensions


@pytest.fixture
def built(monkeypatch, tmp_path):
    """-> the names that are really built; each build leaves a library in its folder."""
    names = []

    def build(name, sources, flags, build_directory, is_python_module):
        names.append(name)
        with open(f"{build_directory}/{name}.so", "w") as library:
            library.write("code")
        return "built"

    monkeypatch.setattr(cpp_extension, "_jit_compile", build)
    monkeypatch.setattr(cpp_extension, "_import_module_from_library", lambda name, folder, _: f"{name} in {folder}")
    extensions.reuse_builds()
    return names


def load(folder, text="int f();", flags=(), name="silu"):
    """What load_inline does once the source is in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "main.cpp").write_text(text)
    sources = [str(folder / "main.cpp")]
    return cpp_extension._jit_compile(name, sources, list(flags), str(folder), is_python_module=True)


def again(monkeypatch):
    """A later process: what has been loaded is forgotten."""
    monkeypatch.setattr(cpp_extension, "_jit_compile", cpp_extension._jit_compile.__wrapped__)
    extensions.reuse_builds()


def test_a_copied_build_is_loaded(built, monkeypatch, tmp_path):
    assert load(tmp_path / "one") == "built"
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    again(monkeypatch)
    assert load(tmp_path / "two") == f"silu in {tmp_path / 'two'}"
    assert built == ["silu"]


@pytest.mark.parametrize("other", [{"text": "int g();"}, {"flags": ("-O1",)}])
def test_another_text_or_flag_is_built(built, monkeypatch, tmp_path, other):
    load(tmp_path / "one")
    again(monkeypatch)
    assert load(tmp_path / "one", **other) == "built"
    assert built == ["silu", "silu"]


def test_two_builds_of_one_name_are_not_told_apart_later(built, monkeypatch, tmp_path):
    load(tmp_path / "one")
    load(tmp_path / "one", text="int g();")
    again(monkeypatch)
    assert load(tmp_path / "one") == "built"
    assert built == ["silu"] * 3
