"""Means over unmasked tokens as losses and metrics: the number of parts only changes rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ftrain import TrainState, WeightedMean, compile_step, make_step, optimizers
from ftrain.cluster import make_mesh
from ftrain.gradients import Rows, accumulate, lookup, loss_scaling, value_and_grad
from ftrain.training.compiled_step import axis_of, spread
from ftrain.training.replica_reduction import CONTRIBUTES

SGD = optimizers.gradient_descent(1.0)
EXAMPLES = 16
TOKENS = 12


def make_batch(seed=0):
    """Examples of very different lengths; one of four devices and some microbatches have none."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, TOKENS + 1, EXAMPLES)
    lengths[4:8] = 0
    lengths[0] = TOKENS
    return {
        "x": rng.normal(size=(EXAMPLES, TOKENS, 3)).astype(np.float32) + lengths[:, None, None],
        "id": rng.integers(0, 5, (EXAMPLES, TOKENS)),
        "mask": (np.arange(TOKENS) < lengths[:, None]).astype(np.float32),
    }


def make_params():
    return {"w": jnp.array([0.1, -0.2, 0.3]), "table": jnp.linspace(-1, 1, 5)}


def per_token(params, batch):
    return jnp.tanh(batch["x"] @ params["w"] + lookup(params["table"], batch["id"])) ** 2


def weighted_loss(params, batch, rng):
    losses = per_token(params, batch)
    large = WeightedMean.of(losses > 0.5, batch["mask"])
    return WeightedMean.of(losses, batch["mask"]), {"large": large, "examples": jnp.float32(1)}


def exact(params, batch):
    """The mean over all unmasked tokens of the whole batch, and its gradient, by plain jax."""

    def mean(params):
        read = jnp.tanh(batch["x"] @ params["w"] + params["table"][batch["id"]]) ** 2
        return jnp.sum(read * batch["mask"]) / jnp.sum(batch["mask"])

    return jax.value_and_grad(mean)(params)


def check_step(after, metrics, state, batch):
    value, gradients = exact(state.params, batch)
    expected = jax.tree.map(lambda p, g: p - g, state.params, gradients)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), after.params, expected
    )
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    large = np.average(np.asarray(per_token(state.params, batch)) > 0.5, weights=batch["mask"])
    assert float(metrics["large"]) == pytest.approx(large, rel=1e-5)
    assert float(metrics["examples"]) == 1


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_microbatches_change_nothing(parts, seed):
    batch = make_batch(seed)
    state = TrainState.create(make_params(), SGD)
    after, metrics = jax.jit(make_step(weighted_loss, SGD, accumulate=parts))(state, batch)
    check_step(after, metrics, state, batch)


@pytest.mark.parametrize("parallel", ["jit", "shard_map", "pmap"])
@pytest.mark.parametrize("parts", [1, 2])
def test_devices_and_replicas_change_nothing(parallel, parts):
    mesh = make_mesh()
    batch = make_batch()
    step = make_step(weighted_loss, SGD, accumulate=parts, replicas=axis_of(parallel))
    state = TrainState.create(make_params(), SGD)
    after, metrics = compile_step(step, mesh, parallel=parallel)(
        TrainState.create(make_params(), SGD), batch
    )
    check_step(after, metrics, state, batch)


def test_a_replica_that_does_not_contribute_is_left_out():
    mesh = make_mesh()
    batch = make_batch() | {CONTRIBUTES: np.repeat([1.0, 0.0, 1.0, 1.0], 4).astype(np.float32)}
    batch["mask"][4:8] = 1.0
    step = make_step(weighted_loss, SGD, replicas=axis_of("shard_map"))
    state = TrainState.create(make_params(), SGD)
    after, metrics = jax.jit(spread(step, mesh, "shard_map"))(state, batch)
    kept = {
        name: np.delete(leaf, slice(4, 8), 0) for name, leaf in batch.items() if name != CONTRIBUTES
    }
    check_step(after, metrics, state, kept)
    assert float(metrics["replicas"]) == 3


def test_loss_scaling_changes_nothing():
    batch = make_batch()
    optimizer = loss_scaling(SGD, scale=1024.0)
    state = TrainState.create(make_params(), optimizer)
    for parts in (1, 4):
        after, metrics = jax.jit(make_step(weighted_loss, optimizer, accumulate=parts))(
            state, batch
        )
        check_step(after, metrics, state, batch)


def test_a_batch_without_weight_moves_nothing():
    batch = make_batch() | {"mask": np.zeros((EXAMPLES, TOKENS), np.float32)}
    state = TrainState.create(make_params(), SGD)
    for parts in (1, 4):
        after, metrics = jax.jit(make_step(weighted_loss, SGD, accumulate=parts))(state, batch)
        jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
        assert float(metrics["loss"]) == float(metrics["gradient_norm"]) == 0.0


def test_an_optimizer_that_searches_along_the_loss_gets_its_value():
    optimizer = optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=100)
    )
    batch = make_batch()
    state = TrainState.create(make_params(), optimizer)
    with pytest.warns(UserWarning, match="does not support Rows"):
        after, metrics = jax.jit(make_step(weighted_loss, optimizer))(state, batch)
    assert float(exact(after.params, batch)[0]) < float(metrics["loss"])


@pytest.mark.parametrize("parts", [1, 4, 7])
def test_the_public_functions_take_them_too(parts):
    batch = make_batch()
    differentiate = accumulate(
        value_and_grad(lambda p, b: weighted_loss(p, b, None), has_aux=True), parts
    )
    (value, metrics), gradients = jax.jit(differentiate)(make_params(), batch)
    expected, exact_gradients = exact(make_params(), batch)
    assert float(value.weight) == batch["mask"].sum()
    assert float(value.value) == pytest.approx(float(expected), rel=1e-5)
    assert isinstance(metrics["large"], WeightedMean)
    np.testing.assert_allclose(gradients["w"], exact_gradients["w"], rtol=1e-4)
    assert isinstance(gradients["table"], Rows)
    table = gradients["table"].to_dense(make_params()["table"])
    np.testing.assert_allclose(table, exact_gradients["table"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("parts", [1, 4])
def test_a_plain_loss_is_a_mean_over_examples(parts):
    def loss(params, batch, rng):
        return jnp.mean(batch["x"] @ params["w"]), {"first": jnp.mean(batch["x"][..., 0])}

    batch = make_batch()
    state = TrainState.create(make_params(), SGD)
    after, metrics = jax.jit(make_step(loss, SGD, accumulate=parts))(state, batch)
    np.testing.assert_allclose(
        after.params["w"], state.params["w"] - batch["x"].mean((0, 1)), rtol=1e-5
    )
    assert float(metrics["first"]) == pytest.approx(batch["x"][..., 0].mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            WeightedMean(jnp.ones(3), 1.0),
            r"must return a scalar loss, got shape \(3,\); take its mean",
        ),
        (
            (jnp.float32(1), {"m": WeightedMean(1.0, jnp.ones(2))}),
            r"metric m must be a scalar, got shape \(2,\)",
        ),
    ],
)
def test_totals_and_weights_must_be_scalars(result, message):
    state = TrainState.create(make_params(), SGD)
    with pytest.raises(ValueError, match=message):
        make_step(lambda params, batch, rng: result, SGD)(state, make_batch())
