"""A right reply of a runner is read as it is. Anything else is a RUNTIME_ERROR with a short, clean reason.

A malformed reply of a real one is an attack (tests/attacks/replies/malformed.py).
"""

import copy
import functools
import json
import math
import operator
import time
from collections.abc import Iterator

import pytest

from harness.judge import replies
from harness.sandbox.process import Died

SHORT = 2_500  # characters of a reason, at most
CLASSES = {kind for kind in vars(replies).values() if isinstance(kind, type) and issubclass(kind, replies.Reply)}
KINDS = sorted(CLASSES - {replies.Reply}, key=lambda kind: kind.__name__)


def right(schema: dict, known: dict, within: tuple = ()) -> object:
    """A value that fits a JSON schema and has every field; of a kind within itself those that it must have."""
    name = schema.get("$ref", "").rpartition("/")[2]
    schema = known.get(name, schema)
    if "anyOf" in schema:  # the other one is null
        return right(schema["anyOf"][0], known, within)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    if schema["type"] == "array":
        each = schema["items"].get("oneOf", [schema["items"]])
        return [right(one, known, within) for one in each] * schema.get("minItems", 1)
    if schema["type"] == "object" and schema["additionalProperties"]:
        return {"HMMA": right(schema["additionalProperties"], known, within)}
    if schema["type"] == "object":
        fields = schema.get("properties", {})
        wanted = schema["required"] if name in within else fields
        return {field: right(fields[field], known, (*within, name)) for field in wanted}
    return {"boolean": True, "integer": 2, "number": 1.5, "string": "00"}[schema["type"]]


SCHEMAS = {kind: kind.model_json_schema() for kind in KINDS}
RIGHT = {kind: right(schema, schema.get("$defs", {})) for kind, schema in SCHEMAS.items()}
CLAIM, VARIABLE, TAKE = (RIGHT[kind] for kind in (replies.Claim, replies.Variable, replies.Take))
COPY_NODE, FILL_NODE = RIGHT[replies.CopyNode], RIGHT[replies.FillNode]


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
OPTIONAL = {"prepare_us", "sass"}  # may be null
ALSO_RIGHT = {"to": (2**48 + 1, 2**63), "from": (2**48 + 1, 2**63), "carveout": (-1,)}


@pytest.mark.parametrize("kind", KINDS)
def test_right_reply_is_read_as_it_is_and_values_of_another_type_or_range_are_refused(kind):
    read = replies.read(kind, json.loads(json.dumps(RIGHT[kind])))
    assert type(read) is kind and read.model_dump(exclude_unset=True, by_alias=True) == RIGHT[kind]
    assert replies.read(kind, RIGHT[replies.Failed]) == replies.Failed(**RIGHT[replies.Failed])
    refused(kind, {"failed": "call"})
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


@pytest.mark.parametrize("said", ["-0.0", "0", "1e-300", "0.0009"])
def test_no_call_takes_no_time(said):
    """One such claim among sixty would end the geometric mean, and the run with it."""
    assert "us" in refused(replies.SelfTimed, json.loads(f'{{"claims": [], "us": {said}}}'))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("nodes", 0, "grid"), [1, 1]),
        (("nodes", 0, "name"), "two words"),
        (("nodes", 0, "name"), 'a"b'),
        (("nodes", 0, "values"), "abc"),
        (("nodes", 0, "carveout"), -2),
        (("nodes", 0, "layout"), [0] * 8193),
        (("nodes", 1, "to"), 2**64),
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
    assert [claim.type for claim in replies.noted(json.dumps([CLAIM, {"type": "NoneType"}]))] == ["00", "NoneType"]
    empty, _ = replies.noted(json.dumps([CLAIM | {"shape": [0, 3], "stride": [0, 0]}, CLAIM]))
    assert (empty.shape, empty.stride) == ([0, 3], [0, 0])
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
    kernels = [{**RIGHT[replies.Kernel], "name": "k" * 3000}] * 200
    read = replies.read(replies.Compiled, {"artefacts": [{"bytes": 1, "kernels": kernels}] * 20})
    assert sum(len(artefact.kernels) for artefact in read.artefacts) == 4000
