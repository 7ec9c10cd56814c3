"""TensorFlow 1's names for what belongs to a variable: slots, moving averages, powers of beta."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

AVERAGE = "ExponentialMovingAverage"
GLOBAL_STEP = "global_step"
REMAINDER = "remainder"  # a slot that TensorFlow does not have: what rounding removed

# For the slots of each of the ten optimizers, the ends of their variables' names. Gradient descent
# and proximal gradient descent have none. Adagrad and proximal Adagrad have the same slots.
SLOTS: dict[frozenset[str], tuple[dict[str, str], ...]] = {
    frozenset(names[0]): names
    for names in (
        ({"momentum": "Momentum"},),
        ({"accumulator": "Adagrad"}, {"accumulator": "ProximalAdagrad"}),
        (
            {
                "gradient_accumulator": "AdagradDA",
                "gradient_squared_accumulator": "AdagradDA_1",
            },
        ),
        ({"accum": "Adadelta", "accum_update": "Adadelta_1"},),
        ({"m": "Adam", "v": "Adam_1"},),
        ({"rms": "RMSProp", "momentum": "RMSProp_1"},),
        ({"rms": "RMSProp", "mg": "RMSProp_1", "momentum": "RMSProp_2"},),
        ({"accum": "Ftrl", "linear": "Ftrl_1"},),
    )
}
_ADAM = frozenset({"m", "v"})
_SLOT = re.compile(r"(?P<state>opt_state/(?:.*?/)?)slots/(?P<slot>[^/]+)(?:/(?P<parameter>.*))?")
_COUNT = re.compile(r"(?P<state>opt_state/(?:.*/)?)count")
_MOST_UPDATES = 1_000_000  # for which powers are computed one by one


class SlotName(NamedTuple):
    """The name of a slot in a state, in parts."""

    state: str  # the scope of the optimizer's state
    slot: str
    parameter: str


def parse_slot(name: str) -> SlotName | None:
    """Return the parts of a slot's name, such as opt_state/slots/m/dense/kernel; else None.

    >>> parse_slot("opt_state/0/slots/m/dense/kernel")
    SlotName(state='opt_state/0/', slot='m', parameter='dense/kernel')
    """
    found = _SLOT.fullmatch(name)
    return None if found is None else SlotName(found[1], found[2], found[3] or "")


def slots_by_state(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the slots of each optimizer state in a state, by its scope."""
    slots: dict[str, set[str]] = {}
    for name in names:
        parts = parse_slot(name)
        if parts is not None and parts.slot != REMAINDER:
            slots.setdefault(parts.state, set()).add(parts.slot)
    return {state: frozenset(own) for state, own in slots.items()}


def slot_variables(name: SlotName, own: frozenset[str]) -> list[str]:
    """Return the names that TensorFlow may have given to a slot of an optimizer with `own` slots.

    >>> slot_variables(SlotName("opt_state/", "v", "dense/kernel"), frozenset({"m", "v"}))
    ['dense/kernel/Adam_1']
    """
    ends = [names[name.slot] for names in SLOTS.get(own, ()) if name.slot in names]
    return [f"{name.parameter}/{end}".removeprefix("/") for end in ends]


class Count(NamedTuple):
    """The updates of an optimizer so far, and the variable that says so."""

    value: int
    source: str


def find_count(
    name: str,
    slots: Mapping[str, frozenset[str]],
    variables: Mapping[str, str],
    read: Callable[[str], np.ndarray],
    betas: Sequence[float],
) -> Count | None:
    """Return the count of an optimizer's state, from the powers of Adam or from the step.

    Args:
      name: of the count, such as opt_state/count.
      slots: those of each state, from `slots_by_state`.
      variables: names in the checkpoint, by what they were renamed to.
    """
    found = _COUNT.fullmatch(name)
    if found is None:
        return None
    if slots.get(found[1]) == _ADAM:
        powers = [_only(variables, f"beta{number}_power") for number in (1, 2)]
        for finder in (_exact_count, _near_count):
            for source, beta in zip(powers, betas, strict=True):
                count = None if source is None else finder(read(source), beta)
                if source is not None and count is not None:
                    return Count(count, source)
    for step in (GLOBAL_STEP, "step"):
        if step in variables and (count := as_count(read(variables[step]))) is not None:
            return Count(count, variables[step])
    return None


def as_count(value: np.ndarray) -> int | None:
    """Return a scalar of any type as a count; None unless it is a whole number >= 0."""
    if value.shape != () or value.dtype.kind not in "iufV":
        return None
    number = float(value) if value.dtype.kind in "fV" else int(value)
    if not math.isfinite(number) or number < 0 or number != int(number):
        return None
    return int(number)


def _only(variables: Mapping[str, str], end: str) -> str | None:
    """Return the variable whose last part is `end`, if there is exactly one."""
    found = [source for name, source in variables.items() if name.rpartition("/")[2] == end]
    return found[0] if len(found) == 1 else None


def _exact_count(power: np.ndarray, beta: float) -> int | None:
    """Return t if `power` is beta multiplied t times by beta, rounded as TensorFlow rounds.

    TensorFlow starts at beta and multiplies once an update. The products of float32 differ from
    beta**(t + 1), but are the same every time; so they are computed again. Near zero they repeat.
    """
    about = _estimate(power, beta)
    if about is None or about > _MOST_UPDATES:
        return None
    factors = np.full(int(about * 1.1) + 10, beta, power.dtype)
    with np.errstate(under="ignore"):
        matches = np.flatnonzero(np.multiply.accumulate(factors) == power)
    return int(matches[0]) if len(matches) == 1 else None


def _near_count(power: np.ndarray, beta: float) -> int | None:
    """Return t if `power` is close to beta**(t + 1), and to no other power."""
    about = _estimate(power, beta)
    if about is None:
        return None
    rounding = about * float(np.finfo(power.dtype).eps) / -math.log(beta)
    is_close = abs(about - round(about)) < 0.1 and rounding < 0.1
    return round(about) if is_close else None


def _estimate(power: np.ndarray, beta: float) -> float | None:
    if power.shape != () or power.dtype.kind != "f" or not 0 < beta < 1:
        return None
    value = float(power)
    if not np.finfo(power.dtype).tiny < value < 1:
        return None
    return max(math.log(value) / math.log(beta) - 1, 0.0)
