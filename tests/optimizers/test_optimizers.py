"""One table runs every optimizer through the same checks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ftrain import optimizers
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


# the transform for a learning rate, and, where the formula is short, one step of it in numpy at rate 0.1
TABLE = {
    "gradient_descent": (lambda lr: optimizers.gradient_descent(lr), descend),
    "momentum": (lambda lr: optimizers.momentum(lr, 0.9), accumulate),
    "nesterov": (lambda lr: optimizers.momentum(lr, 0.9, use_nesterov=True), nesterov),
    "adam": (lambda lr: optimizers.adam(lr, 0.9, 0.99, epsilon=0.01), adam),
    "adagrad": (lambda lr: optimizers.adagrad(lr), None),
    "adagrad_da": (lambda lr: optimizers.adagrad_da(lr, l1_regularization_strength=0.01), None),
    "adadelta": (lambda lr: optimizers.adadelta(lr), None),
    "rmsprop": (lambda lr: optimizers.rmsprop(lr, momentum=0.5), None),
    "rmsprop_centered": (lambda lr: optimizers.rmsprop(lr, centered=True), None),
    "ftrl": (lambda lr: optimizers.ftrl(lr, l1_regularization_strength=0.01), None),
    "proximal_gradient_descent": (lambda lr: optimizers.proximal_gradient_descent(lr, 0.01, 0.1), None),
    "proximal_adagrad": (lambda lr: optimizers.proximal_adagrad(lr, 0.1, 0.01, 0.1), None),
}
WITH_FORMULA = [name for name, (_, rule) in TABLE.items() if rule is not None]
PARAMS = {"a": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": {"c": jnp.float32(0.25)}}


@pytest.fixture(params=TABLE)
def case(request):
    return TABLE[request.param]


def gradients_of(step: int, params):
    return jax.tree.map(lambda leaf: jnp.cos(leaf * (step + 1)).astype(leaf.dtype), params)


def run(transform, params, steps=5, update=None):
    state = transform.init(params)
    update = update or transform.update
    for step in range(steps):
        updates, state = update(gradients_of(step, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("case", WITH_FORMULA, indirect=True)
def test_numbers_are_those_of_the_formula(case):
    make, rule = case
    params, state = run(make(0.1), PARAMS)
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
            np.testing.assert_allclose(tree["a"] if name == "a" else tree["b"]["c"], kept[slot], rtol=2e-4)


def test_it_compiles_once_and_gives_the_same_numbers(case):
    transform = case[0](0.1)
    compiled = jax.jit(transform.update)
    plain, _ = run(transform, PARAMS)
    jitted, _ = run(transform, PARAMS, update=compiled)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), plain, jitted)
    assert compiled._cache_size() == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_and_slots_keep_their_dtype(case, dtype):
    params, state = run(case[0](0.1), jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS))
    assert {leaf.dtype for leaf in jax.tree.leaves((params, state.slots))} == {jnp.dtype(dtype)}


def test_it_composes_with_optax(case):
    chained = optax.chain(optax.clip_by_global_norm(0.5), case[0](0.1))
    params, state = run(chained, PARAMS)
    assert float(current_learning_rate(state)) == pytest.approx(0.1)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    masked = optax.masked(case[0](0.1), {"a": True, "b": False})
    updates, _ = masked.update(gradients_of(0, PARAMS), masked.init(PARAMS), PARAMS)
    assert updates["b"]["c"] == gradients_of(0, PARAMS)["b"]["c"]


def test_a_schedule_is_followed_and_shown(case):
    _, state = run(case[0](lambda count: 0.5 / (count + 1)), PARAMS, steps=4)
    assert float(state.learning_rate) == pytest.approx(0.5 / 4)
    assert int(state.count) == 4


def test_an_empty_tree_works(case):
    params, _ = run(case[0](0.1), {})
    assert params == {}


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
        (lambda: optimizers.gradient_descent(float("nan")), "learning_rate must be a finite number, got nan"),
        (lambda: optimizers.momentum(0.1, -0.5), "momentum must be >= 0, got -0.5"),
        (lambda: optimizers.adam(beta1=1.0), r"beta1 must be in \[0, 1\), got 1.0"),
        (lambda: optimizers.adam(beta2=-0.1), r"beta2 must be in \[0, 1\), got -0.1"),
        (lambda: optimizers.adagrad(0.1, 0.0), "initial_accumulator_value must be > 0, got 0.0"),
        (lambda: optimizers.adagrad(0.1, -1.0), "initial_accumulator_value must be > 0, got -1.0"),
        (lambda: optimizers.adagrad_da(0.1, 0.0), "initial_gradient_squared_accumulator_value must be > 0, got 0.0"),
        (lambda: optimizers.proximal_adagrad(0.1, 0.0), "initial_accumulator_value must be > 0, got 0.0"),
        (lambda: optimizers.ftrl(0.1, initial_accumulator_value=-1), "initial_accumulator_value must be >= 0, got -1"),
        (lambda: optimizers.ftrl(0.1, learning_rate_power=0.5), "learning_rate_power must be <= 0, got 0.5"),
        (lambda: optimizers.ftrl(0.1, l1_regularization_strength=-1), "l1_regularization_strength must be >= 0, got"),
        (lambda: optimizers.ftrl(0.1, l2_regularization_strength=-1), "l2_regularization_strength must be >= 0, got"),
        (lambda: optimizers.ftrl(0.1, l2_shrinkage_regularization_strength=-1), "l2_shrinkage_regularization_streng"),
        (lambda: optimizers.adadelta(epsilon=-1.0), "epsilon must be >= 0, got -1.0"),
    ],
)
def test_bad_hyperparameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_parameters_must_be_passed():
    transform = optimizers.adam()
    with pytest.raises(ValueError, match="needs the parameters"):
        transform.update(PARAMS, transform.init(PARAMS))


def test_slots_are_listed_and_read_by_name_in_a_chain():
    chained = optax.chain(optax.clip_by_global_norm(0.5), optimizers.adam(0.1), optax.scale(1.0))
    _, state = run(chained, PARAMS, steps=2)
    assert optimizers.slot_names(state) == ["m", "v"]
    np.testing.assert_array_equal(optimizers.get_slot(state, "b/c", "m"), state[1].slots["m"]["b"]["c"])
    with pytest.raises(KeyError, match="there is no slot n; there are m, v"):
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
