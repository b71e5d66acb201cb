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
_PRCTL = {
    "pdeathsig": 1,
    "dumpable": 4,
    "keepcaps": 8,
    "bounding_drop": 24,
    "securebits": 28,
    "subreaper": 36,
    "no_new_privs": 38,
    "ambient": 47,
}
_AMBIENT_RAISE, _AMBIENT_CLEAR = 2, 4
_PASSING, _SETPCAP = 2, 8  # capabilities: CAP_DAC_READ_SEARCH; CAP_SETPCAP
_SECUREBITS = 0b11000011  # root's uid gives no capability and none can be made ambient; both locked
_ACCESS_AS_OPEN = 0b1100  # access(2) counts the capabilities of a user other than root, as open(2) does; locked

_AUDIT_X86_64 = 0xC000003E
_X32 = 0x40000000
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06  # BPF
_SPEC_ALLOW = 1 << 2  # without it some kernels slow a filtered process down, and its times with it

# System calls of x86_64 that no kernel author needs, by number. What the comments name is what they would open.
_DENIED = (
    101,
    310,
    311,
    438,
    312,
    440,
    448,  # ptrace, process_vm_*, pidfd_getfd, kcmp, process_madvise, process_mrelease
    29,
    30,
    31,
    64,
    65,
    66,
    220,
    68,
    69,
    70,
    71,
    240,
    241,  # System V shared memory, semaphores, queues; POSIX queues
    425,
    426,
    427,  # io_uring: file and socket calls that no filter sees
    298,
    321,
    323,
    300,
    154,  # perf_event_open, bpf, userfaultfd, fanotify_init, modify_ldt
    253,
    294,
    254,
    301,  # inotify, fanotify_mark: they tell that another process opened a file that all read
    248,
    249,
    250,  # keys
    165,
    166,
    155,
    161,
    442,
    428,
    467,
    429,
    430,
    431,
    432,
    433,  # mounts, chroot, pivot_root
    308,
    272,
    304,
    212,
    179,
    443,  # setns, unshare, open_by_handle_at, lookup_dcookie, quotactl
    246,
    320,
    169,
    167,
    168,
    175,
    313,
    176,
    172,
    173,
    163,
    103,
    153,  # kexec, reboot, swap, modules, ports, logs
    164,
    227,
    170,
    171,  # clock and host name
)
# Landlock does not govern these. A separate user owns nothing outside its folders, so only a shared one needs them.
_DENIED_SHARED = (
    90,
    91,
    268,
    452,
    92,
    93,
    94,
    260,  # chmod, chown
    132,
    235,
    261,
    280,  # times
    188,
    189,
    190,
    197,
    198,
    199,
    463,
    466,
    469,  # extended attributes
)
_SOCKET, _CONNECT, _CLONE, _CLONE3, _PRLIMIT = 41, 42, 56, 435, 302
_TRUNCATE, _OPEN, _OPENAT, _OPENAT2 = 76, 2, 257, 437
_MEMORY_FILES = (319, 447)  # memfd_create, memfd_secret: memory that the judge could not count
_UNIX, _NETLINK, _NETLINK_USERSOCK = 1, 16, 2
_NAMESPACES = 0x7E020000  # the CLONE_NEW* flags of clone, CLONE_NEWTIME aside, which it does not take
_CLONE_PARENT = 0x8000  # makes a sibling, which its maker never has to wait for
_EXIT_SIGNAL = 0xFF  # of clone's flags: the signal that the parent gets when the child ends
_OTHERS_PRIORITY = ((141, 1), (142, 0), (144, 0), (314, 0), (251, 1), (279, 0), (256, 0))  # call, argument: pid or 0
# What other processes let be known of themselves: getpriority, ioprio_get, sched_getattr.
_OTHERS_STATE = ((140, 1), (252, 1), (315, 0))
_SET_AFFINITY = 203
_SIGNALS = (62, 200, 234, 129, 297)  # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo; pid first
_PIDFD_SIGNAL = 424
_SIGCONT = 18
# Calls that send a signal, and which argument it is.
_SIGNAL_ARGUMENTS = ((62, 1), (200, 1), (234, 2), (129, 1), (297, 2), (_PIDFD_SIGNAL, 1))
_FCNTL, _F_SETSIG, _PRCTL_CALL = 72, 10, 157
# What has the kernel work for a process that is stopped: timer_create, timerfd_create, io_setup. A timer that wakes
# 4000 watchers takes half a millisecond of whoever is timed then. setitimer stays: nothing watches its few timers.
_TIMERS = (222, 283, 206)
# Locks on a file that all may read are a board for messages. To take one succeeds and does nothing, since no other
# process writes what a runner writes; to ask who holds one is refused, as leases and dnotify are.
_FLOCK, _TAKE_LOCK, _ASK_LOCK = 73, (6, 7, 37, 38), (5, 36, 1024, 1025, 1026)  # F_SETLK, ...; F_GETLK, ..., F_NOTIFY
_NOTHING = 0  # an error that is none
_EVERYBODY = 0xFFFFFFFF  # pid -1


