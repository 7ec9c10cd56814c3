"""The syntax of faults."""

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftrain.launching import Fault, parse_faults

WHOLE = st.integers(0, 10**9)
RANKED = st.builds(Fault, st.sampled_from(["kill", "freeze", "hang", "nan"]), WHOLE, WHOLE)
SLOW = st.builds(Fault, st.just("slow_data"), WHOLE, WHOLE, st.floats(1e-3, 1e6))
FULL = st.builds(Fault, st.just("full_disk"), st.none() | WHOLE, WHOLE)
EXIT = st.builds(Fault, st.just("exit"), WHOLE, WHOLE, st.none(), st.integers(0, 255))


def write(fault: Fault) -> str:
    values = {"rank": fault.rank, "step": fault.step, "secs": fault.secs, "code": fault.code}
    return " ".join(
        [fault.kind, *(f"{key}={value!r}" for key, value in values.items() if value is not None)]
    )


def test_every_kind():
    text = (
        "kill rank=1 step=40; freeze rank=2 step=60; hang rank=1 step=50; "
        "slow_data rank=0 step=80 secs=5; "
        "nan rank=1 step=90; full_disk step=100; exit rank=0 step=30 code=3"
    )
    assert parse_faults(text) == [
        Fault("kill", 1, 40),
        Fault("freeze", 2, 60),
        Fault("hang", 1, 50),
        Fault("slow_data", 0, 80, secs=5.0),
        Fault("nan", 1, 90),
        Fault("full_disk", None, 100),
        Fault("exit", 0, 30, code=3),
    ]


@given(st.lists(RANKED | SLOW | FULL | EXIT), st.sampled_from([";", "; ", " ;\n", ";;"]))
def test_what_is_written_is_read(faults, between):
    assert parse_faults(between.join(write(fault) for fault in faults)) == faults


def test_the_order_of_keys_does_not_matter():
    assert parse_faults("slow_data secs=0.5 step=2 rank=1") == [Fault("slow_data", 1, 2, 0.5)]


@pytest.mark.parametrize("text", ["", " ", ";", " ; ;"])
def test_nothing_is_no_fault(text):
    assert parse_faults(text) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "burn rank=1 step=4",
            r"'burn rank=1 step=4': unknown kind 'burn'; expected one of kill, freeze, .*exit",
        ),
        ("kill rank=1", r"'kill rank=1': step missing; expected 'kill rank=\.\. step=\.\.'"),
        ("slow_data", r"rank and step and secs missing"),
        ("kill rank=1 step=4 step=5", r"step is given twice"),
        (
            "kill rank=1 step=4 code=5",
            r"unexpected 'code=5'; expected 'kill rank=\.\. step=\.\.'",
        ),
        ("kill rank=1 step=4 now", r"unexpected 'now'"),
        ("kill rank=1 step = 4", r"unexpected 'step'"),
        ("kill rank=one step=4", r"rank must be an integer, got 'one'"),
        ("kill rank=-1 step=4", r"rank must be an integer, got '-1'"),
        ("kill rank=1 step=", r"step must be an integer, got ''"),
        ("kill rank=1 step=1_0", r"step must be an integer, got '1_0'"),
        ("kill rank=² step=1", r"rank must be an integer"),
        ("kill rank=1 step=" + "9" * 5000, r"step must be an integer"),
        ("exit rank=1 step=4 code=256", r"code must be an integer up to 255, got '256'"),
        ("slow_data rank=1 step=4 secs=nan", r"secs must be a finite number > 0, got 'nan'"),
        ("slow_data rank=1 step=4 secs=inf", r"secs must be a finite number > 0"),
        ("slow_data rank=1 step=4 secs=0", r"secs must be a finite number > 0"),
        (
            "kill rank=1 step=4; full_disk",
            r"fault 'full_disk': step missing; expected 'full_disk \[rank=\.\.\] step",
        ),
    ],
)
def test_a_bad_one_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_faults(text)


@given(
    st.text()
    | st.lists(st.sampled_from(["kill", "rank=1", "step=2", ";", "secs", "=", "exit"])).map(
        " ".join
    )
)
@example("=")
@example("kill rank=1 step==2")
def test_nothing_else_is_raised(text):
    with contextlib.suppress(ValueError):
        assert all(fault.step >= 0 for fault in parse_faults(text))
