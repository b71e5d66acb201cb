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

from harness.sandbox import confine

ROOT = Path(__file__).resolve().parents[2]
UIDS = range(60578, 61184)  # that no distribution and no systemd gives to a user or a service
MEASURES = ("uid", "capabilities", "landlock", "tcp", "scope", "seccomp", "network", "memfd", "rlimits", "oom")
# Of the checkout.
SECRET = {"harness", "problems", "leaderboard", "ptx_model", "tests", "docs", "tools", "shared", ".git", ".build"}
SYSTEM = (
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/bin",
    "/sbin",
    "/proc",
    "/opt/nvidia",
    "/usr/local",
    "/nix/store",
    # Of /sys all but what root's debuggers read (/sys/kernel/debug, /sys/kernel/tracing, /sys/fs/bpf, ...) and the
    # cgroups, which tell when another runner is continued.
    "/sys/block",
    "/sys/bus",
    "/sys/class",
    "/sys/dev",
    "/sys/devices",
    "/sys/kernel/mm",
    "/sys/module",
)
# Of /etc what programs read when they start and compile; nothing of users, hosts and services.
ETC = (
    "OpenCL",
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "ld.so.preload",
    "locale.alias",
    "locale.conf",
    "localtime",
    "malloc.conf",
    "nsswitch.conf",
    "os-release",
    "python3*",
    "ssl/openssl.cnf",
    "timezone",
)
DEVICES = ("null", "zero", "full", "random", "urandom", "nvidia*", "dxg")
COMPILERS = ("nvcc", "g++")
IMPORTED = ("torch", "numpy", "triton", "cutlass")  # by what runs in a runner; those that are installed
USER = "submission"  # what a runner's user is called; /etc/passwd, which it cannot read, knows none of its name
WATCHES = 19  # CAP_SYS_PTRACE


class SandboxError(RuntimeError):
    """A jail that the machine said it could give could not be made. Never the submission's fault."""


