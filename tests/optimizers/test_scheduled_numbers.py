"""Every number of an optimizer and of a step may be a schedule."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ftrain import TrainState, make_step, optimizers, schedules
from ftrain.checkpoints import CheckpointManager
from ftrain.gradients import (
    as_transform,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    global_norm,
)
from ftrain.optimizers import apply_updates
from ftrain.schedules import Scheduled

PARAMS = {"a": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": {"c": jnp.float32(0.25)}}
GIVEN = {"learning_rate": 0.1, "momentum": 0.9}
# A value to start from where the default is zero, and one that stays valid where it is not.
FROM = {"epsilon": 0.1, "momentum": 0.9, "learning_rate_power": -0.5}
NUMBERS = [
    (function, name)
    for function in (
        optimizers.adadelta,
        optimizers.adagrad,
        optimizers.adagrad_da,
        optimizers.adam,
        optimizers.ftrl,
        optimizers.gradient_descent,
        optimizers.momentum,
        optimizers.proximal_adagrad,
        optimizers.proximal_gradient_descent,
        optimizers.rmsprop,
    )
    for name, parameter in inspect.signature(function).parameters.items()
    if parameter.annotation == Scheduled
]


def gradients_of(step, params):
    return jax.tree.map(lambda leaf: jnp.cos(leaf * (step + 1)), params)


def run(transform, params=PARAMS, steps=4):
    state = transform.init(params)
    for step in range(steps):
        updates, state = transform.update(gradients_of(step, params), state, params)
        params = apply_updates(params, updates)
    return params


def given(function, **numbers):
    needed = inspect.signature(function).parameters
    return {name: value for name, value in GIVEN.items() if name in needed} | numbers


def test_every_number_but_initial_values_is_one():
    found = {(function.__name__, name) for function, name in NUMBERS}
    assert len(found) == 36
    for function in {function for function, _ in NUMBERS}:
        for name, parameter in inspect.signature(function).parameters.items():
            is_number = isinstance(parameter.default, float) and not name.startswith("initial_")
            assert (function.__name__, name) in found or not is_number


@pytest.mark.parametrize(
    ("function", "name"), NUMBERS, ids=lambda each: getattr(each, "__name__", each)
)
def test_a_schedule_gives_what_injected_values_give(function, name):
    parameter = inspect.signature(function).parameters[name]
    start = GIVEN.get(name) or FROM.get(name) or parameter.default or 0.05

    def schedule(count):
        return start * (1 + jnp.asarray(count, jnp.float32)) / (2 + jnp.asarray(count, jnp.float32))

    expected = run(
        optax.inject_hyperparams(function)(**given(function, **{name: schedule}))
        if name != "weight_decay"
        else _decayed(function, schedule)
    )
    moved = run(function(**given(function, **{name: schedule})))
    constant = run(function(**given(function, **{name: start})))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), moved, expected
    )
    assert any(map(np.any, jax.tree.leaves(jax.tree.map(jnp.not_equal, moved, constant))))


def _decayed(function, schedule):
    """Weight decay, applied to the update by hand."""
    plain = function(**given(function))

    def update(gradients, state, params):
        inner, count = state
        updates, inner = plain.update(gradients, inner, params)
        rate = inner.learning_rate * schedule(count)
        return jax.tree.map(lambda u, p: u - rate * p, updates, params), (inner, count + 1)

    return optax.GradientTransformation(lambda params: (plain.init(params), 0), update)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_dtypes_stay(dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS)
    transform = optimizers.momentum(0.1, schedules.polynomial_decay(0.9, 4), weight_decay=0.1)
    state = transform.init(params)
    updates, after = transform.update(gradients_of(0, params), state, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), state, after)


@pytest.mark.parametrize(
    ("function", "numbers"),
    [
        (clip_by_norm, {"clip_norm": 0.7}),
        (clip_by_global_norm, {"clip_norm": 0.7}),
        (clip_by_value, {"clip_value_min": -0.2, "clip_value_max": 0.4}),
    ],
)
def test_clipping_in_a_chain_may_be_scheduled(function, numbers):
    def halving(value):
        return lambda count: value * 0.5 ** jnp.asarray(count, jnp.float32)

    transform = as_transform(function, **{name: halving(value) for name, value in numbers.items()})
    state = transform.init(PARAMS)
    for count in range(3):
        clipped, state = jax.jit(transform.update)(PARAMS, state, PARAMS)
        fixed = {name: value * 0.5**count for name, value in numbers.items()}
        expected, _ = as_transform(function, **fixed).update(PARAMS, optax.EmptyState())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), clipped, expected)


def loss(params, batch, rng):
    return jnp.sum((batch["x"] @ params["a"] + params["b"]["c"]) ** 2)


BATCH = {"x": np.ones((4, 2), np.float32)}


def test_the_norm_of_a_step_is_clipped_by_a_schedule():
    limits = schedules.piecewise_constant([0, 1], [0.5, 0.25, 0.125])
    optimizer = optimizers.gradient_descent(1.0)
    step = jax.jit(make_step(loss, optimizer, clip_global_norm=limits))
    state = TrainState.create(PARAMS, optimizer)
    for limit in (0.5, 0.25, 0.125, 0.125):
        after, metrics = step(state, BATCH)
        moved = global_norm(jax.tree.map(jnp.subtract, after.params, state.params))
        np.testing.assert_allclose(moved, limit, rtol=1e-4)
        assert float(metrics["gradient_norm"]) > 1
        state = after
    assert step._cache_size() == 1


def test_the_decay_of_averages_may_be_scheduled():
    decay = schedules.join([0.0, 0.5], [2])
    optimizer = optimizers.gradient_descent(0.01)
    step = jax.jit(make_step(loss, optimizer, averages=decay))
    state = TrainState.create(PARAMS, optimizer, averages=True)
    expected = PARAMS["a"]
    for now in (0.0, 0.0, 0.5, 0.5):
        state, _ = step(state, BATCH)
        expected = now * expected + (1 - now) * state.params["a"]
        np.testing.assert_allclose(state.averages["a"], expected, rtol=1e-6)


def test_the_averages_of_replicas_may_be_scheduled():
    decay = schedules.join([0.0, 0.5], [1])
    waiting = optimizers.sync_replicas(optimizers.gradient_descent(0.1), 1, averages=decay)
    params, state = PARAMS, waiting.init(PARAMS)
    expected = PARAMS["a"]
    for now in (0.0, 0.5):
        updates, state = waiting.update(gradients_of(0, params), state, params)
        params = apply_updates(params, updates)
        expected = now * expected + (1 - now) * params["a"]
        np.testing.assert_allclose(optimizers.averaged_params(state)["a"], expected, rtol=1e-6)


def test_a_resumed_run_repeats_every_bit(tmp_path):
    optimizer = optimizers.groups(
        optimizers.momentum(
            schedules.cosine_decay(0.01, 8),
            schedules.polynomial_decay(0.9, 8, 0.5),
            weight_decay=schedules.exponential_decay(0.1, 2, 0.5),
        ),
        [
            optimizers.Group("b/.*", learning_rate_scale=schedules.join([0.0, 2.0], [3])),
        ],
    )
    step = jax.jit(
        make_step(
            loss,
            optimizer,
            clip_global_norm=schedules.polynomial_decay(1.0, 8, 0.1),
            averages=schedules.polynomial_decay(0.5, 8, 0.9),
        )
    )
    state = TrainState.create(PARAMS, optimizer, averages=True)
    with CheckpointManager(tmp_path) as manager:
        for number in range(8):
            if number == 4:
                manager.save(4, state)
            state, metrics = step(state, BATCH)
        resumed = manager.restore(like=TrainState.create(PARAMS, optimizer, averages=True))
    for _ in range(4):
        resumed, again = step(resumed, BATCH)
    for one, other in zip(
        jax.tree.leaves((state, metrics)), jax.tree.leaves((resumed, again)), strict=True
    ):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)


def test_the_record_of_a_run_knows_schedules_by_what_they_compute():
    def settings(start):
        clip = schedules.polynomial_decay(start, 8, 0.1)
        return make_step(loss, optimizers.adam(), clip_global_norm=clip).settings

    assert settings(1.0) == settings(1.0)
    assert settings(1.0)["clip_global_norm"] != settings(2.0)["clip_global_norm"]
    assert settings(1.0)["clip_global_norm"].startswith("schedule ")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_norm_that_is_no_norm_is_refused(value):
    with pytest.raises(ValueError, match="clip_global_norm must be > 0"):
        make_step(loss, optimizers.adam(), clip_global_norm=value)
