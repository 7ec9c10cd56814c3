"""Averages compared with values that TensorFlow 1 computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import array, cases

from ftrain.averages import ZeroDebiased, average_names, update_averages

pytestmark = pytest.mark.reference
CASES = cases("moving_averages")


def sequence(case):
    """Return the averages after each update; variables start at their value, tensors at zero."""
    dtype = case["dtype"]
    decay = case["decay"]
    start = jnp.asarray(array(case["average_initial"], dtype))
    debiased = ZeroDebiased.create(start)
    averages = start
    for n, value in enumerate(case["sequence"]):
        values = jnp.asarray(array(value, dtype))
        count = None if case["num_updates"] is None else n
        if case["over"] == "tensor" and case["zero_debias"]:
            debiased = debiased.update(values, decay, count)
            averages = debiased.values
        else:
            averages = update_averages(averages, values, decay, count)
        yield averages


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{n}-{case['over']}-{case['dtype']}" for n, case in enumerate(CASES)]
)
def test_values(case):
    if case["over"] == "variable":
        assert case["average_initial"] == case["variable_initial"]
    tolerance = {"rtol": 1e-12} if case["dtype"] == "float64" else {"rtol": 1e-6, "atol": 1e-6}
    with jax.enable_x64(case["dtype"] == "float64"):
        for ours, expected in zip(sequence(case), case["average_after_update"], strict=True):
            assert ours.dtype == case["dtype"]
            np.testing.assert_allclose(ours, array(expected, case["dtype"]), **tolerance)


@pytest.mark.parametrize("case", [case for case in CASES if case["over"] == "variable"][:1])
def test_names(case):
    assert average_names({"w": jnp.zeros(3)}) == {"w": case["names"]["average"]}
    assert {average: name for name, average in average_names({"w": 0}).items()} == case["names"][
        "variables_to_restore"
    ]
