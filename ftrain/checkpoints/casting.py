"""Casting: values in another dtype of the same kind, if it can hold them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ftrain.checkpoints.errors import CheckpointError

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


def kind_of(dtype: Any) -> type | None:
    """Booleans, integers, reals or complex numbers; None for keys, text and objects."""
    try:
        return next((kind for kind in _KINDS if jnp.issubdtype(np.dtype(dtype), kind)), None)
    except TypeError:  # not a dtype of numpy's
        return None


def cast(value: np.ndarray, dtype: Any, name: str, *, copy: bool = False) -> np.ndarray:
    """The value of a leaf in a dtype of its kind; an error if numbers are too large for it."""
    with np.errstate(over="ignore", invalid="ignore"):
        new = value.astype(dtype, copy=copy)
    if new.dtype == value.dtype:
        return new
    is_lost = (
        new != value if kind_of(dtype) is np.integer else np.isfinite(new) != np.isfinite(value)
    )
    if np.any(is_lost):
        raise CheckpointError(
            f"leaf {name} is {value.dtype} in the checkpoint, with values too large for {dtype}"
        )
    return new
