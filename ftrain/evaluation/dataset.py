"""Metrics over a dataset: exact over a padded last batch, over devices and over processes."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftrain.averages import averaged
from ftrain.data import Pipeline, feed
from ftrain.evaluation.batches import EvaluationBatches, add_mask, check_evaluated
from ftrain.evaluation.program import Parts, Predict, compiled_program, measure_batch
from ftrain.metrics import Metric, mean
from ftrain.metrics.metric import check_metrics
from ftrain.training import TrainState
from ftrain.training.arguments import check_arrays
from ftrain.training.loss import Batch
from ftrain.training.state import put_leaf
from ftrain.tree import Tree

IN_FLIGHT = 4  # batches that are dispatched but not finished

Result = float | np.ndarray


def evaluate(
    function: Predict,
    state: TrainState | Tree,
    data: Pipeline | Iterable[Mapping[str, Any]],
    metrics: Mapping[str, Metric] | None = None,
    *,
    model_state: Tree | None = None,
    use_averages: bool = False,
    mesh: Mesh | None = None,
) -> dict[str, Result]:
    """Return metrics over all examples of `data`, each counted once.

    `function(params, batch)`, or `function(params, batch, model_state)` if there is a model state,
    returns a dict of outputs, each with a leading axis of examples:

        def predict(params, batch):
            return {"logits": apply(params, batch["image"])}

        test = Pipeline(source, batch_size=256, shuffle=False, epochs=1, last="pad")
        ftrain.evaluate(predict, state, test, {"accuracy": ftrain.metrics.accuracy()})

    Metrics read the outputs and the entries of the batch by their names. Sums and weights are
    added, in float64, so the number of batches, devices and processes changes nothing but rounding.

    A last batch that is smaller is padded with zeros to the size of the others, so one program is
    compiled. The batch has an entry `mask`: 1 for an example, 0 for padding. An output may be a
    `WeightedMean`, over tokens for example: its weights must be 0 for padding. If the data have
    an entry `mask` of one number per example, it weighs the examples.

    Define `function` once: it is compiled again only if the function, the metrics or shapes change.

    Args:
      state: a TrainState, or parameters.
      data: a pipeline with epochs=1, and of one process also an iterable of dicts of arrays. Of
        several processes, each has its part of every batch, and all get the same result.
      metrics: `Metric`s by name; by default the mean of every output.
      model_state: that of parameters without a state.
      use_averages: evaluate the moving averages of the parameters.
      mesh: the devices to use; by default those of the parameters.
    """
    params, model_state = _split_state(state, model_state, use_averages)
    checked = None if metrics is None else check_metrics(metrics)
    mesh = mesh if mesh is not None else _mesh_of((params, model_state))
    check_evaluated(data, mesh)
    if mesh is not None and mesh.size > 1:
        params, model_state = _put_on(mesh, (params, model_state))
    program = compiled_program(function, checked, mesh)
    batches = EvaluationBatches(data, mesh)
    totals: Parts | None = None
    pending: deque[Parts] = deque()
    iterator = feed(data)
    try:
        for step, batch in enumerate(iterator):
            pending.append(program(params, model_state, *batches.prepare(batch, step)))
            if len(pending) > IN_FLIGHT:
                totals = _merge(checked, totals, pending.popleft())
    finally:
        iterator.close()
    for parts in pending:
        totals = _merge(checked, totals, parts)
    if totals is None:
        raise ValueError("there is no batch to evaluate: the data are empty, or were read already")
    # A compiled function returns a dict in alphabetical order.
    names = totals if checked is None else checked
    computed = {name: _metric(checked, name).compute(totals[name]) for name in names}
    return {
        key: value for name, result in computed.items() for key, value in _results(name, result)
    }


def trace_evaluation(
    function: Predict, state: TrainState, batch: Batch, metrics: Mapping[str, Metric] | None
) -> None:
    """Raise if the function and the metrics do not fit a batch; nothing is computed."""
    checked = None if metrics is None else check_metrics(metrics)
    rows, weights = add_mask({name: np.asarray(value) for name, value in batch.items()}, None)

    def measure(params: Tree, model_state: Tree, batch: Batch, mask: jax.Array) -> Parts:
        return measure_batch(function, checked, params, model_state, batch, mask)

    jax.eval_shape(measure, state.params, state.model_state, rows, weights)


def _split_state(
    state: TrainState | Tree, model_state: Tree | None, use_averages: bool
) -> tuple[Tree, Tree | None]:
    if not isinstance(state, TrainState):
        if use_averages:
            raise ValueError("use_averages needs a TrainState, which has the averages")
        check_arrays("params", state)
        return state, model_state
    if model_state is not None:
        raise ValueError("model_state is for parameters without a state; the state has its own")
    if not use_averages:
        return state.params, state.model_state
    if state.averages is None:
        raise ValueError("use_averages needs averages: give the step a decay, averages=0.999")
    return averaged(state.averages, state.params), state.model_state


def _mesh_of(tree: Tree) -> Mesh | None:
    """Return the mesh that the leaves of a tree are on; None for one device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
            return sharding.mesh if isinstance(sharding.mesh, Mesh) else None
    return None


def _put_on(mesh: Mesh, tree: Tree) -> Tree:
    """Replicate the leaves that are not on the devices of the mesh."""
    devices = set(mesh.devices.flat)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def put(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices:
            return leaf
        return put_leaf(jnp.asarray(leaf), everywhere)

    return jax.tree.map(put, tree)


def _metric(metrics: dict[str, Metric] | None, name: str) -> Metric:
    return mean(name) if metrics is None else metrics[name]


def _merge(metrics: dict[str, Metric] | None, totals: Parts | None, parts: Parts) -> Parts:
    """Add the accumulators of a batch, on the host; waits for the device."""
    parts = jax.tree.map(_wide, parts)
    if totals is None:
        return parts
    return {name: _metric(metrics, name).merge(totals[name], part) for name, part in parts.items()}


def _wide(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(np.float64)
    return array.astype(np.int64) if array.dtype.kind == "i" else array


def _results(name: str, computed: Any) -> Iterator[tuple[str, Result]]:
    if isinstance(computed, Mapping):
        for key, value in computed.items():
            yield from _results(f"{name}/{key}", value)
        return
    array = np.asarray(computed)
    if array.dtype.kind not in "biufV":
        raise TypeError(
            f"metric {name} must compute a number, an array or a dict of these, "
            f"got {computed!r:.60}"
        )
    yield name, array if array.ndim else float(array)