def _call(name: str, *arguments: object) -> int:
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def prctl(option: str, value: int, more: int = 0) -> None:
    """OSError if the kernel refuses."""
    _call("prctl", _PRCTL[option], *(ctypes.c_ulong(v) for v in (value, more, 0, 0)))


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
    measures = jail["measures"]
    prctl("dumpable", 1)  # the reaper is not; else /proc/self belongs to root and cannot be written
    if "oom" in measures:
        _write("/proc/self/oom_score_adj", OOM_SCORE)
    if "rlimits" in measures:
        _limit(jail["uid"] is not None)
    ruleset = _landlock(jail) if "landlock" in measures else None
    if jail["uid"] is not None and jail["passing"]:
        become(jail["uid"], passing=True)
    else:
        if "capabilities" in measures and os.geteuid() == 0:
            _drop_bounding()
        if jail["uid"] is not None:
            become(jail["uid"])
        if "capabilities" in measures:
            _drop_capabilities()
    prctl("no_new_privs", 1)
    prctl("pdeathsig", 9)  # after setuid, which clears it
    if os.getppid() != reaper:
        raise OSError(errno.ESRCH, "the reaper is gone")
    os.chdir(jail["cwd"])
    os.umask(0o022)
    if ruleset is not None:
        _call("syscall", 446, ruleset, ctypes.c_uint(0))
        os.close(ruleset)
    if "seccomp" in measures:
        _filter(_rules(jail, reaper))


def become(uid: int, passing: bool = False) -> None:
    """Turn this process of root's into one of the user and group `uid`.

    passing: with one capability left, CAP_DAC_READ_SEARCH, also after exec: it passes folders that are closed to other
    users, and reads what lies there. Only Landlock then says what may be read, so it must be in force.
    """
    if passing:
        prctl("keepcaps", 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if passing:
        _set_capabilities(1 << _PASSING | 1 << _SETPCAP, inheritable=1 << _PASSING)
        prctl("ambient", _AMBIENT_RAISE, _PASSING)
        _drop_bounding(_SECUREBITS | _ACCESS_AS_OPEN)  # after that nothing can be raised any more
        _set_capabilities(1 << _PASSING, inheritable=1 << _PASSING)


def closed(uid: int, passing: bool, needed: list[tuple[str, int]]) -> str:
    """Become `uid` as above. Return the first of these paths that is not accessible in its mode (os.access), or ""."""
    become(uid, passing)
    return next((path for path, mode in needed if not os.access(path, mode)), "")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _limit(own_user: bool) -> None:
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: FILE_LIMIT,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
    }
    if own_user:  # the count is the user's, so that it would hit what else a shared one runs
        wanted[resource.RLIMIT_NPROC] = PROCESS_LIMIT
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _drop_bounding(securebits: int = _SECUREBITS) -> None:
    for capability in range(CAPABILITIES):
        try:
            prctl("bounding_drop", capability)
        except OSError as error:
            if error.errno != errno.EINVAL:  # past the last one
                raise
            break
    prctl("securebits", securebits)


def _drop_capabilities() -> None:
    try:
        prctl("ambient", _AMBIENT_CLEAR)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without ambient capabilities
            raise
    _set_capabilities(0, 0)


def _set_capabilities(held: int, inheritable: int) -> None:
    """held: permitted and in effect. All of the first 32."""
    header = struct.pack("=Ii", 0x20080522, 0)
    _call("capset", header, struct.pack("=6I", held, held, inheritable, 0, 0, 0))


def _landlock(jail: dict) -> int:
    """Return the descriptor of the ruleset."""
    abi, scoped = jail["abi"], SCOPES if "scope" in jail["measures"] else 0
    handled = FIRST_RIGHTS | REFER | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)
    attributes = [handled, NO_TCP if "tcp" in jail["measures"] else 0, scoped][: 1 if abi < 4 else 2 if abi < 6 else 3]
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


# A rule of the filter: (system call, error, conditions), each condition (argument, test, *values) on its low 32 bits.
# A call that meets every condition of a rule gets its error.
_Rule = tuple[int, int, tuple[tuple, ...]]


