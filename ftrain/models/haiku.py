"""Models of haiku."""

import functools
import inspect
from typing import Any

import jax

from ftrain.models.library import (
    as_arrays,
    check_inputs,
    find_flags,
    import_library,
    library_of,
    set_flags,
    wrong_object,
)
from ftrain.models.model import Model
from ftrain.tree import Tree, named_leaves


def haiku(function: Any, *example_inputs: Any, train_argument: str | None = None) -> Model:
    """Return the `Model` of a function that uses haiku modules, transformed or not.

        def forward(image, is_training):
            return Net()(image, is_training)

        model = ftrain.models.haiku(forward, batch["image"][:1])

    The model state is haiku's state. Each call draws all random numbers from its `rng`.

    Args:
      function: a function, or the result of `hk.transform` or `hk.transform_with_state`.
      example_inputs: inputs for `init`: arrays, or their shapes as `jax.ShapeDtypeStruct`.
      train_argument: the argument of the function that is True in training. Found if it is named
        `train`, `training` or `is_training`; or `deterministic`, `use_running_average` or
        `inference`, which are False in training.
    """
    library = import_library("haiku", "haiku")
    has_state = not isinstance(function, library.Transformed)
    if isinstance(function, (library.Transformed, library.TransformedWithState)):
        transformed = function
    elif isinstance(function, type) or not callable(function) or library_of(function):
        raise wrong_object(
            "haiku", function, "a function, or one that hk.transform has transformed"
        )
    else:
        transformed = library.transform_with_state(function)
    signature = inspect.signature(transformed.init)
    inputs_only = signature.replace(parameters=[*signature.parameters.values()][1:])  # not the rng
    flags, _ = find_flags("haiku", inputs_only, train_argument)
    check_inputs("haiku", inputs_only, example_inputs, flags)

    @jax.jit
    def init(rng: jax.Array) -> tuple[Tree, Tree | None]:
        made = transformed.init(rng, *as_arrays(example_inputs), **set_flags(flags, True))
        params, state = made if has_state else (made, {})
        return params, state or None

    @functools.cache
    def shapes() -> tuple[Tree, Tree | None]:
        return jax.eval_shape(init, jax.random.key(0))

    def apply(
        params: Tree,
        model_state: Tree | None,
        *inputs: Any,
        rng: jax.Array | None,
        train: bool,
    ) -> tuple[Any, Tree | None]:
        arguments = set_flags(flags, train)
        params, model_state = _like_made(shapes(), (params, model_state))
        if not has_state:
            return transformed.apply(params, rng, *inputs, **arguments), None
        outputs, after = transformed.apply(params, model_state or {}, rng, *inputs, **arguments)
        return outputs, after or None

    return Model(init, apply)


def _like_made(made: Tree, tree: Tree) -> Tree:
    """Return a tree in haiku's own structure.

    The names of haiku's modules have slashes. In trees that were put together from the names of
    leaves, such as those of a checkpoint, they have become dicts in dicts.
    """
    structure = jax.tree.structure(made)
    if jax.tree.structure(tree) == structure:
        return tree
    leaves = named_leaves(tree)
    names = named_leaves(made)
    if leaves.keys() != names.keys():
        return tree  # haiku names what is missing
    return jax.tree.unflatten(structure, [leaves[name] for name in names])
