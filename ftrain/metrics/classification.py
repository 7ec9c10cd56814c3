"""Metrics of a classifier: accuracy, precision, recall, F1 and the confusion matrix.

All of them read two entries. `logits` has the scores of the classes along its last axis, one score
per example for two classes (the second is predicted above `threshold`: 0 for logits, 0.5 for
probabilities), or the predicted classes as integers. `labels` has the true classes, from 0. With
more axes, such as tokens, every label counts. A prediction from NaN is wrong, whatever the label.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ftrain.gradients.means import WeightedMean
from ftrain.metrics.metric import (
    Metric,
    Values,
    divide,
    read_array,
    read_weights,
    shared,
    summed,
)
from ftrain.tree import widen

Average = Literal["macro", "micro", "weighted", "binary", "none"]
Normalize = Literal["none", "true", "predicted", "all"]


@shared
def accuracy(
    *,
    logits: str = "logits",
    labels: str = "label",
    weights: str | None = None,
    threshold: float = 0.0,
) -> Metric:
    """The share of labels that are predicted."""

    def measure(values: Values, mask: jax.Array) -> WeightedMean:
        scores, wanted = _read(values, logits, labels)
        predicted, _ = _predict(scores, wanted, threshold)
        hits = jnp.where(predicted == wanted, 1.0, 0.0)
        return WeightedMean.of(hits, read_weights(values, mask, weights, wanted.shape))

    return summed(measure, _share, WeightedMean(0.0, 0.0))


@shared
def cross_entropy(
    *, logits: str = "logits", labels: str = "label", weights: str | None = None
) -> Metric:
    """The mean of -log(softmax(logits)[label]), in nats: the usual loss of a classifier."""

    def measure(values: Values, mask: jax.Array) -> WeightedMean:
        scores, labelled = _read(values, logits, labels)
        if scores.ndim != labelled.ndim + 1:
            raise ValueError(
                f"cross_entropy needs the scores of all classes: {logits!r} must have one axis "
                f"more than {labels!r}, got {scores.shape} and {labelled.shape}"
            )
        losses = optax.softmax_cross_entropy_with_integer_labels(widen(scores), labelled)
        known = (labelled >= 0) & (labelled < scores.shape[-1])
        weight = read_weights(values, mask, weights, labelled.shape)
        losses = jnp.where(known, losses, jnp.nan)
        return WeightedMean.of(jnp.where(weight == 0, 0, losses), weight)

    return summed(measure, _share, WeightedMean(0.0, 0.0))


@shared
def top_k(
    k: int = 5, *, logits: str = "logits", labels: str = "label", weights: str | None = None
) -> Metric:
    """The share of labels that are among the `k` classes with the highest scores.

    Of equal scores the lower class comes first, so `top_k(1)` is the accuracy.
    """
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k}")

    def measure(values: Values, mask: jax.Array) -> WeightedMean:
        scores, wanted = _read(values, logits, labels)
        if scores.ndim != wanted.ndim + 1:
            raise ValueError(
                f"top_k needs the scores of all classes: {logits!r} must have one axis more than "
                f"{labels!r}, got {scores.shape} and {wanted.shape}"
            )
        classes = scores.shape[-1]
        if k > classes:
            raise ValueError(f"k is {k}, but {logits!r} has {classes} classes")
        known = (wanted >= 0) & (wanted < classes)
        place = jnp.where(known, wanted, 0)[..., None]
        own = jnp.take_along_axis(scores, place, axis=-1)
        is_before = (scores > own) | (
            (scores == own) & (jnp.arange(classes, dtype=place.dtype) < place)
        )
        rank = jnp.sum(is_before.astype(jnp.int32), axis=-1)
        is_hit = (rank < k) & known & ~_has_nan(scores)
        hits = jnp.where(is_hit, 1.0, 0.0)
        return WeightedMean.of(hits, read_weights(values, mask, weights, wanted.shape))

    return summed(measure, _share, WeightedMean(0.0, 0.0))


def precision(
    average: Average = "macro",
    *,
    logits: str = "logits",
    labels: str = "label",
    weights: str | None = None,
    classes: int | None = None,
    threshold: float = 0.0,
) -> Metric:
    """Of the examples predicted to be of a class, the share that is: tp / (tp + fp).

    Args:
      average: over classes: "macro" is the mean of those that occur, "weighted" is weighted by
        how often they do, "micro" counts all classes together, "binary" is class 1 alone, and
        "none" returns an array of all classes. A class that is never predicted has precision 0.
      classes: their number, if predictions are given as integers.
    """
    return _scored(_precision, average, logits, labels, weights, classes, threshold)


def recall(
    average: Average = "macro",
    *,
    logits: str = "logits",
    labels: str = "label",
    weights: str | None = None,
    classes: int | None = None,
    threshold: float = 0.0,
) -> Metric:
    """Of the examples of a class, the share that is predicted: tp / (tp + fn); see `precision`."""
    return _scored(_recall, average, logits, labels, weights, classes, threshold)


def f1(
    average: Average = "macro",
    *,
    logits: str = "logits",
    labels: str = "label",
    weights: str | None = None,
    classes: int | None = None,
    threshold: float = 0.0,
) -> Metric:
    """The harmonic mean of precision and recall: 2 tp / (2 tp + fp + fn); see `precision`."""
    return _scored(_f1, average, logits, labels, weights, classes, threshold)


@shared
def confusion_matrix(
    *,
    logits: str = "logits",
    labels: str = "label",
    weights: str | None = None,
    classes: int | None = None,
    threshold: float = 0.0,
    normalize: Normalize = "none",
) -> Metric:
    """How often each class (row) is predicted to be each class (column), as a square array.

    A prediction from NaN is in no column. `normalize` divides by the sums of the rows, "true", of
    the columns, "predicted", or by the sum of "all".
    """
    if normalize not in get_args(Normalize):
        raise ValueError(
            f"normalize must be one of {', '.join(get_args(Normalize))}, got {normalize!r}"
        )

    def measure(values: Values, mask: jax.Array) -> dict[str, jax.Array]:
        scores, wanted = _read(values, logits, labels)
        predicted, count = _predict(scores, wanted, threshold)
        size = _class_count(count, classes)
        weight = read_weights(values, mask, weights, wanted.shape)
        found = jnp.zeros((size, size), weight.dtype)
        return {
            "matrix": found.at[_places(wanted, size), _places(predicted, size)].add(
                weight, mode="drop"
            ),
            "unknown": _unknown(wanted, size, weight),
        }

    def compute(sums: dict[str, Any]) -> np.ndarray:
        matrix = np.asarray(sums["matrix"], np.float64)
        _check_known(sums["unknown"], len(matrix))
        axis = {"none": (), "true": (1,), "predicted": (0,), "all": (0, 1)}[normalize]
        divisor = np.sum(matrix, axis=axis, keepdims=True) if axis else np.ones(())
        return np.nan_to_num(divide(matrix, np.broadcast_to(divisor, matrix.shape)), nan=0.0)

    return summed(measure, compute, {"matrix": 0.0, "unknown": 0.0})


class _Counts(NamedTuple):
    """The weight of examples of each class."""

    right: Any  # predicted, and of the class
    predicted: Any
    labelled: Any
    unknown: Any  # of labels that are no class, a number


@shared
def _scored(
    score: Callable[[_Counts], np.ndarray],
    average: Average,
    logits: str,
    labels: str,
    weights: str | None,
    classes: int | None,
    threshold: float,
) -> Metric:
    if average not in get_args(Average):
        raise ValueError(f"average must be one of {', '.join(get_args(Average))}, got {average!r}")

    def measure(values: Values, mask: jax.Array) -> _Counts:
        scores, wanted = _read(values, logits, labels)
        predicted, count = _predict(scores, wanted, threshold)
        size = _class_count(count, classes)
        weight = read_weights(values, mask, weights, wanted.shape)

        def by_class(of: jax.Array, weight: jax.Array) -> jax.Array:
            return jnp.zeros(size, weight.dtype).at[_places(of, size)].add(weight, mode="drop")

        return _Counts(
            by_class(wanted, jnp.where(predicted == wanted, weight, 0)),
            by_class(predicted, weight),
            by_class(wanted, weight),
            _unknown(wanted, size, weight),
        )

    def compute(counts: _Counts) -> Any:
        counts = _Counts(*(np.asarray(part, np.float64) for part in counts))
        _check_known(counts.unknown, counts.right.size)
        return _averaged(score, counts, average)

    return summed(measure, compute, _Counts(0.0, 0.0, 0.0, 0.0))


def _averaged(score: Callable[[_Counts], np.ndarray], counts: _Counts, average: Average) -> Any:
    if average == "micro":
        return float(score(_Counts(*(np.sum(part) for part in counts))))
    scores = score(counts)
    if average == "none":
        return scores
    if average == "binary":
        if scores.size != 2:
            raise ValueError(
                f'average="binary" is of 2 classes, got {scores.size}; use "macro" or "micro"'
            )
        return float(scores[1])
    occurs = (counts.labelled > 0) | (counts.predicted > 0)
    weights = counts.labelled if average == "weighted" else occurs.astype(np.float64)
    return float(divide(np.sum(scores * weights), np.sum(weights)))


def _precision(counts: _Counts) -> np.ndarray:
    return np.nan_to_num(divide(counts.right, counts.predicted), nan=0.0)


def _recall(counts: _Counts) -> np.ndarray:
    return np.nan_to_num(divide(counts.right, counts.labelled), nan=0.0)


def _f1(counts: _Counts) -> np.ndarray:
    return np.nan_to_num(divide(2 * counts.right, counts.predicted + counts.labelled), nan=0.0)


def _share(accumulator: WeightedMean) -> float:
    return float(divide(accumulator.total, accumulator.weight))


def _read(values: Values, logits: str, labels: str) -> tuple[jax.Array, jax.Array]:
    """Return scores or predicted classes, and labels, whose shapes fit."""
    scores = read_array(values, logits)
    wanted = read_array(values, labels)
    if scores.shape == (*wanted.shape, 1):
        scores = scores[..., 0]
    if wanted.shape not in (scores.shape, scores.shape[:-1]):
        raise ValueError(
            f"labels {labels!r} have shape {wanted.shape}, {logits!r} has {scores.shape}; expected "
            f"labels of {scores.shape[:-1]}, one class per example, not one-hot"
        )
    if (
        wanted.ndim > 1
        and scores.ndim == wanted.ndim
        and jnp.issubdtype(scores.dtype, jnp.floating)
    ):
        raise ValueError(
            f"labels {labels!r} have the shape of {logits!r}, {wanted.shape}: they look one-hot; "
            "expected one class per example, such as their argmax"
        )
    return scores, wanted.astype(jnp.int32)


def _predict(
    scores: jax.Array, wanted: jax.Array, threshold: float
) -> tuple[jax.Array, int | None]:
    """Return the predicted classes, -1 for NaN, and the number of classes if it is known."""
    if scores.ndim > wanted.ndim:
        chosen = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        return jnp.where(_has_nan(scores), -1, chosen), scores.shape[-1]
    if jnp.issubdtype(scores.dtype, jnp.floating):
        chosen = jnp.where(scores > threshold, 1, 0)
        return jnp.where(jnp.isnan(scores), -1, chosen).astype(jnp.int32), 2
    is_truth = scores.dtype == jnp.bool_
    return scores.astype(jnp.int32), 2 if is_truth else None


def _class_count(found: int | None, given: int | None) -> int:
    if found is None and given is None:
        raise ValueError("predictions are integers: give the number of classes, classes=10")
    if found is not None and given is not None and found != given:
        raise ValueError(f"classes is {given}, but the scores are of {found} classes")
    return found or given or 0


def _has_nan(scores: jax.Array) -> jax.Array:
    return jnp.any(jnp.isnan(scores), axis=-1)


def _places(classes: jax.Array, size: int) -> jax.Array:
    """Return where to add; a number that is no class is outside, so that nothing is added."""
    return jnp.where((classes >= 0) & (classes < size), classes, size)


def _unknown(labels: jax.Array, size: int, weight: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where((labels >= 0) & (labels < size), 0, weight))


def _check_known(unknown: Any, size: int) -> None:
    if float(unknown) != 0:
        raise ValueError(
            f"labels must be from 0 to {size - 1}, but labels of weight {float(unknown):g} are "
            "not; give those that do not count the weight 0, with weights="
        )
