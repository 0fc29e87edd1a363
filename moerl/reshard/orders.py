"""What trainer rank 0 tells the engines during a direct sync, and what their ranks answer: JSON over the engine's own HTTP endpoint.

    trainer rank 0 --Order--> engine's main process --> each rank of the engine --> [one answer per rank] --> trainer rank 0

Torch-free, so that both sides can afford to import it.
"""

import msgspec

from moerl.errors import ReshardError

LOAD_FORMAT = "moerl"
"""As which an order passes through `/update_weights_from_tensor`."""

PROTOCOL = 1

DRAFT = "draft."
"""What the names of parameters begin with that belong to a second model, which drafts tokens for the one that is served."""


class Order(msgspec.Struct, frozen=True, tag_field="order"):
    """Base of all orders."""


class Describe(Order, frozen=True, tag="describe"):
    """Say what you are. Answer: `Description`."""


class Close(Order, frozen=True, tag="close"):
    """From now on refuse to continue generation: weights are about to be written. Answered by the engine's main process alone."""


class Join(Order, frozen=True, tag="join"):
    """Meet the trainer in a new group, with a new plan.

    Attributes:
        rank: of the engine's first rank in that group; the others follow.
        plans: for each rank of the engine, its part of the plan, encoded.
        nodes: number of each group member's machine.
        kind: of transport.
    """

    host: str
    port: int
    name: str
    backend: str
    rank: int
    world: int
    plans: list[bytes]
    nodes: list[int]
    kind: str
    timeout_s: float


class Receive(Order, frozen=True, tag="receive"):
    """Take all buckets and write them. Answer: `Received`.

    Attributes:
        base: the version that changes are counted from; None if all weights are sent in full.
    """

    version: int
    base: int | None
    timeout_s: float


class Verify(Order, frozen=True, tag="verify"):
    """Read all parameters back. Answer: `Received`."""


class Commit(Order, frozen=True, tag="commit"):
    """All engines hold `version`, completely: name it, drop what was cached under another one, and allow generation to continue."""

    version: int


class Leave(Order, frozen=True, tag="leave"):
    """Give up the group."""


class Read(Order, frozen=True, tag="read"):
    """Say what small parameters hold, for diagnosis; the engine goes on serving. Answer: `Values`."""

    names: list[str]


AnyOrder = Describe | Close | Join | Receive | Verify | Commit | Leave | Read


class Described(msgspec.Struct, frozen=True):
    """Shape and dtype ("bfloat16") of a parameter."""

    shape: tuple[int, ...]
    dtype: str


class Description(msgspec.Struct, frozen=True):
    """Attributes:
    node: see `moerl.reshard.node`.
    parameters: of this rank, by name.
    """

    protocol: int
    node: str
    parameters: dict[str, Described]


class Values(msgspec.Struct, frozen=True):
    """Attributes:
    values: little-endian float32 of this rank's parameters, by name; without those that it doesn't have.
    """

    values: dict[str, bytes]


class Received(msgspec.Struct, frozen=True):
    """Attributes:
    wire_nbytes: bytes that came in as payload of buckets.
    nbytes: of the parameters that they describe, padding excepted.
    checksums: of the full content of each bucket, in the plan's order.
    """

    wire_nbytes: int
    nbytes: int
    checksums: list[int]


def encode(order: Order) -> str:
    return msgspec.json.encode(order).decode()


def decode(text: str | bytes) -> AnyOrder:
    """Raises:
    ReshardError: it is no order of this version of moerl.
    """
    try:
        return msgspec.json.decode(text, type=AnyOrder)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReshardError(
            f"expected an order of weight sync, got something else: {error}; is the engine's moerl another version?"
        ) from error


def answers[T](text: str, kind: type[T]) -> list[T]:
    """The ranks' answers to an order.

    Raises:
        ReshardError: they are none.
    """
    try:
        return msgspec.json.decode(text, type=list[kind])
    except msgspec.DecodeError as error:
        raise ReshardError(f"an engine's answer is not what was asked for ({error}): {text[:500]}") from error
