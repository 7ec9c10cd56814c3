"""Rematerialisation: compute values again in the backward pass instead of keeping them.

The backward pass needs the values of the forward pass, and keeping all of them is most of the
memory of a step. "dots" keeps the results of matrix products and convolutions, and computes what
is cheap again. "names" keeps what the model names by `jax.ad_checkpoint.checkpoint_name`. "layers"
cuts the traced loss where the fewest bytes are alive, as between the layers of a network, keeps
these bytes, and computes each part again when its turn comes (Chen et al. 2016). With each of them
the body of a `jax.lax.scan` is computed again too, from what these rules keep of it.

The numbers are the same up to rounding, because XLA fuses other operations; random numbers are the
same. On CPUs, XLA merges equal computations, and so undoes this for layers outside of a scan.

There is no mode that computes everything again: without anything to start from, the backward pass
would have to keep all values of its own forward pass.
"""

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import convert_element_type_p, jit_p, scan_p

from ftrain.jaxpr import apply_equation, dtype_of, interpret
from ftrain.tree import Tree

Remat = Literal["none", "dots", "layers", "names"]
_NUMBERS_OF_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # that are tried


def check_remat(remat: str) -> None:
    """Raise ValueError for an unknown kind of rematerialisation."""
    if remat not in get_args(Remat):
        choices = ", ".join(f'"{choice}"' for choice in get_args(Remat))
        raise ValueError(f"remat must be one of {choices}, got {remat!r:.60}")


def recompute(function: Callable[..., Tree], remat: Remat) -> Callable[..., Tree]:
    """Return a function that keeps less for its backward pass; its results are the same."""
    if remat == "none":
        return function
    policies = {
        "dots": jax.checkpoint_policies.dots_saveable,
        "names": jax.checkpoint_policies.save_any_names_but_these(),
        "layers": None,
    }
    policy = policies[remat]

    def in_parts(*arguments: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(arguments)

        def flat(*leaves: jax.Array) -> Tree:
            return function(*structure.unflatten(leaves))

        traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        plain = jax.make_jaxpr(
            lambda *leaves: _inline(traced.jaxpr, traced.consts, leaves, policy)
        )(*leaves)
        trace = _Trace(plain.jaxpr)
        cuts = trace.best_cuts() if remat == "layers" else trace.around_scans()
        results = trace.evaluate(plain.consts, leaves, cuts, policy)
        return jax.tree.structure(shapes).unflatten(results)

    return in_parts


def _inline(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], policy: Any) -> list[Any]:
    """Evaluate a traced function; functions that it calls become part of it.

    Bodies of scans are computed again in the backward pass.
    """

    def evaluate(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        inner = equation.params.get("jaxpr")
        if equation.primitive is jit_p and isinstance(inner, ClosedJaxpr):
            return _inline(inner.jaxpr, inner.consts, operands, policy)
        if equation.primitive is scan_p and isinstance(inner, ClosedJaxpr):
            # In a loop, XLA cannot merge the two computations anyway.
            body = jax.checkpoint(jaxpr_as_fun(inner), policy=policy, prevent_cse=False)
            traced = jax.make_jaxpr(body)(*inner.in_avals)
            equation = equation.replace(params={**equation.params, "jaxpr": traced})
        return apply_equation(equation, operands)

    return interpret(jaxpr, consts, inputs, evaluate)


class _Part(NamedTuple):
    """A part of a traced function, as a function of its own."""

    equations: list[JaxprEqn]
    inputs: list[Var]
    outputs: list[Var]

    def evaluate(self, values: dict[Var, Any], policy: Any) -> list[Any]:
        """Return the outputs; recompute what `policy` does not keep, except of a scan."""
        names = DebugInfo("part", "remat", ("",) * len(self.inputs), ("",) * len(self.outputs))
        effects = frozenset().union(*(equation.effects for equation in self.equations))
        jaxpr = Jaxpr((), self.inputs, self.outputs, self.equations, effects, names)
        function = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))
        if not any(equation.primitive is scan_p for equation in self.equations):
            function = jax.checkpoint(function, policy=policy)
        return function(*(values[variable] for variable in self.inputs))


