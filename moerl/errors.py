"""Every error moerl raises on purpose.

Each member also inherits the standard type a caller would expect, so `except ValueError` works as well as
`except MoerlError`. A message says what was expected, what came, and what to do about it.
"""


class MoerlError(Exception):
    """Base of all errors that moerl raises on purpose; the command line prints these without a traceback."""


class ConfigError(MoerlError, ValueError):
    """One or more settings are wrong; carries every violation found, not only the first.

    Attributes:
        violations: one sentence per violation.
    """

    def __init__(self, violations: str | list[str]):
        self.violations = [violations] if isinstance(violations, str) else list(violations)
        head = "1 setting is wrong" if len(self.violations) == 1 else f"{len(self.violations)} settings are wrong"
        super().__init__(head + ":\n" + "\n".join(f"  - {violation}" for violation in self.violations))

    def __reduce__(self):
        # Errors cross process borders pickled; the default would feed the finished message back in as a violation.
        return type(self), (self.violations,)


class ModelError(MoerlError, ValueError):
    """A model folder is missing, incomplete, not a mixture of experts, or of a family that moerl does not know."""


class TraceError(MoerlError, ValueError):
    """A routing trace is malformed or does not belong to the tokens or the model it came with."""


class ReplayError(MoerlError, RuntimeError):
    """Replayed routes were not used exactly once, or a setting would make Megatron ignore them."""


class RolloutError(MoerlError, ValueError):
    """A rollout cannot be trusted: its tokens, logprobs, routes and versions do not fit together."""


class TaskError(MoerlError, ValueError):
    """The prompts or the reward of a task are unusable."""


class EngineError(MoerlError, RuntimeError):
    """An inference engine did not start, died, or refused a request."""


class ReshardError(MoerlError, RuntimeError):
    """New weights did not reach an engine, or the engine holds other bytes than were sent."""


class LedgerError(MoerlError, RuntimeError):
    """What is said of a group of rollouts contradicts what was recorded of it: delivered twice, or never admitted."""


class CheckpointError(MoerlError, RuntimeError):
    """A checkpoint is missing, incomplete, or belongs to another configuration."""


class TrainError(MoerlError, RuntimeError):
    """A training step was refused (for instance a non-finite loss), or the run did not do what it must."""


class ReportError(MoerlError, ValueError):
    """A recording of routes and logprobs is missing, damaged or of one side only, or two recordings do not belong together."""


class WaitTimeout(MoerlError, TimeoutError):
    """A named wait reached its deadline."""
