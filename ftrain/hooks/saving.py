"""The hook that saves and restores checkpoints."""

from pathlib import Path

from ftrain.checkpoints import CheckpointManager
from ftrain.training import Hook, Report, TrainState, Trigger, every


class CheckpointSaver(Hook):
    """Start from the newest checkpoint in `directory`, save there when it is time, and once more at the end."""

    def __init__(self, directory: str | Path, *, when: Trigger = every(secs=600), keep: int = 3):
        self.when = when
        self.manager = CheckpointManager(directory, keep=keep)

    def start(self, state: TrainState) -> TrainState:
        self.manager.__enter__()  # close() leaves it
        return state if self.manager.latest() is None else self.manager.restore(like=state)

    def after_step(self, report: Report) -> None:
        self.manager.save(report.step, report.state)

    def end(self, report: Report) -> None:
        self.manager.wait()
        if report.step > (self.manager.latest() or 0):
            self.manager.save(report.step, report.state)
        self.manager.wait()

    def close(self) -> None:
        self.manager.close()
