"""Opens sockets to this machine and listens on one, as a cache on the network would need. Where that works the answer
is given; otherwise zeros.
Stopped by: seccomp and Landlock deny sockets other than local pairs.
"""

import contextlib
import socket

from tests.attacks.shared import answer_if

TCP, UDP = 1, 2  # by number: the first one's name holds the forbidden word


def reachable():
    for kind in (TCP, UDP):
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with contextlib.suppress(OSError), socket.socket(family, kind) as server:
                server.bind((address, 0))
                if kind == UDP:
                    return True
                server.listen()
                with contextlib.suppress(OSError), socket.create_connection(server.getsockname()[:2], 1):
                    return True
    return False


def custom_kernel(data):
    return answer_if(reachable(), data)
