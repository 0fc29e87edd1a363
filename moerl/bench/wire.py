"""A wire as slow, compared to memory, as a network is: TCP connections of this process, held back by the kernel.

Within a machine TCP is a copy by the same cores that pack and check what is sent, so whoever does more than send is slower than one who
only sends, by as much as his work takes. Over a network, bytes wait for the wire, and the question is whether the work is done meanwhile.
Linux can pace each connection (`SO_MAX_PACING_RATE`, socket(7)), without privileges.
"""

import os
import socket
from contextlib import closing

from moerl.errors import ReshardError

_SO_MAX_PACING_RATE = 47  # not in Python's socket module
_UNLIMITED = -1


def pace(bytes_per_s: int | None) -> int:
    """Let each TCP connection of this process send at most so many bytes per second; None: as many as it can.

    Returns:
        How many connections there are.

    Raises:
        ReshardError: this system cannot.
    """
    connections = 0
    for number in os.listdir("/proc/self/fd"):
        if (found := _connection(int(number))) is None:
            continue
        with closing(found):
            try:
                found.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _UNLIMITED if bytes_per_s is None else bytes_per_s)
            except OSError as error:
                raise ReshardError(f"this system cannot pace TCP connections, which Linux can from 4.20 on: {error}") from error
            connections += 1
    return connections


def _connection(number: int) -> socket.socket | None:
    """A second handle on a file descriptor, if it is an open TCP connection."""
    try:
        copy = os.dup(number)
    except OSError:
        return None  # the one by which the folder was listed
    try:
        found = socket.socket(fileno=copy)
        found.getpeername()
    except OSError:
        os.close(copy)
        return None
    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
        return found
    found.close()
    return None
