"""The confinement of a jailed process between fork and exec: user, capabilities, files, network, system calls.

Plain system calls through ctypes, nothing but the standard library, so that the small process that forks it starts
quickly. harness/sandbox/policy.py decides, and this module carries it out. What it cannot carry out raises OSError: a
process never runs less confined than policy.py decided.
"""

import ctypes
import errno
import os
import resource
import struct

FILE_LIMIT = 8 * 2**30  # bytes of one file, memory files too
PROCESS_LIMIT = 16384  # processes and threads of a separate user; CUDA and OpenMP start many threads
CAPABILITIES = 64  # more than any kernel has
OOM_SCORE = "1000"  # the kernel takes this one first

# Landlock. Rights by the ABI that brought them; the numbers are the kernel's.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = (1 << bit for bit in range(4))
MAKE_CHAR, MAKE_BLOCK, REFER, TRUNCATE, IOCTL_DEV = 1 << 6, 1 << 11, 1 << 13, 1 << 14, 1 << 15
FIRST_RIGHTS = (1 << 13) - 1  # those of ABI 1
READ = EXECUTE | READ_FILE | READ_DIR
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # that a rule on a plain file may hold
NO_TCP = 0b11  # bind, connect
SCOPES = 0b11  # abstract sockets and signals stay among the confined

_libc = ctypes.CDLL(None, use_errno=True)
PDEATHSIG, DUMPABLE, KEEPCAPS, BOUNDING_DROP, SECUREBITS, NO_NEW_PRIVS, AMBIENT = 1, 4, 8, 24, 28, 38, 47  # of prctl
_AMBIENT_RAISE = 2
_PASSING, _SETPCAP = 2, 8  # capabilities: CAP_DAC_READ_SEARCH; CAP_SETPCAP
_SECUREBITS = 0b11000011  # root's uid gives no capability and none can be made ambient; both locked
_ACCESS_AS_OPEN = 0b1100  # access(2) counts the capabilities of a user other than root, as open(2) does; locked

_ERRNO = 0x00050000  # what a filter answers with an error
_SPEC_ALLOW = 1 << 2  # without it some kernels slow a filtered process down, and its times with it


def _call(name: str, *arguments: object) -> int:
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def prctl(option: int, value: int, more: int = 0) -> None:
    """OSError if the kernel refuses."""
    _call("prctl", option, *(ctypes.c_ulong(v) for v in (value, more, 0, 0)))


def landlock_abi() -> int:
    """OSError: the kernel has no Landlock, or it is switched off."""
    return _call("syscall", 444, None, ctypes.c_size_t(0), 1)


def seccomp_available() -> None:
    """OSError: the kernel cannot answer a system call with an error of our choice."""
    if os.uname().machine != "x86_64":
        raise OSError(errno.ENOSYS, f"the filter is written for x86_64, this is {os.uname().machine}")
    _call("syscall", 317, ctypes.c_uint(2), ctypes.c_uint(0), ctypes.byref(ctypes.c_uint32(_ERRNO)))


def confine(jail: dict, reaper: int) -> None:
    """Carry out the orders of `jail` (sandbox.Jail.orders). reaper: pid of the calling process's parent."""
    prctl(DUMPABLE, 1)  # the reaper is not; else /proc/self belongs to root and cannot be written
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(OOM_SCORE)
    _limit(jail["uid"] is not None)
    ruleset = _landlock(jail) if jail["abi"] else None
    if jail["uid"] is not None and jail["passing"]:
        become(jail["uid"], passing=True)
    else:
        if os.geteuid() == 0:
            _drop_bounding()
        if jail["uid"] is not None:
            become(jail["uid"])
        _set_capabilities(0, inheritable=0)  # what is ambient goes with what is inheritable
    prctl(NO_NEW_PRIVS, 1)
    prctl(PDEATHSIG, 9)  # after setuid, which clears it
    if os.getppid() != reaper:
        raise OSError(errno.ESRCH, "the reaper is gone")
    os.chdir(jail["cwd"])
    os.umask(0o022)
    if ruleset is not None:
        _call("syscall", 446, ruleset, ctypes.c_uint(0))
        os.close(ruleset)
    if program := jail["filter"]:  # which the kernel asks at each system call from now on
        buffer = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: the number of instructions, padding, their address.
        header = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
        _call("syscall", 317, ctypes.c_uint(1), ctypes.c_uint(_SPEC_ALLOW), header)


def become(uid: int, passing: bool = False) -> None:
    """Turn this process of root's into one of the user and group `uid`. passing: with one capability left,
    CAP_DAC_READ_SEARCH, also after exec: it passes folders that are closed to other users, and reads what lies there.
    Only Landlock then says what may be read, so it must be in force.
    """
    if passing:
        prctl(KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if passing:
        _set_capabilities(1 << _PASSING | 1 << _SETPCAP, inheritable=1 << _PASSING)
        prctl(AMBIENT, _AMBIENT_RAISE, _PASSING)
        _drop_bounding(_SECUREBITS | _ACCESS_AS_OPEN)  # after that nothing can be raised any more
        _set_capabilities(1 << _PASSING, inheritable=1 << _PASSING)


def closed(uid: int, passing: bool, needed: list[tuple[str, int]]) -> str:
    """Become `uid` as above. Return the first of these paths that is not accessible in its mode (os.access), or ""."""
    become(uid, passing)
    return next((path for path, mode in needed if not os.access(path, mode)), "")


def _limit(own_user: bool) -> None:
    none = (resource.RLIMIT_CORE, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE)
    wanted = {resource.RLIMIT_FSIZE: FILE_LIMIT, **dict.fromkeys(none, 0)}
    if own_user:  # the count is the user's, so that it would hit what else a shared one runs
        wanted[resource.RLIMIT_NPROC] = PROCESS_LIMIT
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _drop_bounding(securebits: int = _SECUREBITS) -> None:
    for capability in range(CAPABILITIES):
        try:
            prctl(BOUNDING_DROP, capability)
        except OSError as error:
            if error.errno != errno.EINVAL:  # past the last one
                raise
            break
    prctl(SECUREBITS, securebits)


def _set_capabilities(held: int, inheritable: int) -> None:
    """held: permitted and in effect. All of the first 32."""
    _call("capset", struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", held, held, inheritable, 0, 0, 0))


def _landlock(jail: dict) -> int:
    """Return the descriptor of the ruleset."""
    abi = jail["abi"]
    handled = FIRST_RIGHTS | REFER | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)
    attributes = [handled, NO_TCP, SCOPES][: 1 if abi < 4 else 2 if abi < 6 else 3]
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    ruleset = _call("syscall", 444, packed, ctypes.c_size_t(len(packed)), 0)
    everything = handled & ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV)
    own = f"/proc/{os.getpid()}"
    for paths, rights in (
        (jail["read"], READ),
        (jail["write"], everything),
        (jail["devices"], READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | IOCTL_DEV),
        ([own], READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE),
    ):
        for path in paths:
            _rule(ruleset, path, rights & handled)
    return ruleset


def _rule(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return  # nothing there to be allowed
    try:
        if not os.path.isdir(f"/proc/self/fd/{fd}"):
            rights &= FILE_RIGHTS
        _call("syscall", 445, ruleset, 1, struct.pack("=Qi", rights, fd), ctypes.c_uint(0))
    finally:
        os.close(fd)
