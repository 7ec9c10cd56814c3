"""Derivatives that stay rows: `value_and_grad` for models that read tables through `lookup`.

A function is traced once. The trace tells which parameters are read through `lookup` and in no other way. It is then
evaluated with a zero, a tap, added to the outcome of each of those lookups, and differentiated with respect to the
taps instead of the tables: the derivative of a tap is the gradient of the rows that were read.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.extend.core.primitives import jit_p, remat_p

from ftrain.gradients.lookup import gather, lookup_p
from ftrain.gradients.rows import Rows, widen
from ftrain.tree import Tree


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Tree]]:
    """`jax.value_and_grad`, but the gradient of a table that is read through `lookup` alone is `Rows`.

    The rows of all lookups of a table are together, each named once, with what was read twice summed. A table that
    is also used in another way, say as an output layer, gets an ordinary gradient, as every other parameter does.
    Inside of `jax.shard_map` the rows are those that the device read.
    `fun` is traced, as by `jax.jit`: Python cannot branch on values in it, and what it returns are arrays and numbers.
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
            raise TypeError(f"has_aux is for a function that returns a pair, (value, auxiliary), not {shapes!r:.80}")
        value, auxiliary, gradients = _differentiate(traced, jax.tree.structure(shapes), leaves, has_aux)
        wanted = structure.unflatten(gradients)
        return (value, auxiliary) if has_aux else value, wanted[0] if isinstance(argnums, int) else wanted

    return differentiate


def _differentiate(traced: ClosedJaxpr, result: Any, leaves: list[jax.Array], has_aux: bool) -> tuple[Any, Any, list]:
    jaxpr = traced.jaxpr
    looked_up = _only_looked_up(jaxpr)
    owners = {variable: n for n, variable in enumerate(jaxpr.invars) if variable in looked_up}
    sites = list(_sites(jaxpr, owners))
    others = {n: leaf for n, leaf in enumerate(leaves) if jaxpr.invars[n] not in owners}

    def objective(others: dict[int, jax.Array], taps: list[jax.Array]) -> Any:
        inputs = [others.get(n, leaf) for n, leaf in enumerate(leaves)]
        lookups = _Lookups(list(taps))
        outcome = jax.tree.unflatten(result, _evaluate(jaxpr, traced.consts, inputs, owners, lookups))
        value, auxiliary = outcome if has_aux else (outcome, None)
        return value, (auxiliary, lookups.ids)

    taps = [_make_tap(aval) for _, aval in sites]
    differentiate = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
    (value, (auxiliary, ids)), (dense, sparse) = differentiate(others, taps)
    gradients = dict(dense)
    if owners:
        zero = _zero_after([value, *jax.tree.leaves(auxiliary)])
        read = [(owner, widen(i) + zero, values) for (owner, _), i, values in zip(sites, ids, sparse, strict=True)]
        gradients |= {
            n: _collect(leaves[n], [(i, values) for owner, i, values in read if owner == n]) for n in owners.values()
        }
    return value, auxiliary, [gradients[n] for n in range(len(leaves))]


