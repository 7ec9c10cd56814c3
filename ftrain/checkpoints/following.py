"""Following: checkpoints as they appear in a directory that another process writes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ftrain.checkpoints.manager import CheckpointManager

POLL = 0.5  # seconds between two looks at the directory


def wait_for_checkpoint(
    directory: str | Path,
    *,
    after: int = -1,
    timeout: float | None = None,
    poll: float = POLL,
    stop: Callable[[], bool] = lambda: False,
) -> int | None:
    """The newest step in a directory of checkpoints or of a run, as soon as there is one after step `after`.

    Waits at most `timeout` seconds, for ever if that is None, and only until `stop` returns True; then returns None.
    The directory may be created later.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        # Before the look: a run saves its last checkpoint just before it ends, and that one must not be missed.
        is_last_look = stop() or (deadline is not None and time.monotonic() >= deadline)
        newest = CheckpointManager(directory).latest()
        if newest is not None and newest > after:
            return newest
        if is_last_look:
            return None
        time.sleep(poll if deadline is None else min(poll, max(0.0, deadline - time.monotonic())))


def checkpoints_iterator(
    directory: str | Path,
    *,
    after: int = -1,
    timeout: float | None = None,
    poll: float = POLL,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Each new checkpoint's step, as it appears; ends when none has appeared for `timeout` seconds, or `stop` says so.

    If several have appeared since the last one was taken, only the newest is given.
    """
    step: int | None = after
    while (
        step := wait_for_checkpoint(directory, after=step, timeout=timeout, poll=poll, stop=stop)
    ) is not None:
        yield step
