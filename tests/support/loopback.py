"""An sshd on this machine, with keys and a configuration that only a test uses.

Nothing in ~/.ssh is read or written, and no privilege is needed.
"""

import contextlib
import getpass
import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.sandbox import reaper
from tests.support import comes, system

ALIAS = "there"  # the host's name in the client's configuration
START_S = 20
SEPARATION = Path("/run/sshd")  # a folder that an sshd of root needs; its service makes it


@dataclass(frozen=True)
class Server:
    """A running sshd. ssh: the client's command; process: the listening one, with a child for each connection."""

    folder: Path
    ssh: str
    process: subprocess.Popen

    def drop_connections(self) -> int:
        """Kill what serves connections, as a cut network would end them. Return how many processes that were."""
        found = [pid for pid in reaper.descendants(self.process.pid) if _name(pid).startswith("sshd")]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        return len(found)


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[Server]:
    """Run an sshd on a free port of the loopback interface until the end of the block."""
    program = system.need("sshd")
    for name in ("ssh", "rsync", "ssh-keygen"):
        system.need(name)
    for key in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
    port = _free_port()
    algorithm, public = (folder / "host_key.pub").read_text().split()[:2]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {algorithm} {public}\n")
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nPrintMotd no\nMaxStartups 100\n"
        # Runs here wait for no other run on this machine, and none waits for them.
        f"SetEnv XDG_RUNTIME_DIR={folder}/runtime\n"
    )
    (folder / "runtime").mkdir(mode=0o700)
    (folder / "ssh_config").write_text(
        f"Host {ALIAS}\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile none\n  StrictHostKeyChecking yes\n"
        f"Host refused\n  HostName 127.0.0.1\n  Port {_free_port()}\n"
    )
    if os.geteuid() == 0:
        SEPARATION.mkdir(mode=0o755, exist_ok=True)
    log = folder / "sshd.log"
    process = subprocess.Popen([program, "-D", "-f", str(folder / "sshd_config"), "-E", str(log)])
    try:
        comes(lambda: process.poll() is not None or _answers(port), START_S)
        if not _answers(port):
            raise RuntimeError(f"sshd did not start: {log.read_text() if log.exists() else process.poll()}")
        yield Server(folder, f"ssh -F {shlex.quote(str(folder / 'ssh_config'))}", process)
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
