"""The filter of system calls of a jailed process, by seccomp: it may make those of one table, and all others get EPERM.

The table has what Python, torch, OpenMP, compilers, Triton and CUDA's driver use. What is not in it reaches other
processes (ptrace, process_vm_readv, System V memory, queues, keys, fanotify), leaves the jail (namespaces, mounts,
connect), does work that nobody counts or sees (memfd_create, io_uring, userfaultfd, perf events, bpf), or is for root.
"""

import errno
import os
import struct
from dataclasses import dataclass


def _numbers(text: str) -> dict[str, int]:
    words = text.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


# By name and number on x86_64.
CALLS = _numbers("""
    read 0 write 1 open 2 close 3 stat 4 fstat 5 lstat 6 lseek 8 pread64 17 pwrite64 18 readv 19 writev 20 access 21
    dup 32 dup2 33 sendfile 40 fcntl 72 flock 73 fsync 74 fdatasync 75 truncate 76 ftruncate 77 getdents 78 getcwd 79
    chdir 80 fchdir 81 rename 82 mkdir 83 rmdir 84 creat 85 link 86 unlink 87 symlink 88 readlink 89 umask 95 mknod 133
    statfs 137 fstatfs 138 readahead 187 getxattr 191 lgetxattr 192 fgetxattr 193 listxattr 194 llistxattr 195
    flistxattr 196 getdents64 217 fadvise64 221 openat 257 mkdirat 258 mknodat 259 newfstatat 262 unlinkat 263
    renameat 264 linkat 265 symlinkat 266 readlinkat 267 faccessat 269 splice 275 tee 276 sync_file_range 277
    fallocate 285 dup3 292 preadv 295 pwritev 296 renameat2 316 copy_file_range 326 preadv2 327 pwritev2 328 statx 332
    close_range 436 openat2 437 faccessat2 439

    mmap 9 mprotect 10 munmap 11 brk 12 mremap 25 msync 26 mincore 27 madvise 28 mlock 149 munlock 150 mlockall 151
    munlockall 152 remap_file_pages 216 mbind 237 set_mempolicy 238 get_mempolicy 239 migrate_pages 256 move_pages 279
    membarrier 324 mlock2 325 pkey_mprotect 329 pkey_alloc 330 pkey_free 331 set_mempolicy_home_node 450

    clone 56 fork 57 vfork 58 execve 59 exit 60 wait4 61 kill 62 getpid 39 uname 63 getrlimit 97 getrusage 98 sysinfo 99
    times 100 getuid 102 getgid 104 geteuid 107 getegid 108 setpgid 109 getppid 110 getpgrp 111 setsid 112 getgroups 115
    getresuid 118 getresgid 120 getpgid 121 getsid 124 capget 125 personality 135 getpriority 140 setpriority 141
    prctl 157 arch_prctl 158 setrlimit 160 gettid 186 tkill 200 set_tid_address 218 exit_group 231 tgkill 234 waitid 247
    ioprio_set 251 ioprio_get 252 set_robust_list 273 get_robust_list 274 prlimit64 302 getcpu 309 execveat 322 rseq 334
    pidfd_send_signal 424 pidfd_open 434

    sched_yield 24 sched_setparam 142 sched_getparam 143 sched_setscheduler 144 sched_getscheduler 145
    sched_get_priority_max 146 sched_get_priority_min 147 sched_rr_get_interval 148 futex 202 sched_setaffinity 203
    sched_getaffinity 204 sched_setattr 314 sched_getattr 315 futex_waitv 449

    rt_sigaction 13 rt_sigprocmask 14 rt_sigreturn 15 pause 34 nanosleep 35 getitimer 36 alarm 37 setitimer 38
    gettimeofday 96 rt_sigpending 127 rt_sigtimedwait 128 rt_sigqueueinfo 129 rt_sigsuspend 130 sigaltstack 131 time 201
    restart_syscall 219 clock_gettime 228 clock_getres 229 clock_nanosleep 230 rt_tgsigqueueinfo 297 getrandom 318

    poll 7 ioctl 16 pipe 22 select 23 epoll_create 213 epoll_wait 232 epoll_ctl 233 pselect6 270 ppoll 271
    epoll_pwait 281 signalfd 282 eventfd 284 signalfd4 289 eventfd2 290 epoll_create1 291 pipe2 293 epoll_pwait2 441

    socket 41 accept 43 sendto 44 recvfrom 45 sendmsg 46 recvmsg 47 shutdown 48 bind 49 listen 50 getsockname 51
    getpeername 52 socketpair 53 setsockopt 54 getsockopt 55 accept4 288 recvmmsg 299 sendmmsg 307
""")
# On a GPU only, where a runner is never stopped: the kernel works for a process that is stopped, and wakes for it.
TIMERS = _numbers("""
    timer_create 222 timer_settime 223 timer_gettime 224 timer_getoverrun 225 timer_delete 226 timerfd_create 283
    timerfd_settime 286 timerfd_gettime 287
""")
# Landlock does not govern these. A separate user owns nothing outside its folders; one that is the judge's user does.
OWNERSHIP = _numbers("""
    chmod 90 fchmod 91 chown 92 fchown 93 lchown 94 utime 132 setxattr 188 lsetxattr 189 fsetxattr 190 removexattr 197
    lremovexattr 198 fremovexattr 199 utimes 235 fchownat 260 futimesat 261 fchmodat 268 utimensat 280
""")
CLONE3 = 435  # passes its flags where a filter cannot look
NEWEST = 450  # of the calls that this table knows; later ones, and those of x32, are unknown as on an older kernel

