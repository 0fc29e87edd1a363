"""Ports for servers that another process starts, some seconds after the port was chosen.

They lie below those that the system gives to connections by itself: in a busy run it would hand out the chosen one in between.
"""

import random
import socket
from pathlib import Path

_RANGE = range(20_000, 32_000)  # Ray takes its own from below
_TRIES = 64
_SYSTEMS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nobody listens; where none of the range is free, one that the system chooses.

    Raises:
        OSError: nothing can be bound on this host.
    """
    limit = _first_of_system()
    # Not from the seeded generators: two runs of one seed would choose alike.
    for port in random.SystemRandom().sample(_RANGE, _TRIES):
        if port < limit and _bound(host, port):
            return port
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    """The port, if it could be bound; else 0. With port 0, that of the system's choice."""
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            if not port:
                raise
            return 0
        return probe.getsockname()[1]


def _first_of_system() -> int:
    """The lowest port that the system gives to connections by itself; Linux's default where it does not say."""
    try:
        return int(_SYSTEMS.read_text().split()[0])
    except OSError:
        return 32768
