"""The agenda: which hooks are due after a step, and when the next one will be."""

import math
from collections.abc import Sequence

from ftrain.training.hook import Hook


class Agenda:
    """Keeps, for each hook, when it was due last."""

    def __init__(self, hooks: Sequence[Hook], start: int = 0, now: float = 0.0):
        self._hooks = hooks
        self._fired = [hook.when.counts_from(start) for hook in hooks]
        self._moments = [now] * len(hooks)
        self.next_step = self.next_time = 0.0  # when some hook is due next, by count and by time
        self.look_ahead(start)

    def due(self, step: int, now: float) -> list[Hook]:
        """The hooks that are due after `step`."""
        if step < self.next_step and now < self.next_time:
            return []
        due: list[Hook] = []
        for i, hook in enumerate(self._hooks):
            if hook.when.due(step, now - self._moments[i], self._fired[i]):
                due.append(hook)
                self._fired[i], self._moments[i] = step, now
        self.look_ahead(step)
        return due

    def look_ahead(self, step: int) -> None:
        """Find out when a hook is due next after `step`, so that no step before has to ask."""
        whens = [hook.when for hook in self._hooks]
        counts = (when.next(step, last) for when, last in zip(whens, self._fired, strict=True))
        self.next_step = min(counts, default=math.inf)
        moments = (
            moment + when.patience for when, moment in zip(whens, self._moments, strict=True)
        )
        self.next_time = min(moments, default=math.inf)
