"""Messages between the judge's processes, read from whoever writes there."""

import json
import os
import socket
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.runner import wire

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def read(data: bytes) -> dict:
    """What receive makes of `data` from a writer that then closes."""
    ours, theirs = socket.socketpair()
    writer = threading.Thread(target=lambda: (theirs.sendall(data), theirs.close()))
    with ours:
        writer.start()
        try:
            return wire.receive(ours, 5)[0]
        finally:
            ours.close()
            writer.join()


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_what_is_sent_arrives(message):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send(ours, message)
        got, fds = wire.receive(theirs, 5)
    assert fds == [] and json.dumps(got) == json.dumps(message)


FALSE_HEADERS = st.builds(struct.pack, st.just("<II"), *[st.integers(0, 2**32 - 1)] * 2)


@given(st.binary(max_size=200) | st.builds(bytes.__add__, FALSE_HEADERS, st.binary(max_size=100)))
def test_any_bytes_are_a_message_or_a_wire_error(data):
    """Nothing else comes out of the reader, and nothing is read past the announced length."""
    try:
        message = read(data)
    except wire.WireError:
        return
    assert isinstance(message, dict)
    length, count = struct.unpack("<II", data[:8])
    assert count == 0 and json.dumps(message) == json.dumps(json.loads(data[8 : 8 + length]))


def test_deep_nesting_and_a_list_are_wire_errors_and_a_writer_that_stops_a_timeout():
    for body in (b"[" * 100_000, b"[]"):
        with pytest.raises(wire.WireError):
            read(struct.pack("<II", len(body), 0) + body)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(struct.pack("<II", 100, 0) + b"{")
        with pytest.raises(TimeoutError):
            wire.receive(theirs, 0.2)


def test_descriptors_that_came_with_a_false_message_are_closed():
    ours, theirs = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    with ours, theirs:
        held = os.open("/dev/null", os.O_RDONLY)
        socket.send_fds(ours, [struct.pack("<II", 2, 7)], [held])
        os.close(held)
        with pytest.raises(wire.WireError, match="7 fds announced, 1 came"):
            wire.receive(theirs, 5)
        assert len(os.listdir("/proc/self/fd")) == before
