"""`moerl rollout`: the generating half of a run. Engines serve the model folder; scored groups go to `rollouts/`."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from moerl.config.schema import Config
from moerl.errors import EngineError
from moerl.models import ModelSpec
from moerl.observe.console import RunConsole
from moerl.observe.logs import setup_logging
from moerl.observe.sinks import open_sinks
from moerl.observe.timer import PhaseTimer
from moerl.train.progress import Progress
from moerl.train.source import open_live, prepare_folder, rollout_metrics


def record(config: Config, spec: ModelSpec) -> None:
    """Generate and record `train.steps` steps of groups, all by version 0."""
    # Every step is sampled by version 0, so its lag is no measure of staleness; what runs ahead is bounded by the capacity.
    ahead = {"max_lag": config.train.steps, "capacity_groups": 2 * config.rollout.prompts_per_step}
    config = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"save": True}),
            "buffer": config.buffer.model_copy(update=ahead),
        }
    )
    folder, progress = Path(config.run.dir), Progress(0, 0, 0)
    prepare_folder(folder, config, fresh=True)
    setup_logging(folder, "rollout", config.observe.log_level)
    with ExitStack() as stack:
        console = stack.enter_context(RunConsole(config.train.steps, shown=config.observe.console))
        phase = PhaseTimer(console.phase)
        sinks = open_sinks(folder, config)
        stack.callback(sinks.close)
        console.message("starting the engines ...")
        _, source = open_live(stack, config, spec, folder, trainer_ranks=0, at=progress, message=console.message)
        source.published(0)
        while progress.step < config.train.steps:
            try:
                with phase("rollout"):
                    groups, figures = source.groups(progress)
            except EngineError as error:
                if not source.revive(error):
                    raise
                source.pool.publish(0)  # a restarted engine serves the folder's weights, which is what is recorded here
                source.published(0)
                continue
            metrics = {**rollout_metrics(groups), **figures, **phase.take()}
            sinks.log(progress.step, metrics)
            console.step(progress.step, {name: metrics[name] for name in ("reward", "solved_share", "response_length")})
            progress = replace(progress, step=progress.step + 1, position=progress.position + config.rollout.prompts_per_step)
        console.message(f"recorded {config.train.steps} steps in {folder}/rollouts")
        console.message(f"next: moerl train @ … --rollouts {folder}")
