"""A right reply of a runner is read as it is. Anything else is a RUNTIME_ERROR with a short, clean reason."""

import copy
import functools
import json
import math
import operator
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.judge import phases, replies
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.session import Session
from harness.problem import folders
from harness.runner import gate
from harness.sandbox.process import Died
from tests.support import SUPPORT, warm

SHORT = 2_500  # characters of a reason, at most
CLAIM = {
    "type": "Tensor",
    "dtype": "float16",
    "shape": [3, 4],
    "stride": [4, 1],
    "device": "cpu",
    "same": True,
    "conj": True,
    "neg": True,
    "items": [{"type": "value", "value": "5"}],
    "keys": ["sum"],
    "value": "null",
}
KERNEL = {
    "name": "gemm",
    "registers": 32,
    "stack_bytes": 1,
    "spill_bytes": 2,
    "shared_bytes": 4096,
    "sass": {"HMMA": 5},
    "tmem_columns": 64,
}
KERNEL_NODE = {"kind": "kernel", "name": "_Z3addPf", "grid": [1, 2, 3], "block": [128, 1, 1], "cluster": [2, 1, 1]}
KERNEL_NODE |= {"early": True, "cooperative": False, "not_portable": False, "image": 0, "shared": 1024}
KERNEL_NODE |= {"dynamic_shared": 65536, "carveout": -1, "layout": [0, 8], "values": "0011223344556677"}
COPY_NODE = {"kind": "copy", "to": 2**46, "from": 2**46 + 512, "bytes": 12}
FILL_NODE = {"kind": "fill", "to": 2**46, "pitch": 64, "width": 16, "height": 2, "value": 7, "element": 4}
TAKE = {"to": 2**46, "from": 2**46 + 512, "bytes": 12}
VARIABLE = {"image": 0, "name": "count", "value": "00ff"}
# A right reply of every kind, with every field.
RIGHT = {
    replies.Done: {},
    replies.Ready: {"ready": True},
    replies.Failed: {"failed": "call", "type": "ValueError", "memory": False, "text": "Traceback"},
    replies.Prepared: {"prepared": True},
    replies.Claim: CLAIM,
    replies.Called: {"claims": [CLAIM, {"type": "NoneType"}]},
    replies.Noted: {"claims": [CLAIM, {"type": "NoneType"}]},
    replies.SelfTimed: {"us": 1.5, "claims": [CLAIM]},
    replies.KernelNode: KERNEL_NODE,
    replies.CopyNode: COPY_NODE,
    replies.FillNode: FILL_NODE,
    replies.Variable: VARIABLE,
    replies.Take: TAKE,
    replies.Recorded: {
        "before": [FILL_NODE],
        "nodes": [KERNEL_NODE, COPY_NODE],
        "variables": [VARIABLE],
        "used": [0, 512],
        "scratch": 1024,
        "claims": [CLAIM],
        "takes": [TAKE],
        "unrecorded": "it waits",
        "branches": True,
        "prepare_us": 3.5,
    },
    replies.Kernel: KERNEL,
    replies.Artefact: {"bytes": 5, "kernels": [KERNEL]},
    replies.Compiled: {"artefacts": [{"bytes": 5, "kernels": [KERNEL]}]},
    replies.Profiled: {"table": "Name  CPU total\nadd   3 us", "trace": '{"traceEvents": []}'},
}
KINDS = sorted(RIGHT, key=lambda kind: kind.__name__)


