"""Shares of the run: `decay_steps = "100%"` in the place of a number of steps."""

from typing import Any

from ftrain.config.load import Table
from ftrain.schedules.lengths import is_share, resolve_steps

_MAX_DEPTH = 40  # of tables inside of each other; a plan accepts fewer
_OTHER_KEYS = ("boundaries", "transition_begin")  # of schedules, beside keys that end in _steps
# The length of a run may depend on these tables, so it is not known for them.
_WITHOUT_LENGTH = ("model", "data")


def resolve_shares(values: Table, steps: int) -> tuple[Table, dict[str, str]]:
    """Replace shares of a run of `steps` steps; return the values, and each share by its key."""
    found: dict[str, str] = {}

    def resolve(key: str, value: Any, takes_steps: bool) -> Any:
        if key.count(".") > _MAX_DEPTH:
            return value
        if isinstance(value, dict):
            return {
                name: resolve(f"{key}.{name}", each, takes_steps_at(name))
                for name, each in value.items()
            }
        if isinstance(value, list):
            return [resolve(f"{key}.{n}", each, takes_steps) for n, each in enumerate(value)]
        if not takes_steps or not is_share(value):
            return value
        found[key] = value
        return resolve_steps(value, steps)

    resolved = {
        name: value if name in _WITHOUT_LENGTH else resolve(name, value, False)
        for name, value in values.items()
    }
    return resolved, found


def takes_steps_at(name: str) -> bool:
    """True for the name of a key that takes a number of steps."""
    return name.endswith("_steps") or name in _OTHER_KEYS


def restore_shares(tables: Table, shares: dict[str, str]) -> None:
    """Write the shares back into a resolved config, in place."""
    for key, share in shares.items():
        *path, last = key.split(".")
        place: Any = tables
        for name in path:
            place = place[int(name)] if isinstance(place, list) else place.get(name, {})
        if isinstance(place, list):
            place[int(last)] = share
        else:
            place[last] = share
