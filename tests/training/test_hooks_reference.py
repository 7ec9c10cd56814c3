"""The recorded events of TensorFlow 1's monitored sessions, in our terms.

All numbers come from the cases: which hooks there are, how many runs, where an error is raised,
how fast the clock is.

Its `begin`, before there is a session, is our `__init__`, `after_create_session` our `begin`,
`before_run` and `after_run` our `before_step` and `after_step`. The error for the end of its input
is our EndOfData, and AbortedError a runtime error with "ABORTED" in its message.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from regression import init_params, loss_fn

from ftrain import TrainState, make_step, optimizers
from ftrain.checkpoints import CheckpointManager
from ftrain.coordination import EndOfData
from ftrain.hooks import (
    CheckpointSaver,
    FeedBatch,
    FinalOps,
    Logging,
    NonFiniteError,
    SaveListener,
    StepCounter,
    StopAtStep,
    StopOnNaN,
    SummarySaver,
    WaitForStep,
)
from ftrain.summaries import read_events, read_metrics
from ftrain.training import Hook, Loop, Scaffold, every, never, timer
from ftrain.training.hook import StateSaver

pytestmark = [pytest.mark.reference, pytest.mark.usefixtures("no_thread_left")]
CASES = references.cases("hooks")
SGD = optimizers.gradient_descent(0.1)
STEP = make_step(loss_fn, SGD)
ERRORS = {
    "ValueError": lambda: ValueError("from the hook"),
    "OutOfRangeError": lambda: EndOfData("no more"),
    "StopIteration": lambda: StopIteration("no more"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("ctrl-c"),
    "AbortedError": lambda: jax.errors.JaxRuntimeError("ABORTED: preempted"),
    "UnavailableError": lambda: jax.errors.JaxRuntimeError("UNAVAILABLE: gone"),
    "CancelledError": lambda: jax.errors.JaxRuntimeError("CANCELLED: cancelled"),
}
EVENTS = {
    "start": "begin",
    "begin": "after_create_session",
    "before": "before_run",
    "after": "after_run",
    "end": "end",
}


def of(scenario, **fields):
    return [
        c
        for c in CASES
        if c["scenario"] == scenario and all(c.get(key) == value for key, value in fields.items())
    ]


def runs_of(case):
    """What the recorded runs returned: the global step, one for each run."""
    return [event["returned"] for event in case["events"] if event["event"] == "run"]


def hooks_of(case):
    """The names of the recorded hooks, in order."""
    begun = [event["who"] for event in case["events"] if event["event"] == "begin"]
    return [who for who in begun if not who.startswith("listener")]


def where(case, what):
    """Return the hook, our method and the step at which the first event `what` was recorded."""
    events = case["events"]
    number = next(n for n, event in enumerate(events) if event["event"] == what)
    before = next(
        event for event in reversed(events[:number]) if event["who"] == events[number]["who"]
    )
    ours = {recorded: own for own, recorded in EVENTS.items()}
    return events[number]["who"], ours[before["event"]], before["global_step"]


def failing_hooks(case, events):
    """The recorded hooks, of which one raises what was recorded, where it was, and as often."""
    raised = [event for event in case["events"] if event["event"] == "raise"]
    who, method, step = where(case, "raise")
    fails = (method, step, raised[0]["error"])
    return [
        Recorder(n, events, fails=fails if n == who else None, times=len(raised))
        for n in hooks_of(case)
    ]


def number_in(case, pattern):
    """A number that only the description of a case tells."""
    return int(re.search(pattern, case["description"])[1])


def clock_of(case, default=0.0):
    found = re.search(r"advances ([\d.]+) seconds", case["description"])
    return Clock(float(found[1]) if found else default)


def name_of(case):
    return ", ".join(
        str(case[key])
        for key in ("description", "arguments", "save_steps", "session")
        if case.get(key)
    )


def state_at(step=0):
    return TrainState.create(init_params(), SGD).replace(step=jnp.int32(step))


class Recorder(Hook):
    """Records its calls under TensorFlow's names; raises or requests a stop at a given event."""

    when = every(steps=1)
    changes_batch = True

    def __init__(self, name, events, *, fails=None, times=1, stops=None):
        self.name = name
        self.events = events
        self.fails = fails
        self.times = times
        self.stops = stops
        self.note("start", 0)

    def note(self, event, step, report=None):
        recorded = {"who": self.name, "event": EVENTS[event]}
        self.events.append(recorded if event == "start" else recorded | {"global_step": step})
        if self.stops == (event, step):
            self.events.append({"who": self.name, "event": "request_stop", "global_step": step})
            report.stop("asked to")
        if self.fails is not None and self.fails[:2] == (event, step) and self.times:
            self.times -= 1
            self.events.append({"who": self.name, "event": "raise", "error": self.fails[2]})
            raise ERRORS[self.fails[2]]()

    def begin(self, report):
        self.note("begin", report.step)

    def before_step(self, report, batch):
        self.note("before", report.step, report)

    def after_step(self, report):
        self.note("after", report.step, report)

    def end(self, report):
        self.note("end", report.step)


