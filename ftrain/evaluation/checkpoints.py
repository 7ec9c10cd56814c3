"""Evaluation of checkpoints as they appear, also in a process other than the training run."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ftrain.checkpoints import CheckpointError, CheckpointManager, checkpoints_iterator
from ftrain.hooks import Evaluator
from ftrain.hooks.callback import published_values
from ftrain.summaries import MetricsFile, SummaryWriter
from ftrain.training import TrainState
from ftrain.training.hook import Value


def evaluate_checkpoints(
    directory: str | Path,
    evaluate: Callable[..., Mapping[str, Any]],
    like: TrainState,
    *,
    use_averages: bool = False,
    write_to: str | Path | None = None,
    last_step: int | None = None,
    timeout: float | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, dict[str, Value]]]:
    """Evaluate the newest checkpoint in `directory`, then each new one; yield (step, metrics).

    `directory` is a run directory or a directory of checkpoints. It may be created later. The
    iterator ends after `last_step`, when no new checkpoint appears for `timeout` seconds, or when
    none is left to evaluate and `stop` returns True. If several checkpoints appear during one
    evaluation, only the newest of them is evaluated.

    Args:
      evaluate: a function from parameters, and the model state if there is one, to metrics. With
        `use_averages` it is called with the moving averages of the parameters.
      like: a state with the structure, shapes, dtypes and shardings of the run's, such as
        `TrainState.create(...)` with the same arguments.
      write_to: a directory for the metrics: an event file and a `metrics.jsonl`.
    """
    evaluator = Evaluator(evaluate, use_averages=use_averages)
    manager = CheckpointManager(directory)
    is_last = False

    def is_over() -> bool:
        return is_last or stop()

    writers = [] if write_to is None else _open(Path(write_to), manager.latest())
    try:
        for step in checkpoints_iterator(directory, timeout=timeout, stop=is_over):
            try:
                state = manager.restore(like=like, step=step)
            except CheckpointError:
                if step in manager.steps():
                    raise
                continue  # the run deleted it meanwhile, so there is a newer one
            metrics = published_values(evaluator.measure(state))
            for writer in writers:
                writer.write(step, metrics)
            is_last = last_step is not None and step >= last_step
            yield step, metrics
    finally:
        for writer in writers:
            writer.close()


def _open(directory: Path, newest: int | None) -> list[SummaryWriter | MetricsFile]:
    """Open writers that keep earlier metrics, up to the newest checkpoint: it is evaluated now."""
    start = max((newest or 0) - 1, 0)
    metrics = MetricsFile(directory / "metrics.jsonl", start_step=start)
    return [metrics, SummaryWriter(directory, start_step=start)]
