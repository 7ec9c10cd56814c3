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

MIN_SAVES = 10  # of a run


def verify_resume(
    config: ConfigPath,
    overrides: Overrides = None,
    kills: Annotated[int, typer.Option(min=1, help="Number of times the run is killed.")] = 20,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes of the run.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the random moments of the kills.")] = 0,
    directory: Annotated[
        Path | None, typer.Option(help="Where to keep both runs; by default they are deleted.")
    ] = None,
) -> None:
    """Prove that a run that is killed and resumed equals an uninterrupted one, bit for bit.

    It trains twice: once uninterrupted, and once killed (SIGKILL) at random moments, about half of
    them during a save, and resumed. It compares the digests of each step's batch and state, and the
    final states. Of several processes, it kills one at a time, each as often as the others; the
    others must exit by themselves.
    """
    from ftrain.cli.kill_test import KillTest

    directory = None if directory is None else local_path(directory)
    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise typer.BadParameter(f"{directory} is not empty")
    overrides = [*(overrides or []), *_more_saves(config, overrides or [])]
    home = directory or Path(tempfile.mkdtemp(prefix="verify-resume-"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does
            # KeyboardInterrupt, so that the processes that train end too.
            signal.signal(number, signal.default_int_handler)
    test = KillTest(config, overrides, home, seed, processes)
    failure = None
    try:
        failure = _find_failure(test, kills)
    finally:
        if directory is None and failure is None:
            shutil.rmtree(home, ignore_errors=True)
    if failure is not None:
        typer.echo(f"{failure}\nboth runs are kept in {home}")
        raise typer.Exit(1)
    typer.echo(
        f"the same, bit for bit: {test.compared:,} steps of {test.count} runs, "
        f"{test.resumed} of them resumed from a checkpoint, after {test.kills} kills, "
        f"{test.inside} of them during a save; and the final state"
    )


def _find_failure(test: "KillTest", kills: int) -> str | None:
    """Do both runs, and return the first difference or hang, or None."""
    started = time.monotonic()
    steps = test.run_straight()
    typer.echo(f"uninterrupted: {steps:,} steps in {time.monotonic() - started:.1f} s")
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
                    f"the run ended after {test.kills} of {kills} kills, and {test.resumed} runs "
                    f"were resumed from a checkpoint: use more steps, such as steps={steps * 4}"
                )
                raise typer.Exit(1)
            difference = test.compare_final_states()
            return f"DIFFERENT: {difference}" if difference else None


def _describe_kill(trial: "Trial") -> str:
    """Return which process was killed and when, and unexpected exit codes of the others."""
    from ftrain.launching import PEER_FAILED

    if trial.kill is None:
        return "no: the run ended"
    moment = "during a save" if trial.kill.inside else "between two saves"
    if len(trial.codes) == 1:
        return moment
    others = [
        rank for rank in range(len(trial.codes)) if rank not in (trial.kill.rank, *trial.late)
    ]
    unexpected = [rank for rank in others if trial.codes[rank] != PEER_FAILED]
    ends = [f"process {rank} ended with exit code {trial.codes[rank]}" for rank in unexpected]
    return "; ".join([f"process {trial.kill.rank} {moment}", *ends])


def _describe_late(trial: "Trial") -> str:
    from ftrain.cli.kill_test import PATIENCE

    late = "; ".join(f"process {rank} did not exit by itself" for rank in trial.late)
    limit = ""
    if trial.kill is not None:
        limit = f" within {PATIENCE:g} s after process {trial.kill.rank} was killed"
    return f"{late}{limit}; killed/output.txt has its last output"


def _more_saves(config: Path, overrides: list[str]) -> list[str]:
    """Return overrides for enough checkpoints to resume from."""
    from ftrain.config import build, load, plan

    planned = plan(load(config, overrides))
    if "epochs" in planned.top:
        planned = build(planned).plan  # which knows its steps
    interval = max(1, planned.top["steps"] // MIN_SAVES)
    every = planned.calls["checkpoint"].arguments.get("every_steps")
    if every is not None and every <= interval:
        return []
    typer.echo(f"saving every {interval} steps, so that there are checkpoints to resume from")
    return [f"checkpoint.every_steps={interval}"]
