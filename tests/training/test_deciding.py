"""Decisions of several processes, as one of them hears of them."""

import pytest

from ftrain.cluster import ProcessMismatchError, create_local
from ftrain.training.consensus import Consensus, check_program


@pytest.fixture
def group(monkeypatch):
    """A group of which the proposals are kept."""
    group = create_local()
    group.proposed = []  # pyright: ignore[reportAttributeAccessIssue] - the test's own
    monkeypatch.setattr(group, "propose", group.proposed.append)
    return group


def decided(run, **proposal):
    return {
        "decided": {"stop": "enough", "interrupted": False, "by": 0, "run": run} | proposal,
        "step": 3,
    }


def test_all_stop_at_the_step_that_was_decided_on(group):
    together = Consensus(group)
    together.begin(0, 0.0)
    group.handle(decided(0))
    assert [together.agree_to_continue(step) for step in range(5)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert together.reason == "enough"


def test_what_an_earlier_loop_decided_too_late_is_nothing_to_the_next(group):
    Consensus(group).begin(0, 0.0)
    together = Consensus(group)
    together.begin(0, 0.0)
    group.handle({"hold": True})
    group.handle(decided(0))
    assert together.agree_to_continue(3)
    group.handle(decided(1))
    assert not together.agree_to_continue(3)


def test_loops_that_are_made_before_the_first_is_entered(group):
    first, second = Consensus(group), Consensus(group)
    first.begin(0, 0.0)
    group.handle(decided(0))
    assert first.is_over(3)
    assert not second.is_over(3)


def test_a_stop_that_is_asked_for_before_the_start_is_proposed_then(group):
    together = Consensus(group)
    together.ask_to_stop("early")
    assert group.proposed == []
    together.begin(0, 0.0)
    assert group.proposed == [{"stop": "early", "interrupted": False, "by": 0, "run": 0}]


def test_programs_that_differ_are_shown_where_they_do(group, monkeypatch):
    told = iter([["a", "b", "a"], ["same\nours", "same\ntheirs", ""]])
    monkeypatch.setattr(group, "gather", lambda name, value, limit: next(told))
    with pytest.raises(ProcessMismatchError, match="process 1 has 'theirs', process 0 has 'ours'"):
        check_program(group, 1, "same\nours")
