"""Judge on another machine, over the user's own ssh and rsync: `python -m harness remote HOST PROBLEM ...`.

The run is detached there. The same command follows it again, whatever became of this process or of the connection;
`python -m harness remote HOST --stop` ends it. harness/tools/on_host.sh is what runs on the host.

`request`, `copied` and `commit` are what another machine gets of this checkout to judge as here. In a folder there,
root/ mirrors this machine's file system as far as files are sent, so that every path from the checkout to another file
is the same; job/ is for what a run writes besides its records.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from harness.judge import options
from harness.judge.options import Options, spelled
from harness.problem import folders, sources
from harness.problem.folders import UsageError
from harness.results import environment, output, text
from problems.common import load

ROOT = Path(__file__).resolve().parents[2]
TREE = f"root{ROOT}"  # where the checkout lies in the folder there
RUNS = "leaderboard/results/*/*/*.jsonl"  # the files of runs
ON_HOST = Path(__file__).with_name("on_host.sh")
# A dead connection is noticed after 45 s.
SSH_OPTIONS = "-T -o ConnectTimeout=20 -o ServerAliveInterval=15 -o ServerAliveCountMax=3"


@dataclass(frozen=True)
class Request:
    """arguments: of a verb there; files: those that the arguments name, also outside the checkout."""

    arguments: list[str]
    files: list[Path]


def request(args: Options, further: Iterable[str] = ()) -> Request:
    """Translate options, and arguments of a problem's own check. UsageError: a file that they name is missing."""
    files: list[Path] = []

    def sent(name: str, path: str) -> str:
        file = Path(path).resolve()
        if not file.is_file():
            raise UsageError(f"--{name} must be a Python file, found none at {path}")
        with folders.reading(file.name):
            files.extend(sources.files_of(file))
        return os.path.relpath(file, ROOT)

    values = dict(vars(args))
    if args.submission:
        values["submission"] = [sent("submission", path) for path in args.submission]
    if args.against and args.against.endswith(".py"):
        values["against"] = sent("against", args.against)
    folder = folders.place(args.problem)
    if folder.parent != load.PROBLEMS:
        files += [*folder.rglob("*"), *([] if folders.is_own(folder) else folders.find(args.problem).files.values())]
    values["problem"] = folder.name if folder.parent == load.PROBLEMS else os.path.relpath(folder, ROOT)
    values |= {name: os.path.relpath(f"/job/{name}", f"/{TREE}") for name in ("json", "events") if values[name]}
    arguments = [values.pop("problem"), *further]
    for name, value in values.items():
        if value in (True, ""):
            arguments.append(spelled(name))
        elif value != getattr(Options, name):
            arguments += [f"{spelled(name)}={item}" for item in (value if isinstance(value, list) else [value])]
    return Request(arguments, files)


def commit() -> dict[str, str]:
    """The environment that says there which commit the files are of (harness/results/environment.py)."""
    name, dirty = environment.commit()
    return {"GIT_COMMIT": name or "", "GIT_DIRTY": "" if dirty is None else str(int(dirty))}


