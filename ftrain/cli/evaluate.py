"""ftrain eval RUN"""

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, such as runs/digits.")],
    step: Annotated[int | None, typer.Option(help="The checkpoint to evaluate; the newest if not given.")] = None,
) -> None:
    """Evaluate a checkpoint of a run."""
    from ftrain.config import ConfigError, build, load, plan
    from ftrain.config.run_directory import CONFIG
    from ftrain.hooks.console import format_values
    from ftrain.training import use_compilation_cache

    if not (run / CONFIG).exists():
        raise ConfigError(f"{run / CONFIG}: there is no such file; RUN is a directory that `ftrain train` made")
    use_compilation_cache()
    job = build(plan(load(run / CONFIG)), directory=run)
    if job.evaluator is None:
        raise ConfigError(f"{run}: the task {job.plan.top['task']} has no evaluation")
    state = job.saver.manager.restore(like=job.initial_state(), step=step)
    measured = job.evaluator.measure(state)
    typer.echo(f"step {int(state.step)}: {format_values(measured)}")
