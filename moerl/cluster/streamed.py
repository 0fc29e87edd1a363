"""The driver's end of the stream: starts the actor that keeps the engines busy, and asks it for the groups of a step.

The next step's groups are asked for as soon as a step has its own, so that they have been handed over when the trainer wants them.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moerl.buffer.metrics import Doing
from moerl.cluster.calls import own_error
from moerl.cluster.stream import Stream
from moerl.config.schema import Config
from moerl.errors import EngineError, WaitTimeout
from moerl.rollout.generate import Sampling
from moerl.rollout.sample import Group, Prompt

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 180.0
_CONTROL_TIMEOUT_S = 60.0


class Streamed:
    """Groups for one step after the other; use as a context manager.

    Args:
        prompts: the training set.
        folder: of the run; the ledger goes there.
        step, position: where a new run begins, or a resumed one continues.
    """

    def __init__(self, config: Config, prompts: Sequence[Prompt], sampling: Sampling, folder: Path, *, step: int, position: int):
        self._config = config
        self._arguments = config, msgspec.msgpack.encode(list(prompts)), sampling
        self._begins = str(folder.resolve()), step, position
        self._actor: Any = None
        self._ahead: tuple[int, Any] | None = None

    def __enter__(self) -> Self:
        # The ledger belongs to the run folder, which this machine has.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._actor = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=here)(Stream).remote(*self._arguments)
        try:
            self._get(self._actor.start.remote(*self._begins), "the stream of groups to start", _START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def use(self, engines: Sequence[Any]) -> None:
        """These engine actors are there now; they are used from the next publication on."""
        self._ahead = None  # it may have failed with the engines; a step that was handed out is handed out again
        self._get(self._actor.use.remote(list(engines)), "the stream to take the engines", _CONTROL_TIMEOUT_S)

    def announce(self, version: int) -> None:
        """A version is about to be pushed; with `sync.interrupt = "drain"`, returns when no request runs."""
        limit = _CONTROL_TIMEOUT_S + (self._config.rollout.request_timeout_s if self._config.sync.interrupt == "drain" else 0)
        self.doing("sync")
        self._get(self._actor.announce.remote(version), "running requests to end", limit)

    def published(self, version: int) -> None:
        """All engines serve `version`, completely."""
        self._get(self._actor.published.remote(version), "the stream to go on", _CONTROL_TIMEOUT_S)
        self.doing("other")

    def doing(self, what: Doing) -> None:
        """What the trainer does from now on."""
        self._actor.doing.remote(what)

    def take(self, step: int, *, last: bool) -> tuple[list[Group], dict[str, float]]:
        """The groups of a step in the order of the prompts, and the figures since the step before.

        Args:
            last: no further step follows.

        Raises:
            EngineError, TaskError, RolloutError: why they will not come. WaitTimeout: they did not come in time.
        """
        ahead, self._ahead = self._ahead, None
        self.doing("wait_groups")
        call = ahead[1] if ahead is not None and ahead[0] == step else self._actor.take.remote(step)
        encoded, figures = self._get(call, f"the groups of step {step}", self._config.parallel.timeout_s)
        if not last:
            self._ahead = step + 1, self._actor.take.remote(step + 1)
        self.doing("train")
        return [msgspec.msgpack.decode(group, type=Group) for group in encoded], figures

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """The same groups with rewards.

        Raises:
            TaskError: the reward failed for one of them.
        """
        limit = len(groups) * self._config.task.reward_timeout_s + _CONTROL_TIMEOUT_S
        return msgspec.msgpack.decode(
            self._get(self._actor.score.remote(msgspec.msgpack.encode(list(groups))), "rewards", limit), type=list[Group]
        )

    def stop(self) -> None:
        """End the stream and its workers. Safe to call twice."""
        actor, self._actor = self._actor, None
        if actor is not None:
            ray.wait([actor.stop.remote()], timeout=_CONTROL_TIMEOUT_S)
            ray.kill(actor)

    def _get(self, call: Any, what: str, timeout_s: float) -> Any:
        start = beat = time.monotonic()
        while True:
            now = time.monotonic()
            try:
                return ray.get(call, timeout=min(1.0, max(0.01, start + timeout_s - now)))
            except GetTimeoutError:
                if time.monotonic() - start > timeout_s:
                    raise WaitTimeout(f"waited {timeout_s:g} s for {what}; {self._state()}") from None
                if now - beat > self._config.observe.heartbeat_s:
                    beat = now
                    logger.info("waiting for %s for %.0f s; %s", what, now - start, self._state())
            except RayTaskError as error:
                raise own_error(error, what) from error
            except RayActorError as error:
                raise EngineError(f"the process that keeps the engines busy died while {what} were waited for: {error}") from error

    def _state(self) -> str:
        try:
            return ray.get(self._actor.waits_for.remote(), timeout=5.0)
        except (GetTimeoutError, RayActorError, RayTaskError) as error:
            return f"what it is busy with is not known ({type(error).__name__})"
