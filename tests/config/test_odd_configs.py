"""Any config is planned, or is a ConfigError of at most two lines: no other exception."""

import contextlib
import copy
import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftrain.config import ConfigError, Plan, build, load, plan

CONFIGS = sorted(Path(__file__).parents[2].glob("configs/*.toml"))
NAMES = [
    "adam",
    "guard",
    "optax.chain",
    "optax.MultiSteps",
    "optax.apply_if_finite",
    "optax.masked",
    "math.pi",
    "os.getcwd",
]
ODD_NAMES = [
    "",
    ".",
    ":",
    "a:",
    ":b",
    "os:",
    "optax.",
    "optax",
    "typed_task:Head",
    "typed_task:raising",
    "builtins.type",
]
TEXTS = st.sampled_from(
    [*NAMES, *ODD_NAMES, "-1", "nan", "x" * 300, "a\nb", "\x00", "é"]
) | st.text(max_size=6)
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.dates() | TEXTS
KEYS = st.sampled_from(
    ["name", "inner", "optimizer", "args", "learning_rate", "opt", "leaf", "axes"]
) | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
OPTIMIZERS = st.recursive(
    st.fixed_dictionaries({"name": TEXTS, "learning_rate": VALUES}) | SCALARS,
    lambda inner: st.fixed_dictionaries(
        {"name": st.sampled_from(NAMES)},
        optional={"inner": inner, "opt": inner, "args": st.lists(inner, max_size=2)},
    ),
    max_leaves=4,
)


def places(table: dict, path: tuple = ()) -> list[tuple]:
    """The path of every value and of every table."""
    inner = [
        place
        for key, value in table.items()
        if isinstance(value, dict)
        for place in places(value, (*path, key))
    ]
    return [(*path, key) for key in table] + inner


def plan_or_refusal(path: Path, values: dict) -> Plan | str:
    """Return the plan of these values, or the error message; any other exception fails the test."""
    path.write_text(tomli_w.dumps(values), encoding="utf-8")
    try:
        return plan(load(path))
    except ConfigError as error:
        return str(error)


def check_refusal(directory: Path, values: dict) -> None:
    planned = plan_or_refusal(directory / "job.toml", values)
    if isinstance(planned, str):
        assert 0 < len(planned.splitlines()) <= 2
        return
    again = plan_or_refusal(directory / "again.toml", planned.resolved())
    assert not isinstance(again, str), again
    assert repr(again.resolved()) == repr(planned.resolved())


def replaced(values: dict, place: tuple, value: object) -> dict:
    values = copy.deepcopy(values)
    table = values
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    return values


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "odd", [3, -1, 1.5, "", "x", True, [], [3], {}, {"name": ""}, {"name": 3}, [{"name": "x"}]]
)
def test_every_key_of_a_shipped_config_with_an_odd_value(tmp_path, config, odd):
    values = tomllib.loads(config.read_text())
    for place in places(values):
        check_refusal(tmp_path, replaced(values, place, odd))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=st.sampled_from(CONFIGS), value=VALUES, data=st.data())
def test_any_key_of_a_shipped_config_with_any_value(tmp_path, config, value, data):
    values = tomllib.loads(config.read_text())
    place = data.draw(st.sampled_from(places(values)))
    check_refusal(tmp_path, replaced(values, place, value))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(optimizer=OPTIMIZERS)
def test_any_optimizer_is_built_or_refused(tmp_path, optimizer):
    values = {
        "task": "regression:regression",
        "steps": 3,
        "data": {"batch_size": 8},
        "optimizer": optimizer,
    }
    planned = plan_or_refusal(tmp_path / "job.toml", values)
    if isinstance(planned, Plan):
        with contextlib.suppress(ConfigError):
            build(planned)


FIELDS = [
    "encoder",
    "head",
    "heads",
    "activation",
    "level",
    "mode",
    "weights",
    "scales",
    "sizes",
    "pair",
    "where",
    "limit",
]
MORE_FIELDS = ["span", "options", "norm", "opaque", "array", "unresolved"]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model=st.dictionaries(st.sampled_from(FIELDS + MORE_FIELDS), VALUES, max_size=3))
def test_any_arguments_of_a_task_are_planned_or_refused(tmp_path, model):
    optimizer = {"name": "adam", "learning_rate": 0.1}
    values = {
        "task": "typed_task:typed",
        "steps": 3,
        "data": {"batch_size": 8},
        "optimizer": optimizer,
    }
    check_refusal(tmp_path, values | {"model": model})