class _Trace:
    """The equations of a traced function, and which values are alive between them."""

    def __init__(self, jaxpr: Jaxpr):
        self._jaxpr = jaxpr
        given = {*jaxpr.constvars, *jaxpr.invars}
        # Casts of parameters and inputs are cheap: each part has its own.
        self._casts = {
            equation.outvars[0]: equation
            for equation in jaxpr.eqns
            if equation.primitive is convert_element_type_p
            and given.issuperset(_variables(equation.invars))
            and equation.outvars[0] not in jaxpr.outvars
        }
        own = set(self._casts)
        self._equations = [
            equation for equation in jaxpr.eqns if not own.intersection(equation.outvars)
        ]
        self._last_use: dict[Var, int] = {}
        for number, equation in enumerate(self._equations):
            self._last_use |= dict.fromkeys(_variables(equation.invars), number)
        end = len(self._equations)
        self._last_use |= dict.fromkeys(_variables(jaxpr.outvars), end)
        self._sizes = [sum(map(_bytes, equation.outvars)) for equation in self._equations]
        self._spans = [  # of each value: its bytes, where it is made, and its last use
            (_bytes(variable), number, self._last_use[variable])
            for number, equation in enumerate(self._equations)
            for variable in equation.outvars
            if variable in self._last_use
        ]

    def evaluate(
        self, consts: Sequence[Any], inputs: Sequence[Any], cuts: list[int], policy: Any
    ) -> list[Any]:
        """Return the results of the function, computed in the parts between the cuts."""
        jaxpr = self._jaxpr
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        bounds = [0, *cuts, len(self._equations)]
        for start, stop in itertools.pairwise(bounds):
            part = self._part(start, stop)
            values.update(zip(part.outputs, part.evaluate(values, policy), strict=True))
        return [
            variable.val if isinstance(variable, Constant) else values[variable]
            for variable in jaxpr.outvars
        ]

    def around_scans(self) -> list[int]:
        """Return the cuts before and after each scan, which is a part of its own."""
        scans = [n for n, equation in enumerate(self._equations) if equation.primitive is scan_p]
        cuts = {cut for number in scans for cut in (number, number + 1)}
        return sorted(cuts - {0, len(self._equations)})

    def best_cuts(self) -> list[int]:
        """Return where to cut, so that the least memory is needed.

        A backward pass needs what is alive at the cuts, and the values of one part at a time.
        """
        total = sum(self._sizes)
        alive = self._alive_bytes()
        best = scans = self.around_scans()
        least = self._memory(scans)
        for count in _NUMBERS_OF_PARTS:
            cuts = sorted({*scans, *self._cut(total / count, alive)})
            needed = self._memory(cuts)
            if needed < least:
                best = cuts
                least = needed
        return best

    def _part(self, start: int, stop: int) -> _Part:
        equations = self._equations[start:stop]
        used = {variable for each in equations for variable in _variables(each.invars)}
        casts = [equation for variable, equation in self._casts.items() if variable in used]
        equations = casts + equations
        made = [variable for equation in equations for variable in equation.outvars]
        read = dict.fromkeys(
            variable for equation in equations for variable in _variables(equation.invars)
        )
        inputs = [variable for variable in read if variable not in set(made)]
        outputs = [variable for variable in made if self._last_use.get(variable, -1) >= stop]
        return _Part(equations, inputs, [each for each in outputs if each not in self._casts])

    def _alive_bytes(self) -> list[int]:
        """Return the bytes that are alive before each equation, and after the last."""
        changes = [0] * (len(self._equations) + 2)
        for size, made, last in self._spans:
            changes[made + 1] += size
            changes[last + 1] -= size
        return list(itertools.accumulate(changes))

    def _cut(self, size: float, alive: list[int]) -> list[int]:
        """Return cuts between parts of about `size` bytes, where the fewest bytes are alive."""
        cuts: list[int] = []
        start = 0
        filled = 0
        for number, own in enumerate(self._sizes):
            filled += own
            if filled >= size:
                middle = (start + number + 1) // 2
                cut = min(range(middle, number + 1), key=lambda at: (alive[at], -at), default=0)
                if cut > start:
                    cuts.append(cut)
                    filled = sum(self._sizes[cut : number + 1])
                    start = cut
        return cuts

    def _memory(self, cuts: list[int]) -> int:
        """Return the bytes of what is alive at a cut, and of the largest part."""

        def is_kept(made: int, last: int) -> bool:
            following = bisect.bisect_right(cuts, made)
            return following < len(cuts) and cuts[following] <= last

        kept = sum(size for size, made, last in self._spans if is_kept(made, last))
        bounds = [0, *cuts, len(self._equations)]
        parts = [sum(self._sizes[start:stop]) for start, stop in itertools.pairwise(bounds)]
        return kept + max(parts)


def _variables(operands: Sequence[Any]) -> list[Var]:
    return [operand for operand in operands if not isinstance(operand, Constant)]


def _bytes(variable: Any) -> int:
    dtype = dtype_of(variable)
    return variable.aval.size * dtype.itemsize if dtype is not None else 0
