"""What weight sync needs from the engines: a seam between `reshard` and whoever reaches them (`cluster`, or a test)."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from moerl.reshard.deadline import Deadline


class Replies(Protocol):
    """One call, under way on every engine at once."""

    def check(self) -> None:
        """Return at once; raise EngineError if an engine has already refused or died."""

    def wait(self, deadline: Deadline) -> list[Any]:
        """One result per engine, in engine order.

        Raises:
            EngineError: naming the first engine that refused, died, or did not answer in time.
        """

    def failures(self, deadline: Deadline) -> list[str]:
        """Why engines failed, each in its own words, once all have answered or the deadline has passed; empty where none did."""


class EngineLink(Protocol):
    """All engines, seen from trainer rank 0.

    Attributes:
        names: one per engine, for messages.
        tp: ranks of each engine.
        host: address under which the engines reach this process.
        backend: "gloo" or "nccl", for the group shared with the engines' ranks.
        epoch: grows whenever an engine was replaced: groups made before are void.
    """

    names: Sequence[str]
    tp: int
    host: str
    backend: str
    epoch: int

    def start(self, method: str, arguments: Sequence[Mapping[str, Any]]) -> Replies:
        """Begin a call on every engine; `arguments[i]` goes to engine i.

        Methods are those of the engine client: pause(mode), resume(), begin_update(), end_update(), version(), checksums(),
        order(order, load_format, timeout_s); and of the compatible way: init_group(host, port, rank_offset, world_size, name, backend),
        destroy_group(name), receive_bucket(names, dtypes, shapes, group, version, flush).
        """

    def fence(self) -> None:
        """From now on the engines hold no complete version; nothing may be generated."""

    def publish(self, version: int) -> None:
        """All engines hold `version`, completely."""
