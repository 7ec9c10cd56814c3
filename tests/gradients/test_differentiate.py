"""`value_and_grad` inside other transformations, where it could fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ftrain import TrainState, make_step, optimizers
from ftrain.cluster import make_mesh
from ftrain.gradients import Rows, lookup, value_and_grad

TABLE = jnp.arange(14.0).reshape(7, 2) / 10
IDS = jnp.arange(8) % 5


def loss_fn(table, ids=IDS):
    return jnp.sum(jnp.sin(lookup(table, ids)) ** 2)


def test_in_float64():
    with jax.enable_x64(True):
        table = jnp.asarray(np.asarray(TABLE), jnp.float64)
        _, rows = value_and_grad(loss_fn)(table)
        assert rows.values.dtype == jnp.float64
        np.testing.assert_allclose(rows.to_dense(table), jax.grad(loss_fn)(table), rtol=1e-12)
        optimizer = optimizers.adam(0.1)
        step = make_step(lambda params, batch, rng: jnp.sum((params["w"] - batch) ** 2), optimizer)
        state, _ = step(TrainState.create({"w": jnp.ones(3, jnp.float64)}, optimizer), jnp.zeros(3))
        assert state.params["w"].dtype == jnp.float64


@pytest.mark.parametrize(
    "extra", [jax.random.key(0), jnp.complex64(1j), 3, True, 0.5, jnp.ones(2), None]
)
def test_what_comes_beside_the_value_may_be_anything(extra):
    (_, aux), rows = jax.jit(
        lambda t: value_and_grad(lambda t: (loss_fn(t), extra), has_aux=True)(t)
    )(TABLE)
    np.testing.assert_allclose(rows.to_dense(TABLE), jax.grad(loss_fn)(TABLE), rtol=1e-6)
    assert jax.tree.structure(aux) == jax.tree.structure(extra)


def test_a_model_state_may_hold_keys():
    def loss(params, batch, rng, model_state):
        return jnp.sum(params["w"] ** 2), {}, {"key": jax.random.split(model_state["key"])[0]}

    optimizer = optimizers.adam(0.1)
    state = TrainState.create({"w": jnp.ones(2)}, optimizer, model_state={"key": jax.random.key(3)})
    after, _ = jax.jit(make_step(loss, optimizer))(state, jnp.zeros(1))
    assert (
        jax.random.key_data(after.model_state["key"]) != jax.random.key_data(jax.random.key(3))
    ).any()


def test_a_table_may_be_a_numpy_array():
    _, rows = value_and_grad(loss_fn)(np.asarray(TABLE))
    np.testing.assert_allclose(rows.to_dense(TABLE), jax.grad(loss_fn)(TABLE), rtol=1e-6)


def test_duplicates_of_bfloat16_are_summed_in_float32():
    table = jnp.ones((3, 1), jnp.bfloat16)
    _, rows = value_and_grad(
        lambda t: jnp.mean(lookup(t, jnp.zeros(512, jnp.int32)).astype(jnp.float32))
    )(table)
    assert float(rows.to_dense(table)[0, 0]) == 1.0


def test_under_shard_map_each_device_has_the_rows_it_read():
    mesh = make_mesh()
    data = PartitionSpec("data")
    whole = PartitionSpec()

    def total(table, ids):
        return jax.lax.psum(loss_fn(table, ids), "data")

    spread = jax.shard_map(total, mesh=mesh, in_specs=(whole, data), out_specs=whole)
    np.testing.assert_allclose(
        value_and_grad(spread)(TABLE, IDS)[1], jax.grad(loss_fn)(TABLE), rtol=1e-5
    )

    def own(table, ids):
        _, rows = value_and_grad(loss_fn)(table, ids)
        return jax.lax.psum(rows.to_dense(table), "data")

    summed = jax.shard_map(own, mesh=mesh, in_specs=(whole, data), out_specs=whole)(TABLE, IDS)
    np.testing.assert_allclose(summed, jax.grad(loss_fn)(TABLE), rtol=1e-5)
    with pytest.raises(ValueError, match="replication"):
        jax.shard_map(loss_fn, mesh=mesh, in_specs=(whole, data), out_specs=whole)(TABLE, IDS)


def test_it_can_be_nested_and_differentiated():
    def outer(table):
        _, rows = value_and_grad(loss_fn)(table)
        return jnp.sum(rows.values**2)

    assert np.isfinite(jax.grad(outer)(TABLE)).all()


def test_a_pair_is_wanted_for_has_aux():
    with pytest.raises(TypeError, match="has_aux requires a function that returns a pair"):
        value_and_grad(loss_fn, has_aux=True)(TABLE)


@pytest.mark.parametrize("ids", [[2**32 + 1], [-(2**40)], [7]])
def test_large_numbers_are_not_cut_off(ids):
    np.testing.assert_array_equal(
        lookup(TABLE, np.array(ids), out_of_range="drop"), jnp.zeros((1, 2))
    )


def test_no_ids_at_all():
    assert lookup(TABLE, []).shape == (0, 2)


def test_rows_of_narrow_types_name_the_right_rows():
    table = jnp.ones((70_000, 1))
    momentum = optimizers.momentum(0.1, 0.9)
    state = momentum.init({"t": table})
    rows = Rows(jnp.arange(3000, dtype=jnp.uint16), jnp.ones((3000, 1)), unique=True)
    _, state = momentum.update({"t": rows}, state, {"t": table})
    slot = optimizers.get_slot(state, "t", "momentum")
    assert float(slot.sum()) == 3000.0
    assert not slot[3000:].any()
    descent = optimizers.gradient_descent(0.1)
    updates, _ = descent.update(
        {"t": Rows(jnp.array([250], jnp.uint8), jnp.ones((1, 1)))},
        descent.init({"t": table}),
        {"t": table},
    )
    assert float(optimizers.apply_updates({"t": table}, updates)["t"][250, 0]) == pytest.approx(0.9)