@dataclass(frozen=True)
class Jail:
    """One process's bounds. `code`: read-only, its only way to project code; `home`, `tmp`, `cache`: writable.

    uid: a separate user (the caller owns the lease and gives the folders to it), None: the judge's. `without`: names
    of MEASURES to leave out, to bisect a tool that breaks; nothing judged runs with it. stopped_by: what stops it
    between its calls, "cgroup" or "signals", None: nothing. While it is stopped, no timer of the kernel works for it,
    and nothing that it can do continues a process that was stopped by a signal.
    """

    code: Path
    home: Path
    tmp: Path
    cache: Path
    uid: int | None = None
    network: bool = False
    without: frozenset[str] = frozenset()
    stopped_by: str | None = None

    def measures(self) -> list[str]:
        """Return those of MEASURES that will be in force."""
        left_out = set(self.without) | ({"tcp", "network"} if self.network else set())
        left_out |= {"uid"} if self.uid is None or not _user_fits(self.without) else set()
        left_out |= {"tcp", "scope"} if "landlock" in left_out else set()
        left_out |= {"network", "memfd"} if "seccomp" in left_out else set()
        return [name for name, why_not in offered().items() if not why_not and name not in left_out]

    def orders(self) -> dict:
        """Return what harness/sandbox/confine.py carries out, in types that marshal knows."""
        measures = self.measures()
        return {
            "measures": measures,
            "abi": confine.landlock_abi() if "landlock" in measures else 0,
            "uid": self.uid if "uid" in measures else None,
            "passing": passing(),
            "stopped_by": self.stopped_by,
            "cwd": str(self.home),
            "parent": os.getpid(),
            "read": [str(self.code), *read_paths()],
            "write": [str(self.home), str(self.tmp), str(self.cache)],
            "devices": [str(path) for name in DEVICES for path in Path("/dev").glob(name)],
        }

    def environment(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        """Return the whole environment of the process. extra: what the judge adds."""
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG") or k.startswith("CUDA_")}
        library = os.pathsep.join(library_path())
        user_site = bool(site.ENABLE_USER_SITE) and site.getusersitepackages() in sys.path
        cache = {
            "KERNEL_BUILD_DIR": "build",
            "TRITON_CACHE_DIR": "triton",
            "TORCH_EXTENSIONS_DIR": "torch_extensions",
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "CUTE_DSL_CACHE_DIR": "cute_dsl",
            "XDG_CACHE_HOME": "xdg",
            "CUDA_CACHE_PATH": "cuda",
            "NUMBA_CACHE_DIR": "numba",
            "HUMMING_CACHE_DIR": "humming",
        }
        return {
            **kept,
            **({"LD_LIBRARY_PATH": library} if library else {}),
            **({"PYTHONUSERBASE": site.getuserbase()} if user_site else {}),
            **{key: str(self.cache / name) for key, name in cache.items()},
            "PYTHONPATH": os.pathsep.join([str(self.code), *python_path()]),
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
    details = {
        "uid": f"{UIDS[0]} to {UIDS[-1]}, one a runner",
        "landlock": f"ABI {confine.landlock_abi()}" if not offered()["landlock"] else "",
        "capabilities": "only CAP_DAC_READ_SEARCH, to pass closed folders; Landlock says what is read"
        if passing()
        else "none",
        "network": "no sockets but unconnected local ones",
    }
    found = {
        name: f"off: {why}" if why else "on" + (f" ({details[name]})" if details.get(name) else "")
        for name, why in offered().items()
    }
    if offered()["uid"] and not offered()["seccomp"]:
        found["uid"] += "; pinning of other threads is refused"
    found |= {"no_new_privs": "on", "dumpable": "on (off for the judge: no process reads its memory)", "reaper": "on"}
    if found["scope"] != "on" and not found["uid"].startswith("on"):
        found["reaper"] = "on, but a runner of the judge's user can signal what it finds, the reaper and parent aside"
    found["python_path"] = os.pathsep.join(python_path())
    found["library_path"] = os.pathsep.join(library_path())
    return found


@functools.cache
def offered() -> dict[str, str]:
    """Return for each of MEASURES "" if this machine offers it, else why not."""
    found = dict.fromkeys(MEASURES, "")
    try:
        abi = confine.landlock_abi()
        if abi < 2:
            found["landlock"] = "Landlock ABI 1 lets no process rename between folders (Linux 5.19 does)"
    except OSError as error:
        abi, found["landlock"] = 0, error.strerror or str(error)
    found["uid"] = _why_no_uid(passing=False)
    if found["uid"] and not found["landlock"]:
        found["uid"] = _why_no_uid(passing=True)
    found["tcp"] = found["landlock"] or ("" if abi >= 4 else f"Landlock ABI {abi}, from 4 on")
    found["scope"] = found["landlock"] or ("" if abi >= 6 else f"Landlock ABI {abi}, from 6 on")
    try:
        confine.seccomp_available()
    except OSError as error:
        found["seccomp"] = error.strerror or str(error)
    if found["seccomp"]:
        found["network"] = found["memfd"] = f"needs the system-call filter: {found['seccomp']}"
    return found


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
    needed = [(sys.executable, os.X_OK), *((path, os.R_OK | os.X_OK) for path in (sys.prefix, sys.base_prefix))]
    needed += [(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)) for path in _import_paths()]
    needed += [(path, os.R_OK | os.X_OK) for path in library_path() if os.path.isdir(path)]
    needed += [(path, os.X_OK) for path in map(shutil.which, COMPILERS) if path]
    needed += [(str(path), os.R_OK | os.W_OK) for path in Path("/dev").glob("nvidia[0-9]*")]
    needed += [(tempfile.gettempdir(), os.X_OK)]
    for name in IMPORTED:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            needed += [(spec.origin, os.R_OK)] if spec and spec.origin else []
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


def _user_fits(without: frozenset[str]) -> bool:
    """Return whether runners without these measures can be separate users: none passes closed folders unfenced."""
    return "uid" not in without and not (passing() and "landlock" in without)


def _mapped_uids() -> list[int]:
    """Those of UIDS that exist here, as users and as groups."""
    found = set(UIDS)
    for kind in ("uid", "gid"):
        ranges = [line.split() for line in Path(f"/proc/self/{kind}_map").read_text().splitlines()]
        found &= {n for first, _, count in ranges for n in UIDS if int(first) <= n < int(first) + int(count)}
    return sorted(found)


@contextlib.contextmanager
def user(without: frozenset[str] = frozenset()) -> Iterator[int | None]:
    """A uid that no other living runner has, while the context is open; None where there is none to be had.

    without: what the runner's jail leaves out.
    """
    if offered()["uid"] or not _user_fits(without):
        yield None
        return
    folder = runtime_folder("uids")
    busy = {os.stat(entry).st_uid for entry in Path("/proc").iterdir() if entry.name.isdigit() and entry.exists()}
    candidates = _mapped_uids()
    random.shuffle(candidates)
    for uid in candidates:
        fd = os.open(folder / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        try:
            if uid not in busy:
                yield uid
                return
        finally:
            os.close(fd)
    raise SandboxError(f"every uid from {UIDS[0]} to {UIDS[-1]} is in use")


def runtime_folder(name: str) -> Path:
    """Return a folder for this user's locks that no other user can write. SandboxError: another user made it."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = base / f"kernel-locks-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise SandboxError(f"{folder} is not this user's own folder: remove it")
    (folder / name).mkdir(mode=0o700, exist_ok=True)
    return folder / name


def python_path() -> list[str]:
    """The parent's PYTHONPATH entries that a runner keeps, see _narrow."""
    return [str(path) for path in _entries("PYTHONPATH")]


def library_path() -> list[str]:
    """The parent's LD_LIBRARY_PATH entries that a runner keeps, see _narrow."""
    return [str(path) for path in _entries("LD_LIBRARY_PATH")]


def _entries(variable: str) -> list[Path]:
    entries = [Path(entry).resolve() for entry in os.environ.get(variable, "").split(os.pathsep) if entry]
    return [path for path in entries if _narrow(path)]


def _import_paths() -> list[str]:
    """Where this interpreter imports from, see _narrow."""
    paths = [Path(entry).resolve() for entry in sys.path if entry]
    return [str(path) for path in paths if path.exists() and _narrow(path)]


def read_paths() -> tuple[str, ...]:
    """Return the existing paths that a jailed process may read and execute from, without the checkout."""
    names = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "HOME")
    return _read_paths(tuple(map(os.environ.get, names)), tuple(sys.path))


@functools.cache
def _read_paths(*_: tuple) -> tuple[str, ...]:
    paths = [Path(path) for path in (sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)))]
    paths += map(Path, (*_import_paths(), *python_path(), *library_path(), *SYSTEM))
    paths += _entries("PATH") + _toolkits()
    paths += [path for name in ETC for path in Path("/etc").glob(name) if _readable_by_all(path)]
    found: dict[str, None] = {}
    for path in paths:
        found |= dict.fromkeys(map(str, _carved(path.resolve())))
    # A path within another one needs no separate rule.
    return tuple(path for path in found if not any(str(parent) in found for parent in Path(path).parents))


