"""The precision policy: the dtypes of parameters, computation, outputs and optimizer slots.

    ftrain.train(loss_fn, params, data, optimizer=adam(), steps=1000, precision="bfloat16")

A loss function is called with its parameters and the floating-point entries of its batch cast to
the dtype of the computation. The cast is differentiated too, so gradients arrive in the dtype of
the parameters, and small updates add up in the parameters.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p
from jax.typing import DTypeLike

from ftrain.jaxpr import dtype_of, equations_of
from ftrain.optimizers import LearningRate
from ftrain.optimizers.rounding import is_narrow
from ftrain.training.optimizer_precision import (
    keeps_small_updates,
    scale_loss_unless_scaled,
    store_slots,
)
from ftrain.tree import Tree, leaves_with_names, matching_names

F = TypeVar("F", bound=Callable[..., Any])
DTYPES = ("bfloat16", "float16", "float32", "float64")
_SAMPLED_STEPS = (0, *(2**power for power in range(21)))  # where a schedule is looked at


class PrecisionError(ValueError):
    """A policy that does not fit the optimizer, the state or the batch."""


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a run. A step that computes in float16 scales its loss by itself.

    Loss functions should compute the loss itself in float32, from `logits.astype(jnp.float32)`.
    What is computed from parameters and inputs only has the dtype of the computation if the model
    mixes no wider arrays into it: JAX promotes a product with a float32 constant to float32.

    Args:
      compute: the dtype in which the loss function computes: its parameters and the floating-point
        entries of its batch are cast to it. Integers and the model state are not.
      params: the dtype of the parameters in the state.
      output: the dtype of loss and metrics, and of what `apply` returns.
      slots: the dtype of the optimizer's slots; by default the optimizer's own choice. Slots
        narrower than float32 are rounded stochastically.
      keep: patterns for the full names of leaves that are not cast, such as "batch/label" or
        "params/norm/.*".
    """

    compute: DTypeLike
    params: DTypeLike = "float32"
    output: DTypeLike = "float32"
    slots: DTypeLike | None = None
    keep: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("compute", "params", "output", "slots"):
            value = getattr(self, name)
            if name != "slots" or value is not None:
                object.__setattr__(self, name, _checked(name, value))
        keep = (self.keep,) if isinstance(self.keep, str) else tuple(self.keep)
        object.__setattr__(self, "keep", keep)
        for pattern in keep:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"keep: {pattern!r} is not a regular expression: {error}"
                ) from None

    def __str__(self) -> str:
        chosen = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name)
        }
        return ", ".join(
            f"{name} {value if isinstance(value, str) else ' '.join(value)}"
            for name, value in chosen.items()
        )

    def store(self, params: Tree) -> Tree:
        """Return parameters in the dtype of the policy, as the state holds them."""
        return self._cast({"params": params}, self.params)["params"]

    def apply(self, function: F) -> F:
        """Return `function(params, batch, ...)` so that it computes as a step of the policy does.

        It is meant for predictions and evaluation: parameters and the floating-point entries of the
        batch are cast, and what the function returns is in the dtype of the output. Further
        arguments, such as a model state, are passed on as they are.

            predict = Precision("bfloat16").apply(lambda params, batch: model(params, batch["x"]))
        """

        @functools.wraps(function)
        def computed(params: Tree, *batch_and_more: Any, **options: Any) -> Any:
            params, batch_and_more = self._to_compute(params, batch_and_more)
            return self._to_output(function(params, *batch_and_more, **options))

        return computed  # pyright: ignore[reportReturnType] - it has the signature of `function`

    def loss(self, loss_fn: F) -> F:
        """Return a loss function that computes in the dtype of the policy.

        The model state that it returns has the dtypes of the one that it got.
        """

        @functools.wraps(loss_fn)
        def computed(params: Tree, batch: Tree, rng: jax.Array, *model_state: Tree) -> Any:
            try:
                matching_names({"params": params, "batch": batch}, self.keep, "keep")
            except ValueError as error:
                raise PrecisionError(str(error)) from None
            params, (batch,) = self._to_compute(params, (batch,))
            result = loss_fn(params, batch, rng, *model_state)
            if not model_state or not isinstance(result, tuple) or len(result) != 3:
                return self._to_output(result)
            loss, metrics, after = result
            return (*self._to_output((loss, metrics)), _like(after, model_state[0]))

        return computed  # pyright: ignore[reportReturnType] - it has the signature of `loss_fn`

    def wrap(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return the optimizer of the policy: with its slots, and with loss scaling for float16.

        An optimizer that scales the loss already keeps its own scale.
        """
        if self.slots is not None:
            optimizer = store_slots(optimizer, self.slots)
        return scale_loss_unless_scaled(optimizer) if self.compute == "float16" else optimizer

    def check(
        self,
        params: Tree,
        optimizer: optax.GradientTransformation,
        learning_rate: LearningRate | None,
    ) -> None:
        """Raise PrecisionError if parameters have other dtypes, or cannot hold the learning rate.

        Only shapes and dtypes of the parameters matter.
        """
        for name, leaf in leaves_with_names({"params": params}):
            dtype = jnp.result_type(leaf)
            if (
                jnp.issubdtype(dtype, jnp.floating)
                and dtype != self.params
                and not self._kept(name)
            ):
                raise PrecisionError(
                    f"{name} is {dtype}, and the policy stores parameters in {self.params}: pass "
                    "the same precision to TrainState.create"
                )
        if not is_narrow(self.params) or learning_rate is None:
            return
        rate = _peak(learning_rate)
        smallest = float(jnp.finfo(self.params).eps) / 2
        if abs(rate) < smallest and not keeps_small_updates(optimizer, params):
            raise PrecisionError(
                f"params in {self.params} cannot hold a learning rate of {rate:.3g}: a parameter "
                f"of 1 does not change by less than {smallest:.2g}, and this optimizer rounds to "
                "nearest; keep params in float32, or use an optimizer of ftrain with "
                'rounding="compensated"'
            )

    def check_scale(self, scale: jax.Array | None) -> None:
        """Raise PrecisionError if the state lacks the loss scale that float16 needs."""
        if self.compute == "float16" and scale is None:
            raise PrecisionError(
                "the state has no loss scale, which a step in float16 needs: pass the same "
                "precision to TrainState.create"
            )

    def _to_compute(self, params: Tree, rest: tuple[Any, ...]) -> tuple[Tree, tuple[Any, ...]]:
        """Cast the parameters, and the batch if it is the first of the other arguments."""
        params = self._cast({"params": params}, self.compute)["params"]
        if not rest:
            return params, rest
        batch, *more = rest
        for name, leaf in leaves_with_names({"batch": batch}):
            is_wide = hasattr(leaf, "dtype") and jnp.result_type(leaf) == jnp.float64
            if is_wide and self.compute != "float64" and not self._kept(name):
                raise PrecisionError(
                    f"{name} is float64, and the policy would round it to {self.compute}: convert "
                    f'it to float32 in the input, or keep it as it is with keep=["{name}"]'
                )
        return params, (self._cast({"batch": batch}, self.compute)["batch"], *more)

    def _cast(self, tree: Tree, dtype: DTypeLike) -> Tree:
        named, structure = leaves_with_names(tree), jax.tree.structure(tree)
        cast = [leaf if self._kept(name) else _convert(leaf, dtype) for name, leaf in named]
        return structure.unflatten(cast)

    def _kept(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.keep)

    def _to_output(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: _convert(leaf, self.output), tree)


def count_products(jaxpr: Jaxpr) -> Counter[str]:
    """Return how many matrix products and convolutions a traced function has, by dtype."""
    products = (dot_general_p, conv_general_dilated_p)
    return Counter(
        str(dtype_of(equation.invars[0]))
        for equation in equations_of(jaxpr)
        if equation.primitive in products
    )


def as_precision(precision: Precision | DTypeLike | None) -> Precision | None:
    """Return a policy; a dtype is one that computes in it."""
    if precision is None or isinstance(precision, Precision):
        return precision
    return Precision(precision)


def _checked(name: str, value: Any) -> str:
    """Return the name of a dtype; raise ValueError if it is not one to compute in."""
    try:
        dtype = "" if value is None else jnp.dtype(value).name
    except TypeError:
        dtype = ""
    if dtype not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, got {value!r:.60}")
    settings: Any = jax.config  # its attributes are defined at run time
    if dtype == "float64" and not settings.jax_enable_x64:
        raise ValueError(f"{name} is float64, which JAX only has with JAX_ENABLE_X64=1")
    return dtype


def _convert(leaf: Any, dtype: DTypeLike) -> Any:
    """Cast a floating-point array; anything else is returned as it is."""
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return leaf
    own = jnp.result_type(leaf)
    if not jnp.issubdtype(own, jnp.floating) or own == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    return jnp.asarray(leaf).astype(dtype)


def _like(tree: Tree, before: Tree) -> Tree:
    """Return `tree` with the dtypes of `before`, if it has the same structure."""
    if jax.tree.structure(tree) != jax.tree.structure(before):
        return tree  # the compiled step names the leaf that differs
    return jax.tree.map(lambda new, old: _convert(new, jnp.result_type(old)), tree, before)


def _peak(learning_rate: LearningRate) -> float:
    """Return the highest rate of a schedule, at least of those at its sampled steps."""
    if not callable(learning_rate):
        return float(learning_rate)
    at_once = jax.ensure_compile_time_eval  # a schedule may be looked at while a step is traced
    with at_once():
        rates = [float(np.asarray(learning_rate(step))) for step in _SAMPLED_STEPS]
    return max(rates, key=abs)
