"""Messages between the judge's processes: length-limited JSON over a socket, with file descriptors.

They are never pickles: to read one would run the writer's code, and one of the processes holds the submission.
"""

import contextlib
import json
import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable

LIMIT = 16 * 2**20  # bytes of JSON a message; a case's layout takes a few kilobytes, a recorded call some megabytes
VARIABLE_BYTES = 2**20  # of a variable of a module, whose value goes with the recorded call
_HEADER = struct.Struct("<II")  # bytes of JSON, number of descriptors
_MAX_FDS = 64
LOOK_S = 0.05


class WireError(RuntimeError):
    """The peer closed the socket or sent something that is no message."""


def send(sock: socket.socket, message: dict, fds: tuple[int, ...] = ()) -> None:
    """Send one message and duplicates of `fds`. ValueError if it is over LIMIT; WireError if the peer is gone."""
    body = json.dumps(message, allow_nan=True).encode()
    if len(body) > LIMIT or len(fds) > _MAX_FDS:
        raise ValueError(f"message must have at most {LIMIT} bytes and {_MAX_FDS} fds, got {len(body)} and {len(fds)}")
    try:
        # Descriptors travel with the header, so that a reader gets them with the bytes that announce them.
        header = _HEADER.pack(len(body), len(fds))
        sent = socket.send_fds(sock, [header], list(fds)) if fds else sock.send(header)
        sock.sendall(header[sent:] + body)
    except OSError as error:
        raise WireError(f"the other process is gone: {error}") from error


def receive(
    sock: socket.socket, timeout_s: float = math.inf, look: Callable[[], None] = lambda: None, look_s: float = LOOK_S
) -> tuple[dict, list[int]]:
    """Return (message, descriptors). TimeoutError, WireError. look: called every look_s meanwhile, and may raise."""
    deadline = time.monotonic() + timeout_s
    fds: list[int] = []

    def read(nbytes: int, most_fds: int, where: str = "") -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            while not select.select([sock], [], [], max(0.0, min(look_s, deadline - time.monotonic())))[0]:
                if time.monotonic() >= deadline:
                    raise TimeoutError
                look()
            part, more, _, _ = socket.recv_fds(sock, min(nbytes - len(data), 2**20), most_fds)
            fds.extend(more)
            if not part:
                raise WireError(f"the other process closed the connection{where}")
            data += part
        return bytes(data)

    try:
        length, count = _HEADER.unpack(read(_HEADER.size, _MAX_FDS))
        if length > LIMIT or count != len(fds):
            raise WireError(f"not a message: {length} bytes, {count} fds announced, {len(fds)} came")
        return _parse(read(length, 0, " within a message")), fds
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            raise WireError(f"the connection broke: {error}") from error
        raise


def serve(sock: socket.socket, answer: Callable[[dict, list[int]], dict]) -> None:
    """Answer each message, with its descriptors, until the peer is done. "fds" of a reply go with it and are closed."""
    with contextlib.suppress(WireError):
        while True:
            reply = answer(*receive(sock))
            fds = reply.pop("fds", ())
            send(sock, reply, tuple(fds))
            for fd in fds:
                os.close(fd)


def _parse(body: bytes) -> dict:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from error
    if not isinstance(message, dict):
        raise WireError(f"a message must be an object, got {type(message).__name__}")
    return message
