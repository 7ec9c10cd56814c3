"""Checks of hyperparameters, parameters and gradients, with errors that name what is wrong."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from ftrain.gradients.rows import Rows, is_rows
from ftrain.hyperparameters import check_finite
from ftrain.schedules import Scheduled
from ftrain.tree import Tree, leaves_like, leaves_with_names, named_leaves


def check_at_init(
    transform: optax.GradientTransformationExtraArgs,
    check: Callable[..., None],
    **values: Scheduled,
) -> optax.GradientTransformationExtraArgs:
    """Wrap `transform` so that its init checks these values, as TensorFlow 1 does."""

    def init(params: Tree) -> Tree:
        check(**values)
        return transform.init(params)

    return optax.GradientTransformationExtraArgs(init, transform.update)


def check_dtype(**values: DTypeLike | None) -> None:
    """Raise ValueError for a value that is neither None nor a real floating-point dtype."""
    for name, value in values.items():
        try:
            is_real = value is None or jnp.issubdtype(jnp.dtype(value), jnp.floating)
        except TypeError:
            is_real = False
        if not is_real:
            raise ValueError(
                f"{name} must be a dtype of real numbers, such as float32, got {value!r}"
            )


def check_parameters(params: Tree) -> None:
    """Raise TypeError for a parameter that cannot have a gradient."""
    for name, leaf in named_leaves(params).items():
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"parameter {name} is {dtype}, which has no gradient; "
                "keep what is not trained in model_state"
            )


def check_real(params: Tree) -> None:
    """Raise TypeError for a complex parameter: the rules are for real numbers."""
    for name, leaf in named_leaves(params).items():
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            raise TypeError(
                f"parameter {name} is {jnp.result_type(leaf)}; "
                "keep its real and imaginary parts apart"
            )


def check_learning_rate(learning_rate: object) -> None:
    """Raise an error for a learning rate that is neither a finite number nor a schedule."""
    check_finite(learning_rate=learning_rate)
    if not callable(learning_rate) and not isinstance(
        learning_rate, (int, float, jax.Array, np.ndarray, np.number)
    ):
        raise TypeError(f"learning_rate must be a number or a schedule, got {learning_rate!r:.60}")


def leaves_of_gradients(
    gradients: Tree, params: Tree, what: str = "gradients"
) -> list[jax.Array | Rows | None]:
    """Return each parameter's gradient or update: an array or `Rows` of its shape, or None."""
    given = leaves_like(gradients, params, what, is_leaf=lambda node: node is None or is_rows(node))
    if given and what == "gradients" and all(gradient is None for gradient in given):
        raise ValueError("every gradient is None, expected a gradient of at least one parameter")
    for gradient, (name, parameter) in zip(given, leaves_with_names(params), strict=True):
        if is_rows(gradient):
            _check_rows(gradient, name, parameter, what)
        elif gradient is not None and jnp.shape(gradient) != jnp.shape(parameter):
            raise ValueError(
                f"{what} and parameters differ at {name}: {what.removesuffix('s')} has shape "
                f"{jnp.shape(gradient)}, parameter {jnp.shape(parameter)}"
            )
    return given


def _check_rows(rows: Rows, name: str, table: jax.Array, what: str) -> None:
    if not jnp.issubdtype(rows.indices.dtype, jnp.integer) or rows.indices.ndim != 1:
        wrong = f"{rows.indices.dtype}{list(rows.indices.shape)}"
        raise TypeError(
            f"{what} of {name} are Rows whose indices must be a list of integers, got {wrong}; "
            "put ftrain.gradients.densify() before a transform that does not support Rows"
        )
    count = rows.indices.shape[0]
    if jnp.ndim(table) == 0 or rows.values.shape != (count, *jnp.shape(table)[1:]):
        expected = f"{(count, *jnp.shape(table)[1:])} for {count} rows of {jnp.shape(table)}"
        raise ValueError(
            f"{what} and parameters differ at {name}: the values of Rows have shape "
            f"{rows.values.shape}, expected {expected}"
        )
