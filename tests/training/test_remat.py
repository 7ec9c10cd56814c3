"""Rematerialisation: less is kept for the backward pass, and the results are the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import ftrain
from ftrain import TrainState, make_step
from ftrain.cluster import make_mesh
from ftrain.data import ArraySource, Pipeline
from ftrain.gradients import Rows, lookup
from ftrain.optimizers import adam, gradient_descent
from ftrain.training.remat import recompute
from ftrain.tree import count_bytes

LAYERS = 8
WIDTH = 16
MODES = ["dots", "layers", "names"]


def init(rng=None):
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {"layers": [jax.random.normal(key, (WIDTH, WIDTH)) * 0.3 for key in keys]}


def layer(hidden, weights, key):
    mixed = jnp.tanh(hidden @ weights) * jax.nn.sigmoid(hidden)
    kept = jax.random.bernoulli(key, 0.9, mixed.shape)
    return checkpoint_name(hidden + jnp.sin(jnp.where(kept, mixed, 0)), "layer")


def loss_fn(params, batch, rng):
    hidden = batch["x"]
    for number, weights in enumerate(params["layers"]):
        hidden = jax.jit(layer)(hidden, weights, jax.random.fold_in(rng, number))
    return jnp.mean(hidden**2), {"largest": jnp.max(hidden)}


def loss_of_scan(params, batch, rng):
    def body(carry, weights):
        hidden, key = carry
        return (layer(hidden, weights, key), jax.random.fold_in(key, 1)), None

    (hidden, _), _ = jax.lax.scan(body, (batch["x"], rng), jnp.stack(params["layers"]))
    return jnp.mean(hidden**2)


def batch_of(examples: int = 64):
    return {"x": jax.random.normal(jax.random.key(1), (examples, WIDTH))}


def kept_bytes(loss, remat) -> int:
    """The bytes that a forward pass keeps for its backward pass."""

    def value(params, rng):
        result = loss(params, batch_of(), rng)
        return result[0] if isinstance(result, tuple) else result

    function = recompute(value, remat)

    def backward(params):
        return jax.vjp(lambda params: function(params, jax.random.key(0)), params)[1]

    return count_bytes(jax.eval_shape(backward, init()))


@pytest.mark.parametrize("remat", MODES)
@pytest.mark.parametrize("loss", [loss_fn, loss_of_scan])
def test_less_is_kept_for_the_backward_pass(loss, remat):
    everything = kept_bytes(loss, "none")
    assert kept_bytes(loss, remat) < 0.6 * everything


def test_layers_keep_what_is_alive_between_them():
    one_layer = count_bytes(batch_of())
    parameters = count_bytes(init())
    assert kept_bytes(loss_fn, "layers") < parameters + (LAYERS + 4) * one_layer


@pytest.mark.optimized
@pytest.mark.parametrize("remat", MODES)
def test_layers_in_a_scan_need_less_memory(remat):
    optimizer = gradient_descent(0.1)
    state = TrainState.create(init(), optimizer)

    def memory(remat):
        step = make_step(loss_of_scan, optimizer, remat=remat)
        compiled = jax.jit(step).lower(state, batch_of(512)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory(remat) < 0.6 * memory("none")


@pytest.mark.parametrize("remat", MODES)
@pytest.mark.parametrize("loss", [loss_fn, loss_of_scan])
@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_the_numbers_are_the_same_and_so_are_the_random_ones(loss, remat, precision):
    optimizer = gradient_descent(0.1)
    state = TrainState.create(init(), optimizer)
    results = []
    for mode in ("none", remat):
        step = jax.jit(make_step(loss, optimizer, remat=mode, precision=precision))
        after, metrics = step(state, batch_of())
        results.append((after.params, metrics))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), *results)


@pytest.mark.parametrize("remat", MODES)
@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_a_table_keeps_its_row_sparse_gradient(remat, precision):
    def loss(params, batch, rng):
        hidden = lookup(params["table"], batch["ids"])
        for weights in params["layers"]:
            hidden = hidden + jnp.tanh(hidden @ weights)
        return jnp.mean(hidden**2)

    params = init() | {"table": jax.random.normal(jax.random.key(2), (100, WIDTH))}
    optimizer = adam(0.1)
    state = TrainState.create(params, optimizer)
    batch = {"ids": jnp.array([5, 9, 5, 70])}
    step = make_step(loss, optimizer, remat=remat, precision=precision)
    expected = make_step(loss, optimizer, precision=precision).differentiate(state, batch)[3]
    found = step.differentiate(state, batch)[3]
    assert isinstance(found["table"], Rows)
    np.testing.assert_allclose(
        found["table"].to_dense(params["table"]),
        expected["table"].to_dense(params["table"]),
        rtol=1e-5,
    )


@pytest.mark.parametrize("remat", MODES)
def test_with_a_model_state_microbatches_and_a_resumed_run(tmp_path, remat):
    def loss(params, batch, rng, model_state):
        value, metrics = loss_fn(params, batch, rng)
        return value, metrics, {"seen": model_state["seen"] + 1, "mean": value}

    arrays = {name: np.asarray(array) for name, array in batch_of().items()}
    train = functools.partial(
        ftrain.train,
        loss,
        init(),
        Pipeline(ArraySource(arrays), batch_size=8),
        optimizer=adam(0.01),
        model_state={"seen": jnp.zeros((), jnp.int32), "mean": jnp.zeros(())},
        accumulate=2,
        remat=remat,
    )
    straight = train(steps=6)
    assert int(straight.model_state["seen"]) == 12
    train(steps=3, directory=tmp_path)
    resumed = train(steps=6, directory=tmp_path)
    for one, other in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        assert jnp.array_equal(one, other)


@pytest.mark.parametrize("remat", MODES)
def test_on_a_mesh_of_replicas(remat):
    def loss(params, batch, rng):
        return loss_fn(params, batch, jax.random.key(0))  # each replica has its own rng

    arrays = {name: np.asarray(array) for name, array in batch_of().items()}
    train = functools.partial(
        ftrain.train,
        loss,
        init(),
        Pipeline(ArraySource(arrays), batch_size=8),
        optimizer=gradient_descent(0.1),
        steps=2,
        mesh=make_mesh(data=2),
        parallel="shard_map",
    )
    for one, other in zip(
        jax.tree.leaves(train().params), jax.tree.leaves(train(remat=remat).params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match='remat must be one of "none", "dots", "layers", "names"'):
        make_step(loss_fn, adam(0.1), remat="everything")
