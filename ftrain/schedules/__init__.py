"""Schedules: functions from a step to a value, for learning rates and anything else that changes over a run."""

from ftrain.schedules.composition import inverse_sqrt, join, warmup, warmup_stable_decay
from ftrain.schedules.cosine import (
    cosine_decay,
    cosine_decay_restarts,
    linear_cosine_decay,
    noisy_linear_cosine_decay,
)
from ftrain.schedules.decay import (
    exponential_decay,
    inverse_time_decay,
    natural_exp_decay,
    piecewise_constant,
    polynomial_decay,
)
from ftrain.schedules.schedule import Schedule

__all__ = [
    "Schedule",
    "cosine_decay",
    "cosine_decay_restarts",
    "exponential_decay",
    "inverse_sqrt",
    "inverse_time_decay",
    "join",
    "linear_cosine_decay",
    "natural_exp_decay",
    "noisy_linear_cosine_decay",
    "piecewise_constant",
    "polynomial_decay",
    "warmup",
    "warmup_stable_decay",
]
