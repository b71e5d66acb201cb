"""The policy of the sandbox: what a submission's process may reach. harness/sandbox/confine.py carries it out."""

import contextlib
import fcntl
import functools
import importlib.util
import marshal
import os
import pwd
import random
import shutil
import site
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.sandbox import confine, reaper, syscalls

ROOT = Path(__file__).resolve().parents[2]
# Variables and the folders in cache/ that they name.
CACHES = ("KERNEL_BUILD_DIR build", "TRITON_CACHE_DIR triton", "TORCH_EXTENSIONS_DIR torch_extensions")
CACHES += ("TORCHINDUCTOR_CACHE_DIR inductor", "CUTE_DSL_CACHE_DIR cute_dsl", "XDG_CACHE_HOME xdg")
CACHES += ("CUDA_CACHE_PATH cuda", "NUMBA_CACHE_DIR numba", "HUMMING_CACHE_DIR humming", "DG_JIT_CACHE_DIR dg")
UIDS = range(60578, 61184)  # that no distribution and no systemd gives to a user or a service
MEASURES = ("uid", "landlock", "tcp", "scope", "seccomp")  # that not every machine offers
# Of the checkout.
SECRET = {"harness", "problems", "leaderboard", "ptx_model", "tests", "docs", "tools", "shared", ".git", ".build"}
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/proc", "/opt/nvidia", "/usr/local", "/nix/store")
# All but what root's debuggers read (/sys/kernel/debug, /sys/kernel/tracing, /sys/fs/bpf, ...), and the cgroups.
SYS = ("block", "bus", "class", "dev", "devices", "kernel/mm", "module")
# Of /etc what programs read when they start and compile, and where they are; nothing of users, hosts and services.
ETC_START = ("OpenCL", "alternatives", "ld.so.*", "malloc.conf", "nsswitch.conf", "python3*", "ssl/openssl.cnf")
ETC_PLACE = ("locale.*", "localtime", "os-release", "timezone")
DEVICES = ("null", "zero", "full", "random", "urandom", "nvidia*", "dxg")
COMPILERS = ("nvcc", "g++")
IMPORTED = ("torch", "numpy", "triton", "cutlass")  # by what runs in a runner; those that are installed
USER = "submission"  # what a runner's user is called; /etc/passwd, which it cannot read, knows none of its name
WATCHES = 19  # CAP_SYS_PTRACE


class SandboxError(RuntimeError):
    """A jail that the machine said it could give could not be made. Never the submission's fault."""


