"""Models of flax nnx."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ftrain.models.library import (
    call_with,
    find_flags,
    import_library,
    library_of,
    set_flags,
    wrong_object,
)
from ftrain.models.model import Model
from ftrain.models.skeleton import Skeleton, Traced, entry_name, is_array, separate
from ftrain.tree import Tree


class _Parts(NamedTuple):
    """What a module has besides its arrays."""

    graphdef: Any
    params: Skeleton
    others: Skeleton
    rngs: Any  # the shapes of the random state: keys and counts
    takes_rngs: bool  # as an argument of its call
    flags: dict[str, bool]


def nnx(model: Any, *, wrt: Any = None, train_argument: str | None = None) -> Model:
    """Return the `Model` of a flax nnx module.

        model = ftrain.models.nnx(Net)  # called as Net(rngs=...)
        model = ftrain.models.nnx(lambda rngs: Net(hidden=64, rngs=rngs))
        model = ftrain.models.nnx(net)  # starts from the values that it has

    Parameters are its `nnx.Param` variables. All other variables, such as `nnx.BatchStat`, and
    arrays are the model state, except intermediates, which are dropped. Random streams, as those of
    `nnx.Dropout`, are not carried: each call draws from its `rng`. `train` chooses the module's
    training or evaluation mode, on a copy, and sets an argument of its call that is named like
    `deterministic` or `train`.

    Args:
      model: a function of `nnx.Rngs`, or a class, that makes the module; or a module, which is not
        changed.
      wrt: which variables are parameters, a filter of nnx, for instance `nnx.LoRAParam`.
      train_argument: the name of the argument of the module's call that is True in training, if it
        has another name.
    """
    library = import_library("flax.nnx", "flax")
    wrt = library.Param if wrt is None else wrt

    def take_apart(module: Any) -> tuple[tuple[Tree, Tree], _Parts]:
        return _take_apart(library, module, wrt, train_argument)

    if isinstance(model, library.Module):
        copy = library.clone(model)
        library.pop(copy, library.Intermediate)
        arrays, parts = take_apart(copy)
        arrays = jax.tree.map(jnp.asarray, arrays)
        return Model(
            lambda rng: arrays,
            lambda *given, **options: _apply(library, parts, wrt, *given, **options),
        )
    if not callable(model) or library_of(model) not in (None, "nnx"):
        raise wrong_object(
            "nnx", model, "a module of flax.nnx, or a function of rngs that makes one"
        )

    def make(rng: jax.Array) -> tuple[tuple[Tree, Tree], _Parts]:
        made = call_with(model, "rngs", library.Rngs(rng))
        if not isinstance(made, library.Module):
            raise wrong_object("nnx", made, "a function that returns a module of flax.nnx")
        library.pop(made, library.Intermediate)
        _mark_arrays(library, made)
        return take_apart(made)

    traced = Traced(make)
    return Model(
        traced, lambda *given, **options: _apply(library, traced.rest, wrt, *given, **options)
    )


def _take_apart(
    library: Any, module: Any, wrt: Any, train_argument: str | None
) -> tuple[tuple[Tree, Tree], _Parts]:
    graphdef, trained, rngs, other = library.split(module, wrt, library.RngState, ...)
    params, params_skeleton = separate(trained, _is_number, name=_name)
    model_state, other_skeleton = separate(other, _is_number, name=_name)
    signature = inspect.signature(type(module).__call__)
    flags, _ = find_flags("nnx", signature, train_argument)
    parts = _Parts(
        graphdef=graphdef,
        params=params_skeleton,
        others=other_skeleton,
        rngs=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), rngs),
        takes_rngs="rngs" in signature.parameters,
        flags=flags,
    )
    return (params, model_state or None), parts


def _apply(
    library: Any,
    parts: _Parts,
    wrt: Any,
    params: Tree,
    model_state: Tree | None,
    *inputs: Any,
    rng: jax.Array | None,
    train: bool,
) -> tuple[Any, Tree | None]:
    module = library.merge(
        parts.graphdef,
        parts.params.fill("params", params),
        _random_state(parts.rngs, rng, train),
        parts.others.fill("model_state", model_state or {}),
    )
    (module.train if train else module.eval)()
    arguments: dict[str, Any] = set_flags(parts.flags, train)
    if parts.takes_rngs and rng is not None:
        arguments["rngs"] = library.Rngs(rng)
    outputs = module(*inputs, **arguments)
    left_out = (wrt, library.RngState, library.Intermediate)
    after = library.state(module, library.Not(library.Any(*left_out)))
    found, _ = separate(after, _is_number, name=_name)
    return outputs, found or None


def _random_state(shapes: Any, rng: jax.Array | None, train: bool) -> Any:
    """Return the state of the random streams: keys of their own from `rng`, and counts of 0."""
    leaves, structure = jax.tree.flatten(shapes)
    if leaves and rng is None and train:
        raise ValueError(
            "the model has random streams, such as dropout's: in training call it with rng=..."
        )
    rng = jax.random.key(0) if rng is None else rng  # a fixed one in evaluation

    def start(number: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)
        own = jax.random.fold_in(rng, number)
        return jax.random.split(own, leaf.shape) if leaf.shape else own

    return jax.tree.unflatten(structure, [start(*each) for each in enumerate(leaves)])


def _mark_arrays(library: Any, module: Any) -> None:
    """Mark plain attributes that are arrays as data; while it traces, nnx does not do so itself."""
    for _, part in library.iter_modules(module):
        for name, value in [*vars(part).items()]:
            if isinstance(value, Tracer):
                setattr(part, name, library.data(value))


def _is_number(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def _name(entry: Any) -> str | None:
    # The value of a variable: its name is that of the variable.
    is_value = isinstance(entry, jax.tree_util.GetAttrKey) and entry.name == "value"
    return None if is_value else entry_name(entry)
