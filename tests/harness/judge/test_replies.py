"""A right reply of a runner is read as it is. Anything else is a RUNTIME_ERROR with a short, clean reason."""

import copy
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.judge import replies
from harness.runner import clock, wire
from harness.sandbox.process import Died

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
# A right reply of every kind, with every field.
RIGHT = {
    replies.Done: {},
    replies.Ready: {"ready": True},
    replies.Failed: {"failed": "call", "type": "ValueError", "memory": False, "text": "Traceback"},
    replies.Started: {
        "ready": True,
        "clock": clock.CudaClock.name,
        "replaced": ["time.sleep"],
        "switches": ["gradients"],
    },
    replies.Prepared: {"prepared": True},
    replies.Claim: CLAIM,
    replies.Called: {"claims": [CLAIM, {"type": "NoneType"}], "switches": ["gradients"]},
    replies.Noted: {"claims": [CLAIM, {"type": "NoneType"}]},
    replies.Seen: {"records": 3, "elsewhere": {"7": ["add"]}},
    replies.Timed: {
        "us": 1.5,
        "host_us": 2.5,
        "host_bound": False,
        "setup_us": 3.5,
        "claims": [CLAIM],
        "activity": {"records": 3, "elsewhere": {"7": ["add"]}},
    },
    replies.Kernel: KERNEL,
    replies.Artefact: {"bytes": 5, "kernels": [KERNEL]},
    replies.Compiled: {"artefacts": [{"bytes": 5, "kernels": [KERNEL]}]},
    replies.Batched: {"calls": [[CLAIM], []]},
    replies.Profiled: {"table": "Name  CPU total\nadd   3 us", "trace": '{"traceEvents": []}'},
    replies.Sealed: {"replaced": ["time.sleep"], "switches": []},
}
KINDS = sorted(RIGHT, key=lambda kind: kind.__name__)
OPTIONAL = {"clock", "setup_us", "activity", "sass", "tmem_columns"}  # may be null
# May be missing, in one kind at least.
DEFAULTED = {
    "trace",
    "dtype",
    "shape",
    "stride",
    "device",
    "same",
    "conj",
    "neg",
    "items",
    "keys",
    "value",
    "setup_us",
    "claims",
    "activity",
    "sass",
    "tmem_columns",
}
MAPPINGS = {"elsewhere", "sass"}  # objects whose keys are data
NUMBERS = (-1, math.nan, math.inf, -math.inf, 2**63, 10**400, -(10**400))
DEEP = json.loads("[" * 900 + "]" * 900)
WRONG = {
    bool: (None, 0, 1, 1.0, "true", "", [], [True], {}, DEEP),
    int: (None, True, 1.5, "1", [], [1], {}, DEEP, 2**48 + 1, *NUMBERS),
    float: (True, "1", [], [1.0], {}, DEEP, 1e13, *NUMBERS),
    str: (0, 1, True, 1.5, [], ["a"], {}, {"a": "b"}, DEEP, math.nan, 10**400, "x" * (2**20 + 1)),
    list: (None, 0, True, "", "abc", {}, {"0": "a"}, [None], [[]], [[["a"]]], DEEP, [1.5] * 1025, ["a"] * 1025),
    dict: (None, 0, True, "", "abc", [["a", "b"]], DEEP),
}
CONTROLS = "".join(map(chr, [*range(32), *range(127, 160), 0x200B, 0x202E, 0x2028, 0xFEFF]))


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


