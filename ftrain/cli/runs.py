"""Run directories, as commands take them."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftrain.config import Job


def open_run(run: Path) -> "Job":
    """The job that a run directory holds."""
    from ftrain.config import ConfigError, build, load, plan
    from ftrain.config.run_directory import CONFIG

    if not (run / CONFIG).exists():
        raise ConfigError(f"{run / CONFIG}: there is no such file; RUN is a directory that `ftrain train` made")
    return build(plan(load(run / CONFIG)), directory=run)
