"""Models of flax linen."""

import inspect
from typing import Any

import jax

from ftrain.models.library import (
    as_arrays,
    check_inputs,
    find_flags,
    import_library,
    set_flags,
    wrong_object,
)
from ftrain.models.model import Model
from ftrain.tree import Tree

# Collections that hold what one call computes, and nothing that the next one needs.
_DROPPED = ("intermediates", "perturbations")


def linen(module: Any, *example_inputs: Any, train_argument: str | None = None) -> Model:
    """Return the `Model` of a flax linen module.

        model = ftrain.models.linen(Net(hidden=64), batch["image"][:1])

    Parameters are the collection "params". The other collections, such as "batch_stats", are the
    model state, except "intermediates" and "perturbations", which are dropped. Each call draws all
    random numbers, of dropout and of any other name, from its `rng`.

    Args:
      example_inputs: inputs for `init`: arrays, or their shapes as `jax.ShapeDtypeStruct`.
      train_argument: the argument of the module's call, or the field of the module, that is True in
        training. Found if it is named `train`, `training` or `is_training`; or `deterministic`,
        `use_running_average` or `inference`, which are False in training.
    """
    library = import_library("flax.linen", "flax")
    if not isinstance(module, library.Module):
        raise wrong_object("linen", module, "a module of flax.linen")
    fields = {name: getattr(module, name, None) for name in type(module).__dataclass_fields__}
    signature = inspect.signature(module.__call__)
    arguments, changed = find_flags("linen", signature, train_argument, fields=fields)
    check_inputs("linen", signature, example_inputs, arguments)

    def in_mode(train: bool) -> tuple[Any, dict[str, bool]]:
        chosen = module.clone(**set_flags(changed, train)) if changed else module
        return chosen, set_flags(arguments, train)

    @jax.jit
    def init(rng: jax.Array) -> tuple[Tree, Tree | None]:
        chosen, flags = in_mode(True)  # some layers exist in training only
        variables = chosen.init(rng, *as_arrays(example_inputs), **flags)
        variables = library.meta.unbox(variables)
        return variables.get("params", {}), _carried(variables) or None

    def apply(
        params: Tree,
        model_state: Tree | None,
        *inputs: Any,
        rng: jax.Array | None,
        train: bool,
    ) -> tuple[Any, Tree | None]:
        chosen, flags = in_mode(train)
        outputs, after = chosen.apply(
            {"params": params, **(model_state or {})},
            *inputs,
            rngs=rng,  # linen draws from it for every name
            mutable=[*(model_state or {})],
            **flags,
        )
        return outputs, _carried(after) or None

    return Model(init, apply)


def _carried(variables: Any) -> dict[str, Any]:
    return {
        name: collection
        for name, collection in variables.items()
        if name != "params" and name not in _DROPPED
    }
