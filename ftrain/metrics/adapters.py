"""Metrics of other libraries: those of clu and of flax nnx as `Metric`s."""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.gradients.means import is_weighted
from ftrain.metrics.metric import Metric, Values, read, shared

MASK = "mask"


@shared
def from_clu(kind: Any, **entries: str) -> Metric:
    """A class of `clu.metrics`, a Metric or a Collection, as a metric.

    Its `from_model_output` gets all entries by their names, and the mask, as `mask`; for clu a mask
    is true or false, not a weight. A collection has a result for each of its metrics.

        ftrain.metrics.from_clu(clu.metrics.Accuracy, labels="label")

    Args:
      entries: the names of entries by the names of arguments, where these differ.
    """
    is_collection = hasattr(kind, "single_from_model_output")
    make = getattr(kind, "single_from_model_output" if is_collection else "from_model_output", None)
    if not isinstance(kind, type) or make is None or not hasattr(kind, "empty"):
        raise TypeError(f"from_clu takes a class of clu.metrics, got {kind!r:.60}")
    if kind.__name__ == "LastValue":
        raise TypeError("LastValue is of the last batch, not of a dataset; use clu.metrics.Average")

    def measure(values: Values, mask: jax.Array) -> Any:
        return make(**_arguments(make, values, mask, entries, kind.__name__))

    def update(accumulator: Any, values: Values, mask: jax.Array) -> Any:
        part = measure(values, mask)
        return part if accumulator is None else accumulator.merge(part)

    def merge(one: Any, other: Any) -> Any:
        if one is None or other is None:
            return one if other is None else other
        return one.merge(other)

    def compute(accumulator: Any) -> Any:
        return jax.tree.map(
            np.asarray, (kind.empty() if accumulator is None else accumulator).compute()
        )

    return Metric(lambda: None, update, merge, compute)


def from_nnx(metric: Any, merge: Callable[[Any, Any], Any] | None = None, **entries: str) -> Metric:
    """A metric of `flax.nnx` as a metric; the object itself is not changed.

    Its `update` gets all entries by their names, and the mask, as `mask`. Those of flax count whole
    examples: weights must be 0 or 1.

        ftrain.metrics.from_nnx(nnx.metrics.Accuracy(), labels="label")

    Args:
      merge: merges two values of each of its variables. `Average`, `Accuracy` and a `MultiMetric`
        of these add them; any other metric must say how: `merge=operator.add` for sums.
      entries: the names of entries by the names of arguments, where these differ.
    """
    from flax import nnx  # pyright: ignore[reportMissingImports] - an optional library

    if not isinstance(metric, nnx.metrics.Metric):
        hint = ": call it" if isinstance(metric, type) else ""
        raise TypeError(f"from_nnx takes a metric of flax.nnx, got {metric!r:.60}{hint}")
    if merge is None and not _adds(metric, nnx):
        raise TypeError(
            f"from_nnx cannot merge the parts of {type(metric).__name__}: pass merge=operator.add "
            "if its variables are sums, and let its update use the mask"
        )
    combine = merge or operator.add
    clean = nnx.clone(metric)
    clean.reset()
    graph, state = nnx.split(clean)
    first, structure = jax.tree.flatten(state)
    first = tuple(np.asarray(leaf) for leaf in first)

    def restore(leaves: tuple[Any, ...]) -> Any:
        return nnx.merge(graph, structure.unflatten(leaves))

    def update(leaves: tuple[Any, ...], values: Values, mask: jax.Array) -> tuple[Any, ...]:
        own = restore(tuple(jnp.asarray(leaf) for leaf in leaves))
        own.update(**_arguments(own.update, values, mask, entries, type(metric).__name__))
        return tuple(jax.tree.leaves(nnx.split(own)[1]))

    def merge_parts(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(combine, one, other))

    def compute(leaves: tuple[Any, ...]) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            computed = restore(tuple(np.asarray(leaf) for leaf in leaves)).compute()
        return jax.tree.map(np.asarray, computed)

    return Metric(lambda: first, update, merge_parts, compute)


def _adds(metric: Any, nnx: Any) -> bool:
    """True for the metrics of flax whose variables are sums, and that use the mask."""
    if isinstance(metric, nnx.MultiMetric):
        inner = [value for value in vars(metric).values() if isinstance(value, nnx.metrics.Metric)]
        return all(_adds(each, nnx) for each in inner)
    return isinstance(metric, nnx.metrics.Average)


def _arguments(
    function: Callable[..., Any],
    values: Values,
    mask: jax.Array,
    entries: dict[str, str],
    name: str,
) -> dict[str, Any]:
    """Return the entries that a function takes, under the names of its arguments."""
    arrays = {key: value for key, value in values.items() if not is_weighted(value)}
    found = arrays | {key: read(arrays, entry) for key, entry in entries.items()} | {MASK: mask}
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return found
    if MASK not in parameters:
        raise TypeError(f"{name} takes no mask, so padding would count; let it take mask=")
    return {key: value for key, value in found.items() if key in parameters}
