"""The folder that one runner lives in: a copy of what it may see, and what it may write. Gone with the judge.

Everything lies in one folder a judge process, kept by a small process (harness/sandbox/reaper.py --folder) that
removes it when the judge is gone, so that nothing is left behind even by kill -9.

    code/    harness modules of the runner, problems/common, problems/NAME with task.py and the submission's closure;
             of a composition also problems/OTHER with task.py, submission.py, in_model.py and the winners
    home/ tmp/ cache/    writable; cache/ starts as what an earlier compile step of the same closure made, and the
                         judge's own machine code

No reference, no wrong/, no other variant, no results.
"""

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness.problem import sources
from harness.problem.folders import Problem
from harness.results import environment
from harness.runner import gate
from harness.sandbox import policy, reaper
from harness.sandbox.process import Died
from problems.common import build, load

ROOT = Path(__file__).resolve().parents[2]
CACHE_LIMIT = 2 * 2**30  # bytes of one compile step's caches
CACHE_FILES = 50_000  # files and folders of them
CACHE_PATH = 600  # letters of a path within them: it has to fit behind that of another folder
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EROFS)  # the machine is
HALF_FILLED_S = 24 * 3600  # after which a folder that is still being filled is one that a killed process left
COMPILERS = {"cpu": ("g++",), "sm90": ("nvcc", "g++"), "sm100": ("nvcc", "g++")}
OUTSIDE = "submission"  # folder of a submission that does not lie in its problem's
# Whose caches are kept, or against which code is built.
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "humming-kernels")
OURS = ("gate-", "capture-")  # how the judge's own machine code is called, which is never kept


class CacheError(RuntimeError):
    """A compile step left something that is not kept: too large, or too many files."""


