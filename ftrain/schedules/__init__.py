"""Schedules: functions from a step to a value, for learning rates and other hyperparameters."""

from ftrain.schedules.composition import inverse_sqrt, join, warmup, warmup_stable_decay
from ftrain.schedules.cosine import (
    cosine_decay,
    cosine_decay_restarts,
    linear_cosine_decay,
    noisy_linear_cosine_decay,
)
from ftrain.schedules.decay import (
    Schedule,
    Scheduled,
    exponential_decay,
    inverse_time_decay,
    natural_exp_decay,
    piecewise_constant,
    polynomial_decay,
    value_at,
)
from ftrain.schedules.lengths import resolve_steps

__all__ = [
    "Schedule",
    "Scheduled",
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
    "resolve_steps",
    "value_at",
    "warmup",
    "warmup_stable_decay",
]
