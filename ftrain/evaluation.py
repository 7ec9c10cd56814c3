"""Evaluation beside a run: each checkpoint is evaluated as it appears, by another process if need be."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ftrain.checkpoints import CheckpointError, CheckpointManager, checkpoints_iterator
from ftrain.hooks import Evaluator
from ftrain.summaries import MetricsFile, SummaryWriter
from ftrain.training import TrainState
from ftrain.training.hook import Value
from ftrain.tree import Tree


def evaluate_checkpoints(
    directory: str | Path,
    evaluate: Callable[[Tree], Mapping[str, Value]],
    like: TrainState,
    *,
    use_averages: bool = False,
    write_to: str | Path | None = None,
    last_step: int | None = None,
    timeout: float | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, dict[str, Value]]]:
    """Evaluate the newest checkpoint in `directory`, and then each new one; yields its step and what was measured.

    `directory` is one of checkpoints or of a run, and may be created later. Ends after `last_step`, when no new
    checkpoint has appeared for `timeout` seconds, or when there is none and `stop` returns True. If several appear
    during one evaluation, only the newest is evaluated next.

    Args:
      evaluate: is given the parameters, or with `use_averages` their moving averages.
      like: a state of the same structure, shapes, dtypes and shardings, `TrainState.create(...)` as for the run.
      write_to: a directory for an event file and a `metrics.jsonl` of what is measured.
    """
    evaluator, manager = (
        Evaluator(evaluate, use_averages=use_averages),
        CheckpointManager(directory),
    )
    done = [False]
    writers = [] if write_to is None else _open(Path(write_to), manager.latest())
    try:
        for step in checkpoints_iterator(
            directory, timeout=timeout, stop=lambda: done[0] or stop()
        ):
            try:
                state = manager.restore(like=like, step=step)
            except CheckpointError:
                if (
                    step in manager.steps()
                ):  # if not, the run has deleted it meanwhile: there is a newer one
                    raise
                continue
            measured = evaluator.measure(state)
            for writer in writers:
                writer.write(step, measured)
            done[0] = last_step is not None and step >= last_step
            yield step, measured
    finally:
        for writer in writers:
            writer.close()


def _open(directory: Path, newest: int | None) -> list[SummaryWriter | MetricsFile]:
    """Writers that keep what is there of checkpoints before the newest one, which is evaluated now."""
    start = max((newest or 0) - 1, 0)
    metrics = MetricsFile(directory / "metrics.jsonl", start_step=start)
    return [metrics, SummaryWriter(directory, start_step=start)]
