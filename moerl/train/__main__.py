"""`torchrun … -m moerl.train @ config.toml`: one trainer rank. Rank 0 drives engines and rewards through Ray."""

import os
import sys

from moerl.errors import MoerlError
from moerl.train.launch import prepare


def main(argv: list[str]) -> int:
    """Train; the exit status. An error that moerl raises on purpose is printed by the rank that met it, without a traceback."""
    try:
        config, spec, options = prepare(argv, world=int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else 1)
        from moerl.train import platform

        platform.quiet()
        platform.install(platform.pick_device(config.train.device))  # before anything imports Megatron
        from moerl.train.loop import train

        train(config, spec, options)
    except MoerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":  # the checkpoint writer's processes import this module again
    sys.exit(main(sys.argv[1:]))
