"""Hooks: code that runs before and after steps, and the report that each call receives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ftrain.coordination import Coordinator
from ftrain.training.loss import Batch
from ftrain.training.replay import PastStep
from ftrain.training.state import TrainState
from ftrain.training.step_metrics import StepMetrics
from ftrain.training.stopping import Stopping
from ftrain.training.trigger import Trigger, never

Value = float | str
Listener = Callable[..., None]


class Host(Protocol):
    """What hooks can access through a report."""

    coordinator: Coordinator
    stopping: Stopping
    ending: bool

    def listen(self, **listeners: Listener | None) -> None: ...
    def notice(self, text: str) -> None: ...
    def flush(self) -> None: ...
    def save(self, report: "Report") -> None: ...
    def flops(self) -> float | None: ...
    def hook_states(self) -> dict[str, Mapping[str, Any]]: ...
    def past(self, step: int) -> PastStep: ...


class Report:
    """What hooks get after a step.

    `step` is its number, counted from the start of the training; `time` is when it was finished, in
    seconds; `examples` is the size of its batch, 0 if unknown; `published` has what hooks published
    at it so far.
    """

    def __init__(
        self,
        host: Host,
        step: int,
        state: TrainState | None,
        metrics: StepMetrics,
        *,
        examples: int = 0,
        publish: Callable[[Mapping[str, Value]], None] = lambda values: None,
    ):
        self.step = step
        self.time = metrics.time
        self.examples = examples
        self.published: dict[str, Value] = {}
        self._host = host
        self._state = state
        self._metrics = metrics
        self._publish = publish
        self._row: dict[str, float] | None = None

    @property
    def state(self) -> TrainState:
        """The state after the step. Only valid during the call: the next step overwrites it."""
        if self._state is None:
            raise RuntimeError(
                f"the state of step {self.step} is no longer available; "
                "set needs_state = True on a hook that reads it"
            )
        return self._state

    @property
    def interrupted(self) -> bool:
        """True once an interrupt was requested: save, and skip what takes long."""
        return self._host.stopping.interrupted

    @property
    def stop_reason(self) -> str | None:
        """The reason to stop, once there is one."""
        return self._host.stopping.reason

    @property
    def ending(self) -> bool:
        """True once the last step is done and the hooks' `end` is called."""
        return self._host.ending

    @property
    def coordinator(self) -> Coordinator:
        """For threads of a hook: an exception in one of them ends the run, and none outlives it."""
        return self._host.coordinator

    def listen(
        self,
        *,
        metrics: Callable[[StepMetrics], None] | None = None,
        published: Callable[[int, Mapping[str, Value]], None] | None = None,
        notice: Callable[[str], None] | None = None,
        flush: Callable[[], None] | None = None,
        failure: Callable[[Exception, PastStep | None], None] | None = None,
    ) -> None:
        """Have functions of this hook called during the run; for its `begin`.

        Args:
          metrics: called with the metrics of all steps in order, of several fused steps at once,
            when reading them is free; before any hook's `after_step` for the same step.
          published: called with a step and the values that another hook published at it, unless
            this hook is still to be called for the step and finds them in its report.
          notice: called with a message to the user.
          flush: called before a checkpoint is saved, to finish pending writes.
          failure: called with the exception that ended the run, and the step that failed if known.
        """
        self._host.listen(
            metrics=metrics, published=published, notice=notice, flush=flush, failure=failure
        )

    def values(self) -> dict[str, Value]:
        """Return all metrics of the step, and what hooks published so far; waits for the device.

        Empty before the first step.
        """
        return {**self._numbers(), **self.published}

    def read(self, metric: str) -> float:
        """Return one metric of the step as a number; waits for the device."""
        numbers = self._numbers()
        return numbers[metric] if metric in numbers else float(self._metrics.column(metric)[-1])

    def publish(self, values: Mapping[str, Value]) -> None:
        """Publish values to all hooks.

        Hooks that are called after this one for the same step find them in `values`; the others,
        and all of them in `end`, get them if they listen, see `listen`.
        """
        plain = {name: _plain(name, value) for name, value in values.items()}
        self.published.update(plain)
        self._publish(plain)

    def stop(self, reason: str) -> None:
        """Stop the run after this step."""
        self._host.stopping.ask(reason)

    def notice(self, text: str) -> None:
        """Show a message to the user, through the hooks that write a log."""
        self._host.notice(text)

    def flush(self) -> None:
        """Have all hooks finish their pending writes."""
        self._host.flush()

    def save(self) -> None:
        """Save the state of this step now, for example before a long evaluation at the end.

        Values that are published later are added to the checkpoint.
        """
        self._host.save(self)

    def flops(self) -> float | None:
        """Return the floating-point operations of one step, if the compiler reports them."""
        return self._host.flops()

    def hook_states(self) -> dict[str, Mapping[str, Any]]:
        """Return the states of all hooks, for the hook that saves; see `Hook.state`."""
        return self._host.hook_states()

    def past(self, step: int) -> PastStep:
        """Return an earlier step, to be inspected or taken again."""
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
            f"{name} must be a number or a string to be published, got {value!r:.60}"
        ) from None


