"""ftrain ckpt rm RUN STEP..., and pin and unpin"""

from pathlib import Path
from typing import Annotated

import typer

from ftrain.cli.ckpt.arguments import Run, Steps


def remove(
    run: Run,
    steps: Steps = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also the last one that can be restored.")
    ] = False,
) -> None:
    """Remove checkpoints of RUN. Not a pinned one, and the last good one only with --force."""
    from ftrain.checkpoints import CheckpointError, CheckpointManager
    from ftrain.checkpoints.catalog import discard
    from ftrain.checkpoints.paths import checkpoint_directory

    run, steps = _split(run, steps)
    manager = CheckpointManager(checkpoint_directory(run))
    for step in steps:
        aside = manager.directory / (str(int(step)) if step.isdecimal() else step)
        if (
            not step.isdecimal()
            and step.partition(".")[0].isdecimal()
            and "/" not in step
            and aside.is_dir()
        ):
            discard(aside)
        elif not force and step.isdecimal() and manager.steps() == [int(step)]:
            raise CheckpointError(
                f"{aside} is the last checkpoint of {run}; --force removes it too"
            )
        else:
            manager.delete(_number(step))
        typer.echo(f"removed {aside}")


def pin(run: Run, steps: Steps = None) -> None:
    """Keep checkpoints of RUN until they are unpinned."""
    _pin(run, steps, True)


def unpin(run: Run, steps: Steps = None) -> None:
    """Let the checkpoints of RUN go when it is their time."""
    _pin(run, steps, False)


def _pin(run: Path, steps: list[str] | None, pinned: bool) -> None:
    from ftrain.checkpoints import CheckpointManager
    from ftrain.checkpoints.paths import checkpoint_directory

    run, steps = _split(run, steps)
    manager = CheckpointManager(checkpoint_directory(run))
    for step in steps:
        manager.pin(_number(step), pinned)
        typer.echo(f"{'pinned' if pinned else 'unpinned'} {manager.directory / step}")


def _split(run: Path, steps: list[str] | None) -> tuple[Path, list[str]]:
    """A run and its steps, which may be given as RUN STEP... or as RUN/STEP."""
    if steps:
        return run, steps
    if not run.name.partition(".")[0].isdecimal():
        raise typer.BadParameter(f"which steps of {run}? say {run} STEP...")
    return run.parent, [run.name]


def _number(step: str) -> int:
    if not step.isdecimal():
        raise typer.BadParameter(f"a step is a whole number, got {step!r}")
    return int(step)
