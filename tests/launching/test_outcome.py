"""The reported outcome of a job: pure, without any process."""

import signal
from types import SimpleNamespace

import pytest

from ftrain.launching.child_processes import ProcessStatus
from ftrain.launching.failures import Failure
from ftrain.launching.outcome import (
    FailureRecord,
    History,
    outcome_of_stop,
    outcome_of_success,
)
from ftrain.launching.protocol import PEER_FAILED

FAILURE = Failure(0, "error", "process 0 failed")


def status(index=0, **fields):
    return ProcessStatus(index, alive_at=0.0, **fields)


def requests(first=None, second=None):
    return SimpleNamespace(first=first, second=second)


def restarted():
    return FailureRecord("today", "it failed", noticed_at=10.0, restarted=True)


@pytest.mark.parametrize("origin", [250, 0])
def test_the_time_of_a_restart_ends_with_the_first_new_step(origin):
    record = restarted()
    history = History(failures=[record])
    history.update([status(first_step=None)], now=11.0)
    history.update([status(first_step=origin, step=origin)], now=12.0)
    assert record.seconds is None
    history.update([status(first_step=origin, step=origin + 1)], now=14.5)
    history.update([status(first_step=origin, step=origin + 10)], now=20.0)
    assert (record.resumed_from, record.seconds) == (origin, 4.5)
    where = f"step {origin}" if origin else "the start"
    assert record.describe() == f"today: it failed; resumed from {where}, restarted in 4.5 s"


def test_only_the_last_failure_is_measured():
    first, second = restarted(), restarted()
    History(failures=[first, second]).update([status(first_step=300, step=310)], now=12.0)
    assert (first.seconds, second.seconds) == (None, 2.0)
    assert first.describe().endswith("restarted, but reached no new step")


def test_the_number_of_steps_is_known_after_a_restart_too():
    history = History()
    history.update([status(step=120, steps=400, loss=0.5), status(1, step=119)], now=0.0)
    history.update([status(), status(1)], now=1.0)
    assert (history.step, history.steps) == (None, 400)


def test_done_or_stopped():
    done = [status(returncode=0, done=True), status(1, returncode=0, done=True)]
    assert (
        outcome_of_success(done, History(step=20), requests()).text
        == "done: 20 steps on 2 processes"
    )
    assert outcome_of_success(done, History(step=20), requests(signal.SIGTERM)).text.startswith(
        "done"
    )
    silent = [status(returncode=0)]
    assert outcome_of_success(silent, History(), requests()).text == "done: 1 process"
    assert (
        outcome_of_success(silent, History(), requests(signal.SIGINT)).text
        == "stopped by SIGINT before the first step"
    )
    reported = [status(returncode=0, stop_signal="SIGTERM")]
    assert outcome_of_success(reported, History(step=7), requests()) == (
        "stopped by SIGTERM at step 7",
        0,
        False,
    )


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((-15, -15), (143, False)),
        ((-15, PEER_FAILED), (143, False)),
        ((0, -15), (143, False)),
        ((3, -15), (3, True)),
        ((-9, 0), (1, True)),
        ((PEER_FAILED, 0), (PEER_FAILED, True)),
    ],
)
def test_asked_to_stop_and_with_a_failure(codes, expected):
    statuses = [status(index, returncode=code) for index, code in enumerate(codes)]
    outcome = outcome_of_stop(statuses, FAILURE, History(), requests(signal.SIGTERM))
    assert outcome is not None
    assert (outcome.code, outcome.failed) == expected


def test_nobody_asked():
    assert outcome_of_stop([status(returncode=-15)], FAILURE, History(), requests()) is None


def test_insisting_has_its_own_code():
    statuses = [status(returncode=-9, terminated=True)]
    outcome = outcome_of_stop(statuses, FAILURE, History(), requests(signal.SIGTERM, signal.SIGINT))
    assert outcome == (
        "stopped by SIGTERM before the first step, at once by a second signal",
        130,
        False,
    )
