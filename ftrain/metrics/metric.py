"""A metric over a dataset: pure functions that start, update, merge and finish an accumulator."""

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.gradients.means import WeightedMean, is_weighted
from ftrain.tree import widen

P = ParamSpec("P")
Accumulator = Any  # a pytree of arrays
Values = Mapping[str, Any]  # arrays with a leading axis of examples, and WeightedMeans
Computed = Any  # a number, an array, or a dict of these


@dataclass(frozen=True)
class Metric:
    """What a metric accumulates over batches, as four pure functions.

    `values` has the entries of a batch and the outputs of a model, each with a leading axis of
    examples; `mask` has a weight for each example, 0 for padding. `update` is compiled, so it uses
    `jax.numpy`. `merge` and `compute` get numpy arrays, floats in float64: sums over many batches
    lose nothing. In any order, and however the examples are split into batches, the result must be
    the same but for rounding.

    >>> import ftrain.metrics as metrics
    >>> errors = metrics.mean("error")
    >>> parts = [
    ...     errors.update(errors.init(), {"error": jnp.array(part)}, jnp.ones(len(part)))
    ...     for part in ([1.0, 3.0], [8.0])
    ... ]
    >>> errors.compute(errors.merge(*parts))
    4.0
    """

    init: Callable[[], Accumulator]
    update: Callable[[Accumulator, Values, jax.Array], Accumulator]
    merge: Callable[[Accumulator, Accumulator], Accumulator]
    compute: Callable[[Accumulator], Computed]

    def __post_init__(self) -> None:
        for field in fields(self):
            if not callable(getattr(self, field.name)):
                raise TypeError(
                    f"Metric.{field.name} must be a function, got {getattr(self, field.name)!r:.60}"
                )


def check_metrics(metrics: Any) -> dict[str, Metric]:
    """Return the metrics by name; TypeError unless they are a dict of `Metric`s."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            'metrics must be a dict, such as {"accuracy": ftrain.metrics.accuracy()}, '
            f"got {metrics!r:.60}"
        )
    for name, metric in metrics.items():
        if isinstance(metric, Metric):
            continue
        hint = _hint(name, metric)
        raise TypeError(f"metric {name} must be an ftrain.metrics.Metric, got {metric!r:.60}{hint}")
    return dict(metrics)


def _hint(name: str, metric: Any) -> str:
    kinds = metric.__mro__ if isinstance(metric, type) else type(metric).__mro__
    modules = [kind.__module__ for kind in kinds]
    if "clu.metrics" in modules:
        return "; use ftrain.metrics.from_clu(...)"
    if any(module.startswith("flax.nnx") for module in modules):
        return "; use ftrain.metrics.from_nnx(...)"
    if getattr(metric, "__module__", "").startswith("ftrain.metrics"):
        return f"; call it, {metric.__name__}()"
    return ": its init, update, merge and compute keep sums and weights, not means of batches"


def shared(factory: Callable[P, Metric]) -> Callable[P, Metric]:
    """Have `factory` return the same metric for the same arguments: it is compiled once then."""
    made = functools.cache(factory)

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Metric:
        try:
            hash((args, *kwargs.values()))
        except TypeError:  # not a name or a number: the factory reports what it is
            return factory(*args, **kwargs)
        return made(*args, **kwargs)

    return make


def summed(
    measure: Callable[[Values, jax.Array], Accumulator],
    compute: Callable[[Accumulator], Computed],
    zero: Accumulator,
) -> Metric:
    """Return a metric of sums: `measure` returns those of a batch, like `zero` has them."""

    def merge(one: Accumulator, other: Accumulator) -> Accumulator:
        return jax.tree.map(operator.add, one, other)

    def update(accumulator: Accumulator, values: Values, mask: jax.Array) -> Accumulator:
        return merge(accumulator, measure(values, mask))

    return Metric(lambda: zero, update, merge, compute)


def read(values: Values, name: str) -> Any:
    """Return an entry; ValueError lists those that there are."""
    if name not in values:
        raise ValueError(
            f"no entry {name!r} to measure; the batch and the outputs have {', '.join(values)}"
        )
    return values[name]


def read_array(values: Values, name: str) -> jax.Array:
    """Return an entry that is an array."""
    value = read(values, name)
    if is_weighted(value):
        raise ValueError(
            f"entry {name!r} is a WeightedMean, expected an array with an axis of examples"
        )
    return jnp.asarray(value)


def read_weights(
    values: Values, mask: jax.Array, weights: str | None, shape: tuple[int, ...]
) -> jax.Array:
    """Return the weight of each value of an array of this shape: of its example, and its own.

    Weights have the leading axes of the array: one weight per example, or per token, ...
    """
    mask = jnp.asarray(mask)
    if not shape or len(mask) != shape[0]:
        raise ValueError(f"expected {len(mask)} examples along the first axis, got shape {shape}")
    found = widen(_expand(mask, len(shape)))
    if weights is not None:
        own = read_array(values, weights)
        if own.shape != shape[: own.ndim]:
            raise ValueError(
                f"weights {weights!r} have shape {own.shape}, which does not fit values of {shape}"
            )
        own = _expand(widen(own), len(shape)).astype(found.dtype)
        found = jnp.where(found == 0, 0, found * own)
    return jnp.broadcast_to(found, shape)


def read_mean(values: Values, mask: jax.Array, name: str, weights: str | None) -> WeightedMean:
    """Return the mean of all values of an entry, or the entry itself if it is a WeightedMean."""
    value = read(values, name)
    if is_weighted(value):
        if weights is not None:
            raise ValueError(f"entry {name!r} is a WeightedMean, which has its weights already")
        return WeightedMean(widen(value.total), widen(value.weight))
    array = jnp.asarray(value)
    return WeightedMean.of(array, read_weights(values, mask, weights, array.shape))


def divide(total: Any, weight: Any) -> np.ndarray:
    """Return `total / weight` in float64; NaN where nothing has weight."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = np.asarray(total, np.float64) / np.asarray(weight, np.float64)
    return np.where(np.asarray(weight) == 0, np.nan, quotient)


def _expand(array: jax.Array, ndim: int) -> jax.Array:
    return array.reshape(*array.shape, *[1] * (ndim - array.ndim))
