import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ftrain import TrainState, make_step, optimizers
from ftrain.gradients import Rows, guard, loss_scale, loss_scaling, skipped_updates
from ftrain.optimizers import apply_updates, get_slot

PARAMS = {"w": jnp.array([1.0, 2.0]), "table": jnp.ones((5, 2))}


def gradients(size=1.0):
    rows = Rows(jnp.array([1, 3, 1]), jnp.full((3, 2), size))
    return {"w": jnp.array([1.0, -1.0]) * size, "table": rows}


def run(transform, sizes):
    state = transform.init(PARAMS)
    params = PARAMS
    update = jax.jit(transform.update)
    for size in sizes:
        updates, state = update(gradients(size), state, params)
        params = apply_updates(params, updates)
    return params, state


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("wrap", [guard, loss_scaling])
def test_an_update_that_is_not_finite_is_skipped_with_its_state(wrap, bad):
    params, state = run(wrap(optimizers.adam(0.1)), [1.0, bad, 0.5])
    expected, expected_state = run(optimizers.adam(0.1), [1.0, 0.5])
    assert_same(params, expected)
    assert_same(state.inner, expected_state)
    assert int(skipped_updates(state)) == 1
    assert get_slot(state, "table", "m").shape == (5, 2)


def test_a_bad_number_in_one_row_is_enough():
    transform = guard(optimizers.gradient_descent(0.1))
    bad = gradients() | {"table": Rows(jnp.array([0]), jnp.array([[1.0, np.nan]]))}
    updates, state = transform.update(bad, transform.init(PARAMS), PARAMS)
    assert_same(apply_updates(PARAMS, updates), PARAMS)
    assert int(skipped_updates(state)) == 1


def test_a_spike_is_skipped_once_the_usual_is_known():
    transform = guard(optimizers.gradient_descent(0.1), spike=5.0, window=4)
    params, state = run(transform, [1.0, 100.0, 1.0, 1.0])  # too early to tell
    assert int(skipped_updates(state)) == 0
    params, state = run(transform, [1.0, 1.2, 0.8, 1.0, 4.0, 100.0, 1.0])
    assert int(skipped_updates(state)) == 1
    assert_same(params, run(optimizers.gradient_descent(0.1), [1.0, 1.2, 0.8, 1.0, 4.0, 1.0])[0])


def test_after_its_patience_the_guard_gives_way():
    transform = guard(optimizers.gradient_descent(0.1), spike=5.0, window=2, patience=3)
    _, state = run(transform, [1.0] * 3 + [100.0] * 12)
    assert int(skipped_updates(state)) < 12  # larger gradients became usual
    params, state = run(guard(optimizers.gradient_descent(0.1), patience=3), [np.nan] * 4)
    assert int(skipped_updates(state)) == 3
    assert np.isnan(params["w"]).all()


def test_the_scale_shrinks_on_overflow_and_grows_after_a_while():
    transform = loss_scaling(optimizers.gradient_descent(0.1), scale=8.0, growth_interval=3)
    scales = []
    state = transform.init(PARAMS)
    update = jax.jit(transform.update)
    for size in [np.inf, 1, 1, 1, 1, 1, 1, np.nan, np.nan, np.nan, np.nan, np.nan, np.nan]:
        _, state = update(gradients(size), state, PARAMS)
        scales.append(float(loss_scale(state)))
    assert scales == [4, 4, 4, 8, 8, 8, 16, 8, 4, 2, 1, 1, 1]
    fixed = loss_scaling(optimizers.gradient_descent(0.1), scale=8.0, dynamic=False)
    assert float(loss_scale(run(fixed, [1.0, np.inf])[1])) == 8


def half_loss(params, batch, rng):
    # Its gradient, 1e-6 and less, is below what float16 can hold unless it is scaled.
    return (
        jnp.sum((params["w"].astype(jnp.float16) * 1e-3) ** 2).astype(jnp.float32)
        * batch["x"].mean()
    )


