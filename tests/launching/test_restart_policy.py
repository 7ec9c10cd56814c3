"""When a restart is worth it: decisions without any process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.launching.failures import (
    MAX_DELAY,
    MAX_IDLE_ATTEMPTS,
    MAX_IDLE_HANGS,
    Failure,
    GiveUp,
    Restart,
    RestartPolicy,
)


def failure(kind):
    return Failure(0, kind, "something happened")


KILLED, HUNG, LOST, RAISED = (failure(kind) for kind in ("signal", "hang", "peer", "error"))


def test_a_restart_at_once_after_progress():
    policy = RestartPolicy(10)
    assert [policy.decide(KILLED, step) for step in (40, 50, 60)] == [Restart(0.0)] * 3


def test_it_waits_longer_while_there_is_no_progress_and_not_after_that():
    policy = RestartPolicy(10)
    delays = [policy.decide(KILLED, step) for step in (40, None, None, 41, None)]
    assert delays == [Restart(0.0), Restart(1.0), Restart(2.0), Restart(0.0), Restart(1.0)]


def test_who_is_killed_again_and_again_goes_on_if_any_steps_are_taken():
    policy = RestartPolicy(10)
    assert [policy.decide(KILLED, step) for step in (40, 30, 20, 35, 40, 10, 25, 15)] == [
        Restart(0.0)
    ] * 8


@pytest.mark.parametrize("failed", [KILLED, LOST])
def test_five_attempts_in_a_row_without_a_new_step(failed):
    policy = RestartPolicy(10)
    assert policy.decide(failed, 40) == Restart(0.0)
    assert all(isinstance(policy.decide(failed, step), Restart) for step in (None, 0, None, 0))
    assert policy.decide(failed, None) == GiveUp("5 attempts in a row made no progress")


def test_a_hang_is_tried_again_twice():
    policy = RestartPolicy(10)
    assert isinstance(policy.decide(HUNG, 40), Restart)
    assert isinstance(policy.decide(HUNG, 40), Restart)
    assert policy.decide(HUNG, 40) == GiveUp("it hung 2 more times and did not get beyond step 40")
    other = RestartPolicy(10)
    attempts = [(KILLED, None), (HUNG, 0), (KILLED, None), (HUNG, 5), (HUNG, 5)]
    assert all(isinstance(other.decide(failed, step), Restart) for failed, step in attempts)


def test_five_attempts_without_any_step():
    policy = RestartPolicy(10)
    delays = [policy.decide(KILLED, step) for step in (None, 0, None, 0)]
    assert delays == [Restart(0.0), Restart(1.0), Restart(2.0), Restart(4.0)]
    assert policy.decide(KILLED, None) == GiveUp("5 attempts in a row made no progress")


def test_an_exception_is_repeated_only_after_progress():
    policy = RestartPolicy(10)
    assert policy.decide(RAISED, 40) == Restart(0.0)
    assert policy.decide(RAISED, 41) == Restart(0.0)
    assert policy.decide(RAISED, 41) == GiveUp(
        "it did not get beyond step 41, so a restart would repeat it"
    )


def test_an_error_that_may_pass_is_tried_again_also_before_the_first_step():
    policy = RestartPolicy(10)
    delays = [policy.decide(failure("transient"), None) for _ in range(4)]
    assert delays == [Restart(0.0), Restart(1.0), Restart(2.0), Restart(4.0)]
    assert policy.decide(failure("transient"), None) == GiveUp(
        "5 attempts in a row made no progress"
    )


def test_an_exception_before_the_first_step_ends_it():
    assert isinstance(RestartPolicy(10).decide(RAISED, None), GiveUp)
    assert isinstance(RestartPolicy(10).decide(RAISED, 0), GiveUp)


def test_an_exception_behind_the_furthest_step_ends_it_whatever_came_between():
    policy = RestartPolicy(10)
    assert policy.decide(KILLED, 340) == Restart(0.0)
    assert isinstance(policy.decide(RAISED, 310), GiveUp)


def test_a_mistake_is_never_repeated():
    assert RestartPolicy(10).decide(failure("mistake"), 40) == GiveUp("a restart would not help")


def test_restarts_are_used_up():
    policy = RestartPolicy(2)
    assert [policy.decide(KILLED, step) for step in (1, 2)] == [Restart(0.0)] * 2
    assert policy.decide(KILLED, 3) == GiveUp("its 2 restarts are used up")
    assert RestartPolicy(0).decide(KILLED, 3) == GiveUp("restarts are disabled")


ATTEMPTS = st.lists(
    st.tuples(st.sampled_from([KILLED, HUNG, LOST, RAISED]), st.none() | st.integers(0, 20))
)


@given(ATTEMPTS, st.integers(0, 8))
def test_it_never_goes_on_for_nothing(attempts, allowed):
    policy = RestartPolicy(allowed)
    idle = 0
    hangs = 0
    furthest = 0
    for failed, reached in attempts:
        decision = policy.decide(failed, reached)
        progressed = (reached or 0) > furthest
        leads_on = progressed or (bool(reached) and failed in (KILLED, LOST))
        idle, hangs, furthest = (
            (idle + 1, hangs + (failed is HUNG), furthest) if not leads_on else (0, 0, furthest)
        )
        furthest = max(furthest, reached or 0)
        if isinstance(decision, GiveUp):
            assert (
                idle == MAX_IDLE_ATTEMPTS
                or hangs == MAX_IDLE_HANGS
                or (failed is RAISED and not progressed)
                or policy.restarts == allowed
            )
            return
        assert hangs < MAX_IDLE_HANGS
        assert policy.restarts <= allowed
        assert idle < MAX_IDLE_ATTEMPTS
        assert progressed or failed is not RAISED
        assert 0 <= decision.delay <= MAX_DELAY
        assert decision.delay == 0 or not leads_on
