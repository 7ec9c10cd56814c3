"""ftrain replay RUN"""

from pathlib import Path
from typing import Annotated

import typer

from ftrain.paths import local_path


def replay(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run directory with a crash, such as runs/digits."),
    ],
    step: Annotated[
        int | None, typer.Option(help="The step that failed; the newest crash if not given.")
    ] = None,
    no_jit: Annotated[
        bool,
        typer.Option(
            "--no-jit", help="Run it operation by operation, and name the first that fails."
        ),
    ] = False,
) -> None:
    """Run a failed step again, and name the first non-finite value in it."""
    from ftrain.config import ConfigError, open_run
    from ftrain.hooks.console import format_values
    from ftrain.training import use_compilation_cache
    from ftrain.training.compiled_step import CompiledStep
    from ftrain.training.crash import read_crash
    from ftrain.training.replay import find_nan_origin, forward, locate
    from ftrain.training.state import place

    run = local_path(run)
    try:
        crash = read_crash(run, step)
    except LookupError as error:
        raise ConfigError(str(error)) from None
    use_compilation_cache()
    job = open_run(run)
    message = crash.facts["message"].partition("\n")[0]
    typer.echo(f"step {crash.step} failed: {crash.facts['error']}: {message}")
    state = crash.state(like=place(job.initial_state, job.mesh))
    typer.echo(f"the state before it is computed again from step {int(state.step)}")
    compiled = CompiledStep(job.step, job.mesh)
    state = forward(compiled, state, job.pipeline, crash.step, limit=float("inf"))
    kept = crash.batch(like=job.pipeline.batch(0))
    batch = job.pipeline.batch(crash.step - 1) if kept is None else kept
    if no_jit:
        origin = find_nan_origin(job.step, state, batch)
        for phrase in origin or ["operation by operation, all values are finite"]:
            typer.echo(phrase)
    found = locate(job.step, state, batch)
    if not found:
        _, metrics = job.step(state, batch)
        values = {name: float(value) for name, value in metrics.items()}
        typer.echo(f"all values are finite: {format_values(values)}")
    for number, phrase in enumerate(found):
        typer.echo(f"{'first' if number == 0 else 'then'} non-finite: {phrase}")
