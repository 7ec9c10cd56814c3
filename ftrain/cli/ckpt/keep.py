"""ftrain ckpt rm RUN STEP..., and pin and unpin"""

from typing import Annotated

import typer

from ftrain.cli.ckpt.arguments import Run, Steps


def remove(
    run: Run,
    steps: Steps,
    force: Annotated[bool, typer.Option("--force", help="Also the last one that can be restored.")] = False,
) -> None:
    """Remove checkpoints of RUN. Not a pinned one, and the last good one only with --force."""
    from ftrain.checkpoints import CheckpointError, CheckpointManager
    from ftrain.checkpoints.finding import directory_of
    from ftrain.checkpoints.writing import discard

    manager = CheckpointManager(directory_of(run))
    for step in steps:
        aside = manager.directory / step
        if not step.isdecimal() and step.partition(".")[0].isdecimal() and "/" not in step and aside.is_dir():
            discard(aside)
        elif not force and [str(there) for there in manager.steps()] == [step]:
            raise CheckpointError(f"{aside} is the last checkpoint of {run}; --force removes it too")
        else:
            manager.delete(_number(step))
        typer.echo(f"removed {aside}")


def pin(run: Run, steps: Steps) -> None:
    """Keep checkpoints of RUN until they are unpinned."""
    _pin(run, steps, True)


def unpin(run: Run, steps: Steps) -> None:
    """Let the checkpoints of RUN go when it is their time."""
    _pin(run, steps, False)


def _pin(run: Run, steps: Steps, pinned: bool) -> None:
    from ftrain.checkpoints import CheckpointManager
    from ftrain.checkpoints.finding import directory_of

    manager = CheckpointManager(directory_of(run))
    for step in steps:
        manager.pin(_number(step), pinned)
        typer.echo(f"{'pinned' if pinned else 'unpinned'} {manager.directory / step}")


def _number(step: str) -> int:
    if not step.isdecimal():
        raise typer.BadParameter(f"a step is a whole number, got {step!r}")
    return int(step)
