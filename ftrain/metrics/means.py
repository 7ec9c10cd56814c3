"""Metrics of numbers: mean, perplexity and the coefficient of determination."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.gradients.means import WeightedMean
from ftrain.metrics.metric import (
    Accumulator,
    Metric,
    Values,
    divide,
    read_array,
    read_mean,
    read_weights,
    shared,
    summed,
)
from ftrain.tree import widen


@shared
def mean(entry: str = "loss", *, weights: str | None = None) -> Metric:
    """The mean of all values of an entry; NaN if nothing has weight.

    Of an entry with more axes, such as the losses of tokens, all values of an example weigh the
    same. A value with weight 0 does not count, NaN or not; with a weight, a NaN is the result.

    Args:
      entry: an array, or a `WeightedMean`.
      weights: an entry with a weight per example, per token, ...
    """

    def measure(values: Values, mask: jax.Array) -> WeightedMean:
        return read_mean(values, mask, entry, weights)

    return summed(measure, _mean, WeightedMean(0.0, 0.0))


@shared
def perplexity(loss: str = "loss", *, weights: str | None = None) -> Metric:
    """The exponential of the mean of an entry, the cross entropy of each token in nats."""

    def measure(values: Values, mask: jax.Array) -> WeightedMean:
        return read_mean(values, mask, loss, weights)

    def compute(accumulator: WeightedMean) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp(_mean(accumulator)))

    return summed(measure, compute, WeightedMean(0.0, 0.0))


def _mean(accumulator: WeightedMean) -> float:
    return float(divide(accumulator.total, accumulator.weight))


class _Moments(NamedTuple):
    count: Any  # examples with a weight
    weight: Any
    mean: Any  # of the labels, for each output
    spread: Any  # the sum of weight * (label - mean) ** 2
    error: Any  # the sum of weight * (label - prediction) ** 2


@shared
def r2(
    *, predictions: str = "prediction", labels: str = "label", weights: str | None = None
) -> Metric:
    """The coefficient of determination: 1 - sum((y - p)^2) / sum((y - mean(y))^2).

    Of several outputs per example, the mean over them. NaN for fewer than two examples; of labels
    that are all equal 1 if all predictions are right, else 0.
    """

    def measure(values: Values, mask: jax.Array) -> _Moments:
        predicted = widen(read_array(values, predictions))
        wanted = widen(read_array(values, labels)).astype(predicted.dtype)
        if predicted.shape != wanted.shape:
            raise ValueError(
                f"predictions {predictions!r} have shape {predicted.shape}, "
                f"labels {labels!r} have {wanted.shape}; expected one shape"
            )
        rows = (len(wanted), -1)
        weight = read_weights(values, mask, weights, wanted.shape).reshape(rows)
        weight = weight.astype(predicted.dtype)
        wanted = jnp.where(weight == 0, 0, wanted.reshape(rows))
        error = jnp.where(weight == 0, 0, wanted - predicted.reshape(rows))
        total = jnp.sum(weight, axis=0)
        center = jnp.sum(weight * wanted, axis=0) / jnp.where(total == 0, 1, total)
        return _Moments(
            jnp.sum((weight != 0).astype(weight.dtype), axis=0),
            total,
            center,
            jnp.sum(weight * (wanted - center) ** 2, axis=0),
            jnp.sum(weight * error**2, axis=0),
        )

    def update(accumulator: _Moments, values: Values, mask: jax.Array) -> _Moments:
        return _merge(accumulator, measure(values, mask))

    return Metric(lambda: _Moments(0.0, 0.0, 0.0, 0.0, 0.0), update, _merge, _r2)


def _merge(one: _Moments, other: _Moments) -> _Moments:
    """Merge moments around two means; sums of squares would lose the digits of a large mean."""
    weight = one.weight + other.weight
    where = jnp.where if isinstance(weight, jax.Array) else np.where
    share = other.weight / where(weight == 0, 1.0, weight)
    shift = other.mean - one.mean
    return _Moments(
        one.count + other.count,
        weight,
        one.mean + shift * share,
        one.spread + other.spread + shift**2 * one.weight * share,
        one.error + other.error,
    )


def _r2(accumulator: Accumulator) -> float:
    moments = _Moments(*(np.asarray(part, np.float64) for part in accumulator))
    score = 1 - divide(moments.error, moments.spread)
    constant = np.where(moments.error == 0, 1.0, 0.0)
    score = np.where((moments.spread == 0) & np.isfinite(moments.error), constant, score)
    return float(np.mean(np.where(moments.count < 2, np.nan, score)))
