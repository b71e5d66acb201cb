"""Put the problems' winners into the wheel: their Python, their sources, and shared objects for GPUs.

setuptools runs this file for `python -m build packaging`. What is installed is a copy of problems/ under dsv4_kernels,
with the winners only. It needs nvcc, no torch and no GPU.
"""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

try:
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.build_py import build_py
    from setuptools.command.sdist import sdist
except ModuleNotFoundError as error:
    raise SystemExit(f'{error}: pip install "setuptools>=77"') from None

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "problems").is_dir() else HERE.parent  # a source archive holds problems/ itself
sys.path.insert(0, str(ROOT))
from problems.common import build, load  # noqa: E402  neither imports torch

PLATFORM = "manylinux_2_28_x86_64"
# The newest versions of symbols that this platform has: of glibc 2.28, and of the C++ library of GCC 8.
NEWEST = {"GLIBC_2.": 28, "GLIBCXX_3.4.": 24}
# What transformers.py needs of the composed model, and its CUDA.
MODEL = ROOT / "problems/dsv4_forward"
FORWARD = {
    "cache": ("pages",),
    "weights": ("formats", "linear"),
    "torch_ops": ("experts", "linear", "norm"),
    "kernels": ("arguments", "experts", "norm"),
}
KERNELS = [MODEL / "kernels/experts.cu", MODEL / "kernels/norm.cu"]


class Stage(build_py):
    """Copy dsv4_kernels, then the winners into it."""

    def run(self) -> None:
        if self.editable_mode:
            raise SystemExit("dsv4-kernels must be built as a wheel: python -m build packaging")
        package = Path(self.build_lib, "dsv4_kernels")
        shutil.rmtree(package, ignore_errors=True)  # of an earlier build
        super().run()
        complete(package, "dsv4_kernels")
        add_shared_objects(package)


class Wheel(bdist_wheel):
    """One wheel for every Python and torch: launchers are extern "C", and ctypes calls them."""

    def finalize_options(self) -> None:
        self.distribution.has_ext_modules = lambda: True  # so that it is installed where shared objects go
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", PLATFORM


class Sources(sdist):
    """A source archive with what the wheel is made of."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        copy_winners(Path(base_dir))
        for file in (HERE / "staging.py", ROOT / "LICENSE"):
            shutil.copy(file, base_dir)


def complete(package: Path, name: str) -> None:
    """Put the winners into `package`, which holds dsv4_kernels' own files and is imported as `name`."""
    copy_winners(package)
    shutil.copy(ROOT / "LICENSE", package)
    (package / build.PREBUILT.name).mkdir()
    for file in package.rglob("*.py"):
        file.write_text(renamed(without(file.read_text(), "allpairspy"), name))  # which only test cases need


def winning() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return by problem the winners of each target. What is composed of other problems' winners is left out."""
    files = sorted((ROOT / "problems").glob("*/submission.py"))
    return {file.parent.name: load.winners(file.parent) for file in files if not load.constants(file, "COMPOSES")}


def copy_winners(to: Path) -> None:
    """Copy problems/, with the winners and parts of the model only, into the folder `to`."""
    files = [ROOT / "problems/__init__.py", *(ROOT / "problems/common").iterdir()]
    files += [MODEL / f"{folder}/{name}.py" for folder, names in FORWARD.items() for name in names]
    files += build.closure(*KERNELS)
    for problem, targets in winning().items():
        folder = ROOT / "problems" / problem
        files += [folder / "task.py", folder / "submission.py"]
        for name in {name for names in targets.values() for name in names}:
            files += build.closure(folder / f"variants/{name}.py", *sources(folder, name))
    for file in filter(Path.is_file, files):
        place = to / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)


def sources(problem: Path, name: str) -> list[Path]:
    """A variant's C++ and CUDA: the files of its name, and those that its Python names."""
    script = problem / f"variants/{name}.py"
    named = re.findall(r'"(\w+\.(?:cpp|cu))"', script.read_text())
    files = [script.with_suffix(".cpp"), script.with_suffix(".cu"), *map(script.with_name, named)]
    return [file for file in files if file.is_file()]


def renamed(source: str, name: str) -> str:
    """A module whose imports of problems, no package by itself there, and of dsv4_kernels are those of `name`."""
    for old, new in (("problems", f"{name}.problems"), ("dsv4_kernels", name)):
        source = re.sub(rf"^(\s*(?:from|import) ){old}\b", rf"\g<1>{new}", source, flags=re.MULTILINE)
    return source


