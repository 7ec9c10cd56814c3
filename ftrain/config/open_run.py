"""Opening a run: the job of a run directory, from the config in it."""

import dataclasses
from pathlib import Path

import jax

from ftrain.cluster.mesh import AXES, sizes
from ftrain.config.build import build
from ftrain.config.job import Job
from ftrain.config.load import ConfigError, load
from ftrain.config.plan import Plan, plan
from ftrain.paths import RUN_CONFIG
from ftrain.storage import exists


def open_run(run: Path) -> Job:
    """Return the job of a run directory, on one device if its mesh does not fit this machine."""
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


def on_one_device(planned: Plan) -> Plan:
    """Return the same plan for a mesh of one device, which every machine has."""
    call = planned.calls["mesh"]
    one = dataclasses.replace(call, arguments=call.arguments | {"data": 1, "fsdp": 1, "model": 1})
    return dataclasses.replace(planned, calls=planned.calls | {"mesh": one})
