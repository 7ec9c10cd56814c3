"""A model: two pure functions, whichever library it is written in."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ftrain.tree import Tree


class Model:
    """Two pure functions: `init` makes the variables of a model, `apply` computes its outputs.

        model = ftrain.models.Model(init, apply)  # or ftrain.models.nnx(Net), ...

        def loss_fn(params, batch, rng, model_state):
            logits, model_state = model.apply(
                params, model_state, batch["image"], rng=rng, train=True
            )
            return cross_entropy(logits, batch["label"]), {}, model_state

        state = ftrain.train(loss_fn, model, data, optimizer=optimizer)

    `model_state` is what changes without a gradient, such as batch statistics. It is None for a
    model without; then the loss has no fourth argument and returns no model state.

    A model unpacks into `params, model_state, apply`.

    Args:
      init: `init(rng) -> (params, model_state)`, trees of arrays.
      apply: `apply(params, model_state, *inputs, rng, train) -> (outputs, model_state)`. `rng` is a
        key, or None if nothing random is to be drawn; `train` chooses between training, with
        dropout and statistics of the batch, and evaluation.
    """

    def __init__(self, init: Callable[..., Any], apply: Callable[..., Any]):
        for name, function in (("init", init), ("apply", apply)):
            if not callable(function):
                raise TypeError(f"{name} of a Model must be a function, got {function!r:.60}")
        self._init = init
        self._apply = apply

    def init(self, rng: jax.Array) -> tuple[Tree, Tree | None]:
        """Return the parameters and the model state before the first step."""
        made = self._init(rng)
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(
                "init of a Model must return (params, model_state), with None as the model state "
                f"of a model without, got {_describe(made)}"
            )
        return made

    def apply(
        self,
        params: Tree,
        model_state: Tree | None,
        *inputs: Any,
        rng: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[Any, Tree | None]:
        """Return the outputs, and the model state after them."""
        made = self._apply(params, model_state, *inputs, rng=rng, train=train)
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(
                f"apply of a Model must return (outputs, model_state), got {_describe(made)}"
            )
        return made

    @property
    def params(self) -> Tree:
        """The initial parameters: those of the object that was given, or else of key 0."""
        return self._initial[0]

    @property
    def model_state(self) -> Tree | None:
        """The initial model state, or None."""
        return self._initial[1]

    @functools.cached_property
    def _initial(self) -> tuple[Tree, Tree | None]:
        return self.init(jax.random.key(0))

    def __iter__(self) -> Iterator[Any]:
        return iter((self.params, self.model_state, self.apply))


def _describe(made: Any) -> str:
    return f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
