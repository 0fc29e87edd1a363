"""`torchrun … -m moerl.train @ config.toml`: one trainer rank. Rank 0 drives engines and rewards through Ray.

When a run fails, one rank says why, in one message: rank 0 where it is the one to know, and another rank only if no earlier
failure made the launcher end it meanwhile. Tracebacks of unexpected errors go to the rank's log.
"""

import logging
import os
import sys
import time

from moerl.errors import ConfigError, MoerlError
from moerl.train.launch import prepare

log = logging.getLogger("moerl.train")

_AFTERMATH_S = 5.0
"""How long a rank that lost another one waits to be ended by the launcher, before it takes its own error for the cause."""


def main(argv: list[str]) -> int:
    """Train; the exit status."""
    rank = int(os.environ["RANK"]) if "RANK" in os.environ else 0
    try:
        config, spec, options = prepare(argv, started=int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else 1)
        from moerl.train import platform

        platform.quiet()
        platform.install(platform.pick_device(config.train.device))  # before anything imports Megatron
        from moerl.train.loop import train

        train(config, spec, options)
    except MoerlError as error:
        if logging.getLogger().hasHandlers():
            log.error("%s", error)
        if rank != 0:
            time.sleep(_AFTERMATH_S)
        print(f"error: {error}" if rank == 0 else f"error: trainer rank {rank}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        time.sleep(_AFTERMATH_S)  # before anything is said: this may be no more than the loss of another rank
        log.exception("trainer rank %d failed unexpectedly", rank)
        where = f"the traceback is in logs/rank-{rank}.log of the run folder"
        print(f"error: trainer rank {rank} failed unexpectedly, {where}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":  # the checkpoint writer's processes import this module again
    sys.exit(main(sys.argv[1:]))
