"""Trace lookups: find the tables that a traced function looks up, and evaluate it with taps."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.extend.core.primitives import jit_p, remat_p

from ftrain.gradients.lookup import gather, lookup_p


@dataclasses.dataclass
class Lookups:
    """The taps still to be added, and the ids looked up so far, in the order of the lookups."""

    taps: list[jax.Array]
    ids: list[jax.Array] = dataclasses.field(default_factory=list)

    def perform(self, table: jax.Array, ids: jax.Array, **options: Any) -> jax.Array:
        """Look up `ids`, record them and add the next tap."""
        self.ids.append(ids)
        return gather(table, ids, **options) + self.taps.pop(0)


# Variables that stand for tables, each with the number of its table.
Owners = Mapping[Any, int]


def only_looked_up(jaxpr: Jaxpr) -> set[Any]:
    """Return the variables that are used only as tables of lookups."""
    tables: set[Any] = set()
    others = {variable for variable in jaxpr.outvars if not isinstance(variable, Literal)}
    for equation in jaxpr.eqns:
        inner = _inner(equation)
        inner_tables = only_looked_up(inner) if inner is not None else set()
        for position, operand in enumerate(equation.invars):
            if not isinstance(operand, Literal):
                is_looked_up = equation.primitive is lookup_p and position == 0
                is_passed_on = inner is not None and inner.invars[position] in inner_tables
                (tables if is_looked_up or is_passed_on else others).add(operand)
    return tables - others


def sites_of(jaxpr: Jaxpr, owners: Owners) -> Iterator[tuple[int, Any]]:
    """Yield the table's number and the result's type of each lookup, in the order of evaluation."""
    for equation in jaxpr.eqns:
        if equation.primitive is lookup_p and _owner(equation.invars[0], owners) is not None:
            yield owners[equation.invars[0]], equation.outvars[0].aval
        elif (inner := _inner(equation)) is not None:
            yield from sites_of(inner, _passed_on(equation, inner, owners))


def evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], owners: Owners, lookups: Lookups
) -> list:
    """Evaluate a traced function, with taps added to the lookups of the tables in `owners`."""
    if not owners:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*inputs)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        values.update(
            zip(equation.outvars, _perform(equation, operands, owners, lookups), strict=True)
        )
    return [read(variable) for variable in jaxpr.outvars]


def _perform(
    equation: JaxprEqn, operands: list[Any], owners: Owners, lookups: Lookups
) -> Sequence[Any]:
    if equation.primitive is lookup_p and _owner(equation.invars[0], owners) is not None:
        return [lookups.perform(*operands, **equation.params)]
    inner = _inner(equation)
    if inner is not None and (passed_on := _passed_on(equation, inner, owners)):
        if equation.primitive is jit_p:
            return evaluate(inner, equation.params["jaxpr"].consts, operands, passed_on, lookups)
        return _evaluate_checkpointed(equation, inner, operands, passed_on, lookups)
    return _apply(equation, operands)


def _apply(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """Evaluate an equation unchanged: jax runs it as a function of one line."""
    invars = []
    inputs = []
    for variable, operand in zip(equation.invars, operands, strict=True):
        if not isinstance(variable, Literal) and variable not in invars:
            invars.append(variable)
            inputs.append(operand)
    names = DebugInfo(
        "value_and_grad",
        str(equation.primitive),
        ("",) * len(invars),
        ("",) * len(equation.outvars),
    )
    line = Jaxpr((), invars, equation.outvars, [equation], equation.effects, names)
    return jaxpr_as_fun(ClosedJaxpr(line, ()))(*inputs)


def _evaluate_checkpointed(
    equation: JaxprEqn, inner: Jaxpr, operands: list[Any], owners: Owners, lookups: Lookups
) -> list[Any]:
    """Evaluate a `jax.checkpoint` call as one, so that the backward pass recomputes it."""

    @functools.partial(
        jax.checkpoint, policy=equation.params["policy"], prevent_cse=equation.params["prevent_cse"]
    )
    def body(operands: list[Any], taps: list[jax.Array]) -> tuple[list[Any], list[jax.Array]]:
        own = Lookups(list(taps))
        return evaluate(inner, (), operands, owners, own), own.ids

    count = len(list(sites_of(inner, owners)))
    taps = lookups.taps[:count]
    del lookups.taps[:count]
    outputs, ids = body(operands, taps)
    lookups.ids.extend(ids)
    return outputs


def _inner(equation: JaxprEqn) -> Jaxpr | None:
    """The function that an equation calls; only jit and checkpoint are searched for lookups."""
    if equation.primitive is jit_p:
        return equation.params["jaxpr"].jaxpr
    return equation.params["jaxpr"] if equation.primitive is remat_p else None


def _passed_on(equation: JaxprEqn, inner: Jaxpr, owners: Owners) -> dict[Any, int]:
    """The owners by the variables of the called function."""
    pairs = zip(inner.invars, equation.invars, strict=True)
    return {own: owners[given] for own, given in pairs if _owner(given, owners) is not None}


def _owner(variable: Any, owners: Owners) -> int | None:
    return None if isinstance(variable, Literal) else owners.get(variable)
