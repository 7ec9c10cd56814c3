"""The audience: the hooks of a run, and how they are told what happens in it."""

import functools
from collections.abc import Mapping, Sequence

from ftrain.coordination import call_all
from ftrain.training.flight import Call
from ftrain.training.hook import Hook, Host, Report, Value
from ftrain.training.metrics import Metrics
from ftrain.training.replay import Past
from ftrain.training.state import TrainState
from ftrain.training.timing import Timing, clock


class Audience:
    """Tells hooks of the steps of `host`, and hands on what one of them publishes to the others."""

    def __init__(self, host: Host, hooks: Sequence[Hook], timing: Timing):
        self._host, self._hooks, self._timing = host, hooks, timing
        self._watchers = [hook for hook in hooks if type(hook).watch is not Hook.watch]
        self._telling: Hook | None = None  # the one that is being told of a step
        self._published: tuple[int, dict[str, Value]] = (
            -1,
            {},
        )  # the newest step at which a hook was due, and what

    def notice(self, text: str) -> None:
        for hook in self._hooks:
            hook.notice(text)

    def flush(self) -> None:
        for hook in self._hooks:
            hook.flush()

    def report(
        self,
        metrics: Metrics,
        state: TrainState | None,
        due: Sequence[Hook] = (),
        examples: int = 0,
    ) -> Report:
        """What is told of the last step of `metrics`; those `due` are told it themselves, the others what it has to
        publish. If none of them needs the state, which the next step writes over, it is not in it."""
        step = metrics.last

        def publish(values: Mapping[str, Value]) -> None:
            for hook in self._hooks:
                if hook not in due and hook is not self._telling:
                    self.stop_for(hook.receive(step, values))

        has_state = not due or any(hook.needs_state for hook in due)
        return Report(
            self._host,
            step,
            state if has_state else None,
            metrics,
            examples=examples,
            publish=publish,
        )

    def tell(self, call: Call, state: TrainState | None) -> None:
        """Tell of a call that is finished."""
        for hook in self._watchers:
            self._watch(hook, call.metrics)
        if not call.due:
            return
        waiting = list(call.due)
        report = self.report(call.metrics, state, waiting, call.piece.examples)
        for hook in call.due:
            self._telling = waiting.pop(0)
            with self._timing.measure(type(hook).__name__):
                hook.after_step(report)
        self._published = report.step, report.published

    def tell_end(self, metrics: Metrics, state: TrainState | None) -> None:
        """Tell of the end of the run, every one of them, whatever others raise."""
        report = self.report(metrics, state)
        if self._published[0] == report.step:
            report.published.update(self._published[1])

        def end(hook: Hook) -> None:
            self._telling = hook
            with self._timing.measure(type(hook).__name__):
                hook.end(report)

        call_all([functools.partial(end, hook) for hook in self._hooks])

    def save(self, report: Report) -> None:
        """Have the hooks that save the state do so now."""
        for hook in self._hooks:
            if hook.saves_state:
                with self._timing.measure(type(hook).__name__):
                    hook.after_step(report)

    def tell_failure(self, error: Exception, past: Past | None) -> None:
        call_all([functools.partial(hook.failed, error, past) for hook in self._hooks])

    def _watch(self, hook: Hook, metrics: Metrics) -> None:
        started = clock()
        reason = hook.watch(metrics)
        self._timing.add(type(hook).__name__, clock() - started)
        self.stop_for(reason)

    def stop_for(self, reason: str | None) -> None:
        """Stop for the reason that a hook returned, if it did and the run is not over anyway."""
        if reason is not None and not self._host.ending:
            self.notice(f"stopping: {reason}")
            self._host.request_stop(reason)