@dataclass
class Workdir:
    """`jail`: for Child; `file`, `folder`, `files`: the submission, its problem's folder, GPU MODE's files by name, as
    the runner receives. Remove it after the runner.
    """

    jail: policy.Jail
    file: Path
    folder: Path
    files: dict[str, str]
    _place: Path
    _real: list[tuple[str, str]]  # private path, what it stands for; the longest first
    _stack: contextlib.ExitStack

    @classmethod
    def make(
        cls, file: Path, problem: Problem, built: Path | None = None, device: str = "cpu", base: Path | None = None
    ) -> "Workdir":
        """For a runner of the submission `file`. built: what `build_folder` gave, to start from; base: where the folder
        is made. BuildError: the judge's own code does not compile here. ValueError: its closure cannot be read, or laid
        out. Died: a path is too long here, or the like.
        """
        with contextlib.ExitStack() as stack:
            uid = stack.enter_context(policy.user())
            place = Path(tempfile.mkdtemp(dir=base or _folder(os.getpid())))
            stack.callback(reaper.remove_tree, str(place))
            code, home, tmp, cache = (place / name for name in ("code", "home", "tmp", "cache"))
            for folder in (code, home, tmp, cache):
                folder.mkdir()
            copied = {code / path.relative_to(ROOT): path for path in runner_modules()}
            common = [path for path in build.COMMON.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
            copied |= {code / "problems/common" / path.relative_to(build.COMMON): path.resolve() for path in common}
            folder = code / "problems" / problem.folder.name
            copied |= {folder / path.name: path.resolve() for path in _task(problem)}
            copied |= {folder / name: path.resolve() for name, path in problem.files.items()}
            for private, path in _submission(file, problem.folder, folder):
                if copied.setdefault(private, path) != path:
                    raise ValueError(f"{path} would take the place of {copied[private]} in the runner's folder")
            for private, path in copied.items():
                try:
                    private.parent.mkdir(parents=True, exist_ok=True)
                    private.write_bytes(build.read(path))
                except OSError as error:
                    if error.errno in FULL:
                        raise
                    why = f"the runner cannot have a copy of {path.name}: {error.strerror}"
                    raise Died("RUNTIME_ERROR", why) from None
            files = {name: str(folder / name) for name in problem.files}
            if built:
                copy_tree(built, cache)
            own = [gate.artefact()]
            if device == "cuda":
                from harness.runner import recorder  # no run on a CPU needs it

                own.append(recorder.artefact(load.device_target(device)))
            for artefact in own:
                shutil.copytree(artefact.path.parent, cache / "build" / artefact.path.parent.name)
            if uid is not None:
                os.chown(place, -1, uid)  # its group may go through, to code/ that stays the judge's
                place.chmod(0o710)
                for path in (home, tmp, cache, *cache.rglob("*")):
                    os.chown(path, uid, uid)
            jail = policy.Jail(code, home, tmp, cache, uid=uid, stopped=device == "cpu")
            real = [(str(private), str(path)) for private, path in copied.items()]
            # Also what is missing there is named where it would have to be.
            real += [(str(folder / OUTSIDE), str(file.resolve().parent))]
            real += [(str(folder), str(problem.folder)), (str(code), str(ROOT)), (str(place), "<private>")]
            real.sort(key=lambda pair: -len(pair[0]))
            entry = next(private for private, path in copied.items() if path == file.resolve())
            return cls(jail, entry, folder, files, place, real, stack.pop_all())

    def restore(self, text: str) -> str:
        """`text` with the files that the runner saw named by where they really are."""
        for private, path in self._real:
            text = text.replace(private, path)
        return text

    def publish(self, key: str) -> Path:
        """Keep cache/, less the judge's own code, for the next runners of this closure. -> the folder that holds it.
        Only once the runner has ended. What has this key already stays as it is. CacheError: see CACHE_LIMIT,
        CACHE_FILES, CACHE_PATH. Links and special files are left out.
        """
        closures = _closures()
        target = closures / key
        if target.is_dir():
            return target
        closures.mkdir(parents=True, exist_ok=True)
        for path in closures.glob("tmp-*"):
            if time.time() - path.stat().st_mtime > HALF_FILLED_S:
                reaper.remove_tree(str(path))
        with tempfile.TemporaryDirectory(prefix="tmp-", dir=closures) as scratch:
            copy = Path(scratch, "made")
            copy.mkdir()
            try:
                copy_tree(self.jail.cache, copy)
            except OSError as error:
                raise CacheError(f"a file cannot be copied: {error.strerror}") from None
            with contextlib.suppress(OSError):  # somebody else was quicker: a folder with files is not replaced
                copy.rename(target)
        return target

    def remove(self) -> None:
        """Delete the folder and free its uid."""
        self._stack.close()


def build_folder(file: Path, problem: Problem, target: str) -> Path | None:
    """What an earlier compile step of exactly this closure left, if there was one."""
    folder = _closures() / key(file, problem, target)
    return folder if folder.is_dir() else None


def key(file: Path, problem: Problem, target: str) -> str:
    """Of everything that a compile step of the submission `file` for `target` depends on. ValueError: as for make."""
    digest = hashlib.sha256(repr((target, _versions(target))).encode())
    common = sorted(path for path in build.COMMON.iterdir() if path.is_file())
    files = [(path, build.read(path)) for path in sources.closure(file, problem.folder)]
    ours = [*_task(problem), *problem.files.values(), *common]
    for path, content in files + [(path, path.read_bytes()) for path in ours]:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()[:32]


def _task(problem: Problem) -> list[Path]:
    return [problem.folder / "task.py"] if problem.ours else []  # GPU MODE's is one of its files


def copy_tree(source: Path, target: Path) -> None:
    """The plain files and folders of `source`, but for OURS, into `target`, which exists. Nothing else: a link could
    lead anywhere. Files keep only whether they are executable. CacheError: too much.
    """
    todo = [(source, target)]
    size = count = 0
    while todo:
        here, there = todo.pop()
        with os.scandir(here) as entries:
            for entry in entries:
                count += 1
                if len(entry.path) - len(str(source)) > CACHE_PATH:
                    raise CacheError(f"paths within caches may have {CACHE_PATH} letters")
                if count > CACHE_FILES:
                    raise CacheError(f"caches may hold {CACHE_FILES} files, these hold more")
                if entry.name.startswith(OURS):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    (there / entry.name).mkdir(mode=0o755)
                    todo.append((Path(entry.path), there / entry.name))
                elif entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    size += status.st_size
                    if size > CACHE_LIMIT:
                        raise CacheError(f"caches may take {CACHE_LIMIT / 2**30:g} GiB, these take more")
                    shutil.copyfile(entry.path, there / entry.name)
                    (there / entry.name).chmod(0o755 if status.st_mode & 0o100 else 0o644)


def _submission(file: Path, home: Path, folder: Path) -> list[tuple[Path, Path]]:
    """(copy, file) of the closure, which keeps its places: from `home`, the problem's folder, or from the submission's.
    What a composition brings along lies as in problems/, where `folder` is.
    """
    files = sources.files_of(file)
    if all(home in path.parents for path in files):
        top, place = home, folder
    else:
        top, place = file.resolve().parent, folder / OUTSIDE
    brought = [(folder.parent / path.relative_to(load.PROBLEMS), path) for path in sources.brought(file, home)]
    return [(place / path.relative_to(top), path) for path in files] + brought


@functools.cache
def runner_modules() -> tuple[Path, ...]:
    """Files that a runner needs: all of harness/runner/, the packages that hold its modules, and nothing else."""
    modules = [path for path in (ROOT / "harness" / "runner").iterdir() if path.is_file()]
    return (ROOT / "harness" / "__init__.py", ROOT / "problems" / "__init__.py", *sorted(modules))


@functools.cache
def _versions(target: str) -> tuple[str, ...]:
    versions = [sys.version]
    for compiler in COMPILERS[target]:
        if shutil.which(compiler):
            versions.append(subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout)
    return (*versions, *(f"{package} {is_}" for package in PACKAGES if (is_ := environment.version(package))))


def _closures() -> Path:
    """Where builds are kept."""
    return build.directory() / "closures"


def scratch() -> Path:
    """A new folder that is gone with this process, also where it is killed."""
    return Path(tempfile.mkdtemp(dir=_folder(os.getpid())))


_keepers: list[subprocess.Popen] = []  # each has a pipe to its standard input, which ends with this process


@functools.cache
def _folder(pid: int) -> Path:
    """The folder of the process `pid`, this one: a fork must not share its parent's. It is gone with the process."""
    place = _executable_place()
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, "--folder", str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if k in ("PATH", "LD_LIBRARY_PATH")},
        cwd="/",
    )
    _keepers.append(keeper)
    assert keeper.stdout  # it is a pipe
    if not (folder := os.fsdecode(keeper.stdout.readline()).rstrip("\n")):
        raise OSError(f"no private folder could be made in {place}")
    return Path(folder)


def _executable_place() -> Path:
    """The folder for temporary files, or, where code must not be loaded from there, one beside the builds."""
    place = Path(tempfile.gettempdir())
    if not os.statvfs(place).f_flag & os.ST_NOEXEC:
        return place
    place = build.directory() / "private"
    place.mkdir(parents=True, exist_ok=True)
    return place
