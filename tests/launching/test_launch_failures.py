"""Which process is at fault, without any real process."""

import signal

import pytest

from ftrain.launching.child_processes import ProcessStatus
from ftrain.launching.failures import find_cause, find_hang, find_overdue
from ftrain.launching.protocol import HUNG, PEER_FAILED, Done, Failed, Progress


def status(index, step=10, alive_at=0.0, code=None, ended_at=None, **fields):
    made = ProcessStatus(index, alive_at, step=step, **fields)
    if code is not None:
        made.set_exited(code, ended_at)
    return made


def test_a_sign_of_life_is_another_step_or_being_busy():
    process = ProcessStatus(0, alive_at=0.0)
    process.update(Progress(3), 1.0)
    assert process.alive_at == 1.0
    process.update(Progress(3, loss=0.5), 2.0)
    assert (process.alive_at, process.step) == (1.0, 3)
    process.update(Progress(3, busy="compiling"), 4.0)
    process.update(Progress(busy="starting"), 5.0)
    assert (process.alive_at, process.step, process.first_step) == (5.0, 3, 3)


def test_one_that_begins_anew_at_a_lower_step_is_alive_and_not_done():
    process = ProcessStatus(0, alive_at=0.0)
    process.update(Progress(30), 1.0)
    process.update(Done(30), 2.0)
    process.update(Progress(0), 3.0)
    process.update(Progress(1), 4.0)
    assert (process.alive_at, process.step, process.done, process.max_step) == (4.0, 1, False, 30)


def test_the_first_reason_that_a_process_gives_is_kept():
    process = status(0)
    process.update(Failed("A"), 1.0)
    process.update(Failed("B"), 2.0)
    process.set_exited(1, 3.0)
    assert (process.failure, process.ended_at) == (Failed("A"), 1.0)


def test_who_is_overdue():
    statuses = [
        status(0, alive_at=5.0),
        status(1, alive_at=1.0),
        status(2, alive_at=0.0, code=0, ended_at=2.0),
    ]
    assert [each.index for each in find_overdue(statuses, now=6.5, timeout=5.0)] == [1]
    assert find_overdue(statuses, now=5.9, timeout=5.0) == []


def test_one_that_is_done_may_wait_for_the_others_but_not_forever():
    waiting, working = status(0), status(1)
    waiting.update(Done(10), 1.0)
    working.update(Progress(11), 8.0)
    assert find_overdue([waiting, working], now=9.0, timeout=5.0) == []
    working.set_exited(0, 9.0)
    assert find_overdue([waiting, working], now=13.0, timeout=5.0) == []
    assert find_overdue([waiting, working], now=14.5, timeout=5.0) == [waiting]


def test_others_that_are_done_do_not_excuse_one_that_is_not():
    done, silent = status(0), status(1)
    done.update(Done(10), 4.0)
    assert find_overdue([done, silent], now=5.5, timeout=5.0) == [silent]
    assert find_hang([done, silent], now=5.5).process == 1


def test_the_one_with_the_lowest_step_hangs():
    found = find_hang([status(0, 12), status(1, 11, alive_at=3.0), status(2, 12)], now=8.0)
    assert (found.process, found.kind) == (1, "hang")
    assert (
        found.description
        == "process 1 hung at step 11 (no sign of life for 5.0 s, its step is the lowest)"
    )


def test_of_those_with_the_lowest_step_the_one_that_is_silent_longest():
    found = find_hang([status(0, 12, 3.0), status(1, 12, 2.0), status(2, 13, 1.0)], now=8.0)
    assert found.process == 1
    assert "the longest of those with the lowest step" in found.description


def test_one_that_has_not_begun_is_behind_all():
    found = find_hang([status(0, 0), status(1, None)], now=8.0)
    assert found.description == (
        "process 1 hung before its first step (no sign of life for 8.0 s, its step is the lowest)"
    )


def test_one_that_is_halted_for_certain():
    found = find_hang([status(0, 12), status(1, 13)], now=8.0, halted={1})
    assert (found.process, "stopped by a signal" in found.description) == (1, True)


def test_watchdogs_of_those_that_wait_do_not_hide_the_one_they_wait_for():
    waiting = status(0, 12, 5.0, failure=Failed("Hang", "no step"), code=HUNG, ended_at=10.0)
    assert find_hang([waiting, status(1, 11, 4.0)], now=10.0).process == 1


