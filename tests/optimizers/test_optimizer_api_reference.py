"""Constructors, gradients, slots and gathers against what the reference implementation does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_names import function_named
from references import array, cases

from ftrain.gradients import Rows, lookup, value_and_grad
from ftrain.optimizers import apply_updates, gradient_descent, slot_names

pytestmark = pytest.mark.reference
CASES = cases("optimizer_api")
SHORT = {name: f"{name}_regularization_strength" for name in ("l1", "l2", "l2_shrinkage")}
NEEDED = {"momentum": {"momentum": 0.9}}


def of(what):
    return [case for case in CASES if case["what"].startswith(what)]


def ids(found):
    return [f"{n}-{case.get('note', '')}" for n, case in enumerate(found)]


# Only the reference has names of optimizers.
CONSTRUCTORS = [case for case in of("constructor") if "=" in case["note"]]


@pytest.mark.parametrize("case", CONSTRUCTORS, ids=ids(CONSTRUCTORS))
def test_constructors_accept_and_refuse_what_the_reference_does(case):
    name, _, setting = case["note"].partition(" ")
    key, _, value = setting.partition("=")
    function = function_named(name)
    arguments = (
        {"learning_rate": 0.1}
        | NEEDED.get(function.__name__, {})
        | {SHORT.get(key, key): float(value)}
    )
    if "error" not in case:
        function(**arguments)
        return
    assert case["error"] == "ValueError"
    with pytest.raises(ValueError, match=f"got {float(value)}"):
        function(**arguments)


APPLIED = of("apply_gradients")


@pytest.mark.parametrize("case", APPLIED, ids=ids(APPLIED))
def test_apply_gradients(case):
    params = [jnp.asarray(array(values, "float32")) for values in case["initial"]]
    transform = gradient_descent(case["learning_rate"])

    def apply(gradients, params=params):
        updates, _ = transform.update(gradients, transform.init(params), params)
        return apply_updates(params, updates)

    match case["note"]:
        case "all gradients None":
            with pytest.raises(ValueError, match="every gradient is None"):
                apply([None, None])
        case "one gradient None":
            for ours, wanted in zip(
                apply([jnp.ones_like(params[0]), None]), case["value"], strict=True
            ):
                np.testing.assert_allclose(ours, array(wanted, "float32"), rtol=1e-6)
        case "a gradient as a numpy array":
            after = apply([np.ones(params[0].shape, np.float32)], params[:1])
            np.testing.assert_allclose(after[0], array(case["value"][0], "float32"), rtol=1e-6)
        case "a gradient of another shape":
            with pytest.raises(ValueError, match="gradients and parameters differ at 0"):
                apply([jnp.ones(params[0].shape[0] + 1), None])
        case "an integer variable":
            with pytest.raises(TypeError, match="has no gradient"):
                apply([jnp.ones(2)], [jnp.ones(2, jnp.int32)])
        case other:
            # Here, no variables are an empty tree, and a gradient may have any dtype.
            assert other in ("no pairs", "a gradient of another dtype")


SLOTS = [
    case
    for case in of("names of slots")
    if " " not in case["note"] or case["note"].endswith("centered")
]


@pytest.mark.parametrize("case", SLOTS, ids=ids(SLOTS))
def test_names_of_slots(case):
    name, *words = case["note"].split()
    function = function_named(name)
    options = {"centered": True} if words else {}
    state = function(learning_rate=0.1, **NEEDED.get(function.__name__, {}), **options).init(
        {"a": jnp.ones(2)}
    )
    assert slot_names(state) == case["value"]["slot_names"]


MINIMIZED = [case for case in CASES if case["what"] == "minimize" and "value" in case]


@pytest.mark.parametrize("case", MINIMIZED, ids=ids(MINIMIZED))
def test_minimize(case):
    """`var_list` is what is differentiated, and `grad_loss` a factor of the loss."""
    every = {
        "w": jnp.asarray(array(case["w"], "float32")),
        "b": jnp.asarray(array(case["b"], "float32")),
    }
    trained = every if case["var_list"] == "all" else {"w": every["w"]}
    factor = 1.0 if case["grad_loss"] is None else case["grad_loss"]

    def loss(params):
        return factor * (jnp.sum(params["w"] ** 2) + jnp.sum(3 * (every | params)["b"]))

    _, gradients = value_and_grad(loss)(trained)
    transform = gradient_descent(case["learning_rate"])
    updates, _ = transform.update(gradients, transform.init(trained), trained)
    after = every | apply_updates(trained, updates)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(
            gradient, array(case["value"]["gradients"][name], "float32"), rtol=1e-6
        )
    for name, value in after.items():
        np.testing.assert_allclose(value, array(case["value"]["after"][name], "float32"), rtol=1e-6)


GATHERED = of("minimize sum(gather")


@pytest.mark.parametrize("case", GATHERED, ids=ids(GATHERED))
def test_minimize_through_a_gather(case):
    function = function_named(case["note"])
    options = {"lazy": False} if case["note"] == "Adam" else NEEDED.get(function.__name__, {})
    transform = function(learning_rate=case["learning_rate"], **options)
    params = {"v": jnp.asarray(array(case["v"], "float32"))}
    state = transform.init(params)
    rows = jnp.asarray(case["rows"])
    first = case["value"]["first_gradient"]
    whole = Rows(
        jnp.asarray(first["indices"]), jnp.asarray(array(first["values"], "float32"))
    ).to_dense(params["v"])

    @jax.jit
    def step(params, state):
        _, gradients = value_and_grad(lambda params: jnp.sum(lookup(params["v"], rows) ** 2))(
            params
        )
        updates, state = transform.update(gradients, state, params)
        return apply_updates(params, updates), state, gradients

    for number, wanted in enumerate(case["value"]["values_after_step"]):
        params, state, gradients = step(params, state)
        if number == 0:
            np.testing.assert_allclose(gradients["v"].to_dense(params["v"]), whole, rtol=1e-6)
        np.testing.assert_allclose(params["v"], array(wanted, "float32"), rtol=1e-5, atol=1e-6)
