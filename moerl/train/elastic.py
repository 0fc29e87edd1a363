"""torchrun, without its traceback: a failed rank has already said what was wrong, and the exit status is what the caller needs."""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run(argv: list[str]) -> int:
    """Run torchrun's own entry point; the exit status of the first rank that failed."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main(argv)
    except ChildFailedError as error:
        return min(failure.exitcode if failure.exitcode > 0 else 1 for failure in error.failures.values())
    except SignalException:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