class Listener(SaveListener):
    def __init__(self, name, events, stop_at=None):
        self.name = name
        self.events = events
        self.stop_at = stop_at

    def begin(self):
        self.events.append({"who": self.name, "event": "begin"})

    def before_save(self, step):
        self.events.append({"who": self.name, "event": "before_save", "global_step": step})

    def after_save(self, step):
        self.events.append({"who": self.name, "event": "after_save", "global_step": step})
        return step == self.stop_at

    def end(self, step):
        self.events.append({"who": self.name, "event": "end", "global_step": step})


def drive(hooks, data, events, *, start=0, most=100, ask=True, loss=None, **options):
    """Record `while not should_stop(): step()`, and an error that ends it."""
    step = STEP if loss is None else make_step(loss, SGD)
    try:
        with Loop(step, state_at(start), data, hooks=hooks, fuse=1, **options) as loop:
            for _ in range(most):
                stop = loop.should_stop()
                if ask:
                    events.append({"who": "loop", "event": "should_stop", "value": stop})
                if stop:
                    break
                loop.step()
                if loop.stop_reason != "the data ended":
                    events.append({"who": "loop", "event": "run", "returned": loop.steps_taken})
                elif ask:  # the reference leaves the block here
                    break
        events.append({"who": "with block", "event": "left without error"})
        return loop
    except BaseException as error:  # noqa: BLE001 - compared with the recorded one
        events.append({"who": "with block", "event": "error", "error": type(error)})
        return error


def recorded(case, *, without=()):
    """The events of a case, with errors as we raise them, and only what we record."""
    kept = []
    for event in case["events"]:
        if event["who"] in without:
            continue
        plain = {
            key: event[key]
            for key in ("who", "event", "global_step", "value", "returned", "error")
            if key in event
        }
        if event["who"] in ("with block", "constructor") and "error" in event:
            kinds = {"NanLossDuringTrainingError": NonFiniteError}
            kind = event["error"]
            plain = {
                "who": "with block",
                "event": "error",
                "error": kinds.get(kind) or type(ERRORS[kind]()),
            }
        kept.append(plain)
    return kept


@pytest.mark.parametrize("case", of("call order"), ids=name_of)
def test_call_order(case, pipeline):
    events = []
    hooks = [Recorder(name, events) for name in hooks_of(case)]
    drive(hooks, pipeline, events, most=len(runs_of(case)), ask=False)
    assert events == recorded(case)


@pytest.mark.parametrize(
    "case", [*of("request_stop in before_run"), *of("request_stop in after_run")], ids=name_of
)
def test_a_stop_is_asked_for(case, pipeline):
    events = []
    who, method, step = where(case, "request_stop")
    hooks = [
        Recorder(name, events, stops=(method, step) if name == who else None)
        for name in hooks_of(case)
    ]
    drive(hooks, pipeline, events)
    assert events == recorded(case)


def test_a_step_after_a_stop_is_refused(pipeline):
    (case,) = of("run after a stop was requested")
    assert [event["error"] for event in case["events"] if event["event"] == "run again"] == [
        "RuntimeError"
    ]
    with Loop(STEP, state_at(), pipeline, fuse=1) as loop:
        loop.step()
        loop.request_stop("enough")
        assert loop.should_stop()
        with pytest.raises(RuntimeError, match="the run has been stopped: enough"):
            loop.step()


