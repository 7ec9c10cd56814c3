"""Half precision: bfloat16 and float16 follow the float32 trajectory within a stated distance."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimizer_table import TABLE

from ftrain import optimizers
from ftrain.gradients import Rows
from ftrain.optimizers import apply_updates, get_slot, slot_names
from ftrain.optimizers.rounding import nearest, stochastic
from ftrain.tree import named_leaves

HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
STEPS = 200
# Default arguments are tested too: the default beta2 of Adam is 1 in bfloat16.
DEFAULTS = {
    "adam_default": lambda lr, **kept: optimizers.adam(lr, **kept),
    "adadelta_default": lambda lr, **kept: optimizers.adadelta(lr, **kept),
    "rmsprop_default": lambda lr, **kept: optimizers.rmsprop(lr, **kept),
    "ftrl_default": lambda lr, **kept: optimizers.ftrl(lr, **kept),
}
ALL = TABLE | DEFAULTS
LONG = pytest.mark.campaign
SOME = ("momentum", "adam_default", "ftrl")  # every combination of these is tested


def combinations(names, *kinds):
    """Every name with the first kind, and some with the others; the rest is a campaign."""
    first, *_ = kinds
    return [
        pytest.param(
            name,
            *kind[1:],
            marks=[] if kind is first or name in SOME else LONG,
            id=f"{kind[0]}-{name}",
        )
        for name in names
        for kind in kinds
    ]


def train(transform, params, gradients, apply=apply_updates):
    """Return the parameters after each gradient, and the last state."""
    state = transform.init(params)

    def step(carry, gradient):
        params, state = carry
        updates, state = transform.update(gradient, state, params)
        params = apply(params, updates)
        return (params, state), params

    (_, state), seen = jax.jit(lambda: jax.lax.scan(step, (params, state), gradients))()
    return jax.tree.map(np.asarray, seen), state


def half_numbers(rng, shape, dtype):
    """Normal numbers that every dtype holds exactly, so that all trajectories start equal."""
    return rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn).astype(dtype)


def dense_problem(rng, wide=False):
    """Parameters of both dtypes and gradients of 200 steps; with `wide`, the same in float32."""
    params = {}
    gradients = {}
    for name, dtype in HALVES.items():
        dtype = np.float32 if wide else dtype
        params[name] = {"w": half_numbers(rng, (4, 3), dtype), "b": half_numbers(rng, (), dtype)}
        gradients[name] = {
            "w": half_numbers(rng, (STEPS, 4, 3), dtype),
            "b": half_numbers(rng, STEPS, dtype),
        }
    return params, gradients


def row_problem(rng, wide=False):
    params = {}
    gradients = {}
    for name, dtype in HALVES.items():
        params[name] = half_numbers(rng, (6, 2), np.float32 if wide else dtype)
        ids = jnp.asarray(rng.integers(0, 6, (STEPS, 3)))
        gradients[name] = Rows(ids, jnp.asarray(half_numbers(rng, (STEPS, 3, 2), jnp.float32)))
    return params, gradients


def assert_within(half, exact, params, units):
    """At most `units` units in the last place of the largest value of a parameter."""
    trees = (jax.tree.leaves(tree) for tree in (half, exact, params))
    for left, right, start in zip(*trees, strict=True):
        info = ml_dtypes.finfo(left.dtype)
        scale = np.maximum(np.abs(right).max(0), np.abs(start.astype(np.float32)))
        distance = np.abs(left.astype(np.float64) - right.astype(np.float64)) / (
            scale * float(info.eps)
        )
        assert distance.max() <= units, distance.max()


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "problem", "packed"),
    combinations(
        ALL,
        ("dense", dense_problem, False),
        ("packed", dense_problem, True),
        ("rows", row_problem, False),
    ),
)
def test_half_precision_follows_the_float32_trajectory(name, problem, packed):
    """Within one unit in the last place of a parameter's largest value, at each of 200 steps."""
    params, gradients = problem(np.random.default_rng(5))
    transform = ALL[name](0.01, packed=packed)
    half, state = train(transform, params, gradients)
    exact, exact_state = train(transform, *problem(np.random.default_rng(5), wide=True))
    assert_within(half, exact, params, 1.0)
    for slot in slot_names(exact_state):
        for leaf in named_leaves(params):
            left = get_slot(state, leaf, slot)
            np.testing.assert_allclose(
                left, get_slot(exact_state, leaf, slot), rtol=1e-3, atol=1e-4
            )


@pytest.mark.parametrize("apply", [apply_updates, optax.apply_updates], ids=["ftrain", "optax"])
@pytest.mark.parametrize("dtype", HALVES)
def test_many_small_steps_add_up(dtype, apply):
    """50 steps of 0.005 from 1: there a bfloat16 number moves by 0.004 or 0.008, never by 0.001."""
    for make, expected in (
        (lambda: optimizers.gradient_descent(0.01), 0.75),
        (lambda: optimizers.gradient_descent(0.001), 0.975),
        (lambda: optimizers.adam(0.01), 0.5),
    ):
        params = {"w": np.ones(3, HALVES[dtype])}
        gradients = {"w": np.full((50, 3), 0.5, HALVES[dtype])}
        half, _ = train(make(), params, gradients, apply)
        np.testing.assert_allclose(half["w"][-1].astype(np.float32), expected, atol=0.004)


