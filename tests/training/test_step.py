import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from regression import init_params, loss_fn, make_arrays

from ftrain import TrainState, compile_step, make_step, optimizers
from ftrain.averages import averaged
from ftrain.cluster import make_mesh

BATCH = make_arrays(16)
SGD = optimizers.gradient_descent(0.1)


def assert_close(left, right):
    chex.assert_trees_all_close(left, right, rtol=1e-6)


def test_a_step_is_one_step_of_the_optimizer():
    state = TrainState.create(init_params(), SGD)
    after, metrics = make_step(loss_fn, SGD)(state, BATCH)
    gradients = jax.grad(lambda params: loss_fn(params, BATCH, None)[0])(state.params)
    assert_close(after.params, jax.tree.map(lambda p, g: p - 0.1 * g, state.params, gradients))
    assert int(after.step) == 1
    assert float(metrics["learning_rate"]) == pytest.approx(0.1)
    assert float(metrics["gradient_norm"]) == pytest.approx(
        float(optax.tree.norm(gradients)), rel=1e-6
    )
    assert set(metrics) == {"loss", "learning_rate", "gradient_norm", "largest_error"}


def test_a_loss_may_come_without_metrics():
    state = TrainState.create(init_params(), SGD)
    step = make_step(lambda params, batch, rng: loss_fn(params, batch, rng)[0], SGD)
    assert set(step(state, BATCH)[1]) == {"loss", "learning_rate", "gradient_norm"}


def test_clipping_bounds_the_step_and_the_norm_shown_is_the_one_before():
    state = TrainState.create(init_params(), SGD)
    after, metrics = make_step(loss_fn, SGD, clip_global_norm=0.01)(state, BATCH)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, after.params, state.params))
    assert float(moved) == pytest.approx(0.1 * 0.01, rel=1e-5)
    assert metrics["gradient_norm"] > 0.01


def test_randomness_is_a_function_of_seed_and_step():
    def noise(params, batch, rng):
        return jnp.sum(params["w"]) * 0.0 + jax.random.normal(rng)

    step = make_step(noise, SGD)
    state = TrainState.create(init_params(), SGD, seed=4)
    first, second = step(state, BATCH), step(state, BATCH)
    assert first[1]["loss"] == second[1]["loss"]
    third = step(first[0], BATCH)
    assert third[1]["loss"] != first[1]["loss"]
    expected = jax.random.normal(jax.random.fold_in(jax.random.key(4), 1))
    assert third[1]["loss"] == expected


def test_a_model_state_is_carried():
    def counting(params, batch, rng, model_state):
        loss, metrics = loss_fn(params, batch, rng)
        return loss, metrics, {"batches": model_state["batches"] + 1}

    state = TrainState.create(init_params(), SGD, model_state={"batches": 0})
    step = make_step(counting, SGD)
    state, _ = step(state, BATCH)
    state, _ = step(state, BATCH)
    assert int(state.model_state["batches"]) == 2


def test_a_loss_of_the_other_form_is_named():
    def with_state(params, batch, rng, model_state):
        return 0.0, {}, model_state

    with pytest.raises(TypeError, match="a fourth argument needs a model that has one"):
        make_step(with_state, SGD)(TrainState.create(init_params(), SGD), BATCH)
    state = TrainState.create(init_params(), SGD, model_state={"batches": 0})
    with pytest.raises(TypeError, match="because the state has a model_state"):
        make_step(lambda params, batch, rng: 0.0, SGD)(state, BATCH)
    with pytest.raises(
        TypeError, match=r"must return \(loss, metrics, model_state\), got a tuple of 2"
    ):
        make_step(lambda params, batch, rng, model_state: (0.0, {}), SGD)(state, BATCH)


@pytest.mark.parametrize("ramp", [False, True])
def test_averages_are_those_of_tensorflow(ramp):
    """ExponentialMovingAverage(0.99), with the ramp also `global_step`, over 200 steps.

    Both are applied after the optimizer, which has counted the step by then.
    """
    state = TrainState.create(init_params(), SGD, averages=True)
    step = jax.jit(make_step(loss_fn, SGD, averages=0.99, averages_ramp=ramp))
    means = jax.tree.map(np.float64, init_params())
    for n in range(1, 201):
        state, _ = step(state, BATCH)
        decay = min(0.99, (1 + n) / (10 + n)) if ramp else 0.99
        means = jax.tree.map(
            lambda m, p, d=decay: m - (1 - d) * (m - np.float64(p)), means, state.params
        )
    chex.assert_trees_all_close(state.averages, jax.tree.map(np.float32, means), rtol=2e-5)


