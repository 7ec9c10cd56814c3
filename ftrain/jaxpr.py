"""Jaxprs: evaluate a traced function, one equation at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

T = TypeVar("T")


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[T],
    inputs: Sequence[T],
    evaluate: Callable[[JaxprEqn, list[T]], Sequence[T]],
    from_literal: Callable[[Any], T] = lambda value: value,
) -> list[T]:
    """Return the results of a traced function, computed by calling `evaluate` on each equation.

    `evaluate(equation, operands)` returns the results of the equation; `apply_equation` computes
    them as jax does. The values need not be arrays: any property of an array that follows from
    the same property of the operands can be computed. `from_literal` converts a literal of the
    trace to such a value.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(variable: Var | Literal) -> T:
        return from_literal(variable.val) if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        results = evaluate(equation, [read(variable) for variable in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def apply_equation(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Return the results of one equation: jax evaluates it as a function of one line."""
    inputs = {
        variable: operand
        for variable, operand in zip(equation.invars, operands, strict=True)
        if not isinstance(variable, Literal)
    }
    names = DebugInfo(
        "apply_equation",
        str(equation.primitive),
        ("",) * len(inputs),
        ("",) * len(equation.outvars),
    )
    line = Jaxpr((), list(inputs), equation.outvars, [equation], equation.effects, names)
    return jaxpr_as_fun(ClosedJaxpr(line, ()))(*inputs.values())


def dtype_of(variable: Var | Literal) -> Any:
    """Return the dtype of a variable of a trace; None if it is not an array."""
    return getattr(variable.aval, "dtype", None)


def equations_of(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield all equations of a traced function, and those of the functions that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations_of(inner)


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the functions that an equation calls, such as the body of a loop."""
    for value in equation.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, (Jaxpr, ClosedJaxpr)):
                yield each.jaxpr if isinstance(each, ClosedJaxpr) else each