@contextlib.contextmanager
def copied(files: Iterable[Path]) -> Iterator[Path]:
    """A temporary folder with root/: what git does not ignore, runs' files, `files`. UsageError: no git checkout."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        raise UsageError(f"{ROOT} must be a git checkout, since git says which files are sent")
    known = [ROOT / name for name in os.fsdecode(listed.stdout).split("\0")]
    with tempfile.TemporaryDirectory() as folder:
        for path in {*known, *ROOT.glob(RUNS), *files}:
            if path.is_file() and "__pycache__" not in path.parts:
                target = Path(f"{folder}/root{path}")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        yield Path(folder)


class Host:
    """A host as ssh knows it, and the folder there that belongs to this checkout. UsageError: no such name."""

    def __init__(self, name: str) -> None:
        if not name or name.startswith("-") or ":" in name or not name.isprintable() or " " in name:
            raise UsageError(f"HOST must be a name that ssh knows, such as user@machine or an alias, got {name!r}")
        self.name, self.ssh = name, shlex.split(f"{os.environ.get('KERNEL_SSH', 'ssh')} {SSH_OPTIONS}")
        own = f"{os.uname().nodename}{ROOT}".replace("/", "-")
        self.folder = os.environ.get("KERNEL_REMOTE_FOLDER") or f".cache/dsv4-kernels/{own}"

    def call(self, function: str, *arguments: str, out: int | IO = subprocess.PIPE) -> str:
        """Return what a function of on_host.sh prints there, or write it to `out` as it comes. UsageError: failed."""
        folder, tree = shlex.quote(self.folder), shlex.quote(TREE)
        enter = f"mkdir -p -m 700 {folder}\ncd {folder}\ntree={tree}\n"
        script = f"{ON_HOST.read_text()}{enter}{shlex.join([function, *arguments])}\n"
        return self._run([*self.ssh, self.name, shlex.join(["sh", "-c", script])], out)

    def rsync(self, *arguments: str) -> None:
        """Copy from or to the host. Raise as `call`."""
        # --secluded-args, by its old name: the paths pass no shell.
        self._run(["rsync", "-rpz", "--protect-args", "-e", shlex.join(self.ssh), *arguments])

    def _run(self, command: list[str], out: int | IO = subprocess.PIPE) -> str:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE)
        if done.returncode:
            message = text.line("; ".join(done.stderr.decode(errors="replace").strip().splitlines()[-2:]), 400)
            hint = f" (`ssh {self.name}` must work; a run that has begun goes on, the same command follows it)"
            raise UsageError(f"{self.name}: {message}{hint if done.returncode == 255 else ''}")
        return (done.stdout or b"").decode(errors="replace")


def run(name: str, verb: str, args: Options, further: list[str], stdout: TextIO) -> int:
    """Do on the host `name` what the verb would do here, and return the exit code of the run there; of the verb "", end
    what runs there, as Ctrl-C does, after 10 s by force. stdout: where --json - writes. UsageError: the options are
    wrong, a file is missing, or the host cannot be reached, or runs something else.
    """
    host = Host(name)
    if not verb:
        host.call("stop")
        _fetch(host)
        return 0
    options.see(args)
    asked = request(args, further)
    words = [verb, *asked.arguments]
    state, _, arguments = host.call("state").strip().partition("\n")
    same = arguments == shlex.join(words)
    end = f"`python -m harness remote {host.name} --stop` ends it"
    if state == "running" and not same and args.resume is None:
        raise UsageError(f"{host.name} runs `{arguments}` for this checkout; the same command follows it, {end}")
    if state == "running" or (state == "ended" and same):
        output.complain(f"following `{arguments}`, which has begun on {host.name} before")
    else:
        if state == "ended":
            _fetch(host)
        _begin(host, words, asked.files, mirror=args.resume is None)
    try:
        host.call("follow", out=sys.stdout)
    except KeyboardInterrupt:
        output.complain(f"the run goes on on {host.name}: the same command follows it, {end}")
        return output.INTERRUPTED_EXIT
    code = _fetch(host)
    if args.json and (lines := host.call("made", "json")):
        output.deliver(args.json, lines, stdout)
    if args.events:
        with open(args.events, "a") as file:
            file.write(host.call("made", "events"))
    return code


def _begin(host: Host, words: list[str], files: list[Path], mirror: bool) -> None:
    """Send the checkout and begin the run. mirror: remove what is not sent any more; a resumed run may need it."""
    output.complain(f"sending the checkout to {host.name}:{host.folder}")
    options = [f"--exclude=/{name}" for name in ("job", f"{TREE}/.venv", f"{TREE}/.build")]
    options += ["--delete"] if mirror else []
    with copied(files) as copy:
        host.rsync("--checksum", *options, f"{copy}/", f"{host.name}:{host.folder}/")
    output.complain(f"the run begins on {host.name}, and goes on there if this command ends")
    host.call("begin", shlex.join(words), *(f"{name}={value}" for name, value in commit().items()), *words)


def _fetch(host: Host) -> int:
    """Bring back what the run has made, unfinished too. Return its exit code. It may be done twice."""
    code = int(host.call("code"))
    there, here = f"{host.name}:{host.folder}/{TREE}/leaderboard", ROOT / "leaderboard"
    host.rsync("--append-verify", f"{there}/results/", f"{here}/results/")  # a file of a run only grows
    host.rsync(f"{there}/out/", f"{here}/out/")
    host.call("touch", "job/fetched")
    output.complain(f"what the run on {host.name} has made is in leaderboard/ now; exit code {code}")
    return code