def every_text(value: object) -> Iterator[str]:
    """All strings within what was read, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from every_text(item)


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_reply_is_read_as_it_is(kind):
    read = replies.read(kind, json.loads(json.dumps(RIGHT[kind])))
    assert type(read) is kind and read.model_dump(exclude_unset=True) == RIGHT[kind]


def test_what_a_call_noted_is_looked_at():
    assert [claim.type for claim in replies.noted(json.dumps([CLAIM, {"type": "NoneType"}]))] == ["Tensor", "NoneType"]
    for said in ("", "{", "[" * 30_000, '[{"type": 1}]', "3", "[3]", json.dumps([CLAIM] * 1025)):
        with pytest.raises(Died, match="malformed"):
            replies.noted(said)


def test_every_kind_of_reply_is_looked_at():
    made = {kind for kind in vars(replies).values() if isinstance(kind, type) and issubclass(kind, replies.Reply)}
    assert made - {replies.Reply} == set(RIGHT)
    for kind, reply in RIGHT.items():
        assert set(reply) == set(kind.model_fields), kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_another_type_or_out_of_range_is_refused(kind):
    for at, value in places(RIGHT[kind]):
        for wrong in WRONG[type(value)]:
            named = next(key for key in reversed(at) if isinstance(key, str))
            if wrong == value or (wrong is None and named in OPTIONAL) or (wrong == [[]] and kind is replies.Batched):
                continue
            if isinstance(value, list) and wrong in ([], {}):
                continue
            try:
                read = replies.read(kind, changed(RIGHT[kind], at, wrong))
            except Died:
                refused(kind, changed(RIGHT[kind], at, wrong))
            else:
                raise AssertionError(f"{at} as {str(wrong)[:50]} was read as {read}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_field_is_refused(kind):
    for at, _ in places(RIGHT[kind]):
        if isinstance(at[-1], int) or (len(at) > 1 and at[-2] in MAPPINGS):
            continue
        made = copy.deepcopy(RIGHT[kind])
        owner = made
        for key in at[:-1]:
            owner = owner[key]
        del owner[at[-1]]
        if at[-1] in DEFAULTED and not (kind in (replies.Called, replies.Noted) and at == ("claims",)):
            replies.read(kind, made)
        elif at != ("failed",):
            assert f"{at[-1]}: Field required" in refused(kind, made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_further_field_is_refused(kind):
    objects = [((), RIGHT[kind]), *places(RIGHT[kind])]
    for at, value in objects:
        if isinstance(value, dict) and not MAPPINGS & {*at[-1:]}:
            for name in ("x", "", "\x1b[31m", "\ud800", "x" * 100_000, "<b>|", "\n\n"):
                further = {**value, name: 1}
                refused(kind, changed(RIGHT[kind], at, further) if at else further)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_come_out_clean(kind):
    """Whatever is in a text of a right reply, what is read of it can be printed and written."""
    for at, value in places(RIGHT[kind]):
        if not isinstance(value, str) or at[-1] in ("failed", "clock"):
            continue
        for said in (CONTROLS, "\ud800\udfff", "\x1b[31mred\x1b[0m\x1b]0;title\x07", "é漢" * 40_000, "x" * 90_000):
            read = replies.read(kind, changed(RIGHT[kind], at, said)).model_dump()
            for text in every_text(read):
                assert text.replace("\n", "").replace("\t", "").isprintable()
                assert text.encode(errors="strict") is not None
                assert len(text) <= (2**20 if kind is replies.Profiled else replies.TEXT_LIMIT + 100)
            json.dumps(read, allow_nan=False)


def test_a_lone_surrogate_in_an_exception_is_no_malformed_reply():
    """Python itself makes such, of a file name that is no UTF-8."""
    read = replies.read(replies.Done, {**RIGHT[replies.Failed], "text": "no file 'a\udcffb'"})
    assert read.text == "no file 'a\ufffdb'"


def test_a_failure_is_read_whatever_was_asked_for():
    for kind in KINDS:
        assert replies.read(kind, RIGHT[replies.Failed]) == replies.Failed(**RIGHT[replies.Failed])
        refused(kind, {"failed": "call"})
        refused(kind, {**RIGHT[kind], "failed": "judge"})


def test_the_last_of_equal_keys_counts():
    reply = json.loads('{"us": NaN, "us": 7, "host_us": 1, "host_bound": true, "host_bound": false}')
    assert replies.read(replies.Timed, reply).us == 7
    refused(replies.Timed, json.loads('{"us": 7, "us": NaN, "host_us": 1, "host_bound": false}'))


@pytest.mark.parametrize("said", ["-0.0", "-0", "0"])
def test_no_time_is_less_than_nothing(said):
    host_us = replies.read(replies.Timed, json.loads(f'{{"us": 1, "host_us": {said}, "host_bound": true}}')).host_us
    assert str(host_us) == "0.0"


@pytest.mark.parametrize("said", ["-0.0", "0", "1e-300", "0.0009"])
def test_no_call_takes_no_time(said):
    """One such claim among sixty would end the geometric mean, and the run with it."""
    assert "us" in refused(replies.Timed, json.loads(f'{{"us": {said}, "host_us": 1, "host_bound": true}}'))


def test_a_runner_cannot_give_the_clock_a_name():
    """Records of all submissions name the session's clock."""
    started = RIGHT[replies.Started]
    assert replies.read(replies.Started, {**started, "clock": None}).clock is None
    assert "clock" in refused(replies.Started, {**started, "clock": "the sun"})


