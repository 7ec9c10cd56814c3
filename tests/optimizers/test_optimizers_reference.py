"""Every optimizer against values that the reference implementation computed, step by step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from references import array, cases

from ftrain import optimizers

pytestmark = pytest.mark.reference
DENSE = cases("optimizers_dense")


def function_of(case):
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z]|$)|[A-Z][a-z]+", case["optimizer"].replace("RMSProp", "Rmsprop"))
    return getattr(optimizers, "_".join(word.lower() for word in words))


def make(case, dtype):
    """The transform of a case; a rate for each step becomes a schedule."""
    hyperparameters = {name: value for name, value in case["hyperparameters"].items() if value is not None}
    rates = case.get("learning_rate_per_step")
    if rates is not None:
        hyperparameters["learning_rate"] = lambda count: jnp.asarray(array(rates, dtype))[count]
    return function_of(case)(**hyperparameters)


def held_still(transform):
    """The transform with its count kept at 0: the reference's global step, when it is not incremented."""

    def update(gradients, state, params):
        updates, state = transform.update(gradients, state, params)
        return updates, state._replace(count=jnp.zeros_like(state.count))

    return optax.GradientTransformation(transform.init, update)


def assert_close(ours, recorded, dtype, what):
    wanted = array(recorded, dtype)
    tolerance = 1e-9 * np.abs(wanted) + 1e-12 if dtype == "float64" else 1e-5 * np.maximum(1, np.abs(wanted))
    difference = np.abs(np.asarray(ours, dtype) - wanted)
    assert (difference <= tolerance).all(), f"{what}: {ours} should be {wanted}, off by {difference.max()}"


@pytest.mark.parametrize("case", DENSE, ids=[f"{n}-{case['optimizer']}" for n, case in enumerate(DENSE)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dense_steps(case, dtype):
    with jax.enable_x64(dtype == "float64"):
        transform = make(case, dtype)
        if case.get("global_step_is_incremented") is False:
            transform = held_still(transform)
        params = [jnp.asarray(array(variable["initial"], dtype)) for variable in case["variables"]]
        state = transform.init(params)
        recorded = case[dtype]
        assert set(case["slot_names"]) <= set(state.slots)
        for slot, values in recorded["slots_initial"].items():
            for ours, wanted in zip(state.slots[slot], values, strict=True):
                assert_close(ours, wanted, dtype, f"{slot} at the start")
        update = jax.jit(transform.update)
        for step, (gradients, wanted) in enumerate(zip(case["gradients"], recorded["values_after_step"], strict=True)):
            updates, state = update([jnp.asarray(array(g, dtype)) for g in gradients], state, params)
            params = optimizers.apply_updates(params, updates)
            for ours, value in zip(params, wanted, strict=True):
                assert_close(ours, value, dtype, f"parameter after step {step}")
        for slot, values in recorded["slots_final"].items():
            for ours, wanted in zip(state.slots[slot], values, strict=True):
                assert_close(ours, wanted, dtype, f"{slot} at the end")
