"""Every optimizer against values that the reference implementation computed, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_names import function_named
from references import array, cases

from ftrain import optimizers
from ftrain.gradients import Rows
from ftrain.optimizers import get_slot, slot_names

pytestmark = pytest.mark.reference
DENSE = cases("optimizers_dense")
SPARSE = cases("optimizers_sparse")


def make(case, dtype):
    """The transform of a case; a rate for each step becomes a schedule."""
    hyperparameters = {
        name: value for name, value in case["hyperparameters"].items() if value is not None
    }
    rates = case.get("learning_rate_per_step")
    if rates is not None:
        hyperparameters["learning_rate"] = lambda count: jnp.asarray(array(rates, dtype))[count]
    if case["optimizer"] == "Adam":
        hyperparameters["lazy"] = False  # in the reference, the moments of every row decay
    return function_named(case["optimizer"])(**hyperparameters)


def held_still(transform):
    """The transform with its count kept at 0, like a global step that is not incremented."""

    def update(gradients, state, params):
        updates, state = transform.update(gradients, state, params)
        return updates, state._replace(count=jnp.zeros_like(state.count))

    return optax.GradientTransformation(transform.init, update)


def assert_close(ours, recorded, dtype, what):
    wanted = array(recorded, dtype)
    tolerance = (
        1e-9 * np.abs(wanted) + 1e-12
        if dtype == "float64"
        else 1e-5 * np.maximum(1, np.abs(wanted))
    )
    difference = np.abs(np.asarray(ours, dtype) - wanted)
    assert (difference <= tolerance).all(), (
        f"{what}: {ours} should be {wanted}, off by {difference.max()}"
    )


def gradient_of(recorded, variable, dtype):
    """Return an array, or rows of a table; empty rows do not record the shape of a row."""
    if not isinstance(recorded, dict):
        return jnp.asarray(array(recorded, dtype))
    indices = np.array(recorded["indices"], np.int32)
    return Rows(
        jnp.asarray(indices),
        jnp.asarray(array(recorded["values"], dtype).reshape(len(indices), *variable.shape[1:])),
    )


@pytest.mark.parametrize(
    "case",
    DENSE + SPARSE,
    ids=[f"{n}-{case['optimizer']}" for n, case in enumerate(DENSE + SPARSE)],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_steps(case, dtype):
    with jax.enable_x64(dtype == "float64"):
        transform = make(case, dtype)
        if case.get("global_step_is_incremented") is False:
            transform = held_still(transform)
        params = [jnp.asarray(array(variable["initial"], dtype)) for variable in case["variables"]]
        state = transform.init(params)
        recorded = case[dtype]
        assert set(case["slot_names"]) <= set(slot_names(state))
        for slot, values in recorded["slots_initial"].items():
            for n, wanted in enumerate(values):
                assert_close(get_slot(state, str(n), slot), wanted, dtype, f"{slot} at the start")
        # Most of the time would be spent in the compiler, unless there are many variables.
        update = jax.jit(transform.update) if len(params) > 4 else transform.update
        for step, (gradients, wanted) in enumerate(
            zip(case["gradients"], recorded["values_after_step"], strict=True)
        ):
            given = [
                gradient_of(gradient, params[n], dtype) for n, gradient in enumerate(gradients)
            ]
            updates, state = update(given, state, params)
            params = optimizers.apply_updates(params, updates)
            for ours, value in zip(params, wanted, strict=True):
                assert_close(ours, value, dtype, f"parameter after step {step}")
        for slot, values in recorded["slots_final"].items():
            for n, wanted in enumerate(values):
                assert_close(get_slot(state, str(n), slot), wanted, dtype, f"{slot} at the end")
        for row in case.get("rows_never_in_indices", []):
            np.testing.assert_array_equal(
                params[0][row], array(case["variables"][0]["initial"], dtype)[row]
            )
