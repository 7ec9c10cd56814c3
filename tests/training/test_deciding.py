"""Decisions of several processes, as one of them hears of them."""

import pytest

from ftrain.cluster import MismatchError, create_local
from ftrain.training.consensus import Consensus, check_program


@pytest.fixture
def company(monkeypatch):
    """A company of which the proposals are kept."""
    company = create_local()
    company.proposed = []  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(company, "propose", company.proposed.append)
    return company


def decided(run, **proposal):
    return {
        "decided": {"stop": "enough", "interrupted": False, "by": 0, "run": run} | proposal,
        "step": 3,
    }


def test_all_stop_at_the_step_that_was_decided_on(company):
    together = Consensus(company)
    together.begin(0, 0.0)
    company.listen(decided(0))
    assert [together.go_on(step) for step in range(5)] == [True, True, True, False, False]
    assert together.reason == "enough"


def test_what_an_earlier_loop_decided_too_late_is_nothing_to_the_next(company):
    Consensus(company).begin(0, 0.0)
    together = Consensus(company)
    together.begin(0, 0.0)
    company.listen({"hold": True})
    company.listen(decided(0))
    assert together.go_on(3)
    company.listen(decided(1))
    assert not together.go_on(3)


def test_loops_that_are_made_before_the_first_is_entered(company):
    first, second = Consensus(company), Consensus(company)
    first.begin(0, 0.0)
    company.listen(decided(0))
    assert first.is_over(3)
    assert not second.is_over(3)


def test_a_stop_that_is_asked_for_before_the_start_is_proposed_then(company):
    together = Consensus(company)
    together.ask_to_stop("early")
    assert company.proposed == []
    together.begin(0, 0.0)
    assert company.proposed == [{"stop": "early", "interrupted": False, "by": 0, "run": 0}]


def test_programs_that_differ_are_shown_where_they_do(company, monkeypatch):
    told = iter([["a", "b", "a"], ["same\nours", "same\ntheirs", ""]])
    monkeypatch.setattr(company, "gather", lambda name, value, limit: next(told))
    with pytest.raises(
        MismatchError, match="at process 1 than at process 0: 'theirs' instead of 'ours'"
    ):
        check_program(company, 1, "same\nours")
