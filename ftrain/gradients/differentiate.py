"""`value_and_grad` with row-sparse gradients, for models that read tables through `lookup`.

The function is traced once. The trace shows which parameters are read only through `lookup`. It is
then evaluated with a zero, a tap, added to the result of each of those lookups, and differentiated
with respect to the taps instead of the tables: the derivative of a tap is the gradient of the rows
that were read.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from ftrain.gradients.rows import Rows, widen
from ftrain.gradients.trace_lookups import Lookups, evaluate, only_looked_up, sites_of
from ftrain.tree import Tree
from ftrain.weighted_mean import value_of


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    merge_rows: bool = True,
) -> Callable[..., tuple[Any, Tree]]:
    """`jax.value_and_grad`, with `Rows` as the gradient of a table read only through `lookup`.

    The `Rows` of a table combine all its lookups. Each row is listed once, with the sum of its
    gradients, so the norm is the norm of the dense gradient. Without `merge_rows`, a row is listed
    as often as it was read, as in the IndexedSlices of TensorFlow 1, which changes the norm. A
    table that is also used in another way, such as an output layer, has an ordinary gradient, like
    every other parameter.

    A function may return a `WeightedMean`: its value is differentiated, and it is returned
    unchanged. Inside `jax.shard_map` the rows are those that the device read. `fun` is traced, as
    by `jax.jit`: Python cannot branch on its values, and it must return arrays and numbers.
    """
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def differentiate(*args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        leaves, structure = jax.tree.flatten(tuple(args[number] for number in chosen))
        leaves = [jnp.asarray(leaf) for leaf in leaves]

        def of_leaves(*leaves: jax.Array) -> Any:
            filled = list(args)
            for number, argument in zip(chosen, structure.unflatten(leaves), strict=True):
                filled[number] = argument
            return fun(*filled, **kwargs)

        traced, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
        if has_aux and not (isinstance(shapes, tuple) and len(shapes) == 2):
            raise TypeError(
                "has_aux requires a function that returns a pair, (value, auxiliary), "
                f"got {shapes!r:.80}"
            )
        structure_out = jax.tree.structure(shapes)
        value, auxiliary, gradients = _differentiate(
            traced, structure_out, leaves, has_aux, merge_rows
        )
        gradients = structure.unflatten(gradients)
        gradients = gradients[0] if isinstance(argnums, int) else gradients
        return (value, auxiliary) if has_aux else value, gradients

    return differentiate


def _differentiate(
    traced: ClosedJaxpr, result: Any, leaves: list[jax.Array], has_aux: bool, merge_rows: bool
) -> tuple[Any, Any, list]:
    jaxpr = traced.jaxpr
    looked_up = only_looked_up(jaxpr)
    owners = {variable: n for n, variable in enumerate(jaxpr.invars) if variable in looked_up}
    sites = list(sites_of(jaxpr, owners))
    others = {n: leaf for n, leaf in enumerate(leaves) if jaxpr.invars[n] not in owners}

    def objective(others: dict[int, jax.Array], taps: list[jax.Array]) -> Any:
        inputs = [others.get(n, leaf) for n, leaf in enumerate(leaves)]
        lookups = Lookups(list(taps))
        outcome = jax.tree.unflatten(
            result, evaluate(jaxpr, traced.consts, inputs, owners, lookups)
        )
        value, auxiliary = outcome if has_aux else (outcome, None)
        return value_of(value), (value, auxiliary, lookups.ids)

    taps = [_make_tap(aval) for _, aval in sites]
    differentiate = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
    (_, (value, auxiliary, ids)), (dense, sparse) = differentiate(others, taps)
    gradients = dict(dense)
    if owners:
        zero = _zero_after(jax.tree.leaves((value, auxiliary)))
        read = [
            (owner, widen(i) + zero, values)
            for (owner, _), i, values in zip(sites, ids, sparse, strict=True)
        ]
        gradients |= {
            n: _collect(
                leaves[n], [(i, values) for owner, i, values in read if owner == n], merge_rows
            )
            for n in owners.values()
        }
    return value, auxiliary, [gradients[n] for n in range(len(leaves))]


def _make_tap(aval: Any) -> jax.Array:
    """Zeros like the result of a lookup; inside `jax.shard_map` each device has its own."""
    zeros = jnp.zeros(aval.shape, aval.dtype)
    axes = tuple(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def _zero_after(results: list[Any]) -> jax.Array:
    """A zero that XLA cannot compute before these scalars.

    Added to the indices, it orders the reads of a table before the writes of its rows. If a
    gradient does not depend on what was read, nothing else orders them, and XLA would copy the
    whole table.
    """
    scalars = [jnp.asarray(result) for result in results if jnp.ndim(result) == 0]
    numbers = [
        scalar.astype(jnp.float32)
        for scalar in scalars
        if jnp.issubdtype(scalar.dtype, jnp.floating)
    ]
    bits = jax.lax.bitcast_convert_type(sum(numbers, jnp.float32(0)), jnp.int32)
    return jax.lax.shift_right_logical(bits & 1, jnp.int32(1))


def _collect(table: jax.Array, read: list[tuple[jax.Array, jax.Array]], merge_rows: bool) -> Rows:
    """Combine all lookups of one table; ids outside of the table are left out."""
    indices = jnp.concatenate([jnp.ravel(ids) for ids, _ in read])
    values = jnp.concatenate([jnp.reshape(values, (-1, *table.shape[1:])) for _, values in read])
    rows = Rows(indices, values)
    if merge_rows:
        return rows.sum_duplicates(table)
    within = rows.is_within(table).reshape(-1, *[1] * (table.ndim - 1))
    return rows.map(lambda values: jnp.where(within, values, 0))
