"""ftrain eval RUN"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ftrain.cli.arguments import StepOption, parse_step
from ftrain.paths import RUN_CONFIG, RUN_LOCK, local_path
from ftrain.storage import exists


def evaluate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory, such as runs/digits.")
    ],
    step: StepOption = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Evaluate each new checkpoint as it appears, until the run ends."
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(help="With --follow: end if no checkpoint appears within this many seconds."),
    ] = None,
) -> None:
    """Evaluate a checkpoint of a run, or follow a run and evaluate all of them."""
    from ftrain.checkpoints import is_held
    from ftrain.config import ConfigError, open_run
    from ftrain.evaluation import evaluate_checkpoints
    from ftrain.hooks.console import format_values
    from ftrain.training import use_compilation_cache

    if follow and step is not None:
        raise typer.BadParameter("--step and --follow exclude each other")
    run = local_path(run)
    use_compilation_cache()
    if follow:
        _wait_for_run(run, timeout)
    job = open_run(run)
    if job.evaluator is None:
        raise ConfigError(f"{run}: the task {job.plan.top['task']} has no evaluation")
    like = job.initial_state()
    if not follow:
        chosen = job.saver.result() if step is None else parse_step(step)
        state = job.saver.manager.restore(like=like, step=chosen)
        measured = _with_tables(job.evaluator.measure(state))
        typer.echo(f"step {int(state.step)}: {format_values(measured)}")
        return
    evaluated = evaluate_checkpoints(
        job.saver.manager.directory,
        job.evaluator.evaluate,
        like,
        use_averages=job.evaluator.use_averages,
        write_to=run / "eval",
        last_step=job.steps,
        timeout=timeout,
        stop=lambda: not is_held(run / RUN_LOCK),
    )
    for number, measured in evaluated:
        typer.echo(f"step {number}: {format_values(measured)}")


def _with_tables(measured: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the values with arrays of several values as strings: a line for each row."""
    import numpy as np

    def shown(value: Any) -> float | str:
        if isinstance(value, str) or np.size(value) == 1:
            return value if isinstance(value, str) else float(np.asarray(value).reshape(()))
        return np.array2string(np.asarray(value), precision=4, suppress_small=True)

    return {name: shown(value) for name, value in measured.items()}


def _wait_for_run(run: Path, timeout: float | None) -> None:
    """Wait until a run has begun in a directory, at most `timeout` seconds; by default 60."""
    deadline = time.monotonic() + (60.0 if timeout is None else timeout)
    while not exists(run / RUN_CONFIG) and time.monotonic() < deadline:
        time.sleep(0.2)