FLOODS = {
    "further fields": (replies.Done, lambda: {str(i): 1 for i in range(400_000)}),
    "one long name": (replies.Done, lambda: {"x" * 4_000_000: 1}),
    "names": (replies.Sealed, lambda: {"replaced": list(range(700_000)), "switches": []}),
    "activity": (replies.Seen, lambda: {"records": 1, "elsewhere": {str(i): 1 for i in range(300_000)}}),
    "kernels": (replies.Compiled, lambda: {"artefacts": [{"bytes": 1, "kernels": [{}] * 4096}] * 256}),
    "kernels of wrong fields": (
        replies.Compiled,
        lambda: {"artefacts": [{"bytes": 1, "kernels": [{"name": 1, "x": 2}] * 4096}] * 60},
    ),
    "a few less kernels": (replies.Compiled, lambda: {"artefacts": [{"bytes": 1, "kernels": [{}] * 4000}] * 7}),
    "a table": (replies.Profiled, lambda: {"table": "\x7f" * 4_000_000}),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_faults_is_refused_at_once(flood):
    """Of 4 MB of empty objects pydantic makes five million faults, 6 GB of them in a minute."""
    kind, make = FLOODS[flood]
    reply = make()
    before = time.process_time()
    refused(kind, reply)
    assert time.process_time() - before < 5


def test_as_much_as_a_compiler_says_is_read():
    kernels = [{**KERNEL, "name": "k" * 3000}] * 200
    read = replies.read(replies.Compiled, {"artefacts": [{"bytes": 1, "kernels": kernels}] * 20})
    assert sum(len(artefact.kernels) for artefact in read.artefacts) == 4000


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["Tensor", "call", "\ud800", "\x1b[2J", 2**63, -0.0, 1e999, True, clock.CudaClock.name])
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
    json.dumps(read.model_dump(), allow_nan=False).encode()
    assert all(text.replace("\n", "").replace("\t", "").isprintable() for text in every_text(read.model_dump()))


BODIES = {
    "nested lists": b"[" * 2_000_000,
    "nested objects": b'{"a":' * 500_000,
    "half closed": b"[[]," * 1_000_000,
    "many digits": b'{"us":' + b"1" * 5000 + b"}",
    "no UTF-8": b'{"a":"\xff\xfe"}',
    "UTF-16 cut": b"\xff\xfe{",
    "nothing": b"",
    "two": b"{}{}",
    "a list": b"[]",
    "a text": b'"' + b"a" * 10**6 + b'"',
    "a null": b"null",
    "zeros": bytes(1000),
    "no value": b'{"a":}',
    "one quote": b'{"',
    "a number": b"1e999",
}


@pytest.mark.parametrize("body", BODIES)
def test_what_is_no_object_is_a_short_wire_error(body):
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)
    data = struct.pack("<II", len(BODIES[body]), 0) + BODIES[body]
    writer = threading.Thread(target=theirs.sendall, args=(data,))
    with ours, theirs:
        writer.start()
        with pytest.raises(wire.WireError) as caught:
            wire.receive(ours, 10)
        writer.join()
    assert len(str(caught.value)) < SHORT and str(caught.value).isprintable()
