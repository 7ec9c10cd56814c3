import sys
import threading

import pytest
import references

from ftrain.coordination import Coordinator, EndOfData, LooperThread
from ftrain.training import timer

pytestmark = pytest.mark.reference
CASES = references.cases("coordinator")
# The reference's OutOfRangeError corresponds to our EndOfData.
ERRORS = {
    "ValueError": ValueError,
    "OutOfRangeError": EndOfData,
    "StopIteration": StopIteration,
    "AbortedError": OSError,
}


class SubclassOfClean(EndOfData):
    pass


def of(what, **keys):
    return [case for case in CASES if case["what"] == what and all(key in case for key in keys)]


def outcome(call, *args, **kwargs):
    try:
        return {"value": call(*args, **kwargs)}
    except BaseException as error:  # noqa: BLE001 - compared below
        return {"error": type(error), "message": str(error)}


def expected_outcome(event):
    if "error" in event:
        return {"error": ERRORS[event["error"]], "message": event["message"]}
    return {"value": event["value"]}


@pytest.mark.parametrize(
    "case", of("tf.train.SecondOrStepTimer"), ids=lambda case: str(case["arguments"])
)
def test_timers_fire_as_in_the_reference(case):
    options = {key.removeprefix("every_"): value for key, value in case["arguments"].items()}
    if "error" in case:
        with pytest.raises(ValueError, match="needs either"):
            timer(**options)
        return
    trigger = timer(**options)
    fired = trigger.counts_from(0)
    moment = 0.0
    for event in case["events"]:
        if event.get("event") == "reset":
            assert trigger.due(99, 0.0, trigger.counts_from(0))
            continue
        due = trigger.due(event["step"], event["clock"] - moment, fired)
        assert due == event["should_trigger"], event
        if due:
            fired, moment = event["step"], event["clock"]


def make_exception(note):
    kinds = {
        "no exception": None,
        "ValueError": ValueError("first"),
        "subclass of a clean type": SubclassOfClean("x"),
        "AbortedError": OSError("x"),
    }
    if note in kinds:
        return kinds[note]
    return (StopIteration if note.startswith("StopIteration") else EndOfData)("x")


@pytest.mark.parametrize(
    "case", of("tf.train.Coordinator", events=1), ids=lambda case: case["note"]
)
def test_a_request_to_stop_as_in_the_reference(case):
    clean = {
        "OutOfRangeError with clean_stop_exception_types=()": (),
        "StopIteration declared clean": (StopIteration,),
    }
    coordinator = Coordinator(clean.get(case["note"], (EndOfData,)))
    error = make_exception(case["note"])
    for event in case["events"]:
        if event["call"] == "request_stop" and case["exc_info_tuple"] and error is not None:
            try:
                raise error
            except BaseException:  # noqa: BLE001 - sys.exc_info() needs it
                coordinator.request_stop(sys.exc_info())
        elif event["call"] == "request_stop":
            coordinator.request_stop(error)
        elif event["call"] != "start":
            found = outcome(getattr(coordinator, event["call"]))
            assert found == (
                expected_outcome(event) if event.keys() & {"value", "error"} else {"value": None}
            ), event
        if "should_stop" in event:
            assert (coordinator.should_stop(), coordinator.joined) == (
                event["should_stop"],
                event["joined"],
            ), event


def by_note(note):
    return next(case for case in CASES if case.get("note") == note)


def test_the_first_exception_counts():
    coordinator = Coordinator()
    coordinator.request_stop(ValueError("first"))
    coordinator.request_stop(OSError("second"))
    assert outcome(coordinator.join) == expected_outcome(by_note("two exceptions, then join"))


def test_only_the_first_request_counts():
    coordinator = Coordinator()
    coordinator.request_stop()
    coordinator.request_stop(ValueError("late"))
    assert outcome(coordinator.join) == expected_outcome(
        by_note("request_stop without, then with an exception, then join")
    )


def test_an_exception_after_join_is_raised_at_once():
    coordinator = Coordinator()
    coordinator.request_stop()
    coordinator.join()
    assert outcome(coordinator.request_stop, ValueError("after join")) == expected_outcome(
        by_note("an exception reported after join is raised at once")
    )


