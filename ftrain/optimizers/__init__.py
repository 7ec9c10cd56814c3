"""Optimizers: optax transforms that compute the numbers of TensorFlow 1's optimizers."""

from ftrain.optimizers.adadelta import adadelta
from ftrain.optimizers.adagrad import adagrad, adagrad_da
from ftrain.optimizers.adam import adam
from ftrain.optimizers.ftrl import ftrl
from ftrain.optimizers.gradient_descent import gradient_descent, momentum
from ftrain.optimizers.groups import group_learning_rates, groups
from ftrain.optimizers.parameter_group import Group, GroupError
from ftrain.optimizers.proximal import proximal_adagrad, proximal_gradient_descent
from ftrain.optimizers.rmsprop import rmsprop
from ftrain.optimizers.rule import (
    LearningRate,
    Rounding,
    Rule,
    apply_updates,
    current_learning_rate,
    from_rule,
)
from ftrain.optimizers.slots import OptimizerState, get_slot, slot_names
from ftrain.optimizers.sync_replicas import Arrivals, arrivals, averaged_params, sync_replicas

__all__ = [
    "Arrivals",
    "Group",
    "GroupError",
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
    "group_learning_rates",
    "groups",
    "momentum",
    "proximal_adagrad",
    "proximal_gradient_descent",
    "rmsprop",
    "slot_names",
    "sync_replicas",
]
