"""The small process between the judge and one of its children: when either is gone, everything below it goes too.

Started as `python -I -S harness/sandbox/reaper.py CONTROL STATUS`. CONTROL: a pipe from the judge with one marshalled
dict, {"argv", "env", "cwd", "keep": descriptors to pass on, "jail": orders or None}; its end means that the judge is
done or dead. STATUS: a pipe to the judge, one line: `pid N`, or `failed WHY`.

Descendants that fork twice and start a session of their own are handed to this process by the kernel, so they die with
the rest. It ends as the child ended: with its exit status, or by the signal that killed it.
Another use: `--folder PLACE` makes a folder and removes it when standard input ends.
Standard library only, and little of it: this runs once for every child.
"""

import ctypes
import marshal
import os
import select
import sys
import time

sys.path.append(os.path.dirname(os.path.abspath(__file__)))

SIGHUP, SIGINT, SIGKILL, SIGPIPE, SIGTERM, SIGSTOP, SIGXFSZ = 1, 2, 9, 13, 15, 19, 25  # importing signal takes 5 ms
GIVE_UP_S = 10  # a process that the kernel cannot end (a hung device) is left after that
_libc = ctypes.CDLL(None)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)


def descendants(root: int) -> list[int]:
    """pids of the living processes below `root`, zombies left out; parents before their children."""
    pids: list[int] = []
    todo = [root]
    while todo:
        children = _children(todo.pop())
        todo += children
        pids += [child for child in children if _state(child) not in ("Z", "X", "")]
    return pids


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []  # it is gone, and its children are the reaper's
    for thread in threads:
        try:
            pids += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
        except OSError:
            continue  # that thread ended
    return pids


def _state(pid: int) -> str:
    """The letter of its state; "" if there is no such process."""
    try:
        return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _read(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def end_all() -> None:
    """End every descendant of this process, but for those that the kernel does not end in GIVE_UP_S."""
    deadline = time.monotonic() + GIVE_UP_S
    pause = 0.0005
    while time.monotonic() < deadline:
        below = descendants(os.getpid())
        # Stopped first, so that none forks on while the list is worked through.
        for number in (SIGSTOP, SIGKILL):
            for pid in below:
                try:  # noqa: SIM105  contextlib takes milliseconds to import
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _start(config: dict) -> int:
    """Fork the child, confine it, exec. -> its pid. RuntimeError: it never came to run; OSError too, and where the
    kernel does not list children (CONFIG_PROC_CHILDREN), without which nothing below it could be ended.
    """
    reaper = os.getpid()
    _read(f"/proc/self/task/{reaper}/children")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for number in (SIGHUP, SIGINT, SIGPIPE, SIGTERM, SIGXFSZ):
                _libc.signal(number, None)  # to the default; what is ignored would stay so through exec
            for fd in config["keep"]:
                os.set_inheritable(fd, True)
            if config["jail"]:
                import confine

                confine.confine(config["jail"], reaper)
            else:
                os.chdir(config["cwd"])
                _libc.prctl(1, SIGKILL, 0, 0, 0)  # dies with the reaper
            os.execve(config["argv"][0], config["argv"], config["env"])
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode()[:2000])
        finally:
            os._exit(127)
    os.close(writer)
    with open(reader, errors="replace") as pipe:
        why = pipe.read()
    if why:
        raise RuntimeError(why)
    return pid


def _watch(control: int, pid: int) -> int | None:
    """Wait until the child ends or the judge is done. -> the child's wait status, None if it still runs."""
    poll = select.poll()
    poll.register(control, select.POLLIN | select.POLLHUP)
    pause = None
    try:
        poll.register(os.pidfd_open(pid), select.POLLIN)
    except OSError:  # a kernel without such descriptors
        pause = 50  # ms
    while True:
        ready = [fd for fd, _ in poll.poll(pause)]
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if control in ready:
            return None


def run_tool(*argv: str) -> "tuple[int, str]":
    """Run a program of coreutils, also where the user's PATH has none. -> (exit status, output)."""
    import subprocess  # takes milliseconds, and most reapers run nothing

    env = {"PATH": f"{os.defpath}:{os.environ.get('PATH', '')}"}
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
    return done.returncode, done.stdout.decode(errors="replace")


def remove_tree(path: str) -> None:
    """Delete a folder with all in it, unreadable or however deep. OSError: something is there after a while."""
    for _ in range(50):
        run_tool("rm", "-rf", "--one-file-system", "--", path)
        if not os.path.lexists(path):
            return
        run_tool("chmod", "-R", "u+rwx", "--", path)  # of folders that their owner may not enter
        time.sleep(0.05)  # a process that is about to be killed may still write there
    raise OSError(f"could not remove {path}")


def main() -> None:
    for number in (SIGHUP, SIGINT, SIGTERM):
        _libc.signal(number, 1)  # ignored: only the end of the pipe, or SIGKILL, ends this
    if sys.argv[1] == "--folder":  # make one in a place, say where it is, and remove it when standard input ends
        folder = os.path.join(sys.argv[2], f"kernel-judge-{os.getpid()}-{os.urandom(6).hex()}")
        os.mkdir(folder, 0o711)
        os.write(1, os.fsencode(folder) + b"\n")
        os.read(0, 1)
        return remove_tree(folder)
    control, status = int(sys.argv[1]), int(sys.argv[2])
    _libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    _libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    try:
        with open(control, "rb", closefd=False) as pipe:
            config = marshal.load(pipe)
    except EOFError:
        return  # the judge is gone before it said what to start
    for fd in (control, status):
        os.set_inheritable(fd, False)
    try:
        pid = _start(config)
    except (OSError, RuntimeError) as error:
        os.write(status, f"failed {error}\n".encode())
        return
    # The child's connections must end with the child, so none is kept here.
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for fd in config["keep"]:
        os.close(fd)
    os.write(status, f"pid {pid}\n".encode())
    ended = _watch(control, pid)
    end_all()
    code = os.waitstatus_to_exitcode(ended) if ended is not None else -SIGKILL
    if code < 0:
        _libc.signal(-code, None)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
