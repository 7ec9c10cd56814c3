"""Checks of hyperparameters: errors give the name, the value and what is expected.

Arrays are not checked: they may have no value yet, such as those that `optax.inject_hyperparams`
passes while a step is traced.
"""

import math
import operator
from collections.abc import Callable
from typing import SupportsIndex, TypeGuard

import numpy as np


def check_finite(**values: object) -> None:
    """Raise ValueError unless every value is a finite number."""
    _check(values, lambda value: True, "a finite number")


def check_positive(**values: object) -> None:
    """Raise ValueError unless every value is > 0."""
    _check(values, lambda value: value > 0, "> 0")


def check_not_negative(**values: object) -> None:
    """Raise ValueError unless every value is >= 0."""
    _check(values, lambda value: value >= 0, ">= 0")


def check_not_positive(**values: object) -> None:
    """Raise ValueError unless every value is <= 0."""
    _check(values, lambda value: value <= 0, "<= 0")


def check_fraction(**values: object) -> None:
    """Raise ValueError unless every value is in [0, 1): a decay of 1 would never forget."""
    _check(values, lambda value: 0 <= value < 1, "in [0, 1)")


def check_unit(**values: object) -> None:
    """Raise ValueError unless every value is in [0, 1]."""
    _check(values, lambda value: 0 <= value <= 1, "in [0, 1]")


def check_count(**values: SupportsIndex) -> None:
    """Raise ValueError unless every value is a whole number >= 1."""
    for name, value in values.items():
        try:
            count = 0 if isinstance(value, (bool, np.bool_)) else operator.index(value)
        except TypeError:
            count = 0
        if count < 1:
            raise ValueError(f"{name} must be a whole number >= 1, got {value!r:.60}")


def check_norm(**values: object) -> None:
    """Raise ValueError unless every value is >= 0; an infinite norm clips nothing."""
    for name, value in values.items():
        if _is_number(value) and not float(value) >= 0:
            raise ValueError(f"{name} must be >= 0, got {value}")


def _check(values: dict[str, object], is_right: Callable[[float], bool], expected: str) -> None:
    for name, value in values.items():
        if _is_number(value) and not (math.isfinite(value) and is_right(float(value))):
            raise ValueError(f"{name} must be {expected}, got {value}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float, np.number))
