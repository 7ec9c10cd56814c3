"""Memory: what the hooks of a run remember, which is stored in its checkpoints."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ftrain.training.hook import Hook

States = Mapping[str, Mapping[str, Any]]  # of hooks, by their keys


class Memory:
    """Collects the states of hooks, and restores them.

    A hook is known by its class and its label, and hooks that share both by their order: "StopWhen(loss, min)",
    "Counting", "Counting#2".

    Args:
      hooks: those of all processes, so that a key is the same in each.
      present: those that this process has.
    """

    def __init__(self, hooks: Sequence[Hook], present: Sequence[Hook]):
        self._known = _keys(hooks)
        own = {id(hook) for hook in present}
        self._hooks = {
            key: hook for key, hook in zip(self._known, hooks, strict=True) if id(hook) in own
        }
        self._first: States | None = None  # what they remembered when the run started
        self._saved: States = {}

    def collect(self) -> dict[str, Mapping[str, Any]]:
        """The states of all hooks that remember something."""
        states = {key: _checked(key, hook.state()) for key, hook in self._hooks.items()}
        return {key: state for key, state in states.items() if state is not None}

    def begin(self) -> list[str]:
        """A run starts, or recovers: find what was saved with its state; returns the keys that no hook has."""
        found = (hook.saved_hook_states() for hook in self._hooks.values())
        saved = next((states for states in found if states is not None), {})
        self._saved = {**(self._first or {}), **saved}
        return [key for key in saved if key not in self._known]

    def restore(self, hook: Hook) -> str | None:
        """Give a hook what it remembered; returns a reason to stop, if it has one.

        A hook of which nothing was saved starts with what it is, and goes back to that when the run recovers.
        """
        key = next((key for key, own in self._hooks.items() if own is hook), None)
        return None if key is None or key not in self._saved else hook.restore(self._saved[key])

    def started(self) -> None:
        """All hooks have begun."""
        if self._first is None:
            self._first = copy.deepcopy(self.collect())


def _keys(hooks: Sequence[Hook]) -> list[str]:
    seen: Counter[str] = Counter()
    keys: list[str] = []
    for hook in hooks:
        name = f"{type(hook).__name__}({hook.label})" if hook.label else type(hook).__name__
        seen[name] += 1
        keys.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return keys


def _checked(key: str, state: Any) -> Mapping[str, Any] | None:
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(f"{key}: state() must return a mapping or None, got {state!r:.60}")
    return state