@pytest.mark.parametrize("dtype", HALVES)
def test_stochastic_rounding_is_right_on_average_and_keeps_no_slot(dtype):
    transform = optimizers.gradient_descent(0.01, rounding="stochastic")
    params = {"w": np.ones(4096, HALVES[dtype])}
    half, state = train(transform, params, {"w": np.full((STEPS, 4096), 0.0625, HALVES[dtype])})
    assert slot_names(state) == []
    last = half["w"][-1].astype(np.float64)
    assert last.mean() == pytest.approx(1 - STEPS * 0.000625, abs=0.002)
    assert len(np.unique(last)) > 2
    again, _ = train(transform, params, {"w": np.full((STEPS, 4096), 0.0625, HALVES[dtype])})
    np.testing.assert_array_equal(half["w"], again["w"])


def test_rounding_to_nearest_is_there_for_those_who_want_it():
    half, state = train(
        optimizers.gradient_descent(0.001, rounding="nearest"),
        {"w": np.ones(2, ml_dtypes.bfloat16)},
        {"w": np.full((50, 2), 0.5, ml_dtypes.bfloat16)},
    )
    assert slot_names(state) == []
    assert (half["w"] == 1).all()


# The slot "linear" of FTRL holds the parameter itself, so in bfloat16 it moves with the resolution
# of a parameter.
NARROW_DISTANCE = {"ftrl": 0.1, "ftrl_default": 0.1}


@pytest.mark.parametrize(
    ("name", "problem"),
    combinations(
        [name for name in ALL if not name.startswith(("grad", "proximal_grad"))],
        ("dense", dense_problem),
        ("rows", row_problem),
    ),
)
def test_narrow_slots_train_float32_parameters(name, problem, rng):
    """Within a tenth of the distance with float32 slots, or a hundredth of the value."""
    params, gradients = problem(rng, wide=True)
    half, state = train(ALL[name](0.01, slot_dtype="bfloat16"), params, gradients)
    exact, _ = train(ALL[name](0.01), params, gradients)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.slots)} == {jnp.dtype(jnp.bfloat16)}
    for left, right in zip(jax.tree.leaves(half), jax.tree.leaves(exact), strict=True):
        travelled = np.abs(right - right[0]).max()
        assert travelled > 0
        np.testing.assert_allclose(
            left, right, atol=0.1 * travelled, rtol=NARROW_DISTANCE.get(name, 0.01)
        )


def test_adam_with_bfloat16_slots_moves_as_with_float32_ones():
    params = {"w": jnp.ones(64)}
    gradients = {"w": np.full((50, 64), 0.5, np.float32)}
    half, _ = train(optimizers.adam(0.01, slot_dtype="bfloat16"), params, gradients)
    np.testing.assert_allclose(half["w"][-1], 0.5, atol=0.02)


def test_parameters_of_several_types_have_remainders_where_they_need_them():
    params = {f"layer{n}": {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2)} for n in range(9)}
    for packed in (True, False, None):
        transform = optimizers.momentum(0.001, 0.9, packed=packed)
        state = transform.init(params)
        updates, state = jax.jit(transform.update)(
            jax.tree.map(jnp.ones_like, params), state, params
        )
        assert jax.tree.map(lambda leaf: leaf.dtype, updates) == jax.tree.map(
            lambda leaf: leaf.dtype, params
        )
        assert slot_names(state) == ["momentum", "remainder"]
        assert get_slot(state, "layer3/w", "remainder").dtype == jnp.float32
        np.testing.assert_allclose(get_slot(state, "layer3/w", "remainder"), -0.001, rtol=1e-4)
        with pytest.raises(KeyError, match="no parameter layer3/b has a slot remainder"):
            get_slot(state, "layer3/b", "remainder")


def test_an_unknown_rounding_is_refused():
    message = 'rounding must be one of "compensated", "stochastic", "nearest", got \'up\''
    with pytest.raises(ValueError, match=message):
        optimizers.adam(rounding="up")
    with pytest.raises(ValueError, match="a rule cannot have a slot named 'remainder'"):
        optimizers.from_rule(lambda *args, **rest: (args[0], args[2]), 0.1, {"remainder": 0.0})


floats = st.floats(width=32, allow_subnormal=False) | st.floats(
    -(2**-12), 2**-12, width=32, allow_subnormal=False
)


@pytest.mark.parametrize("dtype", HALVES)
@given(values=st.lists(floats, min_size=1, max_size=20))
def test_nearest_is_what_a_cast_gives(dtype, values):
    array = np.array(values, np.float32)
    with np.errstate(over="ignore"):
        expected = array.astype(HALVES[dtype]).astype(np.float32)
    np.testing.assert_array_equal(
        jax.jit(nearest, static_argnums=1)(array, HALVES[dtype]), expected
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159, 1e-6, -2.5e-5, 7e-8, 300.3])
def test_stochastic_gives_one_of_two_neighbours_with_the_right_mean(dtype, value):
    array = np.full(20000, value, np.float32)
    rounded = np.asarray(stochastic(array, HALVES[dtype], jax.random.key(1)))
    np.testing.assert_array_equal(rounded.astype(HALVES[dtype]).astype(np.float32), rounded)
    low, high = np.unique(rounded)
    assert low < np.float32(value) < high
    assert np.nextafter(HALVES[dtype](low), HALVES[dtype](high)) == HALVES[dtype](high)
    assert rounded.mean(dtype=np.float64) == pytest.approx(
        value, abs=4 * float(high - low) / 20000**0.5
    )


def test_stochastic_leaves_what_is_not_finite():
    array = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0.0])
    for dtype in HALVES.values():
        np.testing.assert_array_equal(stochastic(array, dtype, jax.random.key(0)), array)