def test_averages_need_a_state_that_has_them():
    with pytest.raises(ValueError, match="averages=True"):
        make_step(loss_fn, SGD, averages=0.9)(TrainState.create(init_params(), SGD), BATCH)


def test_averages_may_be_of_some_parameters():
    state = TrainState.create(init_params(), SGD, averages="w")
    assert state.averages["b"] is None
    after, _ = jax.jit(make_step(loss_fn, SGD, averages=0.5))(state, BATCH)
    assert_close(after.averages["w"], after.params["w"] * 0.5)
    assert after.averages["b"] is None
    used = averaged(after.averages, after.params)
    assert_close(used, {"w": after.averages["w"], "b": after.params["b"]})


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("x.*", r"averages: pattern 'x\.\*' matches no leaf; there are b, w"),
        ("(", r"'\(' is not a regular expression"),
    ],
)
def test_a_pattern_that_matches_no_parameter_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        TrainState.create(init_params(), SGD, averages=["w", pattern])


@pytest.mark.standard_promotion  # optax.adam
def test_plain_optax_shows_the_rate_it_is_told():
    optimizer = optax.adamw(0.5)
    state = TrainState.create(init_params(), optimizer)
    assert jnp.isnan(make_step(loss_fn, optimizer)(state, BATCH)[1]["learning_rate"])
    told = make_step(loss_fn, optimizer, learning_rate=lambda step: 0.5)
    assert float(told(state, BATCH)[1]["learning_rate"]) == 0.5


def test_it_compiles_once_even_for_python_scalars():
    def loss(params, batch, rng):
        return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)

    step = compile_step(make_step(loss, SGD))
    state = TrainState.create({"w": np.zeros(3, np.float32), "b": 0.0}, SGD)
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert step._cache_size() == 1


def test_a_mesh_gives_the_same_numbers():
    step = make_step(loss_fn, optimizers.momentum(0.1, 0.9))

    def after(compiled):
        state = TrainState.create(init_params(), optimizers.momentum(0.1, 0.9))
        for _ in range(4):
            state, metrics = compiled(state, BATCH)
        return jax.device_get((state.params, metrics))

    chex.assert_trees_all_close(
        after(compile_step(step)), after(compile_step(step, make_mesh(4))), rtol=1e-5
    )


def test_the_state_is_frozen():
    state = TrainState.create(init_params(), SGD)
    with pytest.raises(AttributeError):
        state.step = 3


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda p, b, r: b["x"] @ p["w"], ValueError, r"scalar loss, got shape \(16,\)"),
        (
            lambda p, b, r: (p["b"], {"all": b["x"]}),
            ValueError,
            r"metric all must be a scalar, got shape \(16, 3\)",
        ),
        (lambda p, b, r: (p["b"], [1.0]), TypeError, "metrics as a dict, got list"),
        (
            lambda p, b, r: None,
            TypeError,
            "must return a scalar loss, or a loss and a dict of metrics, got None",
        ),
        (
            lambda p, b, r: (p["b"], {}, 3),
            TypeError,
            "must return a scalar loss, or a loss and a dict of metrics, got",
        ),
    ],
)
def test_a_loss_function_that_returns_the_wrong_thing_is_told_so(loss, error, message):
    with pytest.raises(error, match=message):
        make_step(loss, SGD)(TrainState.create(init_params(), SGD), BATCH)


@pytest.mark.parametrize(
    "options", [{"clip_global_norm": 0.0}, {"averages": 1.0}, {"averages": -0.1}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        make_step(loss_fn, SGD, **options)


def test_a_parameter_without_a_gradient_is_named():
    params = init_params() | {"count": jnp.zeros((), jnp.int32)}
    with pytest.raises(
        TypeError,
        match="parameter count is int32, which has no gradient; keep what is not trained in",
    ):
        make_step(loss_fn, SGD)(TrainState.create(params, SGD), BATCH)


@pytest.mark.parametrize("wrong", [0.1, optax.sgd], ids=["float", "not called"])
def test_what_is_no_optimizer_is_refused(wrong):
    with pytest.raises(TypeError, match="optimizer must be an optax"):
        make_step(loss_fn, wrong)


def test_averages_of_half_precision_are_kept_in_float32():
    state = TrainState.create({"w": jnp.ones(2, jnp.bfloat16)}, SGD, averages=True)
    assert state.averages["w"].dtype == jnp.float32
    step = jax.jit(
        make_step(lambda params, batch, rng: jnp.sum(params["w"] * 0), SGD, averages=0.999)
    )
    state = state.replace(step=jnp.int32(10_000), averages={"w": jnp.full(2, 1.01)})
    for _ in range(3):
        state, _ = step(state, BATCH)
    np.testing.assert_allclose(state.averages["w"], 1 + 0.01 * 0.999**3, rtol=1e-6)
