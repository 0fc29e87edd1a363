"""A trainer of one process that dies in the middle: pushes FOLDER into the engine at URL and kills itself at its n-th bucket.

python sync_trainer.py URL TP FOLDER VERSION TRANSPORT BUCKETS
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from moerl.models import read_spec
from moerl.reshard import direct
from moerl.reshard.transport import Transport
from tests.system.sync_harness import ClientLink, make_sync, opening, whole_shards


def die_at(number: int) -> None:
    """Be killed right after bucket `number` was given away."""
    sent = []

    def mortal(transport: Transport) -> None:
        plain = transport.send

        def send(*arguments: Any) -> None:
            plain(*arguments)
            sent.append(None)
            if len(sent) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        transport.send = send

    direct.open_transport = opening(mortal)


def main() -> None:
    url, tp, folder, version, transport, buckets = sys.argv[1:]
    die_at(int(buckets))
    spec = read_spec(folder)
    sync = make_sync(spec, ClientLink([url], int(tp)), way="direct", transport=transport)
    sync.push(whole_shards(spec, Path(folder)), int(version))


if __name__ == "__main__":
    main()