def test_a_step_scales_the_loss_and_unscales_the_gradients():
    params = {"w": jnp.array([2e-2, 3e-2])}
    batch = {"x": jnp.ones(4)}
    plain = optimizers.gradient_descent(1.0)
    _, metrics = make_step(half_loss, plain)(TrainState.create(params, plain), batch)
    scaled = loss_scaling(plain, scale=2.0**14)
    state, scaled_metrics = jax.jit(make_step(half_loss, scaled))(
        TrainState.create(params, scaled), batch
    )
    exact = float(jnp.linalg.norm(2e-6 * params["w"]))
    assert abs(float(metrics["gradient_norm"]) - exact) > 0.1 * exact
    assert float(scaled_metrics["gradient_norm"]) == pytest.approx(exact, rel=0.01)
    assert scaled_metrics["loss"] == metrics["loss"]
    assert float(scaled_metrics["loss_scale"]) == 2.0**14
    np.testing.assert_allclose(
        params["w"] - state.params["w"], 2e-6 * params["w"], rtol=0.05
    )  # float32 of 0.02


def test_gradients_of_half_precision_parameters_do_not_vanish_either():
    def loss(params, batch, rng):
        return jnp.sum(params["w"].astype(jnp.float32) * 1e-9)

    optimizer = loss_scaling(optimizers.adam(0.1, slot_dtype="float32"))
    state = TrainState.create({"w": jnp.ones(3, jnp.float16)}, optimizer)
    state, metrics = jax.jit(make_step(loss, optimizer))(state, {"x": jnp.ones(1)})
    assert float(metrics["gradient_norm"]) == pytest.approx(1e-9 * np.sqrt(3), rel=1e-2)
    assert state.params["w"].dtype == jnp.float16
    assert float(optimizers.get_slot(state.opt_state, "w", "m")[0]) == pytest.approx(
        1e-10, rel=1e-2
    )


def test_a_step_tells_what_was_skipped():
    optimizer = guard(optax.chain(optax.scale(1.0), optimizers.momentum(0.1, 0.9)))
    step = jax.jit(
        make_step(lambda params, batch, rng: jnp.sum(params["w"]) * batch["x"].mean(), optimizer)
    )
    state = TrainState.create({"w": jnp.ones(2)}, optimizer)
    told = []
    for x in (1.0, np.nan, 1.0, np.inf):
        state, metrics = step(state, {"x": jnp.full(4, x)})
        told.append((int(metrics["update_skipped"]), int(metrics["updates_skipped"])))
    assert told == [(0, 0), (1, 1), (0, 1), (1, 2)]
    assert int(state.step) == 4
    assert np.isfinite(state.params["w"]).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: guard(optax.sgd(0.1), spike=1.0), "spike must be > 1, got 1.0"),
        (lambda: guard(optax.sgd(0.1), patience=0), "patience must be a whole number >= 1, got 0"),
        (lambda: guard(optax.sgd(0.1), window=1.5), "window must be a whole number >= 1, got 1.5"),
        (lambda: loss_scaling(optax.sgd(0.1), factor=1.0), "factor must be > 1, got 1.0"),
        (
            lambda: loss_scaling(optax.sgd(0.1), growth_interval=0),
            "growth_interval must be a whole number >= 1",
        ),
        (lambda: loss_scaling(optax.sgd(0.1), scale=0.0), "scale must be > 0, got 0.0"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_not_called_is_named():
    for wrap in (guard, loss_scaling):
        with pytest.raises(
            TypeError, match=r"optimizer must be an optax.GradientTransformation, such as adam"
        ):
            wrap(optimizers.adam)
    with pytest.raises(TypeError, match=r"call its .gradient_transformation\(\)"):
        guard(optax.MultiSteps(optax.sgd(0.1), 2))


def test_a_skipped_step_leaves_the_model_state_alone():
    def loss(params, batch, rng, model_state):
        mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].mean()
        return jnp.sum(params["w"]) * batch["x"].mean(), {}, {"mean": mean}

    optimizer = guard(optimizers.momentum(0.1, 0.9))
    step = jax.jit(make_step(loss, optimizer))
    state = TrainState.create({"w": jnp.ones(2)}, optimizer, model_state={"mean": jnp.float32(1.0)})
    for x in (1.0, np.nan, 2.0):
        state, metrics = step(state, {"x": jnp.full(4, x)})
    assert int(metrics["updates_skipped"]) == 1
    assert float(state.model_state["mean"]) == pytest.approx(1.1)
