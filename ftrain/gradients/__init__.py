"""Gradients: differentiation, accumulation, clipping, loss scaling, and rows of tables."""

from ftrain.gradients.accumulation import accumulate
from ftrain.gradients.clipping import (
    as_transform,
    clip_by_average_norm,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    global_norm,
)
from ftrain.gradients.differentiate import value_and_grad
from ftrain.gradients.guard import guard, skipped_updates
from ftrain.gradients.lookup import lookup
from ftrain.gradients.loss_scaling import loss_scale, loss_scaling
from ftrain.gradients.means import WeightedMean, mean_over_replicas
from ftrain.gradients.rows import Rows, densify, map_values
from ftrain.gradients.rows_fallback import update_with_rows

__all__ = [
    "Rows",
    "WeightedMean",
    "accumulate",
    "as_transform",
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "densify",
    "global_norm",
    "guard",
    "lookup",
    "loss_scale",
    "loss_scaling",
    "map_values",
    "mean_over_replicas",
    "skipped_updates",
    "update_with_rows",
    "value_and_grad",
]
