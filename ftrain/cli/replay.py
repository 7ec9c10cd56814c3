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
            "--no-jit", help="Take it operation by operation, and name the one that fails first."
        ),
    ] = False,
) -> None:
    """Take a step that failed again, and name the first value in it that is not finite."""
    from ftrain.cli.runs import open_run
    from ftrain.config import ConfigError
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
    typer.echo(
        f"step {crash.step} failed: {crash.facts['error']}: {crash.facts['message'].partition(chr(10))[0]}"
    )
    state = crash.state(like=place(job.initial_state, job.mesh))
    typer.echo(f"the state before it is taken again from step {int(state.step)}")
    state = forward(
        CompiledStep(job.step, job.mesh), state, job.pipeline, crash.step, limit=float("inf")
    )
    kept = crash.batch(like=job.pipeline.batch(0))
    batch = job.pipeline.batch(crash.step - 1) if kept is None else kept
    if no_jit:
        for phrase in find_nan_origin(job.step, state, batch) or [
            "operation by operation, all of it is finite"
        ]:
            typer.echo(phrase)
    found = locate(job.step, state, batch)
    if not found:
        _, metrics = job.step(state, batch)
        typer.echo(
            f"all of it is finite: {format_values({name: float(each) for name, each in metrics.items()})}"
        )
    for number, phrase in enumerate(found):
        typer.echo(f"{'first' if number == 0 else 'then'} not finite: {phrase}")
