"""What is told of a job: pure, without any process."""

import signal
from types import SimpleNamespace

import pytest

from ftrain.launching.account import Account
from ftrain.launching.contract import PEER_FAILED
from ftrain.launching.diagnosis import Failure
from ftrain.launching.ending import end_asked, end_well
from ftrain.launching.summary import History, Setback

FAILURE = Failure(0, "error", "process 0 failed")


def account(index=0, **fields):
    return Account(index, sign_at=0.0, **fields)


def requests(asked=None, insisted=None):
    return SimpleNamespace(asked=asked, insisted=insisted)


def restarted():
    return Setback("today", "it failed", noticed_at=10.0, restarted=True)


@pytest.mark.parametrize("origin", [250, 0])
def test_the_time_of_a_restart_ends_with_the_first_new_step(origin):
    setback = restarted()
    history = History(setbacks=[setback])
    history.follow([account(began=None)], now=11.0)
    history.follow([account(began=origin, step=origin)], now=12.0)
    assert setback.seconds is None
    history.follow([account(began=origin, step=origin + 1)], now=14.5)
    history.follow([account(began=origin, step=origin + 10)], now=20.0)
    assert (setback.resumed_from, setback.seconds) == (origin, 4.5)
    where = f"step {origin}" if origin else "the start"
    assert setback.describe() == f"today: it failed; went on from {where}, restarted in 4.5 s"


def test_only_the_last_setback_is_measured():
    first, second = restarted(), restarted()
    History(setbacks=[first, second]).follow([account(began=300, step=310)], now=12.0)
    assert (first.seconds, second.seconds) == (None, 2.0)
    assert first.describe().endswith("went on, but reached no new step")


def test_the_number_of_steps_is_known_after_a_restart_too():
    history = History()
    history.follow([account(step=120, steps=400, loss=0.5), account(1, step=119)], now=0.0)
    history.follow([account(), account(1)], now=1.0)
    assert (history.step, history.steps) == (None, 400)


def test_done_or_stopped():
    done = [account(code=0, done=True), account(1, code=0, done=True)]
    assert end_well(done, History(step=20), requests()).text == "done: 20 steps on 2 processes"
    assert end_well(done, History(step=20), requests(signal.SIGTERM)).text.startswith("done")
    silent = [account(code=0)]
    assert end_well(silent, History(), requests()).text == "done: 1 process"
    assert (
        end_well(silent, History(), requests(signal.SIGINT)).text
        == "stopped by SIGINT before the first step"
    )
    told = [account(code=0, stopped="SIGTERM")]
    assert end_well(told, History(step=7), requests()) == ("stopped by SIGTERM at step 7", 0, False)


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
def test_asked_to_stop_and_not_in_good_order(codes, expected):
    accounts = [account(index, code=code) for index, code in enumerate(codes)]
    ending = end_asked(accounts, FAILURE, History(), requests(signal.SIGTERM))
    assert ending is not None
    assert (ending.code, ending.failed) == expected


def test_nobody_asked():
    assert end_asked([account(code=-15)], FAILURE, History(), requests()) is None


def test_insisting_has_its_own_code():
    accounts = [account(code=-9, forced=True)]
    ending = end_asked(accounts, FAILURE, History(), requests(signal.SIGTERM, signal.SIGINT))
    assert ending == (
        "stopped by SIGTERM before the first step, at once by a second signal",
        130,
        False,
    )
