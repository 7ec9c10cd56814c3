"""Lengths of schedules as shares of the run, so that the length of the run is said once."""

import re

_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")


def resolve_steps(length: int | str, steps: int) -> int:
    """Return `length` in steps: a share of a run of `steps` steps, "5%", or a number of steps.

    A config takes such a share wherever it takes a number of steps: `decay_steps = "100%"`.

    >>> resolve_steps("5%", 2000)
    100
    >>> resolve_steps(50, 2000)
    50
    """
    if not isinstance(length, str):
        return length
    found = _PERCENT.fullmatch(length)
    if found is None:
        raise ValueError(f'expected a number of steps, or a share of the run, "5%", got {length!r}')
    share = float(found.group(1)) / 100
    return max(1, round(share * steps)) if share else 0


def is_share(length: object) -> bool:
    """True for a text such as "5%"."""
    return isinstance(length, str) and _PERCENT.fullmatch(length) is not None
