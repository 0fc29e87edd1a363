"""What rules between settings see and say."""

from dataclasses import dataclass

from moerl.config.schema import Config


@dataclass(frozen=True)
class Check:
    """What a rule sees.

    Attributes:
        given: dotted path -> index of the last source that set it; absent where the default counts.
        world: trainer ranks.
        started: trainer ranks that a launcher has started; None where none has.
    """

    config: Config
    given: dict[str, int]
    world: int
    started: int | None = None


@dataclass(frozen=True)
class Problem:
    """Attributes:
    reads: dotted paths of the settings that the rule compared.
    """

    reads: tuple[str, ...]
    text: str
