"""Lookup: read rows of a table by id, as an operation that `value_and_grad` recognises."""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

OutOfRange = Literal["error", "drop"]


def lookup(
    table: jax.Array, ids: jax.typing.ArrayLike, *, out_of_range: OutOfRange = "error"
) -> jax.Array:
    """`table[ids]`: the rows with these ids, in the shape `ids.shape + table.shape[1:]`.

    It is `jax.numpy.take` along the first axis, except that `ftrain.gradients.value_and_grad`
    returns `Rows` as the gradient of the table. Pass the parameter itself, or a cast of it: then
    the rows that are read are cast, not the table. Any other value computed from a parameter has an
    ordinary, correct gradient, and so has a table inside `jax.lax.scan` or `cond`.

    Args:
      out_of_range: for an id below 0 or beyond the table, "error" raises IndexError if the ids
        are known; compiled code cannot raise and returns rows of NaN, at which a run stops, or
        which a guard skips. "drop" returns zeros and has no gradient: use it for padding.
    """
    if out_of_range not in ("error", "drop"):
        raise ValueError(f'out_of_range must be "error" or "drop", got {out_of_range!r}')
    if not isinstance(table, (jax.Array, np.ndarray)):
        raise TypeError(f"lookup needs a table, an array of rows, got {type(table).__name__}")
    if table.ndim < 1:
        raise ValueError("lookup needs a table of rows, got a scalar")
    if not isinstance(ids, jax.Array):
        ids = np.asarray(ids, dtype=None if np.size(ids) else np.int32)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids must be integers, got {ids.dtype}")
    if out_of_range == "error" and not isinstance(ids, core.Tracer):
        _check_range(np.asarray(ids), table.shape[0])
    elif out_of_range == "error" and not jnp.issubdtype(table.dtype, jnp.inexact):
        raise TypeError(
            "compiled code marks ids out of range by rows of NaN, "
            f"and a table of {table.dtype} has none; "
            'pass out_of_range="drop", which reads zeros for them'
        )
    if isinstance(ids, np.ndarray):
        # jax would truncate 64-bit ids to 32 bits, and so to other rows.
        ids = np.where((ids < 0) | (ids >= table.shape[0]), -1, ids).astype(np.int32)
    return lookup_p.bind(jnp.asarray(table), jnp.asarray(ids), out_of_range=out_of_range)


def gather(table: jax.Array, ids: jax.Array, *, out_of_range: OutOfRange) -> jax.Array:
    """Compute `lookup` by ordinary operations."""
    if table.shape[0] == 0:  # XLA cannot gather from an empty table; every id is out of range
        table = jnp.zeros((1, *table.shape[1:]), table.dtype)
        ids = jnp.full_like(ids, -1)
    fill = jnp.nan if out_of_range == "error" and jnp.issubdtype(table.dtype, jnp.inexact) else 0
    return table.at[ids].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def _check_range(ids: np.ndarray, rows: int) -> None:
    wrong = ids[(ids < 0) | (ids >= rows)]
    if wrong.size:
        raise IndexError(
            f"id {wrong[0]} is not in a table of {rows} rows; "
            'out_of_range="drop" reads zeros for it'
        )


# A primitive, because a trace does not distinguish a plain gather from any other indexing.
lookup_p = Primitive("ftrain_lookup")
lookup_p.def_impl(jax.jit(gather, static_argnames="out_of_range"))


@lookup_p.def_abstract_eval
def _type_of_result(
    table: core.ShapedArray, ids: core.ShapedArray, *, out_of_range: OutOfRange
) -> core.AbstractValue:
    # Trace a gather: its type includes the axes of a mesh over which the result varies.
    function = functools.partial(gather, out_of_range=out_of_range)
    return jax.make_jaxpr(function)(table, ids).out_avals[0]


def _differentiate(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], *, out_of_range: OutOfRange
) -> tuple[jax.Array, jax.Array]:
    table, ids = primals
    function = functools.partial(gather, ids=ids, out_of_range=out_of_range)
    return jax.jvp(function, (table,), (tangents[0],))


def _batch(
    operands: Sequence[jax.Array], axes: Sequence[int | None], *, out_of_range: OutOfRange
) -> tuple[jax.Array, int]:
    """Return the results of a batch, and the axis of the batch in them."""
    table, ids = operands
    table_axis, ids_axis = axes
    if table_axis is None:  # one table for the whole batch: look up more ids
        assert ids_axis is not None
        more_ids = jnp.moveaxis(ids, ids_axis, 0)
        return lookup_p.bind(table, more_ids, out_of_range=out_of_range), 0
    function = functools.partial(gather, out_of_range=out_of_range)
    return jax.vmap(function, in_axes=(table_axis, ids_axis))(table, ids), 0


ad.primitive_jvps[lookup_p] = _differentiate
batching.primitive_batchers[lookup_p] = _batch
mlir.register_lowering(lookup_p, mlir.lower_fun(gather, multiple_results=False))