def places(value: object, at: tuple = ()) -> Iterator[tuple[tuple, object]]:
    """(path, value) of everything within a reply."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*at, key), item
        yield from places(item, (*at, key))


def changed(reply: dict, at: tuple, value: object) -> dict:
    """A copy of `reply` with another value at a place."""
    made = copy.deepcopy(reply)
    owner = made
    for key in at[:-1]:
        owner = owner[key]
    owner[at[-1]] = value
    return made


def refused(kind: type[replies.Reply], reply: dict) -> str:
    """Assert that a reply is refused as it must be. -> the reason."""
    with pytest.raises(Died) as caught:
        replies.read(kind, reply)
    reason = caught.value.reason
    assert caught.value.status == "RUNTIME_ERROR" and reason.startswith("its process sent a malformed reply: ")
    assert len(reason) < SHORT and reason.isprintable() and reason.encode()
    return reason


def assert_clean(value: object) -> None:
    """All strings within what was read, keys too, can be shown and written, and all numbers too."""
    json.dumps(value, allow_nan=False).encode()
    for text in [value] if isinstance(value, str) else []:
        assert text.replace("\n", "").replace("\t", "").isprintable() and text.encode(errors="strict") is not None
    if isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            assert_clean(item)


def test_every_kind_of_reply_is_here():
    made = {kind for kind in vars(replies).values() if isinstance(kind, type) and issubclass(kind, replies.Reply)}
    assert made - {replies.Reply} == set(RIGHT)
    for kind, reply in RIGHT.items():
        assert set(reply) == {field.alias or name for name, field in kind.model_fields.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_right_reply_is_read_as_it_is(kind):
    read = replies.read(kind, json.loads(json.dumps(RIGHT[kind])))
    assert type(read) is kind and read.model_dump(exclude_unset=True, by_alias=True) == RIGHT[kind]
    assert replies.read(kind, RIGHT[replies.Failed]) == replies.Failed(**RIGHT[replies.Failed])
    refused(kind, {"failed": "call"})


DEEP = json.loads("[" * 900 + "]" * 900)
NUMBERS = (-1, math.nan, math.inf, -math.inf, 2**63, 10**400)
WRONG = {
    bool: (None, 0, 1, 1.0, "true", [], {}, DEEP),
    int: (None, True, 1.5, "1", [], {}, DEEP, 2**48 + 1, *NUMBERS),
    float: (True, "1", [], {}, DEEP, 1e13, *NUMBERS),
    str: (0, True, 1.5, [], {}, DEEP, 10**400, "x" * (2**20 + 1)),
    list: (0, True, "abc", {"0": "a"}, [None], [1.5] * 1025, ["a"] * 1025),
    dict: (0, True, "abc", [["a", "b"]], DEEP),
}
OPTIONAL = {"prepare_us", "sass", "tmem_columns"}  # may be null
ALSO_RIGHT = {"to": (2**48 + 1, 2**63), "from": (2**48 + 1, 2**63), "carveout": (-1,)}


@pytest.mark.parametrize("kind", KINDS)
def test_value_of_another_type_or_out_of_range_is_refused(kind):
    for at, value in places(RIGHT[kind]):
        named = next(key for key in reversed(at) if isinstance(key, str))
        for wrong in WRONG[type(value)]:
            if wrong in ALSO_RIGHT.get(named, ()) and type(wrong) is int:
                continue
            if wrong != value and (wrong is not None or named not in OPTIONAL):
                refused(kind, changed(RIGHT[kind], at, wrong))


@pytest.mark.parametrize("kind", KINDS)
def test_further_field_is_refused_and_texts_come_out_clean(kind):
    for name in ("x", "\x1b[31m", "\ud800", "x" * 100_000, "\n\n"):
        refused(kind, {**RIGHT[kind], name: 1})
    for at, value in places(RIGHT[kind]):
        if not isinstance(value, str):
            continue
        owner = functools.reduce(operator.getitem, at[:-1], RIGHT[kind])
        exact = at[-1] in ("failed", "kind") or "image" in owner  # names of symbols and bytes are no texts
        for said in ("".join(map(chr, range(160))), "\ud800\udfff", "\x1b[31mred\x1b[0m", "é漢" * 40_000):
            if exact:
                refused(kind, changed(RIGHT[kind], at, said))
            else:
                assert_clean(replies.read(kind, changed(RIGHT[kind], at, said)).model_dump())


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["Tensor", "call", "\ud800", "\x1b[2J", 2**63, -0.0, 1e999, True, "kernel"])
)
NAMES = st.sampled_from(sorted({key for reply in RIGHT.values() for at, _ in places(reply) for key in map(str, at)}))
ANY = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(), inner, max_size=5),
    max_leaves=15,
)


@given(st.sampled_from(KINDS), st.data())
def test_any_object_is_a_reply_or_a_death(kind, data):
    """Half of the time a right reply with some places changed: an arbitrary object seldom comes near one."""
    reply = data.draw(st.just(RIGHT[kind]) | st.dictionaries(NAMES, ANY, max_size=6))
    for at, _ in data.draw(st.lists(st.sampled_from([*places(reply)] or [((), None)]), max_size=3)):
        if at:
            try:
                reply = changed(reply, at, data.draw(ANY))
            except (KeyError, IndexError, TypeError):
                continue  # what was there is gone
    try:
        read = replies.read(kind, reply)
    except Died:
        refused(kind, reply)
        return
    assert type(read) in (kind, replies.Failed)
    assert_clean(read.model_dump())


@pytest.mark.parametrize("said", ["-0.0", "0", "1e-300", "0.0009"])
def test_no_call_takes_no_time(said):
    """One such claim among sixty would end the geometric mean, and the run with it."""
    assert "us" in refused(replies.SelfTimed, json.loads(f'{{"claims": [], "us": {said}}}'))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("nodes", 0, "kind"), "host function"),
        (("nodes", 0, "grid"), [1, 1]),
        (("nodes", 0, "name"), "two words"),
        (("nodes", 0, "name"), 'a"b'),
        (("nodes", 0, "values"), "abc"),
        (("nodes", 0, "carveout"), -2),
        (("nodes", 0, "layout"), [0] * 8193),
        (("nodes", 1, "to"), 2**64),
        (("nodes", 1, "from"), -1),
        (("before",), [FILL_NODE] * 4097),
        (("nodes",), [COPY_NODE] * 4097),
        (("variables",), [VARIABLE] * (16 * replies.NODES + 1)),
        (("takes",), [TAKE] * 1025),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_hostile_recorded_call_is_refused(place, value):
    assert place[0] in refused(replies.Recorded, changed(RIGHT[replies.Recorded], place, value))


def test_what_a_call_noted_is_looked_at():
    assert [claim.type for claim in replies.noted(json.dumps([CLAIM, {"type": "NoneType"}]))] == ["Tensor", "NoneType"]
    for said in ("", "{", "[" * 30_000, '[{"type": 1}]', "3", "[3]", json.dumps([CLAIM] * 1025)):
        with pytest.raises(Died, match="malformed"):
            replies.noted(said)


FLOODS = {
    "further fields": (replies.Done, lambda: {str(i): 1 for i in range(400_000)}),
    "one long name": (replies.Done, lambda: {"x" * 4_000_000: 1}),
    "kernels": (replies.Compiled, lambda: {"artefacts": [{"bytes": 1, "kernels": [{}] * 4096}] * 256}),
    "nodes": (replies.Recorded, lambda: {"nodes": [{"kind": "kernel", "layout": [-1] * 8000}] * 120}),
    "a table": (replies.Profiled, lambda: {"table": "\x7f" * 4_000_000}),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_flood_of_faults_is_refused_at_once(flood):
    """Of 4 MB of empty objects pydantic makes five million faults, 6 GB of them in a minute."""
    kind, make = FLOODS[flood]
    reply = make()
    before = time.process_time()
    refused(kind, reply)
    assert time.process_time() - before < 15


def test_as_much_as_a_compiler_says_is_read():
    kernels = [{**KERNEL, "name": "k" * 3000}] * 200
    read = replies.read(replies.Compiled, {"artefacts": [{"bytes": 1, "kernels": kernels}] * 20})
    assert sum(len(artefact.kernels) for artefact in read.artefacts) == 4000


# With real processes: what each of them gets, beside an honest neighbour, and a piece of the reason.
HEAD = "import os, sys, time, torch\nwire = sys.modules['harness.runner.wire']\nsend = wire.send\n"
ADD = "    torch.add(data.x, data.y, out=data.z)\n"
BROKEN = {
    "malformed": (
        f"{HEAD}def custom_kernel(data):\n{ADD}    wire.send = lambda sock, message, fds=(): send(sock, "
        "{'claims': [{'type': 7, 'shape': '\\x1b[2J' * 1000}] * 9})\n    return data.z\n",
        "malformed reply",
    ),
    # Gone when the judge turns to it: the neighbour is still being imported.
    "leaves": (
        f"{HEAD}def leave(*message):\n    send(*message)\n    os._exit(0)\n\n\nwire.send = leave\n\n\n"
        f"def custom_kernel(data):\n{ADD}    return data.z\n",
        "exited with status 0",
    ),
    "signal": ("import os\n\n\ndef custom_kernel(data):\n    os.kill(os.getpid(), 40)\n", "killed by signal 40"),
}


def on_tests(folder: Path, problem: Path, sources: dict[str, str]) -> dict[str, list[Outcome]]:
    """What real processes of these submissions get on two test cases, by name."""
    found, handles = folders.find(str(problem)), []
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
        handles.append(RunnerHandle(name, folders.submission(found, folder / f"{name}.py"), "cpu"))
    with warm.installed(), Session(found, "cpu") as running:
        return phases.run_tests(running, handles, list(found.tests[:2]), lambda *_: None)


def test_real_runners_that_break_their_word_touch_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "flush_bytes", lambda: 2**20)
    later = f"{HEAD}time.sleep(2)\n\n\ndef custom_kernel(data):\n{ADD}    return data.z\n"
    sources = {"later": later} | {name: source for name, (source, _) in BROKEN.items()}
    got = on_tests(tmp_path, SUPPORT / "problems" / "vector_add", sources)
    assert {outcome.status for outcome in got.pop("later")} == {"PASSED"}
    for name, outcomes in got.items():
        assert {outcome.status for outcome in outcomes} == {"RUNTIME_ERROR"}
        reason = outcomes[0].reason
        assert BROKEN[name][1] in reason and len(reason) < SHORT and reason.isprintable()


def test_false_shape_of_a_real_runner_is_incorrect(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "flush_bytes", lambda: 2**20)
    form = '{"type": "Tensor", "dtype": "float32", "shape": [2**48] * 4, "stride": [0] * 4, "device": "cpu"}'
    body = "import sys, torch\n\n\ndef custom_kernel(data):\n    a, b, scale = data\n"
    lie = f"    sys.modules['harness.runner.claims'].form = lambda *_: {form}\n"
    add = "    return scale * (torch.cat(a) + torch.cat(b))\n"
    got = on_tests(tmp_path, SUPPORT / "gpu_mode" / "vectoradd", {"lies": body + lie + add, "honest": body + add})
    assert {outcome.status for outcome in got["lies"]} == {"INCORRECT"}
    assert "got float32 (281474976710656, " in got["lies"][0].reason
    assert {outcome.status for outcome in got["honest"]} == {"PASSED"}
