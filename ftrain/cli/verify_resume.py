"""ftrain verify-resume CONFIG [key=value ...]"""

import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftrain.cli.arguments import ConfigPath, Overrides
from ftrain.paths import local_path

if TYPE_CHECKING:
    from ftrain.cli.kill_test import KillTest, Trial

SAVES = 10  # in a run, at least


def verify_resume(
    config: ConfigPath,
    overrides: Overrides = None,
    kills: Annotated[int, typer.Option(min=1, help="How often the run is killed.")] = 20,
    processes: Annotated[int, typer.Option(min=1, help="How many processes train together.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the moments at which it is killed.")] = 0,
    directory: Annotated[
        Path | None, typer.Option(help="Where both runs are kept; if not given, nowhere.")
    ] = None,
) -> None:
    """Prove that a run of CONFIG that is killed and resumed is, bit for bit, one that was not.

    It trains twice, once straight through and once killed (SIGKILL) at random moments, about half of the times inside
    of a save, and resumed. The digests of every step's batch and state are compared, and at the end the final states.
    Of several processes, one at a time is killed, each as often as the others; those have to end by themselves.
    """
    from ftrain.cli.kill_test import KillTest

    directory = None if directory is None else local_path(directory)
    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise typer.BadParameter(f"{directory} is not empty")
    overrides = [*(overrides or []), *_more_saves(config, overrides or [])]
    home = directory or Path(tempfile.mkdtemp(prefix="verify-resume-"))
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # which must end the processes that train, too
        if signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
            signal.signal(number, signal.default_int_handler)
    test, flaw = KillTest(config, overrides, home, seed, processes), None
    try:
        flaw = _find_flaw(test, kills)
    finally:
        if directory is None and flaw is None:
            shutil.rmtree(home, ignore_errors=True)
    if flaw is not None:
        typer.echo(f"{flaw}\nboth runs are kept in {home}")
        raise typer.Exit(1)
    typer.echo(
        f"the same, bit for bit: {test.compared:,} steps of {test.count} runs, {test.resumed} of them resumed "
        f"from a checkpoint, after {test.kills} kills, {test.inside} of them inside of a save; and the final state"
    )


def _find_flaw(test: "KillTest", kills: int) -> str | None:
    """Both runs, and the first thing that is wrong with them: mostly a difference."""
    started = time.monotonic()
    steps = test.run_straight()
    typer.echo(f"straight through: {steps:,} steps in {time.monotonic() - started:.1f} s")
    typer.echo(f"{'run':>4} {'from step':>10} {'to step':>8} {'newest saved':>13}  killed")
    while True:
        trial = test.run_once(killing=test.kills < kills)
        killed = _describe_kill(trial)
        typer.echo(
            f"{test.count:>4} {trial.start:>10,} {trial.end:>8,} {trial.saved:>13,}  {killed}"
        )
        if trial.difference is not None:
            return f"DIFFERENT: {trial.difference}"
        if trial.late:
            return f"HANGING: {_describe_late(trial)}"
        if trial.kill is None:
            if test.kills < kills or not test.resumed:
                typer.echo(
                    f"it ended after {test.kills} of {kills} kills, and {test.resumed} runs were resumed from a "
                    f"checkpoint: give it more steps, as steps={steps * 4}"
                )
                raise typer.Exit(1)
            difference = test.compare_final_states()
            return f"DIFFERENT: {difference}" if difference else None


def _describe_kill(trial: "Trial") -> str:
    """What became of a process, and of the others if they did not take it as they should."""
    from ftrain.launching import PEER_FAILED

    if trial.kill is None:
        return "no: it ended"
    moment = "inside of a save" if trial.kill.inside else "between two saves"
    if len(trial.codes) == 1:
        return moment
    others = [
        rank for rank in range(len(trial.codes)) if rank not in (trial.kill.rank, *trial.late)
    ]
    odd = [rank for rank in others if trial.codes[rank] != PEER_FAILED]
    ends = [f"process {rank} ended with exit code {trial.codes[rank]}" for rank in odd]
    return "; ".join([f"process {trial.kill.rank} {moment}", *ends])


def _describe_late(trial: "Trial") -> str:
    from ftrain.cli.kill_test import PATIENCE

    who = "; ".join(f"process {rank} did not end by itself" for rank in trial.late)
    killed = (
        ""
        if trial.kill is None
        else f" within {PATIENCE:g} s after process {trial.kill.rank} was killed"
    )
    return f"{who}{killed}; killed/output.txt has its last words"


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
