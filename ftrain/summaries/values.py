"""Values: the numbers and texts that a summary can hold."""

import operator
from typing import Any, SupportsIndex

import numpy as np

EXPECTED = "expected a number, an array of shape () or a text"


def plain_value(name: str, value: Any) -> bool | int | float | str:
    """Convert a value to a Python number or text; TypeError if it is neither."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a value must be a text, got {name!r:.60}")
    if isinstance(value, str) and not isinstance(value, np.generic):
        return value
    if isinstance(value, (bool, int, float)) and not isinstance(value, np.generic):
        return _check_size(name, value)
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    if shape is None or dtype is None:
        raise TypeError(f"{name} is {value!r:.60}, a {type(value).__name__}; {EXPECTED}")
    try:
        item = np.asarray(value).item() if shape == () else None
    except Exception as error:  # a traced value, an array that was donated
        reason = str(error).partition("\n")[0]
        raise TypeError(
            f"{name} is an array of {dtype} that cannot be read: {reason}; {EXPECTED}"
        ) from error
    if shape != () or not isinstance(item, (bool, int, float, str)):
        advice = "; write its mean, or its entries under names of their own" if shape != () else ""
        raise TypeError(
            f"{name} is an array of shape {tuple(shape)} and dtype {dtype}; {EXPECTED}{advice}"
        )
    return item


def plain_step(step: SupportsIndex) -> int:
    """Convert a step, such as an array of shape (), to an integer."""
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"a step must be a whole number, got {step!r:.60}") from None


def _check_size(name: str, value: float) -> float:
    try:
        float(value)
    except OverflowError:
        raise TypeError(
            f"{name} is a whole number of {int(value).bit_length()} bits, too large for a float"
        ) from None
    return value
