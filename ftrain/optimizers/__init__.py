"""Optimizers: optax transforms with the numbers of the reference."""

from ftrain.optimizers.adadelta import adadelta as adadelta
from ftrain.optimizers.adagrad import adagrad as adagrad
from ftrain.optimizers.adagrad_da import adagrad_da as adagrad_da
from ftrain.optimizers.adam import adam as adam
from ftrain.optimizers.ftrl import ftrl as ftrl
from ftrain.optimizers.gradient_descent import gradient_descent as gradient_descent
from ftrain.optimizers.momentum import momentum as momentum
from ftrain.optimizers.proximal_adagrad import proximal_adagrad as proximal_adagrad
from ftrain.optimizers.proximal_gradient_descent import proximal_gradient_descent as proximal_gradient_descent
from ftrain.optimizers.rmsprop import rmsprop as rmsprop
from ftrain.optimizers.rule import LearningRate as LearningRate
from ftrain.optimizers.rule import OptimizerState as OptimizerState
from ftrain.optimizers.rule import apply_updates as apply_updates
from ftrain.optimizers.rule import current_learning_rate as current_learning_rate
from ftrain.optimizers.rule import from_rule as from_rule
from ftrain.optimizers.slots import get_slot as get_slot
from ftrain.optimizers.slots import slot_names as slot_names
