"""Metrics of the order that scores put examples in: the area under the ROC curve."""

from typing import Any, NamedTuple

import jax
import numpy as np

from ftrain.metrics.metric import Metric, Values, read_array, read_weights, shared
from ftrain.tree import widen


class _Scored(NamedTuple):
    """The examples of one batch."""

    scores: Any
    labels: Any
    weights: Any


@shared
def auc(*, logits: str = "logits", labels: str = "label", weights: str | None = None) -> Metric:
    """The area under the ROC curve of two classes: how likely a 1 has a higher score than a 0.

    It is exact, ties count half, so the scores of all examples are kept. NaN if one of the classes
    does not occur, or if a score is NaN.

    Args:
      logits: one score per example, or the logits of two classes.
      labels: 0 or 1 for each example.
    """

    def measure(values: Values, mask: jax.Array) -> _Scored:
        wanted = read_array(values, labels)
        scores = widen(read_array(values, logits))
        if scores.shape == (*wanted.shape, 2):
            scores = scores[..., 1] - scores[..., 0]
        elif scores.shape == (*wanted.shape, 1):
            scores = scores[..., 0]
        if scores.shape != wanted.shape:
            raise ValueError(
                f"auc is of two classes: labels {labels!r} have shape {wanted.shape}, so "
                f"{logits!r} must have {wanted.shape} or {(*wanted.shape, 2)}, got {scores.shape}"
            )
        weight = read_weights(values, mask, weights, scores.shape)
        return _Scored(scores.reshape(-1), widen(wanted).reshape(-1), weight.reshape(-1))

    def update(parts: tuple[_Scored, ...], values: Values, mask: jax.Array) -> tuple[_Scored, ...]:
        return (*parts, measure(values, mask))

    def merge(one: tuple[_Scored, ...], other: tuple[_Scored, ...]) -> tuple[_Scored, ...]:
        return (*one, *other)  # joined at the end: joining at each merge would copy all of them

    return Metric(tuple, update, merge, _area)


def _area(parts: tuple[_Scored, ...]) -> float:
    columns = zip(*parts, strict=True) if parts else ([np.zeros(0)],) * 3
    scores, labels, weights = (np.concatenate(column).astype(np.float64) for column in columns)
    counted = weights != 0
    scores, labels, weights = scores[counted], labels[counted], weights[counted]
    wrong = labels[(labels != 0) & (labels != 1)]
    if len(wrong):
        raise ValueError(f"auc is of two classes: labels must be 0 or 1, got {wrong[0]:g}")
    if not len(scores) or np.isnan(scores).any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    scores = scores[order]
    ends = np.append(np.flatnonzero(scores[1:] != scores[:-1]), len(scores) - 1)  # of ties
    positive = np.cumsum((weights * labels)[order])[ends]
    negative = np.cumsum((weights * (1 - labels))[order])[ends]
    if positive[-1] == 0 or negative[-1] == 0:
        return float("nan")
    heights = np.diff(positive, prepend=0.0) / 2 + np.append(0.0, positive[:-1])
    return float(np.sum(np.diff(negative, prepend=0.0) * heights) / (positive[-1] * negative[-1]))