def test_the_first_that_failed_by_itself_is_the_cause():
    statuses = [
        status(0, code=PEER_FAILED, ended_at=1.0),
        status(1, code=1, ended_at=2.5, failure=Failed("PeerFailed", because=2)),
        status(2, 340, code=-signal.SIGKILL, ended_at=2.0),
        status(3, code=1, ended_at=3.0),
    ]
    found = find_cause(statuses)
    assert (found.process, found.kind, found.description) == (
        2,
        "signal",
        "process 2 was killed by SIGKILL at step 340",
    )


def test_what_a_process_said_counts_from_then_on_and_though_it_was_killed():
    failing = status(0)
    failing.update(Failed("OSError", "no such\n  file", retry=True), 1.0)
    failing.set_exited(-signal.SIGKILL, 9.0)
    failing.terminated = True
    found = find_cause([failing, status(1, code=1, ended_at=2.0)])
    assert (found.process, found.kind) == (0, "error")
    assert found.description == "process 0 failed at step 10: OSError: no such file"


def test_others_may_tell_of_a_death_before_it_is_seen():
    reported = status(
        0, code=1, ended_at=5.0, failure=Failed("JaxRuntimeError", "connection reset by peer")
    )
    assert find_cause([reported, status(1, code=-signal.SIGKILL, ended_at=5.1)]).process == 1
    assert find_cause([reported, status(1, code=3, ended_at=5.1)]).process == 1
    assert find_cause([reported, status(1, code=-signal.SIGKILL, ended_at=7.0)]).process == 0


def test_an_abort_may_be_the_answer_to_what_another_did():
    reported = status(0, code=1, ended_at=5.0, failure=Failed("ValueError", "no"))
    assert find_cause([reported, status(1, code=-signal.SIGABRT, ended_at=5.1)]).process == 0


def test_a_long_reason_is_cut():
    assert (
        len(
            find_cause(
                [status(0, code=1, ended_at=1.0, failure=Failed("E", "x" * 4000))]
            ).description
        )
        < 400
    )


@pytest.mark.parametrize(
    ("code", "failed", "kind", "story"),
    [
        (2, None, "mistake", "process 0 failed at step 10 with exit code 2"),
        (
            1,
            Failed("NonFiniteError", "loss is nan", retry=False),
            "mistake",
            "NonFiniteError: loss is nan",
        ),
        (
            -6,
            Failed("NonFiniteError", "loss is nan", retry=False),
            "mistake",
            "NonFiniteError: loss is nan",
        ),
        (3, None, "error", "process 0 failed at step 10 with exit code 3"),
        (74, None, "transient", "process 0 failed at step 10 with exit code 74"),
        (255, None, "error", "with exit code 255"),
        (1, Failed("ValueError", ""), "error", "process 0 failed at step 10: ValueError"),
        (-11, None, "signal", "process 0 was ended by SIGSEGV at step 10"),
        (137, None, "signal", "process 0 was killed by SIGKILL at step 10"),
        (-40, None, "signal", "by signal 40"),
        (HUNG, None, "hang", "process 0 hung at step 10"),
        (HUNG, Failed("Hang", "no step"), "hang", "process 0 hung at step 10: Hang: no step"),
    ],
)
def test_kinds_of_failure(code, failed, kind, story):
    found = find_cause(
        [status(0, returncode=code, ended_at=1.0, failure=failed), status(1, code=0, ended_at=0.0)]
    )
    assert found.kind == kind
    assert story in found.description


def test_only_witnesses():
    statuses = [
        status(
            0, code=PEER_FAILED, ended_at=1.0, failure=Failed("PeerFailed", "silent", because=1)
        ),
        status(1, code=-9, ended_at=4.0, terminated=True),
    ]
    found = find_cause(statuses)
    assert (found.process, found.kind) == (1, "peer")
    assert found.description == "process 0 lost process 1 at step 10: PeerFailed: silent"
    statuses[0].failure = Failed("PeerFailed", because=7)  # there is no process 7
    assert find_cause(statuses).process == 0
    statuses[0].failure = None
    assert find_cause(statuses).description == "process 0 lost another process at step 10"


def test_the_code_to_exit_with():
    assert [status(0, returncode=code, ended_at=0.0).exit_code for code in (3, 75, -9)] == [
        3,
        75,
        1,
    ]
