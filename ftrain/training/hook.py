"""Hooks: what happens around the steps, and the report that tells them of a step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ftrain.coordination import Coordinator
from ftrain.training.loss import Batch
from ftrain.training.metrics import Metrics
from ftrain.training.replay import PastStep
from ftrain.training.state import TrainState
from ftrain.training.trigger import Trigger, never

Value = float | str  # a number, or a text
DATA_ENDED = "the data ended"  # a reason to stop


class Host(Protocol):
    """What a report needs of the loop that made it."""

    coordinator: Coordinator

    @property
    def interrupted(self) -> bool: ...
    @property
    def stop_reason(self) -> str | None: ...
    @property
    def ending(self) -> bool: ...
    def request_stop(self, reason: str) -> None: ...
    def notice(self, text: str) -> None: ...
    def flush(self) -> None: ...
    def save(self, report: "Report") -> None: ...
    def flops(self) -> float | None: ...
    def hook_states(self) -> dict[str, Mapping[str, Any]]: ...
    def past(self, step: int) -> PastStep: ...


class Report:
    """What hooks are told of a step.

    `step` is its number, those before a restart counted; `time` the moment it was finished, in seconds; `examples` the
    size of its batch, 0 if that is not known; `published` what hooks have published at it so far.
    """

    def __init__(
        self,
        host: Host,
        step: int,
        state: TrainState | None,
        metrics: Metrics,
        *,
        examples: int = 0,
        publish: Callable[[Mapping[str, Value]], None] = lambda values: None,
    ):
        self.step = step
        self.time = metrics.time
        self.examples = examples
        self.published: dict[str, Value] = {}
        self._host, self._state, self._metrics, self._publish = host, state, metrics, publish
        self._row: dict[str, float] | None = None

    @property
    def state(self) -> TrainState:
        """The state after the step. Valid during the call only: the next step writes over it."""
        if self._state is None:
            raise RuntimeError(
                f"the state of step {self.step} is gone: a hook that reads it needs needs_state = True"
            )
        return self._state

    @property
    def interrupted(self) -> bool:
        """Whether the run is asked to end soon: save, and leave out what takes long."""
        return self._host.interrupted

    @property
    def stop_reason(self) -> str | None:
        """Why the run is about to end, if it is."""
        return self._host.stop_reason

    @property
    def ending(self) -> bool:
        """True once the last step is done and the hooks' `end` is called."""
        return self._host.ending

    @property
    def coordinator(self) -> Coordinator:
        """Where a hook's own threads belong: what one of them raises ends the run, and no thread outlives it."""
        return self._host.coordinator

    def values(self) -> dict[str, Value]:
        """Every metric of the step, and what hooks published with it so far; waits for the device.

        Empty before the first step.
        """
        return {**self._numbers(), **self.published}

    def read(self, metric: str) -> float:
        """One metric of the step as a number; waits for the device."""
        numbers = self._numbers()
        return numbers[metric] if metric in numbers else float(self._metrics.column(metric)[-1])

    def publish(self, values: Mapping[str, Value]) -> None:
        """Hand values of your own to all hooks.

        Those that are yet to be told of this step find them in `values`, the others get them by `receive`. What is
        published in `end` goes to all others by `receive`, and is in `values` too.
        """
        plain = {name: _plain(name, value) for name, value in values.items()}
        self.published.update(plain)
        self._publish(plain)

    def stop(self, reason: str) -> None:
        """Ask the loop to end after this step."""
        self._host.request_stop(reason)

    def notice(self, text: str) -> None:
        """Tell something to whoever follows the run: hooks that write a log show it."""
        self._host.notice(text)

    def flush(self) -> None:
        """Have all hooks write out what still waits to be written."""
        self._host.flush()

    def save(self) -> None:
        """Have the state of this step saved now: before an evaluation at the end, which may take long, say.

        What comes after it can still be published; it is added to what was saved.
        """
        self._host.save(self)

    def flops(self) -> float | None:
        """Floating-point operations of one step as compiled, if the compiler tells."""
        return self._host.flops()

    def hook_states(self) -> dict[str, Mapping[str, Any]]:
        """What all hooks remember, for whoever saves the state; see `Hook.state`."""
        return self._host.hook_states()

    def past(self, step: int) -> PastStep:
        """An earlier step, to be looked at again."""
        return self._host.past(step)

    def _numbers(self) -> dict[str, float]:
        if self._row is None:
            self._row = self._metrics.row(self.step)
        return self._row


def _plain(name: str, value: Any) -> Value:
    try:
        return value if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be a number or a text to be published, got {value!r:.60}"
        ) from None


