"""Schedules: functions from a step to a value, for learning rates and anything else that changes over a run."""

from ftrain.schedules.composition import inverse_sqrt as inverse_sqrt
from ftrain.schedules.composition import join as join
from ftrain.schedules.composition import warmup as warmup
from ftrain.schedules.composition import warmup_stable_decay as warmup_stable_decay
from ftrain.schedules.cosine import cosine_decay as cosine_decay
from ftrain.schedules.cosine import cosine_decay_restarts as cosine_decay_restarts
from ftrain.schedules.cosine import linear_cosine_decay as linear_cosine_decay
from ftrain.schedules.cosine import noisy_linear_cosine_decay as noisy_linear_cosine_decay
from ftrain.schedules.decay import exponential_decay as exponential_decay
from ftrain.schedules.decay import inverse_time_decay as inverse_time_decay
from ftrain.schedules.decay import natural_exp_decay as natural_exp_decay
from ftrain.schedules.decay import piecewise_constant as piecewise_constant
from ftrain.schedules.decay import polynomial_decay as polynomial_decay
from ftrain.schedules.schedule import Schedule as Schedule