@pytest.mark.parametrize("case", of("feeds of hooks"), ids=name_of)
def test_feeds(case):
    """The caller's feed is our batch; TensorFlow 1 refuses a hook that replaces an entry of it."""
    seen = []

    def loss(params, batch, rng):
        return jnp.sum(params["b"]) + jnp.sum(10 * batch["x"] + batch["y"])

    batch = {"x": np.zeros(1, np.float32), "y": np.zeros(1, np.float32)}
    batch |= {
        name: np.full(1, value, np.float32)
        for name, value in (case.get("caller_feed") or {}).items()
    }
    feeds = [
        FeedBatch(
            lambda step, feed=feed: {
                name: np.full(1, value, np.float32) for name, value in feed.items()
            }
        )
        for feed in case["hook_feeds"]
    ]

    class Reader(Hook):
        when = every(steps=1)

        def after_step(self, report):
            seen.append(report.read("loss"))

    def run():
        with Loop(
            make_step(loss, SGD), state_at(), [batch], hooks=[*feeds, Reader()], fuse=1
        ) as loop:
            loop.step()

    names = [name for feed in case["hook_feeds"] for name in feed]
    if twice := {name for name in names if names.count(name) > 1}:
        assert case["error"] == "RuntimeError"
        with pytest.raises(RuntimeError, match=f"[{''.join(twice)}] is fed by two hooks"):
            run()
        return
    run()
    fed = {"x": 0.0, "y": 0.0} | (case["caller_feed"] or {})
    for feed in case["hook_feeds"]:
        fed |= feed
    assert case["fetch"] == "10 * x + y"
    assert seen == [case.get("value", 10 * fed["x"] + fed["y"])]


def test_feeding_may_end_the_run_and_final_ops_run_at_the_end(pipeline):
    (case,) = of("FeedFnHook and FinalOpsHook")
    runs = [event for event in case["events"] if event["event"] == "run"]

    def feed(step):
        if step == len(runs):
            raise StopIteration
        return {}

    final = FinalOps(lambda state: {"double": 2.0 * int(state.step)})
    assert final.result is case["events"][0]["value"]
    events = []
    loop = drive([FeedBatch(feed), final], pipeline, events)
    assert loop.steps_taken == len(runs)
    assert events[-1]["event"] == "left without error"
    assert final.result == {"double": 2.0 * len(runs)}


@pytest.mark.parametrize("case", of("StopAtStepHook"), ids=name_of)
def test_stop_at_step(case, pipeline):
    """Ours takes no step if none is left to take, and refuses to take none at all."""
    arguments = case["arguments"]
    start = case["restored_global_step"]
    if 0 in arguments.values():
        with pytest.raises(ValueError, match="must be a whole number >= 1, got 0"):
            StopAtStep(**arguments)
        return
    events = []
    expected = recorded(case)
    if start >= arguments.get("last_step", start + 1):
        expected = [{"who": "loop", "event": "should_stop", "value": True}, expected[-1]]
    drive([StopAtStep(**arguments)], pipeline, events, start=start)
    assert events == expected


@pytest.mark.parametrize("case", of("StopAtStepHook arguments"), ids=name_of)
def test_arguments_of_stop_at_step(case):
    with pytest.raises(ValueError, match="needs either last_step or num_steps"):
        StopAtStep(**case["arguments"])


def test_stop_at_step_used_twice(pipeline):
    (case,) = of("StopAtStepHook used twice")
    hook = StopAtStep(num_steps=number_in(case, r"num_steps=(\d+)"))
    events = []
    starts = re.findall(r"starts at step (\d+)|from (scratch)", case["description"])
    for number, start in enumerate((int(step or 0) for step, _ in starts), 1):
        events.append({"who": "test", "event": f"session {number} with the same hook object"})
        drive([hook], pipeline, events, start=start)
    assert events == recorded(case)


class Clock:
    """Advances by `seconds` before every step."""

    def __init__(self, seconds):
        self.now = 0.0
        self.seconds = seconds

    def __call__(self):
        return self.now


class Ticking(Hook):
    """Advances a clock before every step; the loop waits for it before it dispatches another."""

    when = every(steps=1)
    changes_batch = True

    def __init__(self, clock):
        self.clock = clock

    def before_step(self, report, batch):
        self.clock.now += self.clock.seconds


def checkpoints_on(case):
    return [int(name.rpartition("-")[2]) for name in case["checkpoints_on_disk"]]


@pytest.mark.parametrize("case", of("CheckpointSaverHook"), ids=name_of)
def test_checkpoints(case, pipeline, tmp_path):
    """With TensorFlow 1's timer, and a save at the start; our default saves at multiples."""
    events = []
    start = case.get("restored_global_step", 0)
    names = sorted(
        {event["who"] for event in case["events"] if event["who"].startswith("listener")}
    )
    timing = {"steps": case["save_steps"]} if "save_steps" in case else {"secs": case["save_secs"]}
    saver = CheckpointSaver(
        tmp_path,
        when=timer(**timing, at_once=False),
        keep=99,
        at_start=True,
        listeners=[Listener(name, events) for name in names],
    )
    clock = clock_of(case)
    hooks = [Ticking(clock), saver, StopAtStep(num_steps=case.get("num_steps", len(runs_of(case))))]
    drive(hooks, pipeline, events, start=start, ask="save_steps" in case, clock=clock)
    assert events == recorded(case)
    assert CheckpointManager(tmp_path).steps() == checkpoints_on(case)


