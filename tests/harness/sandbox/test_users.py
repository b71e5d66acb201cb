"""Each runner is a separate user: what that keeps it from, and when there is none."""

import ctypes
import os
import struct
import sys
from pathlib import Path

import pytest

from harness.sandbox import policy
from harness.sandbox.process import Child
from tests.support.jails import REFUSED, ROOT, answer, ask, jail_in, needs

AT_OTHERS = (
    "os.sched_setaffinity(pid, [0])",
    "os.kill(pid, 0)",
    "os.kill(pid, 19)",
    "os.setpriority(os.PRIO_PROCESS, pid, 19)",
    "resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))",
    "syscall(101, 16, pid, 0, 0)",
    "syscall(310, pid, 0, 0, 0, 0, 0)",
    "open(f'/proc/{pid}/environ', 'rb').read()",
    "open(f'/proc/{pid}/maps').read()",
    "open(f'/proc/{pid}/mem', 'rb').read(1)",
    "open(f'/proc/{pid}/comm', 'w').write('x')",
    "os.readlink(f'/proc/{pid}/fd/0')",
    "open(f'/proc/{pid}/oom_score_adj', 'w').write('1000')",
)


@pytest.mark.parametrize("attempt", AT_OTHERS)
@pytest.mark.parametrize("whom", ["judge", "reaper", "runner"])
def test_a_user_of_its_own_cannot_touch_other_processes(two_users, whom, attempt):
    one, other = two_users
    pid = {"judge": os.getpid(), "reaper": one._process.pid, "runner": other.pid}[whom]
    reply = ask(one, f"import os, resource; pid = {pid}; {attempt}")
    assert reply.get("errno") in REFUSED, reply


def test_a_user_of_its_own_reads_and_writes_in_its_folders_only(two_users):
    """In spite of the capability with which it passes closed folders, and of folders that are open to all."""
    one, other = two_users
    places = [answer(child, "import os; answer = [os.environ['HOME'], os.environ['TMPDIR']]") for child in two_users]
    answer(other, "import os; open(os.environ['TMPDIR'] + '/x', 'w').write('1'); os.chmod(os.environ['TMPDIR'], 0o777)")
    answer(one, "import os; open(os.environ['TMPDIR'] + '/x', 'w').write('1')")
    for path in (f"{places[1][1]}/x", "/etc/gshadow", str(Path.home() / ".bashrc"), str(ROOT / "README.md")):
        assert ask(one, f"open({path!r}).read()").get("errno") in REFUSED or not os.path.exists(path), path
    for path in (f"{places[1][1]}/y", "/tmp/y", "/var/tmp/y", "/dev/shm/y", f"{ROOT}/y", f"{sys.prefix}/y", "/usr/y"):
        assert ask(one, f"open({path!r}, 'w')").get("errno") in REFUSED, path


def test_what_it_may_read_is_there_also_for_those_who_ask_first(two_users):
    """access() sees the interpreter as open() does: else programs beside it seem to be missing."""
    code = f"import os, shutil; answer = [os.access({sys.executable!r}, os.X_OK), shutil.which({sys.executable!r})]"
    assert answer(two_users[0], code) == [True, sys.executable]


def test_runners_of_one_user_cannot_pin_each_other(tmp_path):
    """As where the judge is not root."""
    needs("seccomp")
    one, other = (Child("jailed", jail=jail_in(tmp_path / name)) for name in ("one", "other"))
    reply = ask(one, f"import os; os.sched_setaffinity({other.pid}, os.sched_getaffinity(0))")
    for child in (one, other):
        child.close()
    assert reply.get("errno") in REFUSED, reply


def test_the_judge_can_read_the_memory_of_another_user(two_users):
    """exec must leave it dumpable, else not even its own /proc is its."""
    child = two_users[0]
    text = "told to nobody else"
    address = answer(
        child, f"import ctypes; kept = ctypes.create_string_buffer({text!r}.encode()); answer = ctypes.addressof(kept)"
    )
    buffer = ctypes.create_string_buffer(len(text))
    local = struct.pack("=QQ", ctypes.addressof(buffer), len(text))
    remote = struct.pack("=QQ", address, len(text))
    assert ctypes.CDLL(None).process_vm_readv(child.pid, local, 1, remote, 1, 0) == len(text)
    assert buffer.raw == text.encode()
    assert os.stat(f"/proc/{child.pid}/environ").st_uid in policy.UIDS


PINS = """
#include <omp.h>
#include <sched.h>
#include <cstdio>
int main() {
    int narrow = 0;
#pragma omp parallel reduction(+ : narrow)
    {
        cpu_set_t set;
        sched_getaffinity(0, sizeof set, &set);
        narrow += CPU_COUNT(&set) == 1;
    }
    printf("%d of %d\\n", narrow, omp_get_max_threads());
}
"""


def test_a_user_of_its_own_can_compile_and_pin_its_threads(two_users):
    """By their numbers, as the C library and OpenMP do."""
    seen = answer(
        two_users[0],
        f"""
        import ctypes, os, subprocess, threading
        event = threading.Event()
        thread = threading.Thread(target=event.wait); thread.start()
        os.sched_setaffinity(thread.native_id, [min(os.sched_getaffinity(0))])
        with open("pins.cpp", "w") as file: file.write({PINS!r})
        subprocess.run(["g++", "-fopenmp", "pins.cpp", "-o", "pins"], check=True)
        bound = dict(os.environ, OMP_PROC_BIND="true", OMP_NUM_THREADS="2", OMP_PLACES="threads")
        said = subprocess.run(["./pins"], env=bound, capture_output=True, text=True)
        answer = [len(os.sched_getaffinity(thread.native_id)), said.stdout + said.stderr]
        event.set(); thread.join()
        """,
    )
    assert seen == [1, "2 of 2\n"]


def test_a_closed_folder_is_no_reason_to_share_a_user():
    """So that the tests of users of their own are not left out without a word."""
    needs("landlock")
    why = policy.offered()["uid"]
    if os.geteuid() != 0 or why.startswith(("uids", "root here", "other users cannot use /dev")):
        pytest.skip(why)
    assert why == ""


def test_the_probe_says_what_a_shared_user_costs(monkeypatch):
    monkeypatch.setattr(policy, "offered", lambda: {**dict.fromkeys(policy.MEASURES, ""), "uid": "not started as root"})
    assert policy.probe()["uid"] == "off: not started as root"


def test_two_leases_are_two_uids(monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    monkeypatch.setattr(policy, "offered", lambda: dict.fromkeys(policy.MEASURES, ""))
    # The last ones: runners of other tests and judges have the first.
    monkeypatch.setattr(policy, "UIDS", policy.UIDS[-2:])
    with policy.user() as first, policy.user() as second:
        assert {first, second} == set(policy.UIDS)
        with pytest.raises(policy.SandboxError, match="in use"), policy.user():
            pass
    with policy.user() as again:
        assert again in policy.UIDS