@dataclass(frozen=True)
class Jail:
    """One process's bounds. `code`: read-only, its only way to project code; `home`, `tmp`, `cache`: writable. uid: a
    separate user (the caller owns the lease and gives it the folders), None: the judge's. stopped: it is stopped
    between its calls, on a CPU; then no timer of the kernel works for it, and nothing that it can do continues it.
    """

    code: Path
    home: Path
    tmp: Path
    cache: Path
    uid: int | None = None
    stopped: bool = False

    def orders(self, reaper: int) -> dict:
        """Return what confine.py carries out, in types that marshal knows. reaper: pid of the process's parent."""
        abi = 0 if offered()["landlock"] else confine.landlock_abi()
        bounds = syscalls.Bounds(
            stopped=self.stopped,
            shared=self.uid is None,
            truncation=self.uid is None and abi < 3,
            protected=(reaper, os.getpid()) if self.uid is None and offered()["scope"] else (),
        )
        return {
            "abi": abi,
            "uid": self.uid,
            "passing": passing(),
            "filter": None if offered()["seccomp"] else syscalls.program(bounds),
            "cwd": str(self.home),
            "read": [str(self.code), *read_paths()],
            "write": [str(self.home), str(self.tmp), str(self.cache)],
            "devices": [str(path) for name in DEVICES for path in Path("/dev").glob(name)],
        }

    def taken(self, option: str = "-B1") -> int:
        """Return the bytes of disk that home/, tmp/ and cache/ take; with "--inodes" the number of what is in them."""
        folders = list(map(str, dict.fromkeys((self.home, self.tmp, self.cache))))
        for _ in range(2):
            status, counts = reaper.run_tool("du", "-s", option, "--", *folders)
            if status == 0:
                break
            reaper.run_tool("chmod", "-R", "u+rwx", "--", *folders)  # or something went while it was counted
        return sum(int(line.split()[0]) for line in counts.splitlines())

    def environment(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        """Return the whole environment of the process. extra: what the judge adds."""
        same = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG") or k.startswith(("CUDA_", "TORCH_CUDA_"))}
        library = os.pathsep.join(kept("LD_LIBRARY_PATH"))
        user_site = bool(site.ENABLE_USER_SITE) and site.getusersitepackages() in sys.path
        return {
            **same,
            **({"LD_LIBRARY_PATH": library} if library else {}),
            **({"PYTHONUSERBASE": site.getuserbase()} if user_site else {}),
            **{name: str(self.cache / place) for name, place in map(str.split, CACHES)},
            "PYTHONPATH": os.pathsep.join([str(self.code), *kept("PYTHONPATH")]),
            "HOME": str(self.home),
            "TMPDIR": str(self.tmp),
            "USER": USER,
            "LOGNAME": USER,
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",  # a pool that spins after a call would look like one that works
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more are processes, which would outlive the call
            # Kept kernels that it bundles name the folder of the process that compiled them.
            "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0",
            **(extra or {}),
        }


def probe() -> dict[str, str]:
    """Return the measures of this machine for the record: "on", with details, or "off: " and why not."""
    abi = "" if offered()["landlock"] else f" (ABI {confine.landlock_abi()})"
    details = {"uid": f" ({UIDS[0]} to {UIDS[-1]}, one a runner)", "landlock": abi}
    measures = {name: f"off: {why}" if why else "on" + details.get(name, "") for name, why in offered().items()}
    held = "only CAP_DAC_READ_SEARCH, to pass closed folders; Landlock says what is read" if passing() else "none"
    python_path, library_path = (os.pathsep.join(kept(variable)) for variable in ("PYTHONPATH", "LD_LIBRARY_PATH"))
    return measures | {"capabilities": held, "python_path": python_path, "library_path": library_path}


@functools.cache
def offered() -> dict[str, str]:
    """Return for each of MEASURES "" if this machine offers it, else why not."""
    reasons = dict.fromkeys(MEASURES, "")
    try:
        abi = confine.landlock_abi()
        if abi < 2:
            reasons["landlock"] = "Landlock ABI 1 lets no process rename between folders (Linux 5.19 does)"
    except OSError as error:
        abi, reasons["landlock"] = 0, error.strerror or str(error)
    reasons["uid"] = _why_no_uid(passing=False)
    if reasons["uid"] and not reasons["landlock"]:
        reasons["uid"] = _why_no_uid(passing=True)
    reasons["tcp"] = reasons["landlock"] or ("" if abi >= 4 else f"Landlock ABI {abi}, from 4 on")
    reasons["scope"] = reasons["landlock"] or ("" if abi >= 6 else f"Landlock ABI {abi}, from 6 on")
    try:
        confine.seccomp_available()
    except OSError as error:
        reasons["seccomp"] = error.strerror or str(error)
    return reasons


@functools.cache
def passing() -> bool:
    """Return whether runners of a separate user need a capability to reach their interpreter, in root's home, say."""
    return not offered()["uid"] and bool(_why_no_uid(passing=False))


def _why_no_uid(passing: bool) -> str:
    if os.geteuid() != 0:
        return "not started as root"
    if len(mapped := _mapped_uids()) == 0:
        return f"uids {UIDS[0]} to {UIDS[-1]} do not exist in this user namespace"
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    if not int(status.get("CapEff", "-1"), 16) >> WATCHES & 1:
        return "root here lacks CAP_SYS_PTRACE, and could not see what another user's process holds"
    read = [sys.prefix, sys.base_prefix, *filter(os.path.exists, [*_narrow(sys.path), *kept("LD_LIBRARY_PATH")])]
    read += [spec.origin for spec in map(importlib.util.find_spec, IMPORTED) if spec and spec.origin]
    needed = [(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)) for path in read]
    run = [sys.executable, tempfile.gettempdir(), *map(shutil.which, COMPILERS)]
    needed += [(path, os.X_OK) for path in run if path]
    needed += [(str(path), os.R_OK | os.W_OK) for path in Path("/dev").glob("nvidia[0-9]*")]
    script = (
        f"import marshal, sys; sys.path.append({str(ROOT / 'harness' / 'sandbox')!r}); import confine; "
        "print(confine.closed(*marshal.loads(sys.stdin.buffer.read())))"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],
        input=marshal.dumps((mapped[0], passing, needed)),
        capture_output=True,
        timeout=60,
    )
    if result.returncode:
        return f"root here cannot become another user: {result.stderr.decode(errors='replace').strip()[-300:]}"
    closed = result.stdout.decode(errors="replace").strip()
    return f"other users cannot use {closed}" if closed else ""


