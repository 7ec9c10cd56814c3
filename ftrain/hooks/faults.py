"""The hook that injects faults, to test how a job recovers."""

import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.launching import Fault
from ftrain.training import Hook, Report, at, never
from ftrain.training.loss import Batch


class Faults(Hook):
    """Inject each fault in process `rank` after its step; faults of data, in the input of the step.

    Injected faults are written to the file `log`, so a restarted job does not repeat them.
    """

    def __init__(self, faults: Sequence[Fault], rank: int, log: Path):
        happened = log.read_text().splitlines() if log.exists() else []
        own = [
            fault
            for fault in faults
            if fault.rank in (None, rank) and _line(fault, rank) not in happened
        ]
        self._of_data = [fault for fault in own if fault.kind in _OF_DATA]
        self._others = [fault for fault in own if fault.kind not in _OF_DATA]
        self._rank = rank
        self._log = log
        self.changes_data = bool(self._of_data)
        self.when = at(*(fault.step for fault in self._others)) if self._others else never()

    def prepare(self, step: int, batch: Batch) -> Batch:
        """Inject the faults in the data of a step; the option `prepare` of a loop."""
        for fault in [each for each in self._of_data if each.step == step]:
            self._remember(fault)
            batch = _OF_DATA[fault.kind](fault, batch)
        return batch

    def after_step(self, report: Report) -> None:
        for fault in [each for each in self._others if each.step == report.step]:
            self._remember(fault)
            report.notice(f"fault after step {report.step}: {fault.kind}")
            _OTHERS[fault.kind](fault)

    def _remember(self, fault: Fault) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "a") as file:
            file.write(_line(fault, self._rank) + "\n")


def _line(fault: Fault, rank: int) -> str:
    return f"{fault.kind} rank={rank} step={fault.step}"


def _slow(fault: Fault, batch: Batch) -> Batch:
    time.sleep(fault.secs or 0.0)
    return batch


def _fill_with_nan(fault: Fault, batch: Batch) -> Batch:
    del fault
    floats = [leaf for leaf in jax.tree.leaves(batch) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if not floats:
        raise ValueError("the fault nan needs a batch with floating-point numbers")
    return jax.tree.map(
        lambda leaf: (
            np.full_like(leaf, np.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        ),
        batch,
    )


def _hang(fault: Fault) -> None:
    while True:
        time.sleep(fault.secs or 1.0)


def _fill_disk(fault: Fault) -> None:
    """From now on no file of this process can grow, as on a full disk."""
    del fault
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))


_OF_DATA: dict[str, Callable[[Fault, Any], Any]] = {"slow_data": _slow, "nan": _fill_with_nan}
_OTHERS: dict[str, Callable[[Fault], None]] = {
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
    "full_disk": _fill_disk,
    "exit": lambda fault: os._exit(1 if fault.code is None else fault.code),
}