_UNIX, _NETLINK, _NETLINK_USERSOCK = 1, 16, 2
_NAMESPACES = 0x7E020000  # the CLONE_NEW* flags of clone, CLONE_NEWTIME aside, which it does not take
_CLONE_PARENT = 0x8000  # makes a sibling, which its maker never has to wait for
_EXIT_SIGNAL = 0xFF  # of clone's flags: the signal that the parent gets when the child ends
_SIGCONT, _F_SETSIG, _PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 18, 10, 1, 4
_EVERYBODY = 0xFFFFFFFF  # pid -1
# Which argument is the signal, and of those that change a process's standing, which is its pid: 0 is the caller's own.
_SIGNALS = {"kill": 1, "tkill": 1, "tgkill": 2, "rt_sigqueueinfo": 1, "rt_tgsigqueueinfo": 2, "pidfd_send_signal": 1}
_STANDING = _numbers("""
    setpriority 1 ioprio_set 1 sched_setparam 0 sched_setscheduler 0 sched_setattr 0 migrate_pages 0 move_pages 0
    prlimit64 0
""")

_AUDIT_X86_64 = 0xC000003E
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF


@dataclass(frozen=True)
class Test:
    """Of the low 32 bits of an argument: whether those in `mask` are `value`, or with `unequal` that they are not."""

    argument: int
    value: int
    mask: int = 0xFFFFFFFF
    unequal: bool = False


@dataclass(frozen=True)
class Bounds:
    """What the filter depends on. stopped: the process is stopped between its calls; shared: it has the judge's user;
    truncation: that is to be refused here, since Landlock does not govern it; protected: pids of the judge that
    Landlock does not keep from its signals.
    """

    stopped: bool = False
    shared: bool = False
    truncation: bool = False
    protected: tuple[int, ...] = ()

    def calls(self) -> set[int]:
        """Return the numbers of the calls that are allowed, as far as no refusal holds."""
        left_out = {"truncate", "openat2"} if self.truncation else set()
        left_out |= {"pidfd_send_signal"} if self.protected else set()
        table = CALLS | ({} if self.stopped else TIMERS) | ({} if self.shared else OWNERSHIP)
        return {number for name, number in table.items() if name not in left_out}

    def refusals(self) -> list[tuple[str, tuple[Test, ...]]]:
        """Return (call, tests) of calls in the table that get EPERM where their arguments meet every test."""
        escapes = Test(0, 0, _NAMESPACES | _CLONE_PARENT, unequal=True)
        continues = Test(0, _SIGCONT, _EXIT_SIGNAL)  # a process that a signal stopped, by a child that ends
        refused: list[tuple[str, tuple[Test, ...]]] = [("clone", (test,)) for test in (escapes, continues)]
        refused += [(name, (Test(signal, _SIGCONT),)) for name, signal in _SIGNALS.items()]
        refused += [("fcntl", (Test(1, _F_SETSIG),))]
        refused += [("prctl", (Test(0, _PR_SET_PDEATHSIG), Test(1, _SIGCONT)))]
        refused += [("prctl", (Test(0, _PR_SET_DUMPABLE),))]  # the judge reads its memory, and counts it
        # Landlock refuses every single one of these signals, and the call succeeds.
        refused += [("kill", (Test(0, _EVERYBODY),))]
        refused += [(name, (Test(pid, 0, unequal=True),)) for name, pid in _STANDING.items()]
        refused += [("socket", (Test(0, _UNIX, unequal=True), Test(0, _NETLINK, unequal=True)))]
        # Libraries ask the kernel for routes by netlink. Of its families one carries messages between processes.
        refused += [("socket", (Test(0, _NETLINK), Test(2, _NETLINK_USERSOCK)))]
        if self.shared:  # by its number a thread of the judge's looks like one of the runner's own
            refused += [("sched_setaffinity", (Test(0, 0, unequal=True),))]
        if self.truncation:  # by an open to read; Landlock sees one to write
            for name, flags in (("open", 1), ("openat", 2)):
                refused += [(name, (Test(flags, os.O_TRUNC, os.O_TRUNC | os.O_ACCMODE),))]
        targets = {target for pid in self.protected for target in (pid, -os.getpgid(pid))}
        for target in sorted(targets):
            tests = (Test(0, target & 0xFFFFFFFF),)
            refused += [(name, tests) for name in _SIGNALS if name != "pidfd_send_signal"]
        return refused


def program(bounds: Bounds) -> bytes:
    """Return the filter as a BPF program."""
    code = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _AUDIT_X86_64),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 1, 0, NEWEST + 1),
        (_EQUAL, 0, 1, CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),  # callers fall back to what they used before
    ]
    numbers = CALLS | TIMERS | OWNERSHIP
    for call, tests in bounds.refusals():
        body = [(_EQUAL, 0, -1, numbers[call])]  # a jump of -1: to the next refusal
        for test in tests:
            body += [(_LOAD, 0, 0, 16 + 8 * test.argument), (_AND, 0, 0, test.mask)]
            body.append((_EQUAL, -1, 0, test.value) if test.unequal else (_EQUAL, 0, -1, test.value))
        body.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
        for i, (op, yes, no, value) in enumerate(body):
            rest = len(body) - 1 - i
            code.append((op, rest if yes < 0 else yes, rest if no < 0 else no, value))
        code.append((_LOAD, 0, 0, 0))
    for number in sorted(bounds.calls()):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    code.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
