"""Models of equinox."""

import inspect
import re
from typing import Any, NamedTuple

import jax

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
    """What a module and its state have besides their arrays."""

    static: Any
    params: Skeleton
    buffers: Skeleton
    state: Skeleton | None
    takes_key: bool
    flags: dict[str, bool]


def equinox(
    model: Any,
    state: Any = None,
    *,
    vmap: bool = True,
    axis_name: str = "batch",
    train_argument: str | None = None,
) -> Model:
    """Return the `Model` of an equinox module.

        model = ftrain.models.equinox(lambda key: Net(hidden=64, key=key))
        model = ftrain.models.equinox(eqx.nn.make_with_state(Net))  # called with a key
        model = ftrain.models.equinox(net, state)  # starts from the values that they have

    Parameters are the arrays of floating point numbers. Other arrays, and the `eqx.nn.State` of a
    module that has one, are the model state. `train` is set by `eqx.nn.inference_mode`, and by an
    argument of the module's call that is named like `inference`.

    The module is called as `module(*inputs, state, key=key)`, without the state if there is none
    and without the key if its call has no such argument.

    Args:
      model: a function of a key, or a class, that makes the module or `(module, state)`; or a
        module.
      state: the `eqx.nn.State` of a module.
      vmap: whether the module takes one example, so that it is mapped over the batch, with a key
        for each example. False for one that takes whole batches.
      axis_name: the name of the mapped axis, as layers such as `eqx.nn.BatchNorm` need it.
      train_argument: the name of the argument of the module's call that is True in training, if it
        has another name.
    """
    library = import_library("equinox", "equinox")
    batch_axis = axis_name if vmap else None

    def apply_parts(parts: _Parts, *given: Any, **options: Any) -> tuple[Any, Tree | None]:
        return _apply(library, parts, batch_axis, *given, **options)

    if isinstance(model, library.Module):
        made = model if state is None else (model, state)
        arrays, parts = _take_apart(library, made, train_argument)
        return Model(
            lambda rng: arrays, lambda *given, **options: apply_parts(parts, *given, **options)
        )
    if state is not None:
        raise TypeError("ftrain.models.equinox: a state belongs to a module, not to a function")
    if not callable(model) or library_of(model) not in (None, "equinox"):
        raise wrong_object(
            "equinox", model, "a module of equinox, or a function of a key that makes one"
        )
    traced = Traced(lambda rng: _take_apart(library, call_with(model, "key", rng), train_argument))
    return Model(traced, lambda *given, **options: apply_parts(traced.rest, *given, **options))


def _take_apart(
    library: Any, made: Any, train_argument: str | None
) -> tuple[tuple[Tree, Tree], _Parts]:
    module, state = _with_state(library, made)
    arrays, static = library.partition(module, is_array)
    trained, other = library.partition(arrays, library.is_inexact_array)
    params, params_skeleton = separate(trained, is_array)
    buffers, buffers_skeleton = separate(other, is_array)
    signature = inspect.signature(type(module).__call__)
    flags, _ = find_flags("equinox", signature, train_argument)
    if "inference" in flags:
        flags.pop("deterministic", None)  # its old name, with a warning
    values: dict[str, Any] = {}
    state_skeleton = None
    if state is not None:
        values, state_skeleton = _separate_state(state)
    parts = _Parts(
        static=static,
        params=params_skeleton,
        buffers=buffers_skeleton,
        state=state_skeleton,
        takes_key="key" in signature.parameters,
        flags=flags,
    )
    return (params, _joined(buffers, values)), parts


def _with_state(library: Any, made: Any) -> tuple[Any, Any]:
    """Return a module and its state, or None if it has none."""
    is_pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], library.nn.State)
    module, state = made if is_pair else (made, None)
    if not isinstance(module, library.Module):
        raise wrong_object("equinox", module, "a module of equinox, or one and its eqx.nn.State")
    if state is not None:
        return module, state

    def is_index(node: Any) -> bool:
        return isinstance(node, library.nn.StateIndex)

    if not any(map(is_index, jax.tree.leaves(module, is_leaf=is_index))):
        return module, None
    try:
        return library.nn.make_with_state(lambda: module)()
    except ValueError:  # its initial state was taken out of it
        raise ValueError(
            f"{type(module).__name__} has a state: pass it too, ftrain.models.equinox(model, state)"
        ) from None


def _separate_state(state: Any) -> tuple[dict[str, Any], Skeleton]:
    """Return the values of a state, by the places in the module that they belong to."""
    markers = jax.tree.structure(state, is_leaf=lambda node: node is not state).node_data()[1]

    def name(entry: Any) -> str:
        if isinstance(entry, jax.tree_util.FlattenedIndexKey):
            place = re.sub(r"^\w+", "", str(markers[entry.key]))  # without the name of the class
            return re.sub(r"\W+", ".", place).strip(".") or entry_name(entry)
        return entry_name(entry)

    return separate(state, is_array, name=name)


def _joined(buffers: Tree, values: Tree) -> Tree | None:
    found = {"buffers": buffers, "state": values}
    return {name: tree for name, tree in found.items() if tree} or None


def _apply(
    library: Any,
    parts: _Parts,
    batch_axis: str | None,
    params: Tree,
    model_state: Tree | None,
    *inputs: Any,
    rng: jax.Array | None,
    train: bool,
) -> tuple[Any, Tree | None]:
    before = model_state or {}
    buffers = before.get("buffers", {})
    module = library.combine(
        parts.params.fill("params", params),
        parts.buffers.fill("model_state/buffers", buffers),
        parts.static,
    )
    module = library.nn.inference_mode(module, value=not train)
    flags = set_flags(parts.flags, train)

    def call(state: Any, key: jax.Array | None, *inputs: Any) -> tuple[Any, Any]:
        keys = {"key": key} if parts.takes_key else {}
        if state is None:
            return module(*inputs, **keys, **flags), None
        made = module(*inputs, state, **keys, **flags)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise TypeError(
                f"{type(module).__name__} has a state, so its call must return (outputs, state), "
                f"got a {type(made).__name__}"
            )
        return made

    state = None
    if parts.state is not None:
        state = parts.state.fill("model_state/state", before.get("state", {}))
    if batch_axis is None:
        outputs, state = call(state, rng, *inputs)
    else:
        keys = None if rng is None else jax.random.split(rng, _examples(inputs))
        axes = (None, None if keys is None else 0, *(0 for _ in inputs))
        outputs, state = jax.vmap(call, in_axes=axes, out_axes=(0, None), axis_name=batch_axis)(
            state, keys, *inputs
        )
    values = {} if state is None else _separate_state(state)[0]
    return outputs, _joined(buffers, values)


def _examples(inputs: tuple[Any, ...]) -> int:
    leaves = jax.tree.leaves(inputs)
    if not leaves:
        raise TypeError("the model has no inputs: pass vmap=False to ftrain.models.equinox")
    return leaves[0].shape[0]