class Hook:
    """Override what you need; `when` chooses the steps after which `after_step` is called.

    Set `needs_state` if `after_step` reads the state, or must stop the run at exactly its step. The
    loop then waits for the device before the next step. Otherwise the hook is called a few steps
    later, and no time is lost.

    A hook subscribes to anything else, such as the metrics of every step or the values that other
    hooks publish, with `Report.listen` in `begin`. It stops the run with `Report.stop`.

    A hook with memory returns it from `state` and gets it back through `restore`. It is stored in
    every checkpoint, so a resumed run continues as if it had not been interrupted.

    If several processes train, all of them have the same hooks, because what hooks compute with the
    state is computed by all processes. Hooks that only write are `chief_only`.
    """

    when: Trigger = never()
    needs_state: bool = True
    changes_batch: bool = False  # True if `before_step` is to be called; steps are not fused then
    chief_only: bool = False  # True if only the first process has it, because it writes for all
    order: int = 0  # hooks with a lower number are called first; see GUARD to SAVE
    label: str = ""  # distinguishes hooks of one class in a checkpoint; else their order

    def begin(self, report: Report) -> None:
        """Called before the first step, and again when a run recovers."""

    def before_step(self, report: Report, batch: Batch) -> Mapping[str, Any] | None:
        """Return entries to put into the batch of the next step; `report` is of the step before.

        Only called if the hook has `changes_batch`.
        """

    def after_step(self, report: Report) -> None:
        """Called after each step that `when` chooses."""

    def end(self, report: Report) -> None:
        """Called once, after the last step, unless an exception ended the run.

        The report has what was published at the last step.
        """

    def close(self) -> None:
        """Called once, always, even after an exception: release threads and files."""

    def state(self) -> Mapping[str, Any] | None:
        """Return what the hook remembers, a small mapping that fits into JSON, or None.

        Infinities and NaN are allowed. Called when a step is saved, after all hooks were called for
        that step and received what was published at it.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Called after `begin` if the run resumes or recovers, with what `state` returned then.

        Not called for a hook without a saved state.
        """


GUARD = -2  # hooks that check a step, so that nothing is written of one that failed
MEASURE = -1  # hooks that measure, so that others find what they publish
WRITE = 1  # hooks that write what was measured
SAVE = 2  # hooks that save the state, and with it what the others know


class StateSaver(Hook):
    """A hook that saves the state, and that a run can be restored from."""

    order = SAVE
    read_only: bool = False  # set by a Scaffold that waits: another process saves
    replaces_final_state: bool = False  # whether `final_state` may return a state

    def restore_state(self, like: TrainState) -> TrainState | None:
        """Called first, and again when a run recovers: return a saved state, or None.

        `like` has the structure of the state; its leaves may be `jax.ShapeDtypeStruct`, with
        shardings.
        """

    def final_state(self, report: Report) -> TrainState | None:
        """Called after `end` of all hooks: return the state to end with, or None to keep it.

        Only with `replaces_final_state`, and not after an interrupt or an exception, because such a
        run is resumed.
        """

    def saved_hook_states(self) -> Mapping[str, Mapping[str, Any]] | None:
        """Return the hook states saved with the state from `restore_state`; None without one."""


def check_hooks(hooks: Sequence[Any]) -> None:
    """Raise TypeError unless all are hooks with a trigger."""
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise TypeError(f"hooks must be instances of ftrain.Hook, got {hook!r}")
        if not isinstance(hook.when, Trigger):
            raise TypeError(
                f"{type(hook).__name__}.when must be a trigger, such as every(steps=100), "
                f"got {hook.when!r}"
            )


def change_batch(hooks: Sequence[Hook], report: Report, batch: Batch) -> Batch:
    """Return the batch with the entries that hooks put into it."""
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