@pytest.mark.parametrize("kind", ["NoneType", "ValueError", "OutOfRangeError"])
def test_stop_on_exception(kind):
    case = by_note(f"stop_on_exception with {kind}")
    reached = []
    coordinator = Coordinator()
    with coordinator.stop_on_exception():
        reached.append("body")
        if kind != "NoneType":
            raise ERRORS[kind]("v")
        reached.append("end of body")
    reached.append("after the block")
    assert reached == case["value"]["reached"]
    assert coordinator.should_stop() == case["value"]["should_stop"]
    assert outcome(coordinator.join) == expected_outcome(case["value"]["join"])


def test_waiting_for_a_stop():
    coordinator = Coordinator()
    expected = by_note("wait_for_stop(0.01)")["value"]
    assert coordinator.wait_for_stop(0.01) is expected["before"]
    coordinator.request_stop()
    assert coordinator.wait_for_stop(0.01) is expected["after"]


@pytest.mark.parametrize("ignored", [False, True])
def test_a_thread_that_outlives_the_grace_period_is_named(ignored):
    coordinator = Coordinator()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="stubborn", daemon=True)
    thread.start()
    coordinator.request_stop()
    found = outcome(
        coordinator.join, [thread], stop_grace_period_secs=0.02, ignore_live_threads=ignored
    )
    release.set()
    thread.join()
    if ignored:
        assert found == {"value": None}
    else:
        assert found["error"] is RuntimeError
        assert "stubborn" in found["message"]


def test_when_one_thread_fails_the_others_stop():
    coordinator = Coordinator()
    trace = []
    case = by_note("one of two threads fails")["value"]

    def fail():
        with coordinator.stop_on_exception():
            raise ValueError("in thread")

    def wait():
        if coordinator.wait_for_stop(30):
            trace.append("the other thread saw the stop")

    threads = [threading.Thread(target=target) for target in (wait, fail)]
    for thread in threads:
        thread.start()
    assert outcome(coordinator.join, threads) == expected_outcome(case["join"])
    assert trace == case["trace"]


def test_join_waits_for_threads_that_were_registered():
    coordinator = Coordinator()
    done = []
    release = threading.Event()

    def work():
        release.wait(30)
        done.append("done")

    thread = threading.Thread(target=work)
    coordinator.register_thread(thread)
    thread.start()
    threading.Timer(0.05, release.set).start()
    coordinator.join()
    assert done == by_note("join() waits for registered threads")["value"]


class Recording(LooperThread):
    def __init__(self, coordinator, interval, calls, fail=False):
        super().__init__(coordinator, interval)
        self.calls, self.coordinator, self.fail = calls, coordinator, fail

    def start_loop(self):
        if not self.fail:
            self.calls.append("start_loop")

    def run_loop(self):
        self.calls.append("run_loop")
        if self.fail:
            raise ValueError("in run_loop")
        if self.calls.count("run_loop") == 3:
            self.coordinator.request_stop()

    def stop_loop(self):
        self.calls.append("stop_loop")


@pytest.mark.parametrize("interval", [None, 0.001])
def test_a_looper_runs_until_its_coordinator_stops(interval):
    coordinator = Coordinator()
    calls = []
    Recording(coordinator, interval, calls).start()
    coordinator.join()
    assert calls == by_note("run_loop requests a stop at its third call")["value"]


def test_a_looper_that_raises_stops_its_coordinator():
    coordinator = Coordinator()
    calls = []
    Recording(coordinator, None, calls, fail=True).start()
    case = by_note("run_loop raises")["value"]
    assert outcome(coordinator.join) == expected_outcome(case["join"])
    assert calls == case["calls"]


def test_a_looper_may_be_given_a_function():
    coordinator = Coordinator()
    calls = []

    def work(word, count):
        calls.append(word)
        if len(calls) == count:
            coordinator.request_stop()

    LooperThread.loop(coordinator, None, work, args=("again",), kwargs={"count": 2})
    coordinator.join()
    assert calls == ["again", "again"]


def test_a_block_ends_its_threads_and_keeps_its_own_error():
    coordinator = Coordinator()

    def work():
        with coordinator:
            LooperThread(coordinator, target=lambda: 1 / 0).start()
            coordinator.wait_for_stop(30)
            raise OSError("mine")

    with pytest.raises(OSError, match="mine") as caught:
        work()
    assert "ZeroDivisionError" in caught.value.__notes__[0]
    assert coordinator.joined
