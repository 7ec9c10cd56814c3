"""`value_and_grad` with row-sparse gradients, for models that read tables through `lookup`.

The function is traced once. The trace shows which parameters are read only through `lookup`. It is
then evaluated with a zero, a tap, added to the result of each of those lookups, and differentiated
with respect to the taps instead of the tables: the derivative of a tap is the gradient of the rows
that were read.

A cast of a table before its lookup, as a precision policy has it, is done to the rows that are
read: the table itself is never converted.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import convert_element_type_p, jit_p, remat_p

from ftrain.gradients.lookup import gather, lookup_p
from ftrain.gradients.means import value_of
from ftrain.gradients.rows import Rows, wide_indices
from ftrain.jaxpr import apply_equation, dtype_of, interpret
from ftrain.tree import Tree


class _Table(NamedTuple):
    """What a variable of a trace stands for: a table, cast to one dtype after the other."""

    number: int
    casts: tuple[jnp.dtype, ...] = ()


Tables = Mapping[Var, _Table]  # the variables of a trace that stand for tables


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
        result = (value, auxiliary) if has_aux else value
        return result, gradients

    return differentiate


def _differentiate(
    traced: ClosedJaxpr,
    result: Any,
    leaves: list[jax.Array],
    has_aux: bool,
    merge_rows: bool,
) -> tuple[Tree, Tree, list[jax.Array | Rows]]:
    """Return the value, the auxiliary result and the gradient of each leaf.

    `result` is the tree structure of what the traced function returns.
    """
    jaxpr = traced.jaxpr
    looked_up = _only_looked_up(jaxpr)
    tables = {
        variable: _Table(n) for n, variable in enumerate(jaxpr.invars) if variable in looked_up
    }
    sites = list(_sites_of(jaxpr, tables))
    others = {n: leaf for n, leaf in enumerate(leaves) if jaxpr.invars[n] not in tables}

    def objective(
        others: dict[int, jax.Array], taps: list[jax.Array]
    ) -> tuple[jax.Array, tuple[Tree, Tree, list[jax.Array]]]:
        inputs = [others.get(n, leaf) for n, leaf in enumerate(leaves)]
        lookups = _Lookups(list(taps))
        outcome = jax.tree.unflatten(
            result, _evaluate(jaxpr, traced.consts, inputs, tables, lookups)
        )
        value, auxiliary = outcome if has_aux else (outcome, None)
        return value_of(value), (value, auxiliary, lookups.ids)

    taps = [_make_tap(aval, leaves[number].dtype) for number, aval in sites]
    differentiate = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
    (_, (value, auxiliary, ids)), (dense, sparse) = differentiate(others, taps)
    gradients = dict(dense)
    if tables:
        zero = _zero_after(jax.tree.leaves((value, auxiliary)))
        read = [
            (number, wide_indices(i) + zero, values)
            for (number, _), i, values in zip(sites, ids, sparse, strict=True)
        ]
        gradients |= {
            n: _collect(
                leaves[n], [(i, values) for number, i, values in read if number == n], merge_rows
            )
            for n in {table.number for table in tables.values()}
        }
    return value, auxiliary, [gradients[n] for n in range(len(leaves))]


def _make_tap(aval: ShapedArray, dtype: jnp.dtype) -> jax.Array:
    """Zeros like the rows of a lookup, in the dtype of the table.

    Inside `jax.shard_map` each device has its own.
    """
    zeros = jnp.zeros(aval.shape, dtype)
    axes = tuple(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def _zero_after(results: list[jax.Array]) -> jax.Array:
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


@dataclasses.dataclass
class _Lookups:
    """The taps still to be added, and the ids looked up so far, in the order of the lookups."""

    taps: list[jax.Array]
    ids: list[jax.Array] = dataclasses.field(default_factory=list)

    def perform(
        self, table: jax.Array, ids: jax.Array, casts: Sequence[jnp.dtype], **options: Any
    ) -> jax.Array:
        """Look up `ids`, record them, add the next tap, and cast the rows as the table was."""
        self.ids.append(ids)
        rows = gather(table, ids, **options) + self.taps.pop(0)
        for dtype in casts:
            rows = rows.astype(dtype)
        return rows


def _only_looked_up(jaxpr: Jaxpr) -> set[Var]:
    """Return the variables that are used only as tables of lookups, also after a cast."""
    tables: set[Var] = set()
    others = {variable for variable in jaxpr.outvars if not isinstance(variable, Literal)}
    for equation in reversed(jaxpr.eqns):  # the uses of a cast come before the cast itself
        inner = _called_function(equation)
        inner_tables = _only_looked_up(inner) if inner is not None else set()
        for position, operand in enumerate(equation.invars):
            if not isinstance(operand, Literal):
                is_looked_up = equation.primitive is lookup_p and position == 0
                is_passed_on = inner is not None and inner.invars[position] in inner_tables
                result = equation.outvars[0] if _is_cast(equation) else None
                is_cast = result in tables and result not in others
                is_table = is_looked_up or is_passed_on or is_cast
                (tables if is_table else others).add(operand)
    return tables - others


def _with_casts(jaxpr: Jaxpr, tables: Tables) -> Tables:
    """Return the variables that stand for tables, with those of casts of them."""
    known = dict(tables)
    for equation in jaxpr.eqns:
        operand = equation.invars[0] if _is_cast(equation) else None
        table = known.get(operand) if isinstance(operand, Var) else None
        if table is not None:
            dtype = dtype_of(equation.outvars[0])
            known[equation.outvars[0]] = table._replace(casts=(*table.casts, dtype))
    return known


def _is_cast(equation: JaxprEqn) -> bool:
    """True for a cast of a variable from one floating dtype to another."""
    if equation.primitive is not convert_element_type_p or isinstance(equation.invars[0], Literal):
        return False
    dtypes = (dtype_of(equation.invars[0]), dtype_of(equation.outvars[0]))
    return all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)


def _sites_of(jaxpr: Jaxpr, tables: Tables) -> Iterator[tuple[int, Any]]:
    """Yield the table's number and the result's type of each lookup, in the order of evaluation."""
    tables = _with_casts(jaxpr, tables)
    for equation in jaxpr.eqns:
        table = _looked_up_table(equation, tables)
        if table is not None:
            yield table.number, equation.outvars[0].aval
        elif (inner := _called_function(equation)) is not None:
            yield from _sites_of(inner, _passed_on(equation, inner, tables))


def _evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    tables: Tables,
    lookups: _Lookups,
) -> list[jax.Array]:
    """Evaluate a traced function, with taps added to the lookups of the tables in `tables`."""
    if not tables:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*inputs)
    tables = _with_casts(jaxpr, tables)

    def evaluate(equation: JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
        table = _looked_up_table(equation, tables)
        if table is not None:
            return [lookups.perform(*operands, casts=table.casts, **equation.params)]
        if _is_cast(equation) and equation.outvars[0] in tables:
            return operands  # the rows are cast instead
        inner = _called_function(equation)
        passed_on = {} if inner is None else _passed_on(equation, inner, tables)
        if inner is None or not passed_on:
            return apply_equation(equation, operands)
        if equation.primitive is jit_p:
            return _evaluate(inner, equation.params["jaxpr"].consts, operands, passed_on, lookups)
        return _evaluate_checkpointed(equation, inner, operands, passed_on, lookups)

    return interpret(jaxpr, consts, inputs, evaluate)


def _evaluate_checkpointed(
    equation: JaxprEqn, inner: Jaxpr, operands: list[jax.Array], tables: Tables, lookups: _Lookups
) -> list[jax.Array]:
    """Evaluate a `jax.checkpoint` call as one, so that the backward pass recomputes it."""

    @functools.partial(
        jax.checkpoint, policy=equation.params["policy"], prevent_cse=equation.params["prevent_cse"]
    )
    def body(
        operands: list[jax.Array], taps: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        own = _Lookups(list(taps))
        return _evaluate(inner, (), operands, tables, own), own.ids

    count = len(list(_sites_of(inner, tables)))
    taps = lookups.taps[:count]
    del lookups.taps[:count]
    outputs, ids = body(operands, taps)
    lookups.ids.extend(ids)
    return outputs


def _called_function(equation: JaxprEqn) -> Jaxpr | None:
    """The function that an equation calls; only jit and checkpoint are searched for lookups."""
    if equation.primitive is jit_p:
        return equation.params["jaxpr"].jaxpr
    return equation.params["jaxpr"] if equation.primitive is remat_p else None


def _passed_on(equation: JaxprEqn, inner: Jaxpr, tables: Tables) -> dict[Var, _Table]:
    """The tables by the variables of the called function."""
    pairs = zip(inner.invars, equation.invars, strict=True)
    return {
        own: tables[given]
        for own, given in pairs
        if not isinstance(given, Literal) and given in tables
    }


def _looked_up_table(equation: JaxprEqn, tables: Tables) -> _Table | None:
    """The table that an equation looks up; None for every other equation."""
    table = equation.invars[0] if equation.primitive is lookup_p else None
    return None if table is None or isinstance(table, Literal) else tables.get(table)
