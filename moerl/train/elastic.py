"""torchrun, without its traceback: a failed rank has already said what was wrong, and the exit status is what the caller needs.

To stop a rank torchrun signals the rank's whole process group, which holds Ray's daemons; here the rank alone is signalled, so
that it can stop engines and Ray in order.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.run import main

from moerl.train.processes import stop_with_parent


def run(argv: list[str]) -> int:
    """Run torchrun's own entry point, until the process that started this one ends; the exit status of the rank that failed first."""
    stop_with_parent()
    SubprocessHandler.close = _signal_rank
    logging.disable(logging.ERROR)  # of this process; the ranks have their own logs
    try:
        main(argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not say so itself
            name = signal.Signals(-failure.exitcode).name
            hint = " (the kernel does this for lack of memory)" if name == "SIGKILL" else ""
            sys.stderr.write(f"error: trainer rank {rank} was killed by {name}{hint}\n")
            return 1
        return failure.exitcode
    except SignalException:
        return 130
    return 0


def _signal_rank(handler: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
    handler.proc.send_signal(death_sig or signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
