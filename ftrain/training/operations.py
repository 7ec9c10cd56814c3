"""Operation by operation: a step that nothing compiles, to find the first result that is not finite."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from ftrain.training.objective import Batch
from ftrain.training.state import TrainState
from ftrain.training.step import Step

_OURS = Path(__file__).parents[1]
_THEIRS = Path(jax.__file__).parents[1]  # where libraries are installed


def bad_operations(step: Step, state: TrainState, batch: Batch) -> list[str]:
    """The first operations of a step that make infinity, and NaN, of what was not, and the lines that asked for them.

    An infinity may be meant, a mask for instance. Loops and branches count as one operation each. Slow: every operation
    is computed by itself.
    """
    closed: ClosedJaxpr = jax.make_jaxpr(step)(state, batch)
    found: dict[str, str] = {}
    for equation, inputs, outputs in _operations(
        closed.jaxpr, closed.consts, jax.tree.leaves((state, batch))
    ):
        for what, test in (("infinity", jnp.isinf), ("NaN", jnp.isnan)):
            if what not in found and _any(test, outputs) and not _any(test, inputs):
                found[what] = _describe(equation, what, inputs)
        if "NaN" in found:
            break
    return list(found.values())


def _operations(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]
) -> Iterator[tuple[JaxprEqn, list[Any], list[Any]]]:
    """Every operation, computed in order, with its inputs and outputs; returns the results of all."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else known[variable]

    for equation in jaxpr.eqns:
        given = [read(variable) for variable in equation.invars]
        inner = equation.params.get("jaxpr")
        if equation.primitive.name in ("jit", "pjit") and isinstance(inner, ClosedJaxpr):
            made = yield from _operations(inner.jaxpr, inner.consts, given)
        else:
            variables = [each for each in equation.invars if not isinstance(each, Literal)]
            alone = jaxpr.replace(
                constvars=[], invars=variables, outvars=equation.outvars, eqns=[equation]
            )
            made = jaxpr_as_fun(ClosedJaxpr(alone, []))(*map(read, variables))
            yield equation, given, made
        known |= dict(zip(equation.outvars, made, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _any(test: Any, values: Sequence[Any]) -> bool:
    numbers = [value for value in values if jnp.issubdtype(jnp.result_type(value), jnp.inexact)]
    return any(bool(test(value).any()) for value in numbers)


def _describe(equation: JaxprEqn, what: str, inputs: Sequence[Any]) -> str:
    of = ", ".join(f"{jnp.result_type(value)}{list(jnp.shape(value))}" for value in inputs)
    return f"the first {what} comes out of {equation.primitive.name}({of}){_line_of(equation)}"


def _line_of(equation: JaxprEqn) -> str:
    """The user's own line behind an operation, or else the one nearest to it."""
    trace = equation.source_info.traceback
    frames = [] if trace is None else list(trace.frames)
    outside = [frame for frame in frames if not _is_library(frame.file_name)]
    if not outside:
        return ""
    frame = outside[0]
    return f"\n  in {frame.file_name}, line {frame.line_num}, in {frame.function_name}"


def _is_library(file: str) -> bool:
    path = Path(file)
    if path.is_relative_to(_OURS):
        return not path.is_relative_to(_OURS / "tasks")
    return path.is_relative_to(_THEIRS) or not path.exists()
