"""The GPUs of this machine, and how many of them a process gets."""

import os
from collections.abc import Mapping
from pathlib import Path

_DEVICES = Path("/dev")


def share_of_gpus(
    processes: int, environ: Mapping[str, str] | None = None, devices: Path = _DEVICES
) -> int | None:
    """How many GPUs each process gets to see; None if it is left to them, as there are none, or too few.

    A process uses all that it sees, and takes most of their memory at once: two of them cannot share one.
    """
    environ = os.environ if environ is None else environ
    platforms = environ.get("JAX_PLATFORMS", "").split(",")
    if processes == 1 or platforms == ["cpu"] or "JAX_CUDA_VISIBLE_DEVICES" in environ:
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        count = sum(
            path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia*")
        )
    else:
        count = len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return count // processes or None
