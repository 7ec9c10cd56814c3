import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ftrain import TrainState, compile_step, make_step
from ftrain.cluster import make_mesh
from ftrain.gradients import guard
from ftrain.optimizers import adam, apply_updates, get_slot
from ftrain.packed import Packed, pack_like, plan, unpack
from ftrain.tree import named_leaves

SMALL = {f"b{n}": jnp.full(3, float(n)) for n in range(9)}


def is_packed(state) -> bool:
    return any(isinstance(slot, Packed) for slot in state.slots.values())


def test_small_leaves_are_packed_if_there_are_several_and_large_ones_are_not():
    large = {"large": jnp.zeros(10_000)}
    assert is_packed(adam().init(SMALL))
    assert not is_packed(adam().init({name: SMALL[name] for name in ("b0", "b1")}))
    assert not is_packed(adam().init({f"l{n}": jnp.zeros(10_000) for n in range(9)}))
    arrays = adam().init(SMALL | large).slots["m"].arrays
    assert [array.shape for array in arrays] == [(10_000,), (27,)]


@pytest.mark.parametrize("shape", [(64, 128), (8,)])
def test_leaves_that_are_spread_over_devices_keep_their_sharding(shape):
    mesh = make_mesh()
    spread, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    params = {"a": jax.device_put(jnp.ones(shape), spread)} | jax.device_put(SMALL, whole)
    state = adam().init(params)
    assert get_slot(state, "a", "m").sharding.is_equivalent_to(spread, len(shape))
    vector = state.slots["m"].arrays[-1]
    assert vector.shape == (27,)
    assert vector.sharding.is_fully_replicated


def test_leaves_of_numpy_and_python_are_taken():
    for params in ({"a": np.zeros(3, np.float32), "b": jnp.zeros(3)}, {"a": 1.0, "b": 2.0}):
        for packed in (None, True):
            transform = adam(0.1, packed=packed)
            updates, _ = transform.update(
                jax.tree.map(np.ones_like, params), transform.init(params), params
            )
            assert all(
                float(jnp.max(leaf)) == pytest.approx(-0.1, rel=1e-3)
                for leaf in jax.tree.leaves(updates)
            )


def test_gradients_of_another_dtype_are_taken_as_they_are_without_packing():
    gradients = {
        name: jnp.ones(3, jnp.bfloat16 if name == "b4" else jnp.float32) for name in SMALL
    } | {"b7": None}
    results = []
    for packed in (True, False):
        transform = adam(0.1, packed=packed)
        updates, _ = transform.update(gradients, transform.init(SMALL), SMALL)
        assert updates["b7"] is None
        results.append(apply_updates(SMALL, updates))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("packed", [True, False])
def test_a_state_of_other_parameters_is_named(packed):
    transform = adam(packed=packed)
    state = transform.init(SMALL)
    changed = SMALL | {"b3": jnp.ones(5)}
    with pytest.raises(ValueError, match=r"differ at b3: slot has shape \(3,\), parameter \(5,\)"):
        transform.update(changed, state, changed)
    more = SMALL | {"c": jnp.ones(5)}
    with pytest.raises(ValueError, match="slots and parameters differ: slots have no c"):
        transform.update(more, state, more)


def test_packing_and_unpacking_are_inverse():
    tree = {"x": adam().init(SMALL), "y": jnp.ones(2)}
    unpacked = unpack(tree)
    assert "x/slots/m/b3" in named_leaves(unpacked)
    again = pack_like(unpacked, tree)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, again, tree)
    shapes = unpack(jax.eval_shape(lambda: tree))
    assert shapes["x"].slots["m"]["b3"].shape == (3,)


def test_no_leaf_and_leaves_without_elements():
    assert plan({}).places == ()
    transform = adam(0.1, packed=True)
    params = {"a": jnp.zeros((0, 3)), "b": jnp.ones(2), "c": jnp.float32(1.0)}
    updates, state = transform.update(params, transform.init(params), params)
    assert updates["a"].shape == (0, 3)
    assert get_slot(state, "c", "v").shape == ()


def test_a_learning_rate_that_is_an_array_is_not_given_away_with_the_state():
    rate = jnp.float32(0.1)
    optimizer = guard(adam(rate))
    step = compile_step(make_step(lambda params, batch, rng: jnp.sum(params["w"] ** 2), optimizer))
    state = TrainState.create({"w": jnp.ones(2)}, optimizer)
    for _ in range(2):
        state, _ = step(state, {"x": jnp.ones(1)})
    assert not rate.is_deleted()
