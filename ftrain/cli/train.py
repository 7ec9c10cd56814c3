"""ftrain train CONFIG [key=value ...]"""

import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftrain.cli.arguments import ConfigPath, Overrides
from ftrain.paths import shown

if TYPE_CHECKING:
    from ftrain.cli.distributed import DeferredStop
    from ftrain.cluster import ProcessGroup
    from ftrain.config import Job
    from ftrain.config.plan import Plan
    from ftrain.run import Run
    from ftrain.training import Hook

process_started = time.monotonic()  # nearly: nothing heavy has been imported yet


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Continue in a run directory that holds another config."
        ),
    ] = False,
    ledger: Annotated[
        Path | None, typer.Option(hidden=True, help="Write digests of every step to this file.")
    ] = None,
    timing: Annotated[
        bool, typer.Option("--timing", help="At the end, show where the time went.")
    ] = False,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="A TOML or JSON file that names the processes of the job: [worker] addresses."
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Which of these processes this one is, such as worker:0.")
    ] = None,
) -> None:
    """Train what CONFIG describes; the same command again resumes, and so does `ftrain train RUN`.

    Ctrl-C saves and stops, a second one stops at once. In a job with several processes (ftrain
    launch, SLURM, Kubernetes, TF_CONFIG), each process runs this command.
    """
    from ftrain.launching.reporter import reporter_of_this_process

    reporter = reporter_of_this_process()  # first: the imports below take time
    from ftrain.cli.distributed import DeferredStop, join, report_failures
    from ftrain.config import load, plan
    from ftrain.training import stop_on_signals, use_compilation_cache

    use_compilation_cache()
    planned = plan(load(config, overrides or []))
    reporter.hang_timeout = (
        reporter.hang_timeout or planned.calls["cluster"].arguments["hang_timeout"] or None
    )
    reporter.start()
    with join(planned, cluster, task, reporter) as group, report_failures(reporter, group):
        stop = DeferredStop()
        with stop_on_signals(stop.request):  # so early because jax would swallow them
            _train(planned, group, stop, accept_changes, ledger, timing)


def _train(
    planned: "Plan",
    group: "ProcessGroup",
    stop: "DeferredStop",
    accept_changes: bool,
    ledger: Path | None,
    timing: bool,
) -> None:
    from rich.console import Console

    from ftrain.cli.distributed import build_chief_first, claim_directory, injected_faults
    from ftrain.hooks import DigestLog, ProgressBar
    from ftrain.run import Run
    from ftrain.tree import count_elements

    job = build_chief_first(planned, group)
    state = job.trace()[0] if group.is_chief else None
    start = None
    if state is not None and job.saver.manager.latest() is not None:
        job.saver.manager.check(like=state)  # before anything on disk is changed
    elif state is not None and job.warm_start is not None and job.saver.manager.is_empty():
        start = job.warm_start.plan(state)
    console = Console()
    bar = None
    if console.is_terminal:
        bar = ProgressBar(job.steps, console, mean=job.logging.mean)
    started = time.monotonic()
    hooks = [*job.hooks(bar), _first_step_hook()]
    hooks += [DigestLog(ledger)] if ledger else []
    faults = injected_faults(job.directory, group.index)
    hooks += [faults] if faults else []
    options = job.options(group)
    if faults is not None and faults.changes_data:
        options["prepare"] = faults.prepare
    with claim_directory(job, group, accept_changes):
        run = Run(
            job.step,
            job.initial(),
            job.pipeline,
            steps=job.steps,
            hooks=hooks,
            directory=job.directory,
            **options,
        )
        if state is not None:
            if planned.config.notice:
                print(planned.config.notice, flush=True)
            _introduce(job, group.count, count_elements(state.params))
            if start is not None:
                print(f"warm start: {start}", flush=True)
        with run:
            stop.forward_to(run.interrupt)
            while not run.should_stop():
                run.advance()
    if group.is_chief:
        if timing:
            _show_timing(run.timing.seconds())
        _conclude(job, run, time.monotonic() - started)


def _first_step_hook() -> "Hook":
    """Return a hook that reports, once, how long this process took to finish its first step."""
    from ftrain.training import Hook, Report, StepMetrics

    class FirstStep(Hook):  # in here, because importing Hook imports jax
        chief_only = True

        def __init__(self) -> None:
            self._report: Report | None = None
            self._reported = False

        def begin(self, report: Report) -> None:
            self._report = report
            report.listen(metrics=self._watch)

        def _watch(self, metrics: StepMetrics) -> None:
            if not self._reported and self._report is not None:
                self._reported = True
                seconds = time.monotonic() - process_started
                self._report.notice(f"first step after {seconds:.1f} s")

    return FirstStep()


def _show_timing(seconds: dict[str, float]) -> None:
    total = sum(seconds.values())
    print("where the time went:")
    for name, spent in seconds.items():
        print(f"  {name:<24}{spent:>9.3f} s{spent / total:>8.1%}")


def _introduce(job: "Job", processes: int, parameters: int) -> None:
    where = f"{job.mesh.size} device(s)" + (f" of {processes} processes" if processes > 1 else "")
    examples = len(job.pipeline.source)
    print(
        f"{job.plan.top['task']}: {parameters:,} parameters, {examples:,} examples, "
        f"{job.steps:,} steps of {job.pipeline.batch_size}, {where}; in {shown(job.directory)}",
        flush=True,
    )


def _conclude(job: "Job", run: "Run", seconds: float) -> None:
    if run.steps_taken < job.steps:
        where = f"step {run.steps_taken} of {job.steps} ({run.stop_reason})"
        had_ended = run.steps_taken == run.start_step and not run.interrupted
        print(
            (f"no further step: the run ended at {where}" if had_ended else f"stopped at {where}")
            + ("; the same command resumes there" if run.interrupted else "")
        )
        return
    taken = run.steps_taken - run.start_step
    print(
        f"done: {taken:,} steps in {seconds:.1f} s"
        if taken
        else f"all {job.steps:,} steps were taken before"
    )
    print(f"look at it:    {_command('tensorboard')} --logdir {shlex.quote(shown(job.directory))}")
    print(f"evaluate it:   {_command('ftrain')} eval {shlex.quote(shown(job.directory))}")


def _command(name: str) -> str:
    """Return what to type for a program of this environment, which may not be activated."""
    installed = Path(sys.executable).with_name(name)
    if shutil.which(name) or not installed.exists():
        return name
    return shlex.quote(os.path.relpath(installed))
