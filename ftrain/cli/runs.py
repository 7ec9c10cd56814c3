"""Run directories, as commands take them."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftrain.config import Job


def wait_for_run(run: Path, timeout: float | None) -> None:
    """Wait until a run has begun in a directory; a minute if there is no other limit."""
    from ftrain.config.run_directory import CONFIG

    deadline = time.monotonic() + (60.0 if timeout is None else timeout)
    while not (run / CONFIG).exists() and time.monotonic() < deadline:
        time.sleep(0.2)


def open_run(run: Path) -> "Job":
    """The job that a run directory holds."""
    from ftrain.config import ConfigError, build, load, plan
    from ftrain.config.run_directory import CONFIG

    if not (run / CONFIG).exists():
        raise ConfigError(f"{run / CONFIG}: there is no such file; RUN is a directory that `ftrain train` made")
    return build(plan(load(run / CONFIG)), directory=run)
