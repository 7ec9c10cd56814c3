"""Metrics over a dataset: small pure (init, update, merge, compute), exact over any split of it."""

from ftrain.metrics.adapters import from_clu, from_nnx
from ftrain.metrics.classification import (
    accuracy,
    confusion_matrix,
    cross_entropy,
    f1,
    precision,
    recall,
    top_k,
)
from ftrain.metrics.means import mean, perplexity, r2
from ftrain.metrics.metric import Metric
from ftrain.metrics.ranking import auc

__all__ = [
    "Metric",
    "accuracy",
    "auc",
    "confusion_matrix",
    "cross_entropy",
    "f1",
    "from_clu",
    "from_nnx",
    "mean",
    "perplexity",
    "precision",
    "r2",
    "recall",
    "top_k",
]