def test_a_listener_may_ask_to_stop(pipeline, tmp_path):
    case = next(c for c in of("CheckpointSaverListener") if "checkpoints_on_disk" in c)
    events = []
    when = timer(steps=case["save_steps"], at_once=False)
    listeners = [Listener("listener", events, stop_at=number_in(case, r"at step (\d+)"))]
    saver = CheckpointSaver(tmp_path, when=when, at_start=True, keep=99, listeners=listeners)
    drive([saver], pipeline, events)
    assert events == recorded(case, without=("after",))
    assert CheckpointManager(tmp_path).steps() == checkpoints_on(case)


def test_a_listener_may_ask_to_stop_before_the_first_step(pipeline, tmp_path):
    """The reference goes on."""
    saver = CheckpointSaver(
        tmp_path, at_start=True, listeners=[Listener("listener", [], stop_at=0)]
    )
    assert drive([saver], pipeline, []).steps_taken == 0


def test_rotation_over_a_restart(pipeline, tmp_path):
    """With TensorFlow 1's timer, which counts from the start of each session."""
    (case,) = of("rotation over a restart")
    length = number_in(case, r"of (\d+) steps")
    for number, event in enumerate(case["events"], 1):
        saver = CheckpointSaver(
            tmp_path,
            when=timer(steps=number_in(case, r"save_checkpoint_steps=(\d+)"), at_once=False),
            keep=number_in(case, r"max_to_keep=(\d+)"),
            at_start=True,
        )
        drive([saver, StopAtStep(number * length)], pipeline, [])
        assert CheckpointManager(tmp_path).steps() == checkpoints_on(event)


@pytest.mark.parametrize("case", of("SummarySaverHook"), ids=name_of)
def test_summaries(case, pipeline, tmp_path):
    start = case.get("restored_global_step", 0)
    timing = {"steps": case["save_steps"]} if "save_steps" in case else {"secs": case["save_secs"]}
    expected = [event["global_step"] for event in case["events"] if event["event"] == "add_summary"]
    runs = runs_of(case)
    last = runs[-1] if runs else expected[-1]
    clock = clock_of(case)
    saver = SummarySaver(tmp_path, when=timer(**timing))
    drive([Ticking(clock), saver, StopAtStep(last)], pipeline, [], start=start, clock=clock)
    expected = list(dict.fromkeys([*expected, last]))  # ours also writes the last step
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == expected
    (file,) = tmp_path.glob("events.out.tfevents.*")
    log = [event.step for event in read_events(file) if event.HasField("session_log")]
    assert log == [
        event["global_step"] for event in case["events"] if event["event"] == "add_session_log"
    ]


@pytest.mark.parametrize("case", of("StepCounterHook"), ids=name_of)
def test_speed(case, pipeline):
    published = []

    class Receiver(Hook):
        def begin(self, report):
            report.listen(published=self.receive)

        def receive(self, step, values):
            published.append((step, values["steps_per_second"]))

    clock = clock_of(case)
    start = case["restored_global_step"]
    expected = [
        (event["global_step"], event["values"]["global_step/sec"])
        for event in case["events"]
        if event["event"] == "add_summary"
    ]
    counter = StepCounter(when=timer(steps=case["every_n_steps"]))
    drive(
        [Ticking(clock), counter, Receiver(), StopAtStep(expected[-1][0])],
        pipeline,
        [],
        start=start,
        clock=clock,
    )
    assert published == expected


def logged_in(case):
    """The steps of the runs in which a line was logged; the line stands before its run."""
    order = [event for event in case["events"] if event["event"] in ("info", "run")]
    return [
        order[i + 1]["returned"] for i, event in enumerate(order[:-1]) if event["event"] == "info"
    ]


