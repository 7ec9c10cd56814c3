"""What optimizers check: hyperparameters, parameters and gradients; the name, what was given, what is wanted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ftrain.gradients.rows import Rows, is_rows
from ftrain.tree import Tree, leaves_like, leaves_with_names, named_leaves

Hyperparameter = float | jax.Array


def check_positive(**values: Hyperparameter) -> None:
    for name, value in _known(values):
        if not value > 0:
            raise ValueError(f"{name} must be > 0, got {value}")


def check_not_negative(**values: Hyperparameter) -> None:
    for name, value in _known(values):
        if not value >= 0:
            raise ValueError(f"{name} must be >= 0, got {value}")


def check_fraction(**values: Hyperparameter) -> None:
    for name, value in _known(values):
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}")


def check_dtype(**values: DTypeLike | None) -> None:
    for name, value in values.items():
        try:
            is_real = value is None or jnp.issubdtype(jnp.dtype(value), jnp.floating)
        except TypeError:
            is_real = False
        if not is_real:
            raise ValueError(f"{name} must be a dtype of real numbers, such as float32, got {value!r}")


def _known(values: dict[str, Hyperparameter]) -> list[tuple[str, float]]:
    """Those that are numbers. Arrays, such as `optax.inject_hyperparams` hands in, may have no value yet."""
    return [(name, float(value)) for name, value in values.items() if isinstance(value, (int, float, np.number))]


def check_parameters(params: Tree) -> None:
    """Every parameter can have a gradient."""
    for name, leaf in named_leaves(params).items():
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"parameter {name} is {dtype}, which has no gradient; keep what is not trained in model_state"
            )


def leaves_of_gradients(gradients: Tree, params: Tree) -> list[Any]:
    """The gradient of each parameter, in order: an array, `Rows` or None, of the parameter's shape."""
    given = leaves_like(gradients, params, "gradients", is_leaf=lambda node: node is None or is_rows(node))
    if given and all(gradient is None for gradient in given):
        raise ValueError("no parameter has a gradient: all of them are None")
    for gradient, (name, parameter) in zip(given, leaves_with_names(params), strict=True):
        if is_rows(gradient):
            _check_rows(gradient, name, parameter)
        elif gradient is not None and jnp.shape(gradient) != jnp.shape(parameter):
            wrong = f"gradient has shape {jnp.shape(gradient)}, parameter {jnp.shape(parameter)}"
            raise ValueError(f"gradients and parameters differ at {name}: {wrong}")
    return given


def _check_rows(rows: Rows, name: str, table: jax.Array) -> None:
    count = rows.indices.shape[0] if rows.indices.ndim == 1 else 0
    if not jnp.issubdtype(rows.indices.dtype, jnp.integer) or rows.indices.ndim != 1:
        wrong = f"{rows.indices.dtype}{list(rows.indices.shape)}"
        raise TypeError(f"the gradient of {name} has Rows whose indices are not a list of integers, but {wrong}")
    if table.ndim == 0 or rows.values.shape != (count, *table.shape[1:]):
        wanted = f"{(count, *table.shape[1:])} for {count} rows of {table.shape}"
        raise ValueError(f"gradients and parameters differ at {name}: Rows hold {rows.values.shape}, not {wanted}")
