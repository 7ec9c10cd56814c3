"""Run directories that commands open."""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ftrain.paths import RUN_CONFIG
from ftrain.storage import exists

if TYPE_CHECKING:
    from ftrain.config import Job
    from ftrain.config.plan import Plan


def wait_for_run(run: Path, timeout: float | None) -> None:
    """Wait until a run has begun in a directory, at most `timeout` seconds; by default 60."""

    deadline = time.monotonic() + (60.0 if timeout is None else timeout)
    while not exists(run / RUN_CONFIG) and time.monotonic() < deadline:
        time.sleep(0.2)


def open_run(run: Path) -> "Job":
    """Return the job of a run directory, on one device if its mesh does not fit this machine."""
    import jax

    from ftrain.cluster.mesh import AXES, sizes
    from ftrain.config import ConfigError, build, load, plan

    if not exists(run / RUN_CONFIG):
        raise ConfigError(
            f"{run / RUN_CONFIG}: there is no such file; "
            "RUN is a directory that `ftrain train` made"
        )
    planned = plan(load(run / RUN_CONFIG))
    asked = planned.calls["mesh"].arguments
    try:
        sizes(**{axis: asked[axis] for axis in AXES}, devices=jax.device_count())
    except ValueError:  # it was trained on more devices than this machine has
        planned = on_one_device(planned)
    return build(planned, directory=run)


def on_one_device(planned: "Plan") -> "Plan":
    """Return the same plan for a mesh of one device, which every machine has."""
    call = planned.calls["mesh"]
    one = dataclasses.replace(call, arguments=call.arguments | {"data": 1, "fsdp": 1, "model": 1})
    return dataclasses.replace(planned, calls=planned.calls | {"mesh": one})