@pytest.mark.parametrize(
    "case", [c for c in of("LoggingTensorHook") if "arguments" in c], ids=name_of
)
def test_logging(case, pipeline):
    """TensorFlow 1 evaluates its tensors once more after the last run.

    So its line at the end is one of ours only if no line was written for the last step.
    """
    lines = []
    arguments = case["arguments"]
    clock = clock_of(case)
    timing = {"every_n_iter": "steps", "every_n_secs": "secs"}
    chosen = {timing[key]: value for key, value in arguments.items() if key in timing}
    logging = Logging(
        ["loss"],
        when=timer(**chosen) if chosen else never(),
        at_end=arguments.get("at_end", False),
        write=lambda line: lines.append(line),
    )
    runs = runs_of(case)
    start = case["restored_global_step"]
    drive([Ticking(clock), logging, StopAtStep(runs[-1])], pipeline, [], start=start, clock=clock)
    expected = logged_in(case)
    if arguments.get("at_end"):
        expected = list(dict.fromkeys([*expected, runs[-1]]))
    assert [
        int(line.split()[1].rstrip(":")) for line in lines if line.startswith("step ")
    ] == expected


@pytest.mark.parametrize("case", of("LoggingTensorHook arguments"), ids=name_of)
def test_a_log_that_would_never_be_written_is_refused(case):
    assert case["error"] == "ValueError"
    timing = {"every_n_iter": "steps", "every_n_secs": "secs"}
    with pytest.raises(ValueError, match=r"needs (steps > 0, got|either steps= or secs=)"):
        Logging(when=timer(**{timing[key]: value for key, value in case["arguments"].items()}))


def test_a_formatter(pipeline):
    (case,) = (c for c in of("LoggingTensorHook") if "arguments" not in c)
    lines = []
    steps = logged_in(case)
    when = timer(steps=steps[1] - steps[0])
    logging = Logging(
        ["loss"], when=when, at_end=False, write=lines.append, format=lambda v: f"formatted {[*v]}"
    )
    drive([logging, StopAtStep(runs_of(case)[-1])], pipeline, [])
    assert lines == [f"step {step}: formatted ['loss']" for step in steps]


def exploding(batch_number, bad):
    def loss(params, batch, rng):
        value, metrics = loss_fn(params, batch, rng)
        return jnp.where(batch["number"][0] == batch_number, bad, value), metrics

    return loss


def numbered(pipeline, count=100):
    return [pipeline.batch(n) | {"number": np.full(8, n)} for n in range(count)]


@pytest.mark.parametrize("fails", [True, False])
def test_nan(fails, pipeline):
    (case,) = of("NanTensorHook", fail_on_nan_loss=fails)
    events = []
    first, *others = (Recorder(name, events) for name in hooks_of(case))
    step = number_in(case, r"before the run is (\d+)")
    guard = StopOnNaN("loss", action="raise" if fails else "stop")
    drive([first, guard, *others], numbered(pipeline), events, loss=exploding(step, jnp.nan))
    expected = recorded(case)
    if fails:  # our guard comes before every hook's after_step
        expected.remove({"who": first.name, "event": "after_run", "global_step": step + 1})
    assert events == expected


def test_infinity_counts_too(pipeline):
    """The reference lets it pass."""
    error = drive([StopOnNaN("loss")], numbered(pipeline), [], loss=exploding(1, jnp.inf))
    assert isinstance(error, NonFiniteError)
    assert error.step == 2


@pytest.mark.parametrize(
    "case", of("GlobalStepWaiterHook"), ids=lambda case: str(case["wait_until_step"])
)
def test_waiting_for_a_step(case, pipeline):
    sleeps = []
    start = case["restored_global_step"]
    hook = WaitForStep(
        case["wait_until_step"], read=lambda: start + len(sleeps), sleep=sleeps.append
    )
    drive([hook], pipeline, [], start=start, most=len(runs_of(case)))
    assert sleeps == [event["seconds"] for event in case["events"] if event["event"] == "sleep"]


def test_the_end_of_the_data(pipeline):
    """Ours has no batch to show before a step that does not come."""
    (case,) = of("OutOfRangeError inside run")
    events = []
    count = number_in(case, r"after (\d+) elements")
    hooks = [Recorder(name, events) for name in hooks_of(case)]
    drive(hooks, [pipeline.batch(step) for step in range(count)], events)
    missing = [{"who": hook.name, "event": "before_run", "global_step": count} for hook in hooks]
    assert events == [event for event in recorded(case) if event not in missing]


