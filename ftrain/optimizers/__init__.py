"""Optimizers: optax transforms with the numbers of the reference."""

from ftrain.optimizers.adam import adam as adam
from ftrain.optimizers.gradient_descent import gradient_descent as gradient_descent
from ftrain.optimizers.momentum import momentum as momentum
from ftrain.optimizers.rule import LearningRate as LearningRate
from ftrain.optimizers.rule import OptimizerState as OptimizerState
from ftrain.optimizers.rule import apply_updates as apply_updates
from ftrain.optimizers.rule import current_learning_rate as current_learning_rate
from ftrain.optimizers.rule import from_rule as from_rule
