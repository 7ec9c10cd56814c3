import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.training import at, every, first, never

TRIGGERS = st.one_of(
    st.integers(1, 20).map(lambda n: every(steps=n)),
    st.lists(st.integers(1, 60), min_size=1, max_size=5).map(lambda steps: at(*steps)),
    st.integers(1, 30).map(first),
    st.just(never()),
    st.just(every(secs=5.0)),
)


def due_steps(trigger, count=30):
    return [step for step in range(1, count + 1) if trigger.due(step, waited=0.0)]


def test_which_steps_are_due():
    assert due_steps(every(steps=10)) == [10, 20, 30]
    assert due_steps(at(25, 3)) == [3, 25]
    assert due_steps(first(4)) == [1, 2, 3, 4]
    assert due_steps(never()) == []


@given(TRIGGERS, st.integers(0, 50))
def test_next_tells_the_first_step_that_is_due(trigger, step):
    expected = next((later for later in range(step + 1, 100) if trigger.due(later, 0.0)), math.inf)
    assert trigger.next(step) == expected or trigger.next(step) >= 100


def test_time_makes_due_what_steps_do_not():
    assert every(secs=5).due(3, waited=5.0)
    assert not every(secs=5).due(3, waited=4.9)
    assert every(steps=10, secs=5).due(10, waited=0.0)
    assert every(secs=5).patience == 5
    assert every(steps=5).patience == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs steps= or secs="),
        ({"steps": 0}, "steps > 0, got 0"),
        ({"secs": -1.0}, "secs > 0, got -1.0"),
    ],
)
def test_what_would_never_or_always_be_due_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        every(**options)


@pytest.mark.parametrize(
    "make", [at, lambda: at(0), lambda: at(2.5), lambda: first(0), lambda: first(-1)]
)
def test_steps_that_cannot_come_are_refused(make):
    with pytest.raises(ValueError, match=r"needs (steps that are )?(a )?whole numbers? >= 1"):
        make()