def _rules(jail: dict, reaper: int) -> list[_Rule]:
    measures, deny = jail["measures"], errno.EPERM
    rules: list[_Rule] = [(number, deny, ()) for number in _DENIED]
    # clone3 passes its flags where a filter cannot look: as on a kernel without it, callers fall back to clone.
    rules += [(_CLONE, deny, ((0, "any", _NAMESPACES | _CLONE_PARENT),)), (_CLONE3, errno.ENOSYS, ())]
    rules += [(_SIGNALS[0], deny, ((0, "is", _EVERYBODY),))]  # Landlock refuses it silently: every one, then success
    rules += [(_PRLIMIT, deny, ((0, "not", 0),))]
    rules += [(number, deny, ((argument, "not", 0),)) for number, argument in (*_OTHERS_PRIORITY, *_OTHERS_STATE)]
    rules += [(_FLOCK, _NOTHING, ()), *((_FCNTL, _NOTHING, ((1, "is", what),)) for what in _TAKE_LOCK)]
    rules += [(_FCNTL, deny, ((1, "is", what),)) for what in _ASK_LOCK]
    if jail.get("stopped_by"):
        rules += [(number, deny, ()) for number in _TIMERS]
    if jail.get("stopped_by") == "signals":
        rules += [(number, deny, ((argument, "is", _SIGCONT),)) for number, argument in _SIGNAL_ARGUMENTS]
        # Input on a descriptor and a process that ends can send any signal, as timers can.
        rules += [(_FCNTL, deny, ((1, "is", _F_SETSIG),))]
        rules += [(_PRCTL_CALL, deny, ((0, "is", _PRCTL["pdeathsig"]), (1, "is", _SIGCONT)))]
        rules += [(_CLONE, deny, ((0, "masked", _EXIT_SIGNAL, _SIGCONT),))]
    if "network" in measures:
        rules += [(_SOCKET, deny, ((0, "not", _UNIX), (0, "not", _NETLINK)))]
        # Libraries ask the kernel for routes by netlink. Of its families one carries messages between processes.
        rules += [(_SOCKET, deny, ((0, "is", _NETLINK), (2, "is", _NETLINK_USERSOCK)))]
        # A path names services of the machine (a container daemon, say), and Landlock does not govern those sockets.
        rules += [(_CONNECT, deny, ())]
    if "memfd" in measures:
        rules += [(number, deny, ()) for number in _MEMORY_FILES]
    if jail["uid"] is None:
        rules += [(number, deny, ()) for number in _DENIED_SHARED]
        # By its number a thread of the judge's looks like one of the runner's own.
        rules += [(_SET_AFFINITY, deny, ((0, "not", 0),))]
        if jail["abi"] < 3:  # then Landlock does not know truncation
            truncates = (os.O_TRUNC | os.O_ACCMODE, os.O_TRUNC)
            rules += [(_TRUNCATE, deny, ()), (_OPENAT2, errno.ENOSYS, ())]
            rules += [(_OPEN, deny, ((1, "masked", *truncates),)), (_OPENAT, deny, ((2, "masked", *truncates),))]
        if "scope" not in measures or "landlock" not in measures:
            kept = {reaper, jail["parent"]}
            for target in sorted({-1, *kept, *(-os.getpgid(pid) for pid in kept)}):
                rules += [(number, deny, ((0, "is", target & 0xFFFFFFFF),)) for number in _SIGNALS]
            rules += [(_PIDFD_SIGNAL, deny, ())]
    return rules


def _filter(rules: list[_Rule]) -> None:
    program = assemble(rules)
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, padding, their address.
    header = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    _call("syscall", 317, ctypes.c_uint(1), ctypes.c_uint(_SPEC_ALLOW), header)


def assemble(rules: list[_Rule]) -> bytes:
    """Return the BPF program of a seccomp filter that denies what `rules` say and allows the rest."""
    refuse = _ERRNO | errno.ENOSYS
    code = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _AUDIT_X86_64),
        (_RETURN, 0, 0, refuse),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, refuse),
    ]
    loaded = True  # the accumulator holds the call's number
    for number, error, conditions in rules:
        tests: list[tuple[int, int, int, int]] = []  # a jump distance of -1: to the next rule
        for argument, test, *values in conditions:
            tests.append((_LOAD, 0, 0, 16 + 8 * argument))
            if test == "is":
                tests.append((_EQUAL, 0, -1, values[0]))
            elif test == "not":
                tests.append((_EQUAL, -1, 0, values[0]))
            elif test == "any":
                tests.append((_ANY_BIT, 0, -1, values[0]))
            else:
                tests += [(_AND, 0, 0, values[0]), (_EQUAL, 0, -1, values[1])]
        body = [(_EQUAL, 0, -1, number), *tests, (_RETURN, 0, 0, _ERRNO | error)]
        if not loaded:
            code.append((_LOAD, 0, 0, 0))
        for i, (op, yes, no, value) in enumerate(body):
            rest = len(body) - 1 - i
            code.append((op, rest if yes < 0 else yes, rest if no < 0 else no, value))
        loaded = not conditions
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
