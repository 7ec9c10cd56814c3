"""The program of an evaluation: outputs and accumulators of one batch, compiled once."""

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftrain.gradients.means import is_weighted
from ftrain.metrics import Metric, mean
from ftrain.metrics.metric import Accumulator
from ftrain.training.arguments import call_with_model_state
from ftrain.training.loss import Batch
from ftrain.tree import Tree

MAX_PROGRAMS = 8  # compiled programs that are kept for one function

# (params, batch) -> outputs, or (params, batch, model_state) -> outputs if there is a model state,
# where outputs are arrays with a leading axis of examples, or WeightedMeans, by name
Predict = Callable[..., Mapping[str, Any]]
Parts = dict[str, Accumulator]  # by the name of the metric

# Compiled programs, by the function or the object whose method it is. They only know it weakly.
_programs: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def compiled_program(
    function: Predict, metrics: dict[str, Metric] | None, mesh: Mesh | None
) -> Any:
    """Return the compiled `measure_batch` of a function; the one of before if there is one."""
    if not callable(function):
        raise TypeError(f"function must be callable, got {function!r:.60}")
    is_method = inspect.ismethod(function)
    owner: Any = function.__self__ if is_method else function
    method = function.__func__ if is_method else None
    key = (method, None if metrics is None else tuple(metrics.items()), mesh)
    try:
        programs = _programs.setdefault(owner, {})
        known = programs.get(key)
    except TypeError:  # it cannot be hashed, or not be referred to weakly
        return _compile(lambda: function, metrics, mesh)
    if known is not None:
        return known
    if len(programs) >= MAX_PROGRAMS:
        programs.clear()
    refer = weakref.ref(owner)

    def find() -> Predict:
        found = refer()
        assert found is not None  # its caller holds it
        return found if method is None else method.__get__(found)

    programs[key] = _compile(find, metrics, mesh)
    return programs[key]


def _compile(
    find: Callable[[], Predict], metrics: dict[str, Metric] | None, mesh: Mesh | None
) -> Any:
    def measure(params: Tree, model_state: Tree, batch: Batch, mask: jax.Array) -> Parts:
        return measure_batch(find(), metrics, params, model_state, batch, mask)

    if mesh is None or mesh.size == 1:
        return jax.jit(measure)
    return jax.jit(measure, out_shardings=NamedSharding(mesh, PartitionSpec()))


def measure_batch(
    function: Predict,
    metrics: dict[str, Metric] | None,
    params: Tree,
    model_state: Tree,
    batch: Batch,
    mask: jax.Array,
) -> Parts:
    """Return the accumulators of one batch."""
    given = {"params": params, "batch": dict(batch)}
    outputs = call_with_model_state("function", function, given, model_state)
    if not isinstance(outputs, Mapping):
        raise TypeError(
            'the evaluated function must return a dict, such as {"logits": logits}, '
            f"got {type(outputs).__name__}"
        )
    for name, value in outputs.items():
        _check_output(name, value, len(mask))
    values = {**batch, **outputs}
    chosen = {name: mean(name) for name in outputs} if metrics is None else metrics
    parts: Parts = {}
    for name, metric in chosen.items():
        try:
            parts[name] = metric.update(metric.init(), values, mask)
        except (TypeError, ValueError) as error:
            if type(error) not in (TypeError, ValueError):  # of JAX, with more than a text
                raise
            raise type(error)(f"metric {name}: {error}") from error
    return parts


def _check_output(name: str, value: Any, size: int) -> None:
    if is_weighted(value):
        for leaf in jax.tree.leaves(value):
            if jnp.ndim(leaf) != 0:
                raise ValueError(
                    f"output {name} is a WeightedMean of shape {jnp.shape(leaf)}, expected a "
                    "number as its total and as its weight"
                )
        return
    if not isinstance(value, (jax.Array, np.ndarray, float, int)):
        raise TypeError(
            f"output {name} must be an array or a WeightedMean, got {type(value).__name__}"
        )
    shape = jnp.shape(value)
    if shape[:1] != (size,):
        raise ValueError(
            f"output {name} has shape {shape}, expected {size} examples along its first axis; a "
            'mean over a batch is a sum and a weight: WeightedMean.of(values, batch["mask"])'
        )