@pytest.mark.parametrize("case", of("error in the with block"), ids=name_of)
def test_an_error_in_the_block(case, pipeline):
    kind = case["description"].split()[0]
    events = []
    expected = recorded(case)
    hooks = [Recorder(name, events) for name in hooks_of(case)]
    steps = max(event["global_step"] for event in case["events"] if event["event"] == "after_run")
    try:
        with Loop(STEP, state_at(), pipeline, hooks=hooks, fuse=1) as loop:
            for _ in range(steps):
                loop.step()
            events.append({"who": "loop", "event": "raise", "error": kind})
            raise ERRORS[kind]()
        events.append({"who": "with block", "event": "left without error"})
    except BaseException as error:  # noqa: BLE001 - compared with the recorded one
        events.append({"who": "with block", "event": "error", "error": type(error)})
    assert events == expected


@pytest.mark.parametrize("case", of("error in a hook"), ids=name_of)
def test_an_error_in_a_hook(case, pipeline):
    """If the `end` of one hook fails, we still call the others: they may have a state to save."""
    events = []
    hooks = failing_hooks(case, events)
    who, method, step = where(case, "raise")
    stop = [StopAtStep(step)] if method == "end" else []
    drive([*hooks, *stop], pipeline, events)
    expected = recorded(case)
    if method == "end":
        later = hooks_of(case)[hooks_of(case).index(who) + 1 :]
        expected[-1:-1] = [{"who": name, "event": "end", "global_step": step} for name in later]
    assert events == expected


@pytest.mark.parametrize(
    "case",
    [c for c in of("recovery") if "last_step" in c],
    ids=lambda case: f"{case['description'][:40]}, {case.get('save_steps')}",
)
def test_recovery(case, pipeline, tmp_path):
    """Ours does not save again the checkpoint that it went on from."""
    events = []
    hooks = failing_hooks(case, events)
    if case.get("save_steps"):
        saver = CheckpointSaver(
            tmp_path,
            when=timer(steps=case["save_steps"], at_once=False),
            keep=99,
            at_start=True,
            listeners=[Listener("listener", events)],
        )
        hooks.append(saver)
    drive([*hooks, StopAtStep(case["last_step"])], pipeline, events)
    expected = recorded(case)
    again = next(i for i, event in enumerate(expected) if event["event"] == "raise")
    saved = [event["global_step"] for event in expected[:again] if event["event"] == "after_save"]
    repeated = [
        {"who": "listener", "event": event, "global_step": saved[-1]}
        for event in ("before_save", "after_save")
        if saved
    ]
    expected = [event for i, event in enumerate(expected) if i < again or event not in repeated]
    assert events == expected
    assert CheckpointManager(tmp_path).steps() == checkpoints_on(case)


def test_recovery_at_the_start(pipeline):
    case = next(c for c in of("recovery") if "twice" in c["description"])
    events = []
    drive([*failing_hooks(case, events), StopAtStep(runs_of(case)[-1])], pipeline, events)
    assert events == recorded(case)


def test_recovery_counts_steps_from_the_first_start(pipeline):
    case = next(c for c in of("recovery") if "num_steps" in c["description"])
    events = []
    hooks = [
        *failing_hooks(case, events),
        StopAtStep(num_steps=number_in(case, r"num_steps=(\d+)")),
    ]
    drive(hooks, pipeline, events)
    assert events == recorded(case)


def test_without_recovery(pipeline):
    (case,) = of("no recovery in SingularMonitoredSession")
    events = []
    drive(failing_hooks(case, events), pipeline, events, recoveries=0)
    assert events == recorded(case)


@pytest.mark.parametrize("case", of("Scaffold"), ids=lambda case: str(case["restored_global_step"]))
def test_scaffold(case, pipeline):
    """Our initial state takes the place of the init op."""
    events = []
    start = case["restored_global_step"]

    class Restorer(StateSaver):
        def restore_state(self, like):
            return like.replace(step=jnp.int32(start)) if start else None

    def initialise(state):
        events.append({"who": "scaffold", "event": "init_fn", "global_step": int(state.step)})
        return state

    def initialise_locally(state):
        events.append({"who": "scaffold", "event": "local_init_op"})
        return state

    scaffold = Scaffold(init_fn=initialise, local_init_fn=initialise_locally)
    hooks = [*(Recorder(name, events) for name in hooks_of(case)), Restorer()]
    with Loop(STEP, state_at(), pipeline, hooks=hooks, fuse=1, scaffold=scaffold) as loop:
        for _ in runs_of(case):
            loop.step()
            events.append({"who": "loop", "event": "run", "returned": loop.steps_taken})
    assert events == [event for event in recorded(case) if event["event"] != "init_op"]
