"""ftrain verify-resume CONFIG [key=value ...]"""

import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftrain.cli.arguments import ConfigPath, Overrides

if TYPE_CHECKING:
    from ftrain.cli.killing import Killer

SAVES = 10  # in a run, at least


def verify_resume(
    config: ConfigPath,
    overrides: Overrides = None,
    kills: Annotated[int, typer.Option(min=1, help="How often the run is killed.")] = 20,
    processes: Annotated[int, typer.Option(min=1, help="How many processes train together.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the moments at which it is killed.")] = 0,
    directory: Annotated[Path | None, typer.Option(help="Where both runs are kept; if not given, nowhere.")] = None,
) -> None:
    """Prove that a run of CONFIG that is killed and resumed is, bit for bit, one that was not.

    It trains twice, once straight through and once killed (SIGKILL) at random moments, about half of the times inside
    of a save, and resumed. The digests of every step's batch and state are compared, and at the end the final states.
    """
    from ftrain.cli.killing import Killer

    if processes > 1:
        raise typer.BadParameter("several processes cannot be started from here yet: --processes must be 1")
    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise typer.BadParameter(f"{directory} is not empty")
    home = directory or Path(tempfile.mkdtemp(prefix="verify-resume-"))
    overrides = [*(overrides or []), *_more_saves(config, overrides or [])]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which must end the process that trains, too
        signal.signal(number, signal.default_int_handler)
    difference = None
    try:
        with Killer(config, overrides, home, seed) as killer:
            difference = _compare(killer, kills)
    finally:
        if directory is None and difference is None:
            shutil.rmtree(home, ignore_errors=True)
    if difference is not None:
        typer.echo(f"DIFFERENT: {difference}\nboth runs are kept in {home}")
        raise typer.Exit(1)
    typer.echo(
        f"the same, bit for bit: {killer.compared:,} steps of {killer.count} runs, {killer.resumed} of them resumed "
        f"from a checkpoint, after {killer.kills} kills, {killer.inside} of them inside of a save; and the final state"
    )


def _compare(killer: "Killer", kills: int) -> str | None:
    """Both runs, and the first difference between them."""
    started = time.monotonic()
    steps = killer.run_straight()
    typer.echo(f"straight through: {steps:,} steps in {time.monotonic() - started:.1f} s")
    typer.echo(f"{'run':>4} {'from step':>10} {'to step':>8} {'newest saved':>13}  killed")
    while True:
        attempt = killer.run_once(killing=killer.kills < kills)
        killed = {None: "no: it ended", True: "inside of a save", False: "between two saves"}[attempt.inside]
        typer.echo(f"{killer.count:>4} {attempt.start:>10,} {attempt.end:>8,} {attempt.saved:>13,}  {killed}")
        if attempt.difference is not None:
            return attempt.difference
        if attempt.inside is None:
            if killer.kills < kills or not killer.resumed:
                typer.echo(
                    f"it ended after {killer.kills} of {kills} kills, and {killer.resumed} runs were resumed from a "
                    f"checkpoint: give it more steps, as steps={steps * 4}"
                )
                raise typer.Exit(1)
            return killer.compare_final_states()


def _more_saves(config: Path, overrides: list[str]) -> list[str]:
    """What is to be overridden so that there are checkpoints enough to resume from."""
    from ftrain.config import load, plan

    planned = plan(load(config, overrides))
    wanted = max(1, planned.top["steps"] // SAVES)
    every = planned.resolved()["checkpoint"].get("every_steps")
    if every is not None and every <= wanted:
        return []
    typer.echo(f"saving every {wanted} steps, so that there is something to resume from")
    return [f"checkpoint.every_steps={wanted}"]