def _make_tap(aval: Any) -> jax.Array:
    """Zeros like the outcome of a lookup; inside of `jax.shard_map` each device has its own, as it has its own ids."""
    zeros = jnp.zeros(aval.shape, aval.dtype)
    axes = tuple(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def _zero_after(results: list[Any]) -> jax.Array:
    """A zero that XLA cannot know before it has computed these scalars.

    Added to indices it puts the reading of a table before the writing of its rows. Where a gradient does not depend
    on what was read, nothing else does, and XLA would copy the whole table to be safe.
    """
    scalars = [jnp.asarray(result) for result in results if jnp.ndim(result) == 0]
    numbers = [scalar.astype(jnp.float32) for scalar in scalars if jnp.issubdtype(scalar.dtype, jnp.floating)]
    bits = jax.lax.bitcast_convert_type(sum(numbers, jnp.float32(0)), jnp.int32)
    return jax.lax.shift_right_logical(bits & 1, jnp.int32(1))


def _collect(table: jax.Array, read: list[tuple[jax.Array, jax.Array]]) -> Rows:
    """All that was read of one table, as one `Rows`; what was read outside of it is left out."""
    indices = jnp.concatenate([jnp.ravel(ids) for ids, _ in read])
    values = jnp.concatenate([jnp.reshape(values, (-1, *table.shape[1:])) for _, values in read])
    return Rows(indices, values).sum_duplicates(table)


@dataclasses.dataclass
class _Lookups:
    """The taps still to be added, and the ids looked up so far; both in the order of the lookups."""

    taps: list[jax.Array]
    ids: list[jax.Array] = dataclasses.field(default_factory=list)

    def perform(self, table: jax.Array, ids: jax.Array, **options: Any) -> jax.Array:
        self.ids.append(ids)
        return gather(table, ids, **options) + self.taps.pop(0)


# Variables that stand for tables, each with the number of its table.
_Owners = Mapping[Any, int]


def _only_looked_up(jaxpr: Jaxpr) -> set[Any]:
    """The variables that are tables of lookups and are used in no other way."""
    tables, others = set(), {variable for variable in jaxpr.outvars if not isinstance(variable, Literal)}
    for equation in jaxpr.eqns:
        inner = _inner(equation)
        inner_tables = _only_looked_up(inner) if inner is not None else set()
        for position, operand in enumerate(equation.invars):
            if not isinstance(operand, Literal):
                is_looked_up = equation.primitive is lookup_p and position == 0
                is_passed_on = inner is not None and inner.invars[position] in inner_tables
                (tables if is_looked_up or is_passed_on else others).add(operand)
    return tables - others


def _sites(jaxpr: Jaxpr, owners: _Owners) -> Iterator[tuple[int, Any]]:
    """For each lookup of an owner's table, the owner and the shape of the outcome, in the order of evaluation."""
    for equation in jaxpr.eqns:
        if equation.primitive is lookup_p and _owner(equation.invars[0], owners) is not None:
            yield owners[equation.invars[0]], equation.outvars[0].aval
        elif (inner := _inner(equation)) is not None:
            yield from _sites(inner, _passed_on(equation, inner, owners))


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], owners: _Owners, lookups: _Lookups) -> list:
    """The outputs of a traced function, with taps added to the lookups of the owners' tables."""
    if not owners:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*inputs)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        values.update(zip(equation.outvars, _perform(equation, operands, owners, lookups), strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _perform(equation: JaxprEqn, operands: list[Any], owners: _Owners, lookups: _Lookups) -> Sequence[Any]:
    if equation.primitive is lookup_p and _owner(equation.invars[0], owners) is not None:
        return [lookups.perform(*operands, **equation.params)]
    inner = _inner(equation)
    if inner is not None and (passed_on := _passed_on(equation, inner, owners)):
        if equation.primitive is jit_p:
            return _evaluate(inner, equation.params["jaxpr"].consts, operands, passed_on, lookups)
        return _evaluate_again_backwards(equation, inner, operands, passed_on, lookups)
    return _apply(equation, operands)


def _apply(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """An equation evaluated as it stands: jax runs it as a function of one line."""
    invars, inputs = [], []
    for variable, operand in zip(equation.invars, operands, strict=True):
        if not isinstance(variable, Literal) and variable not in invars:
            invars.append(variable)
            inputs.append(operand)
    names = DebugInfo("value_and_grad", str(equation.primitive), ("",) * len(invars), ("",) * len(equation.outvars))
    line = Jaxpr((), invars, equation.outvars, [equation], equation.effects, names)
    return jaxpr_as_fun(ClosedJaxpr(line, ()))(*inputs)


def _evaluate_again_backwards(
    equation: JaxprEqn, inner: Jaxpr, operands: list[Any], owners: _Owners, lookups: _Lookups
) -> list[Any]:
    """A call under `jax.checkpoint`, kept as one: the backward pass computes it anew."""

    @functools.partial(jax.checkpoint, policy=equation.params["policy"], prevent_cse=equation.params["prevent_cse"])
    def body(operands: list[Any], taps: list[jax.Array]) -> tuple[list[Any], list[jax.Array]]:
        own = _Lookups(list(taps))
        return _evaluate(inner, (), operands, owners, own), own.ids

    count = len(list(_sites(inner, owners)))
    taps, lookups.taps[:] = lookups.taps[:count], lookups.taps[count:]
    outputs, ids = body(operands, taps)
    lookups.ids.extend(ids)
    return outputs


def _inner(equation: JaxprEqn) -> Jaxpr | None:
    """The function that an equation calls, of the two kinds of calls that lookups are followed into."""
    if equation.primitive is jit_p:
        return equation.params["jaxpr"].jaxpr
    return equation.params["jaxpr"] if equation.primitive is remat_p else None


def _passed_on(equation: JaxprEqn, inner: Jaxpr, owners: _Owners) -> dict[Any, int]:
    """The owners as the called function names them."""
    pairs = zip(inner.invars, equation.invars, strict=True)
    return {own: owners[given] for own, given in pairs if _owner(given, owners) is not None}


def _owner(variable: Any, owners: _Owners) -> int | None:
    return None if isinstance(variable, Literal) else owners.get(variable)
