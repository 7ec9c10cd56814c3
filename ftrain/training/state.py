"""The state of a run: everything that a step reads and writes, as one frozen pytree."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftrain.averages import start_averages
from ftrain.cluster import ProcessMismatchError, Sharding
from ftrain.models import Model
from ftrain.models.library import library_of
from ftrain.training.arguments import check_arrays, check_optimizer, describe_state
from ftrain.training.precision import Precision, as_precision
from ftrain.tree import Tree

S = TypeVar("S")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes. `TrainState.create` makes the first one."""

    step: jax.Array  # the number of steps taken
    params: Tree
    opt_state: Tree
    averages: Tree | None  # moving averages of parameters, at least in float32
    model_state: Tree | None  # other variables of the model, such as batch statistics
    rng: jax.Array  # never changes: step n uses fold_in(rng, n), so a resumed run repeats itself

    @classmethod
    def create(
        cls,
        params: Tree | Model,
        optimizer: optax.GradientTransformation,
        *,
        seed: int | jax.Array = 0,
        averages: bool | str | Sequence[str] = False,
        model_state: Tree | None = None,
        precision: Precision | str | None = None,
    ) -> Self:
        """Return the state before the first step.

        Args:
          params: a tree of arrays, or an `ftrain.models.Model`, which has its own model state.
          seed: an integer, or a key of `jax.random.key`. A model is initialised with a key of its
            own, made from it.
          averages: whether the step keeps moving averages of the parameters: of all of them, or of
            those whose full names match one of these regular expressions, `"encoder/.*"`. The
            others are None.
          precision: that of the step: parameters and slots get its dtypes.
        """
        check_optimizer(optimizer)
        rng = jax.random.key(int(seed)) if isinstance(seed, (int, np.integer)) else seed
        if isinstance(params, Model):
            if model_state is not None:
                raise TypeError(
                    "a Model has its own model_state: pass `model.params` to use another"
                )
            init_rng, rng = jax.random.split(rng)
            params, model_state = params.init(init_rng)
        check_arrays("params", params)
        check_arrays("model_state", model_state)
        params, model_state = jax.tree.map(_settle, (params, model_state))
        policy = as_precision(precision)
        if policy is not None:
            params = policy.store(params)
            optimizer = policy.wrap(optimizer)
        state = cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            averages=_start_averages(params, averages),
            model_state=model_state,
            rng=rng,
        )
        return _unshare(state)

    def replace(self, **changes: Tree) -> Self:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Initial:
    """Makes the initial state of a run, with what else is known about it.

    With `like`, which returns the shapes of the state with their shardings, a resumed run does not
    make the state; then each call must return new arrays, because the run overwrites them.
    """

    make: Callable[[], TrainState]
    like: Callable[[], TrainState] | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for the run's record

    def __call__(self) -> TrainState:
        return self.make()


def place(
    initial: TrainState | Callable[[], TrainState],
    mesh: Mesh | None = None,
    sharding: Sharding | None = None,
) -> TrainState:
    """Put a state on the devices of the mesh: replicated, or sharded by `sharding`."""
    # Some models are callable too: they are described below.
    state = initial() if callable(initial) and library_of(initial) is None else initial
    if not isinstance(state, TrainState):
        raise TypeError(
            f"a run needs a TrainState, or a function that makes one, got {describe_state(state)}"
        )
    if mesh is None or mesh.size == 1:
        return state
    if sharding is None:
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: put_leaf(leaf, everywhere), state)
    return jax.tree.map(put_leaf, state, sharding.shardings(state, mesh))


def put_leaf(leaf: jax.Array, where: NamedSharding) -> jax.Array:
    """Put a leaf on devices; JAX puts the data of a random key, but no key, on other processes."""
    try:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or where.is_fully_addressable:
            return jax.device_put(leaf, where)
        if leaf.sharding == where:
            return leaf
        numbers = jax.device_put(jax.random.key_data(leaf), where)
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(leaf))
    except AssertionError as error:  # JAX raises it if a replicated value differs between processes
        raise ProcessMismatchError(
            "the initial state differs between processes: use one seed for all, and no parameters "
            f"that depend on the process ({' '.join(str(error).split())[-100:]})"
        ) from None


def _start_averages(params: Tree, averages: bool | str | Sequence[str]) -> Tree | None:
    """Return the first averages, at least in float32: half precision would freeze slow ones."""
    if averages is False:
        return None
    return start_averages(params, () if averages is True else averages)


def _unshare(state: S) -> S:
    """Copy arrays that occur twice: a compiled step reuses the memory of each leaf, once."""
    seen: set[int] = set()

    def copy_if_seen(leaf: jax.Array) -> jax.Array:
        is_new = id(leaf) not in seen
        seen.add(id(leaf))
        return leaf if is_new else jnp.copy(leaf)

    return jax.tree.map(copy_if_seen, state)


def _settle(leaf: jax.typing.ArrayLike) -> jax.Array:
    # Python scalars are weakly typed, so the second step would be compiled again.
    return jnp.array(leaf, dtype=jnp.result_type(leaf), copy=False)
