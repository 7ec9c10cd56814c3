"""Optimizers: optax transforms with the numbers of the reference."""

from ftrain.optimizers.adadelta import adadelta
from ftrain.optimizers.adagrad import adagrad
from ftrain.optimizers.adagrad_da import adagrad_da
from ftrain.optimizers.adam import adam
from ftrain.optimizers.ftrl import ftrl
from ftrain.optimizers.gradient_descent import gradient_descent
from ftrain.optimizers.momentum import momentum
from ftrain.optimizers.proximal_adagrad import proximal_adagrad
from ftrain.optimizers.proximal_gradient_descent import proximal_gradient_descent
from ftrain.optimizers.rmsprop import rmsprop
from ftrain.optimizers.rule import (
    LearningRate,
    OptimizerState,
    Rounding,
    Rule,
    apply_updates,
    current_learning_rate,
    from_rule,
)
from ftrain.optimizers.slots import get_slot, slot_names
from ftrain.optimizers.sync_replicas import Arrivals, arrivals, averaged_params, sync_replicas

__all__ = [
    "Arrivals",
    "LearningRate",
    "OptimizerState",
    "Rounding",
    "Rule",
    "adadelta",
    "adagrad",
    "adagrad_da",
    "adam",
    "apply_updates",
    "arrivals",
    "averaged_params",
    "current_learning_rate",
    "from_rule",
    "ftrl",
    "get_slot",
    "gradient_descent",
    "momentum",
    "proximal_adagrad",
    "proximal_gradient_descent",
    "rmsprop",
    "slot_names",
    "sync_replicas",
]