def without(source: str, package: str) -> str:
    """A module without the statements that need `package` or what these define. Other lines keep their numbers."""
    lines, gone = source.splitlines(keepends=True), set()
    for node in ast.parse(source).body:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        if isinstance(node, ast.ImportFrom) and node.module == package:
            gone |= {alias.asname or alias.name for alias in node.names}
        elif not names & gone:
            continue
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            gone.add(node.name)
        elif isinstance(node, ast.Assign):
            gone |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        count = (node.end_lineno or node.lineno) - node.lineno + 1
        lines[node.lineno - 1 : node.end_lineno] = ["\n"] * count
    return "".join(lines)


def add_shared_objects(package: Path) -> None:
    """Compile the CUDA of each GPU target, and put it where build.cuda looks for it in an installed wheel.

    build.BuildError: no nvcc, or it refused a source. RuntimeError: an object needs a newer system than PLATFORM.
    """
    linked = ["--no-as-needed", *map(str, old_libraries(build.directory() / "old-libraries"))]
    options = tuple(option for part in linked for option in ("-Xlinker", part))
    for target in build.ARCH:
        names = [(ROOT / "problems" / problem, name) for problem, of in winning().items() for name in of[target]]
        for source in [*KERNELS, *(source for folder, name in names for source in sources(folder, name))]:
            if source.suffix != ".cu":
                continue
            print(f"compiling {source.relative_to(ROOT)} for {target}", flush=True)
            made = build.cuda(source, target, options).path
            check_versions(made)
            name_there = build.prebuilt(source, target, build.cuda_flags(target)).name
            shutil.copy(made, package / build.PREBUILT.name / name_there)


def old_libraries(folder: Path) -> list[Path]:
    """Make libraries to link with, by which glibc's symbols get their last version before PLATFORM's end.

    glibc 2.34 gave threads and dlopen, which CUDA's static runtime calls, new versions without changing them. They are
    still there by their old ones; the linker takes the newest that it sees, so it has to see the old ones first. These
    libraries are empty, and named as those that had the symbols; every later glibc has libraries of these names.
    """
    libc = subprocess.check_output(["g++", "-print-file-name=libc.so.6"], text=True).strip()
    listed = subprocess.check_output(["nm", "-D", "--defined-only", libc], text=True)
    versions: dict[str, str] = {}
    newer = set()
    for name, default, version in re.findall(r" [TWi] (\w+)(@@?)GLIBC_([\d.]+)$", listed, re.MULTILINE):
        if int(version.split(".")[1]) <= NEWEST["GLIBC_2."]:
            versions[name] = version
        elif default == "@@":
            newer.add(name)
    libraries: dict[str, dict[str, list[str]]] = {}
    for name in sorted(newer & set(versions)):
        library = "libdl.so.2" if name.startswith("dl") else "librt.so.1" if "shm_" in name else "libpthread.so.0"
        if name.startswith(("dl", "shm_", "pthread_", "sem_")):
            libraries.setdefault(library, {}).setdefault(versions[name], []).append(name)
    folder.mkdir(parents=True, exist_ok=True)
    for library, by_version in libraries.items():
        source, script = folder / f"{library}.s", folder / f"{library}.map"
        names = [name for part in by_version.values() for name in part]
        source.write_text("".join(f".globl {name}\n.type {name},@function\n{name}:\n" for name in names))
        script.write_text("".join(f"GLIBC_{v} {{ {'; '.join(part)}; }};\n" for v, part in by_version.items()))
        options = ["-shared", "-nostdlib", f"-Wl,-soname,{library}", f"-Wl,--version-script={script}"]
        subprocess.run(["g++", *options, str(source), "-o", str(folder / library)], check=True)
    return [folder / library for library in sorted(libraries)]


def check_versions(library: Path) -> None:
    """RuntimeError: the shared object names a version of a symbol that PLATFORM does not have."""
    content = library.read_bytes()
    for prefix, newest in NEWEST.items():
        found = [int(number) for number in re.findall(re.escape(prefix).encode() + rb"(\d+)", content)]
        if max(found, default=0) > newest:
            raise RuntimeError(f"{library} needs {prefix}{max(found)}, not {newest}: build on an older system")