class Hook:
    """Override what you need; `when` chooses the steps that `after_step` is called for.

    `needs_state` says whether `after_step` reads the state or must stop the run at its very step. The loop then waits
    for the device before it goes on; without, it tells the hook a few steps later, and no time is lost.

    A hook that remembers something from step to step returns it from `state`, and takes it back in `restore`: it is
    stored in each checkpoint, so that a resumed run goes on as if it had not been interrupted.

    One that saves the state says so with `saves_state`. It is told of a step after all other hooks, so that it saves
    what they know by then.

    Where several processes train together, all of them have all hooks, and must: what they compute with the state, they
    compute together. Those that only write are `chief_only`.
    """

    when: Trigger = never()
    needs_state: bool = True
    chief_only: bool = (
        False  # whether, of several processes, only the first has it, because it writes for all
    )
    saves_state: bool = False  # whether the run can be restored from what it writes; see above
    label: str = ""  # tells hooks of one class apart in a checkpoint; without, their order does
    follows_chief: bool = (
        False  # set by a Scaffold that waits: another process writes, this one only restores
    )

    def restore_state(self, like: TrainState) -> TrainState | None:
        """First of all, and again when a run recovers: a state that was saved, or None.

        `like` has the structure of the state; its leaves may be shapes (`jax.ShapeDtypeStruct`) with their shardings.
        """

    def saved_hook_states(self) -> Mapping[str, Mapping[str, Any]] | None:
        """The `Report.hook_states` saved with the state that `restore_state` returned last; None if there was none."""

    def start(self, state: TrainState) -> TrainState:
        """Then: the state to start from. With nothing to say, answer with the same object."""
        return state

    def begin(self, report: Report) -> None:
        """Before the first step, and again when a run recovers, when the state is known."""

    def state(self) -> Mapping[str, Any] | None:
        """What the hook remembers: a small mapping of what JSON can say, infinities and NaN too, or None.

        It is asked for when a step is saved, after all hooks were told of the step and of what was published at it.
        """

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """After `begin`, if the run resumes or recovers: what `state` returned at the step that it starts from.

        What it returns is a reason to stop: the run then takes no step. It is not called for a hook of which nothing
        was saved; such a hook starts fresh.
        """

    def prepare(self, step: int, batch: Batch) -> Batch:
        """In the thread that reads ahead: the batch of a step in the host's memory, this process's part of it.

        It answers with the batch to use. A hook that overrides this turns fusing off.
        """
        return batch

    def before_step(self, report: Report, batch: Batch) -> Mapping[str, Any] | None:
        """Before every step: entries to put into its batch. A hook that overrides this turns fusing off.

        The report is of the step before.
        """

    def watch(self, metrics: Metrics) -> str | None:
        """For all steps, in order, some steps later, when their metrics are ready and reading them costs no wait.

        It is always called for a step before any hook's `after_step` for the same step. Fused steps come together. What
        it answers with is a reason to stop.
        """

    def after_step(self, report: Report) -> None:
        """After each step that `when` chooses."""

    def receive(self, step: int, values: Mapping[str, Value]) -> str | None:
        """Values that another hook published at a step where this one is not due, or in its `end`.

        What it returns is a reason to stop.
        """

    def notice(self, text: str) -> None:
        """Something that the loop, or another hook, has to say to whoever follows the run."""

    def flush(self) -> None:
        """Write out what still waits to be written: a checkpoint is about to be taken."""

    def end(self, report: Report) -> None:
        """Once, after the last step, unless an exception ended the run.

        The report has what was published at the last step. What other hooks publish in their `end` comes by `receive`.
        """

    def failed(self, error: Exception, past: PastStep | None) -> None:
        """Once, when an exception ended the run; `past` is the step that failed, if it was a step."""

    def close(self) -> None:
        """Once, always, even after an exception: let go of threads and files."""


def check_hooks(hooks: Sequence[Any]) -> None:
    """That they are hooks, and that each says when it is due."""
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise TypeError(f"hooks must be instances of ftrain.Hook, got {hook!r}")
        if not isinstance(hook.when, Trigger):
            raise TypeError(
                f"{type(hook).__name__}.when must be a trigger, such as every(steps=100), got {hook.when!r}"
            )


def feed_batch(hooks: Sequence[Hook], report: Report, batch: Batch) -> Batch:
    """The batch with what hooks put into it."""
    fed: dict[str, Any] = {}
    for hook in hooks:
        entries = hook.before_step(report, batch) or {}
        if twice := [name for name in entries if name in fed]:
            raise RuntimeError(
                f"{twice[0]} is fed by two hooks; {type(hook).__name__} is the second"
            )
        fed.update(entries)
    if fed and not isinstance(batch, Mapping):
        raise TypeError(
            f"{', '.join(fed)} cannot be fed: the batch is a {type(batch).__name__}, not a dict"
        )
    return {**batch, **fed} if fed else batch
