"""A child process: limits on what it takes and sends, and what the kernel says of it."""

import os
import subprocess
import sys
import time

import pytest

from harness.sandbox import policy, process, reaper
from harness.sandbox.process import Child, Died
from tests.support.jails import LIMIT_S, REFUSED, ROOT, alive, answer, ask, jail_in


def test_closing_is_quick(tmp_path):
    jail = jail_in(tmp_path)
    times = []
    for _ in range(5):
        child = Child("jailed", jail=jail)
        answer(child, "answer = 1")
        start = time.monotonic()
        child.close()
        times.append(time.monotonic() - start)
    assert min(times) < 0.2


def test_memory_of_everything_it_started_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "MEMORY_SHARE", 2**28 / process.available_memory())
    child = Child("jailed", jail=jail_in(tmp_path))
    hoard = "import time; x = bytearray(b'1') * 2**29; time.sleep(60)"
    with pytest.raises(Died, match="out of memory") as died:
        ask(child, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hoard!r}])")
    assert died.value.status == "RUNTIME_ERROR"


WRITES = """
folder, kept = os.open(os.environ["TMPDIR"], os.O_RDONLY), []
for _ in range(depth):
    os.mkdir("n" * 250, 0o300, dir_fd=folder)
    folder = os.open("n" * 250, os.O_PATH, dir_fd=folder)
for n in range(10**7):
    with open(os.open(str(n), os.O_WRONLY | os.O_CREAT, dir_fd=folder), "wb") as file:
        file.write(bytes(size))
        if nameless:
            os.unlink(str(n), dir_fd=folder)
            kept.append(os.dup(file.fileno()))
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("depth, size, nameless = 0, 2**22, False", "bytes of files, the limit is 134,217,728"),
        ("depth, size, nameless = 0, 2**22, True", "bytes of files, the limit is 134,217,728"),
        ("depth, size, nameless = 1200, 2**22, False", "bytes of files, the limit is 134,217,728"),
        ("depth, size, nameless = 0, 0, False", "files, the limit is 3,000"),
    ],
    ids=["files", "without a name", "deep and closed to its owner", "many"],
)
def test_files_have_a_limit_in_sum(tmp_path, monkeypatch, words, said):
    monkeypatch.setattr(process, "FILES_LIMIT", {"-B1": 2**27, "--inodes": 3000})
    child = Child("jailed", jail=jail_in(tmp_path))
    with pytest.raises(Died, match=f"out of disk: has .* {said}") as died:
        ask(child, f"import os\n{words}\n{WRITES}")
    assert died.value.status == "RUNTIME_ERROR" and not alive(child.pid)
    reaper.remove_tree(str(tmp_path / "tmp"))


def test_a_child_cannot_fill_the_judge_with_descriptors(tmp_path):
    child = Child("jailed", jail=jail_in(tmp_path))
    answer(child, "answer = 1")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Died, match="40 descriptors"):
        ask(child, "wire.send(sock, {}, (0,) * 40)")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_child_that_reads_nothing_does_not_hold_the_judge_up(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "SEND_LIMIT_S", 0.3)
    child = Child("jailed", jail=jail_in(tmp_path))
    child.send({"code": "import time; time.sleep(600)"})
    with pytest.raises(Died, match="broke its connection"):
        for _ in range(100):
            child.send({"code": "#" * 2**16})
    assert not alive(child.pid)


def test_what_it_started_is_seen_and_threads_are_no_processes(jailed):
    assert jailed.processes() == []
    pid = answer(
        jailed,
        "import threading, subprocess\nevent = threading.Event()\n"
        "thread = threading.Thread(target=event.wait); thread.start()\n"
        "other = subprocess.Popen(['sleep', '60']); answer = other.pid",
    )
    assert jailed.processes() == [pid]
    answer(jailed, "event.set(); thread.join(); other.kill(); other.wait()")
    assert jailed.processes() == []


@pytest.mark.parametrize(
    "take",
    [
        "kept = bytearray(b'1') * 2**26",
        "import mmap; kept = mmap.mmap(-1, 2**26); kept.write(bytes(2**26))",
        "import os; kept = open(os.environ['TMPDIR'] + '/f', 'wb'); kept.write(b'1' * 2**26); kept.flush(); "
        "os.unlink(kept.name)",
    ],
    ids=["memory", "shared memory", "a nameless file"],
)
def test_private_bytes_count_what_a_child_keeps(tmp_path, take):
    child = Child("jailed", jail=jail_in(tmp_path))
    answer(child, "answer = 1")
    before = child.private_bytes()
    answer(child, take)
    grown = child.private_bytes() - before
    child.close()
    assert 2**26 <= grown < 2**26 + 2**23


def test_private_bytes_leave_out_what_the_judge_shares(tmp_path):
    fd = os.memfd_create("buffer")
    os.ftruncate(fd, 2**26)
    child = Child("jailed", jail=jail_in(tmp_path))
    answer(child, "answer = 1")
    before = child.private_bytes()
    code = "import mmap, os; kept = mmap.mmap(fds[0], 2**26); os.close(fds[0]); kept.write(bytes(2**26))"
    child.send({"code": code}, (fd,))
    reply, _ = child.receive(LIMIT_S)
    assert "answer" in reply, reply
    grown = child.private_bytes() - before
    child.close()
    os.close(fd)
    assert grown < 2**23


def test_a_hardened_process_is_closed_to_its_own_user(tmp_path, monkeypatch):
    """Two processes with equal rights and no other fence between them: one reads the other until that hardens."""
    monkeypatch.setattr(policy, "offered", lambda: dict.fromkeys(policy.MEASURES, "not here"))
    reader, holder = (Child("jailed", jail=jail_in(tmp_path / name)) for name in ("reader", "holder"))
    attempt = f"answer = len(open('/proc/{holder.pid}/environ', 'rb').read())"
    assert answer(reader, attempt) > 0
    answer(holder, "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)")
    reply = ask(reader, attempt)
    reader.close()
    holder.close()
    assert reply.get("errno") in REFUSED, reply


def test_harden_makes_a_process_undumpable():
    code = (
        "import ctypes; from harness.sandbox import process; process.harden(); "
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "0\n"


def test_a_program_that_cannot_be_executed_is_named_with_what_to_do(tmp_path):
    program = tmp_path / "python"
    program.write_text("")
    guarded = process.Guarded([str(program)], {}, (), None, None)
    with pytest.raises(policy.SandboxError, match=rf"{program}'. Make it, .* executable for the judge's user"):
        guarded.pid  # noqa: B018
    guarded.end()
