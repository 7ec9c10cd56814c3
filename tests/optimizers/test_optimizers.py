"""Optimizers by themselves: short formulas, hyperparameters, slots by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_table import TABLE

from ftrain import optimizers
from ftrain.gradients import Rows
from ftrain.optimizers import current_learning_rate


def descend(p, g, slots, t):
    return p - 0.1 * g, slots


def accumulate(p, g, slots, t):
    a = 0.9 * slots["momentum"] + g
    return p - 0.1 * a, {"momentum": a}


def nesterov(p, g, slots, t):
    a = 0.9 * slots["momentum"] + g
    return p - 0.1 * (g + 0.9 * a), {"momentum": a}


def adam(p, g, slots, t):
    m = 0.9 * slots["m"] + 0.1 * g
    v = 0.99 * slots["v"] + 0.01 * g * g
    return p - 0.1 * np.sqrt(1 - 0.99**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 0.01), {"m": m, "v": v}


# one step at rate 0.1 in numpy, where the formula is short
FORMULAS = {"gradient_descent": descend, "momentum": accumulate, "nesterov": nesterov, "adam": adam}
NAN = float("nan")
PARAMS = {"a": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": {"c": jnp.float32(0.25)}}


def gradients_of(step: int, params):
    return jax.tree.map(lambda leaf: jnp.cos(leaf * (step + 1)).astype(leaf.dtype), params)


def run(transform, params, steps=5, update=None):
    state = transform.init(params)
    update = update or transform.update
    for step in range(steps):
        updates, state = update(gradients_of(step, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", FORMULAS)
def test_numbers_are_those_of_the_formula(name):
    rule = FORMULAS[name]
    params, state = run(TABLE[name](0.1), PARAMS)
    slots = list(state.slots)
    for name in ("a", "c"):
        value = np.array(PARAMS["a"] if name == "a" else PARAMS["b"]["c"], np.float64)
        kept = {slot: np.zeros_like(value) for slot in slots}
        for step in range(5):
            value, kept = rule(value, np.cos(value * (step + 1)), kept, step + 1)
        ours = params["a"] if name == "a" else params["b"]["c"]
        np.testing.assert_allclose(ours, value, rtol=2e-5)
        for slot in slots:
            tree = state.slots[slot]
            np.testing.assert_allclose(
                tree["a"] if name == "a" else tree["b"]["c"], kept[slot], rtol=2e-4
            )


def test_a_parameter_called_learning_rate_is_not_taken_for_the_rate():
    transform = optimizers.momentum(0.3, 0.9)
    _, state = run(transform, {"learning_rate": jnp.array(7.0)}, steps=1)
    assert float(current_learning_rate(state)) == pytest.approx(0.3)


def test_plain_optax_shows_no_rate_but_injected_hyperparameters_do():
    assert current_learning_rate(optax.adam(0.1).init(PARAMS)) is None
    injected = optax.inject_hyperparams(optax.sgd)(learning_rate=0.2)
    assert float(current_learning_rate(injected.init(PARAMS))) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optimizers.gradient_descent(float("nan")),
            "learning_rate must be a finite number, got nan",
        ),
        (lambda: optimizers.momentum(0.1, -0.5), "momentum must be >= 0, got -0.5"),
        (lambda: optimizers.adam(beta1=1.0), r"beta1 must be in \[0, 1\), got 1.0"),
        (lambda: optimizers.adam(beta2=-0.1), r"beta2 must be in \[0, 1\), got -0.1"),
        (lambda: optimizers.adagrad(0.1, 0.0), "initial_accumulator_value must be > 0, got 0.0"),
        (lambda: optimizers.adagrad(0.1, -1.0), "initial_accumulator_value must be > 0, got -1.0"),
        (
            lambda: optimizers.adagrad_da(0.1, 0.0),
            "initial_gradient_squared_accumulator_value must be > 0, got 0.0",
        ),
        (
            lambda: optimizers.proximal_adagrad(0.1, 0.0),
            "initial_accumulator_value must be > 0, got 0.0",
        ),
        (
            lambda: optimizers.ftrl(0.1, initial_accumulator_value=-1),
            "initial_accumulator_value must be >= 0, got -1",
        ),
        (
            lambda: optimizers.ftrl(0.1, learning_rate_power=0.5),
            "learning_rate_power must be <= 0, got 0.5",
        ),
        (
            lambda: optimizers.ftrl(0.1, l1_regularization_strength=-1),
            "l1_regularization_strength must be >= 0, got",
        ),
        (
            lambda: optimizers.ftrl(0.1, l2_regularization_strength=-1),
            "l2_regularization_strength must be >= 0, got",
        ),
        (
            lambda: optimizers.ftrl(0.1, l2_shrinkage_regularization_strength=-1),
            "l2_shrinkage_regularization_streng",
        ),
        (lambda: optimizers.adadelta(epsilon=-1.0), "epsilon must be >= 0, got -1.0"),
        (lambda: optimizers.adam(epsilon=NAN), "epsilon must be >= 0, got nan"),
        (lambda: optimizers.adam(beta2=NAN), r"beta2 must be in \[0, 1\), got nan"),
        (lambda: optimizers.adadelta(rho=1.5), r"rho must be in \[0, 1\], got 1.5"),
        (lambda: optimizers.adadelta(rho=NAN), r"rho must be in \[0, 1\], got nan"),
        (lambda: optimizers.rmsprop(0.1, decay=-0.1), r"decay must be in \[0, 1\], got -0.1"),
        (lambda: optimizers.rmsprop(0.1, epsilon=-1.0), "epsilon must be >= 0, got -1.0"),
        (lambda: optimizers.rmsprop(0.1, momentum=NAN), "momentum must be >= 0, got nan"),
        (lambda: optimizers.momentum(0.1, float("inf")), "momentum must be >= 0, got inf"),
        (lambda: optimizers.ftrl(0.1, beta=-1.0).init(PARAMS), "beta must be >= 0, got -1.0"),
        (
            lambda: optimizers.ftrl(0.1, learning_rate_power=NAN),
            "learning_rate_power must be <= 0, got nan",
        ),
        (
            lambda: optimizers.adagrad_da(0.1, 0.1, -1.0).init(PARAMS),
            "l1_regularization_strength must be >= 0, got -1.0",
        ),
        (
            lambda: optimizers.adagrad_da(0.1, 0.1, 0.0, NAN),
            "l2_regularization_strength must be a finite number, got nan",
        ),
        (
            lambda: optimizers.proximal_adagrad(0.1, 0.1, -1.0).init(PARAMS),
            "l1_regularization_strength must be >= 0, got -1.0",
        ),
        (
            lambda: optimizers.proximal_gradient_descent(0.1, 0.0, -1.0).init(PARAMS),
            "l2_regularization_strength must be >= 0, got",
        ),
        (
            lambda: optimizers.adam(np.float32("nan")),
            "learning_rate must be a finite number, got nan",
        ),
        (
            lambda: optimizers.adam(packed="x").init(PARAMS),
            "packed must be True, False or None, got 'x'",
        ),
        (
            lambda: optimizers.adam(slot_dtype="flot32"),
            "slot_dtype must be a dtype of real numbers, .* got 'flot32'",
        ),
        (
            lambda: optimizers.adam(slot_dtype=jnp.int32),
            "slot_dtype must be a dtype of real numbers, such as float32",
        ),
    ],
)
def test_bad_hyperparameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_slots_are_listed_and_read_by_name_in_a_chain():
    chained = optax.chain(optax.clip_by_global_norm(0.5), optimizers.adam(0.1), optax.scale(1.0))
    _, state = run(chained, PARAMS, steps=2)
    assert optimizers.slot_names(state) == ["m", "v"]
    np.testing.assert_array_equal(
        optimizers.get_slot(state, "b/c", "m"), state[1].slots["m"]["b"]["c"]
    )
    with pytest.raises(KeyError, match="there is no slot n; the slots are: m, v"):
        optimizers.get_slot(state, "a", "n")
    with pytest.raises(KeyError, match="no parameter z has a slot m; these have: a, b/c"):
        optimizers.get_slot(state, "z", "m")


def test_slots_of_masked_parameters_are_those_that_are_trained():
    masked = optax.masked(optimizers.momentum(0.1, 0.9), {"a": True, "b": False})
    state = masked.init(PARAMS)
    assert optimizers.get_slot(state, "a", "momentum").shape == (2, 2)
    with pytest.raises(KeyError, match="no parameter b/c"):
        optimizers.get_slot(state, "b/c", "momentum")


def test_plain_optax_has_no_slots_that_we_know():
    assert optimizers.slot_names(optax.adam(0.1).init(PARAMS)) == []


@pytest.mark.parametrize("rate", [None, "0.1", [0.1]])
def test_a_learning_rate_is_a_number_or_a_schedule(rate):
    with pytest.raises(TypeError, match="learning_rate must be a number or a schedule, got"):
        optimizers.adam(rate)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (
            {"a": jnp.ones((3, 2, 2)), "b": {"c": None}},
            r"updates and parameters differ at a: update has shape \(3, 2, 2\)",
        ),
        ({"a": None}, "updates and parameters differ: updates have no b/c"),
        (
            {"a": Rows(jnp.ones(1), jnp.ones((1, 2))), "b": {"c": None}},
            r"put ftrain.gradients.densify\(\) before",
        ),
    ],
)
def test_updates_that_do_not_fit_are_named(updates, message):
    with pytest.raises((ValueError, TypeError), match=message):
        optimizers.apply_updates(PARAMS, updates)
