"""ftrain eval RUN"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ftrain.paths import RUN_LOCK, local_path


def evaluate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory, such as runs/digits.")
    ],
    step: Annotated[
        int | None, typer.Option(help="The checkpoint to evaluate; the newest if not given.")
    ] = None,
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
    from ftrain.cli.runs import open_run, wait_for_run
    from ftrain.config import ConfigError
    from ftrain.evaluation import evaluate_checkpoints
    from ftrain.hooks.console import format_values
    from ftrain.training import use_compilation_cache

    if follow and step is not None:
        raise typer.BadParameter("--step and --follow exclude each other")
    run = local_path(run)
    use_compilation_cache()
    if follow:
        wait_for_run(run, timeout)
    job = open_run(run)
    if job.evaluator is None:
        raise ConfigError(f"{run}: the task {job.plan.top['task']} has no evaluation")
    like = job.initial_state()
    if not follow:
        state = job.saver.manager.restore(like=like, step=step)
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