def _mapped_uids() -> list[int]:
    """Those of UIDS that exist here, as users and as groups."""
    uids = set(UIDS)
    for kind in ("uid", "gid"):
        ranges = [line.split() for line in Path(f"/proc/self/{kind}_map").read_text().splitlines()]
        uids &= {n for first, _, count in ranges for n in UIDS if int(first) <= n < int(first) + int(count)}
    return sorted(uids)


@contextlib.contextmanager
def user() -> Iterator[int | None]:
    """A uid that no other living runner has, while the context is open; None where there is none to be had."""
    if offered()["uid"]:
        yield None
        return
    folder = runtime_folder("uids")
    busy = set[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            busy.add(entry.stat().st_uid)
    candidates = [uid for uid in _mapped_uids() if uid not in busy]
    random.shuffle(candidates)
    for uid in candidates:
        fd = os.open(folder / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        try:
            yield uid
            return
        finally:
            os.close(fd)
    raise SandboxError(f"every uid from {UIDS[0]} to {UIDS[-1]} is in use")


def runtime_folder(name: str) -> Path:
    """Return a folder for this user's locks that no other user can write. SandboxError: another user made it."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"kernel-locks-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise SandboxError(f"{folder} is not this user's own folder: remove it")
    (folder / name).mkdir(mode=0o700, exist_ok=True)
    return folder / name


def kept(variable: str) -> list[str]:
    """The entries of the judge's PATH, PYTHONPATH or LD_LIBRARY_PATH that a runner keeps, see _narrow."""
    return _narrow(os.environ.get(variable, "").split(os.pathsep))


def read_paths() -> list[str]:
    """Return the existing paths that a jailed process may read and execute from, without the checkout."""
    paths = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *SYSTEM]
    paths += _narrow(sys.path)
    paths += [path for variable in ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH") for path in kept(variable)]
    paths += [f"/sys/{name}" for name in SYS] + _toolkits()
    paths += [str(path) for name in ETC_START + ETC_PLACE for path in Path("/etc").glob(name)]
    existing = list(dict.fromkeys(str(part) for path in paths for part in _carved(Path(path).resolve())))
    # A path within another one needs no separate rule.
    return [path for path in existing if not any(str(parent) in existing for parent in Path(path).parents)]


def _toolkits() -> list[str]:
    """The CUDA toolkits that the environment or nvcc on PATH point to."""
    folders = [os.environ[key] for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    if nvcc := shutil.which("nvcc"):
        folders.append(str(Path(nvcc).resolve().parent.parent))
    return [folder for folder in folders if os.path.isdir(f"{folder}/nvvm")]


def _narrow(entries: list[str]) -> list[str]:
    """Of folders that a variable or the interpreter names those that may be read: not the checkout or a project's
    folder in it, not a home folder, and nothing above these.
    """
    listed = [user.pw_dir for user in pwd.getpwall() if user.pw_uid == os.geteuid()]
    homes = {Path(os.path.realpath(home)) for home in (os.path.expanduser("~"), *listed)}
    above = {folder for home in homes for folder in (home, *home.parents)}
    paths = [Path(entry).resolve() for entry in entries if entry]
    return [str(path) for path in paths if _shown(path) and path not in above]


def _shown(path: Path) -> bool:
    """Whether a path is allowed as a whole: not the checkout, nothing above it, nor the project's own folders in it."""
    if path == ROOT or path in ROOT.parents:
        return False
    return ROOT not in path.parents or path.relative_to(ROOT).parts[0] not in SECRET


def _carved(path: Path) -> list[Path]:
    """`path`, or where the checkout lies within it, everything beside the way there. None of a folder that the judge's
    user may not enter, which its PATH may name: a runner could not either.
    """
    try:
        if path in ROOT.parents:
            return [part for entry in path.iterdir() if not entry.is_symlink() for part in _carved(entry)]
        return [path] if path.exists() and _shown(path) else []
    except PermissionError:
        return []