def _toolkits() -> list[Path]:
    """The CUDA toolkits that the environment or nvcc on PATH point to."""
    found = [Path(os.environ[key]) for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    if nvcc := shutil.which("nvcc"):
        found.append(Path(nvcc).resolve().parent.parent)
    return [folder for folder in found if (folder / "nvvm").is_dir()]


def _readable_by_all(path: Path) -> bool:
    """Whether any user may read it: a jailed process that keeps root's uid must not read root's files."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    wanted = 0o005 if stat.S_ISDIR(mode) else 0o004
    return mode & wanted == wanted


def _narrow(path: Path) -> bool:
    """Whether a folder that a variable or the interpreter names may be read: not the checkout or a project's folder in
    it, not a home folder, and nothing above these.
    """
    homes = {Path(os.path.realpath(os.path.expanduser(home))) for home in ("~", f"~{_user_name()}")}
    return _shown(path) and not any(path == home or path in home.parents for home in homes)


def _user_name() -> str:
    """Of this process's user, as the password file has it; "" where it does not."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


def _shown(path: Path) -> bool:
    """Whether a path is allowed as a whole: not the checkout, nothing above it, nor the project's own folders in it."""
    if path == ROOT or path in ROOT.parents:
        return False
    return ROOT not in path.parents or path.relative_to(ROOT).parts[0] not in SECRET


def _carved(path: Path) -> list[Path]:
    """`path`, or where the checkout lies within it, everything beside the way there."""
    if path in ROOT.parents:
        return [part for entry in path.iterdir() if not entry.is_symlink() for part in _carved(entry)]
    return [path] if path.exists() and _shown(path) else []
