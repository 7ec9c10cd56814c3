"""One table runs every optimizer through the same checks.

Other tests compare the numbers with the reference.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from optimizer_table import TABLE

from ftrain import optimizers
from ftrain.checkpoints import CheckpointManager
from ftrain.cluster import make_mesh
from ftrain.gradients import Rows
from ftrain.optimizers import apply_updates, current_learning_rate, get_slot, slot_names
from ftrain.packed import Packed
from ftrain.tree import named_leaves

PARAMS = {"a": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": {"c": jnp.float32(0.25)}}
MANY = {
    f"layer{n}": {"w": jnp.full((2, n + 1), 0.1 * n), "b": jnp.full((), 1.0 - n)} for n in range(4)
}


@pytest.fixture(params=TABLE)
def make(request):
    return TABLE[request.param]


def gradients_of(step, params):
    return jax.tree.map(lambda leaf: jnp.cos(leaf * (step + 1)).astype(leaf.dtype), params)


def run(transform, params, steps=5, update=None):
    """Run `update` without compiling it: the compiler would take most of the time."""
    state = transform.init(params)
    update = update or transform.update
    for step in range(steps):
        updates, state = update(gradients_of(step, params), state, params)
        params = apply_updates(params, updates)
    return params, state


def assert_close(left, right, rtol=1e-5):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rtol, atol=1e-6),
        left,
        right,
    )


def test_it_compiles_once_and_gives_the_same_numbers(make):
    transform = make(0.1)
    compiled = jax.jit(transform.update)
    plain, _ = run(transform, PARAMS)
    jitted, _ = run(transform, PARAMS, update=compiled)
    assert_close(plain, jitted)
    assert compiled._cache_size() == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_parameters_and_updates_keep_their_dtype_and_slots_are_float32(make, dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS)
    transform = make(0.1)
    after, state = run(transform, params)
    updates, _ = transform.update(gradients_of(0, params), state, params)
    assert {leaf.dtype for leaf in jax.tree.leaves((after, updates))} == {jnp.dtype(dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.slots)} <= {jnp.dtype(jnp.float32)}


def test_arguments_of_other_transforms_are_ignored(make):
    transform = make(0.1)
    assert isinstance(transform, optax.GradientTransformationExtraArgs)
    state = transform.init(PARAMS)
    plain, _ = transform.update(gradients_of(0, PARAMS), state, PARAMS)
    extra, _ = transform.update(gradients_of(0, PARAMS), state, PARAMS, value=1.0, anything="else")
    jax.tree.map(np.testing.assert_array_equal, plain, extra)


@pytest.mark.standard_promotion  # the schedule divides by an integer
def test_a_schedule_is_followed_and_shown(make):
    _, state = run(make(lambda count: 0.5 / (count + 1)), PARAMS, steps=4)
    assert float(state.learning_rate) == pytest.approx(0.5 / 4)
    assert int(state.count) == 4


def test_a_learning_rate_may_be_traced(make):
    def total(rate):
        params, _ = run(make(rate), PARAMS, steps=2)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))

    traced, slope = jax.jit(jax.value_and_grad(total))(0.1)
    expected, _ = run(make(0.1), PARAMS, steps=2)
    np.testing.assert_allclose(
        traced, sum(jnp.sum(leaf) for leaf in jax.tree.leaves(expected)), rtol=1e-5
    )
    assert np.isfinite(slope)


def test_an_empty_tree_works(make):
    params, _ = run(make(0.1), {})
    assert params == {}


def test_a_leaf_without_a_gradient_stays(make):
    transform = make(0.1)
    state = transform.init(PARAMS)
    updates, after = transform.update({"a": jnp.ones((2, 2)), "b": {"c": None}}, state, PARAMS)
    params = apply_updates(PARAMS, updates)
    assert params["b"]["c"] == PARAMS["b"]["c"]
    assert (params["a"] != PARAMS["a"]).any()
    for slot in slot_names(after):
        assert get_slot(after, "b/c", slot) == get_slot(state, "b/c", slot)


WRAPPERS = {
    "chain": lambda make: optax.chain(optax.clip_by_global_norm(1e6), make(0.1), optax.scale(1.0)),
    "masked": lambda make: optax.masked(make(0.1), {"a": True, "b": {"c": True}}),
    "multi_transform": lambda make: optax.multi_transform(
        {"one": make(0.1), "other": make(0.1)}, {"a": "one", "b": {"c": "other"}}
    ),
    "inject_hyperparams": lambda make: optax.inject_hyperparams(
        lambda learning_rate: make(learning_rate)
    )(0.1),
    "apply_if_finite": lambda make: optax.apply_if_finite(make(0.1), 3),
    "groups": lambda make: optimizers.groups(
        make(0.1), [optimizers.Group("a", learning_rate_scale=1.0)]
    ),
    "own_groups": lambda make: optimizers.groups(
        make(0.1), [optimizers.Group("b/.*", optimizer=make(0.1))]
    ),
    "MultiSteps": lambda make: optax.MultiSteps(make(0.1), 1).gradient_transformation(),
    "with_extra_args_support": lambda make: optax.with_extra_args_support(make(0.1)),
}


@pytest.mark.standard_promotion  # optax.MultiSteps
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_optax_wrappers_change_nothing(make, wrapper):
    wrapped, state = run(WRAPPERS[wrapper](make), PARAMS)
    plain, _ = run(make(0.1), PARAMS)
    assert_close(wrapped, plain)
    assert float(current_learning_rate(state)) == pytest.approx(0.1)


def test_every_number_can_be_injected():
    for function, given in (
        (optimizers.momentum, {"learning_rate": 0.1, "momentum": 0.9}),
        (optimizers.adam, {"learning_rate": 0.1, "beta1": 0.8}),
        (optimizers.adagrad, {"learning_rate": 0.1, "initial_accumulator_value": 0.2}),
        (optimizers.adadelta, {"learning_rate": 0.1, "rho": 0.9}),
        (optimizers.rmsprop, {"learning_rate": 0.1, "decay": 0.8, "momentum": 0.5}),
        (optimizers.ftrl, {"learning_rate": 0.1, "l1_regularization_strength": 0.1}),
        (optimizers.proximal_adagrad, {"learning_rate": 0.1, "l2_regularization_strength": 0.1}),
    ):
        injected, _ = run(optax.inject_hyperparams(function)(**given), PARAMS)
        plain, _ = run(function(**given), PARAMS)
        assert_close(injected, plain)


def test_vmap_trains_several_at_once(make):
    transform = make(0.1)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 2, leaf - 1]), PARAMS)

    def train(params):
        return run(transform, params, steps=2)

    together, states = jax.jit(jax.vmap(train))(several)
    train_alone = jax.jit(train)
    for n in range(3):
        alone, state = train_alone(jax.tree.map(lambda leaf, n=n: leaf[n], several))
        assert_close(jax.tree.map(lambda leaf, n=n: leaf[n], together), alone)
        for slot in slot_names(state):
            assert_close(get_slot(states, "a", slot)[n], get_slot(state, "a", slot))


@pytest.mark.standard_promotion  # the test's gradients multiply by a step
def test_scan_gives_what_a_loop_gives(make):
    transform = make(0.1)

    def step(carry, number):
        params, state = carry
        updates, state = transform.update(gradients_of(number, params), state, params)
        return (apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (PARAMS, transform.init(PARAMS)), jnp.arange(5))
    assert_close(params, run(transform, PARAMS)[0])


@pytest.mark.parametrize(
    "params", [MANY, {"a": jnp.ones((3, 2), jnp.bfloat16), **PARAMS["b"]}], ids=["many", "mixed"]
)
def test_packed_equals_unpacked(make, params):
    packed, packed_state = run(make(0.1, packed=True), params)
    plain, state = run(make(0.1, packed=False), params)
    assert any(isinstance(slot, Packed) for slot in packed_state.slots.values()) == bool(
        slot_names(state)
    )
    assert_close(packed, plain, rtol=1e-6)
    assert slot_names(packed_state) == slot_names(state)
    for slot in slot_names(state):
        for name, plain_slot in named_leaves(state.slots[slot]).items():
            assert_close(get_slot(packed_state, name, slot), plain_slot, rtol=1e-6)


def test_a_checkpoint_names_every_slot_packed_or_not(make, tmp_path):
    _, packed_state = run(make(0.1, packed=True), MANY)
    _, plain_state = run(make(0.1, packed=False), MANY, steps=1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, packed_state)
        again = manager.restore(like=packed_state)
        plain = manager.restore(like=plain_state)
    jax.tree.map(np.testing.assert_array_equal, again, packed_state)
    for slot in slot_names(plain):
        np.testing.assert_array_equal(
            plain.slots[slot]["layer3"]["w"], get_slot(packed_state, "layer3/w", slot)
        )


def rows_of(step, table, ids):
    values = jnp.cos(jnp.arange(len(ids) * 2.0).reshape(-1, 2) * (step + 1))
    return Rows(jnp.array(ids), values)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_name_every_row_equal_a_dense_gradient(make, packed):
    transform = make(0.1, packed=packed)
    table = {"t": jnp.linspace(-1, 1, 8).reshape(4, 2)}

    def train(as_gradient):
        params = table
        state = transform.init(table)
        update = jax.jit(transform.update)
        for step in range(4):
            updates, state = update(
                {"t": as_gradient(rows_of(step, table, [2, 0, 1, 3, 0]))}, state, params
            )
            params = apply_updates(params, updates)
        return params, state

    assert_close(train(lambda rows: rows), train(lambda rows: rows.to_dense(table["t"])))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "name", [name for name in TABLE if name != "adam_not_lazy"]
)  # that one moves every row
def test_rows_that_are_not_named_stay_and_their_slots_too(name, packed):
    transform = TABLE[name](0.1, packed=packed)
    table = {"t": jnp.linspace(-1, 1, 10).reshape(5, 2)}
    params = table
    state = transform.init(table)
    start = state
    update = jax.jit(transform.update)
    for step in range(3):
        updates, state = update({"t": rows_of(step, table, [3, 1, 3, 9, -1])}, state, params)
        params = apply_updates(params, updates)
    untouched = np.array([0, 2, 4])
    np.testing.assert_array_equal(params["t"][untouched], table["t"][untouched])
    assert (params["t"][np.array([1, 3])] != table["t"][np.array([1, 3])]).all()
    for slot in slot_names(state):
        np.testing.assert_array_equal(
            get_slot(state, "t", slot)[untouched], get_slot(start, "t", slot)[untouched]
        )


@pytest.mark.parametrize("packed", [None, True])
def test_sharded_on_four_devices_equals_single(make, packed):
    mesh = make_mesh()
    params = {"w": jnp.linspace(-1, 1, 32).reshape(8, 4), "b": jnp.linspace(0, 1, 4)}
    placed = {
        "w": NamedSharding(mesh, PartitionSpec("data")),
        "b": NamedSharding(mesh, PartitionSpec()),
    }
    transform = make(0.1, packed=packed)
    single, _ = run(transform, params)
    spread, state = run(transform, jax.device_put(params, placed), update=jax.jit(transform.update))
    assert_close(jax.device_get(spread), jax.device_get(single))
    for slot in slot_names(state):
        assert get_slot(state, "w", slot).sharding.is_equivalent_to(placed["w"], 2)


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"a": jnp.ones((2, 2))}, "gradients and parameters differ: gradients have no b/c"),
        (
            {"a": jnp.ones((2, 2)), "b": {"c": 0.0, "d": 0.0}},
            "gradients and parameters differ: parameters have no b/d",
        ),
        (
            {"a": jnp.ones((2, 3)), "b": {"c": jnp.ones(())}},
            r"differ at a: gradient has shape \(2, 3\), parameter \(2, 2\)",
        ),
        (
            {"a": Rows(jnp.array([0]), jnp.ones((1, 3))), "b": {"c": None}},
            r"at a: the values of Rows have shape \(1, 3\), expected \(1, 2\) for 1",
        ),
        (
            {"a": None, "b": {"c": None}},
            "every gradient is None, expected a gradient of at least one",
        ),
    ],
)
def test_gradients_that_do_not_fit_are_named(make, gradients, message):
    transform = make(0.1)
    with pytest.raises(ValueError, match=message):
        transform.update(gradients, transform.init(PARAMS), PARAMS)


@pytest.mark.standard_promotion  # the test scales indices
def test_rows_whose_indices_were_taken_for_numbers_are_named(make):
    transform = make(0.1)
    broken = jax.tree.map(lambda leaf: leaf * 0.5, {"a": Rows(jnp.array([0]), jnp.ones((1, 2)))})
    with pytest.raises(
        TypeError,
        match="gradients of a are Rows whose indices must be a list of integers, got float32",
    ):
        transform.update(broken, transform.init({"a": PARAMS["a"]}), {"a": PARAMS["a"]})


def test_integer_parameters_are_named(make):
    with pytest.raises(TypeError, match="parameter b is int32, which has no gradient"):
        make(0.1).init({"a": jnp.ones(2), "b": jnp.ones(2, jnp.int32)})


def test_parameters_must_be_passed(make):
    transform = make(0.1)
    with pytest.raises(ValueError, match="needs the parameters"):
        transform.update(PARAMS, transform.init(PARAMS))


def test_complex_parameters_are_refused(make):
    with pytest.raises(
        TypeError, match="parameter a is complex64; keep its real and imaginary parts apart"
    ):
        make(0.1).init({"a": jnp.ones(2, jnp.complex64)})


def test_the_state_of_another_optimizer_is_refused(make):
    transform = make(0.1)
    other = optimizers.from_rule(
        lambda gradient, parameter, slots, rate, count: (gradient, slots), 0.1, {"x": 0.0}
    )
    for state, found in (
        (other.init(PARAMS), "got x"),
        ((), "got tuple"),
        (optax.adam(0.1).init(PARAMS), "got tuple"),
    ):
        with pytest.raises(
            ValueError, match=f"the state must have the slots of this optimizer, .*{found}; init"
        ):
            transform.update(PARAMS, state, PARAMS)
