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
) -> Iterator[tuple[int, dict[str, Value]]]:
    """Evaluate the newest checkpoint in `directory`, and then each new one; yields its step and what was measured.

    Ends after `last_step`, or when no new checkpoint has appeared for `timeout` seconds. If several appear during one
    evaluation, only the newest is evaluated next.

    Args:
      evaluate: is given the parameters, or with `use_averages` their moving averages.
      like: a state of the same structure, shapes, dtypes and shardings, `TrainState.create(...)` as for the run.
      write_to: a directory for an event file and a `metrics.jsonl` of what is measured.
    """
    evaluator, manager = Evaluator(evaluate, use_averages=use_averages), CheckpointManager(directory)
    done = [False]
    writers = [] if write_to is None else [SummaryWriter(write_to), MetricsFile(Path(write_to) / "metrics.jsonl")]
    try:
        for step in checkpoints_iterator(directory, timeout=timeout, stop=lambda: done[0]):
            try:
                state = manager.restore(like=like, step=step)
            except CheckpointError:
                if step in manager.steps():  # if not, the run has deleted it meanwhile: there is a newer one
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
