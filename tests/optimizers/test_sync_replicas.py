"""Synchronous replicas as a transform: bits, dtypes, devices, checkpoints, rows and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from optimizer_table import TABLE
from replicas import IDENTITY, PARAMS, assert_same, compiled, counts

from ftrain import TrainState, make_step, optimizers
from ftrain.averages import update_averages
from ftrain.checkpoints import CheckpointManager
from ftrain.cluster import make_mesh
from ftrain.gradients import Rows, densify, guard, lookup, skipped_updates
from ftrain.migration import find
from ftrain.optimizers import (
    apply_updates,
    arrivals,
    averaged_params,
    current_learning_rate,
    get_slot,
    slot_names,
    sync_replicas,
)

# Properties of every transform.

NESTED = {"a": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": {"c": jnp.float32(0.25)}}
INNER = {name: (lambda make=make: make(0.1)) for name, make in TABLE.items()} | {
    "optax.adamw": lambda: optax.adamw(0.1),
    "optax.sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "optax.chain": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adam(lambda count: 0.1 / (count + 1))
    ),
    "optax.lamb": lambda: optax.lamb(0.1),
    "guard": lambda: guard(optimizers.adam(0.1), spike=3.0, window=2),
}


@pytest.fixture(params=INNER)
def inner(request):
    return INNER[request.param]()


def gradients_of(step, params):
    return jax.tree.map(lambda leaf: jnp.cos(leaf * (step + 1)).astype(leaf.dtype), params)


def run(transform, params, sequence, **extra):
    state = transform.init(params)
    update = jax.jit(transform.update)
    for gradients in sequence:
        updates, state = update(gradients, state, params, **extra)
        params = apply_updates(params, updates)
    return params, state


@pytest.mark.standard_promotion  # optax
@pytest.mark.optimized
@pytest.mark.parametrize("needed", [3, pytest.param(1, marks=pytest.mark.campaign)])
def test_what_arrives_at_once_reaches_the_optimizer_bit_for_bit(inner, needed):
    sequence = [gradients_of(step, NESTED) for step in range(4)]
    sequence[1]["a"] = jnp.array([[-0.0, 1e-30], [0.0, 1 / 3]])
    expected, expected_state = run(inner, NESTED, sequence)
    params, state = run(sync_replicas(inner, needed, 7), NESTED, sequence, contributions=7)
    assert_same(params, expected)
    assert_same(state.inner, expected_state)
    assert counts(state) == (0, 7, 4, 0)


@pytest.mark.parametrize("special", [-0.0, np.inf, np.nan, 1e-40, 3e38])
def test_special_numbers_pass_unchanged(special):
    given = {"w": jnp.array([special, 1.0])}
    for needed, contributions in ((1, 1), (2, 3)):
        transform, update = compiled(needed, 3)
        updates, _ = update(given, transform.init(PARAMS), PARAMS, contributions=contributions)
        assert_same(updates, given)


def test_the_sign_of_zero_survives_a_round():
    minus = {"w": jnp.array([-0.0, -0.0])}
    transform, update = compiled(2)
    state = transform.init(PARAMS)
    for gradients, contributions in ((minus, 1), (PARAMS, 0), (minus, 1)):
        updates, state = update(gradients, state, PARAMS, contributions=contributions)
    assert_same(updates, minus)


@pytest.mark.standard_promotion  # optax
def test_every_second_arrival_is_an_update_of_any_optimizer(inner):
    halves = [gradients_of(step, NESTED) for step in range(6)]
    pairs = zip(halves[::2], halves[1::2], strict=True)
    means = [jax.tree.map(lambda a, b: (a + b) / 2, one, other) for one, other in pairs]
    expected, expected_state = run(inner, NESTED, means)
    params, state = run(sync_replicas(inner, 2), NESTED, halves)
    assert_same(params, expected)
    assert_same(state.inner, expected_state)


def test_the_optimizer_is_not_run_while_gradients_wait():
    ran = []

    def update(gradients, state, params=None):
        jax.debug.callback(lambda: ran.append(1))
        return gradients, state

    transform = sync_replicas(optax.GradientTransformation(lambda params: (), update), 3)
    run(transform, PARAMS, [PARAMS] * 7)
    jax.effects_barrier()
    assert len(ran) == 2


@pytest.mark.standard_promotion  # the test's gradients multiply by a step
def test_it_compiles_once_and_scan_gives_what_a_loop_gives():
    transform = sync_replicas(optimizers.adam(0.1), 3, 5, averages=0.9)
    update = jax.jit(transform.update)
    contributions, steps = jnp.array([1, 0, 2, 5, 1, 1, 3, 1]), jnp.array([0, 0, 0, 0, 1, 3, 2, 0])

    def arrive(carry, given, update=transform.update):
        params, state = carry
        gradients = gradients_of(given[0] + given[1], params)
        updates, state = update(
            gradients, state, params, contributions=given[0], local_step=given[1]
        )
        return (apply_updates(params, updates), state), None

    start = (NESTED, transform.init(NESTED))
    scanned, _ = jax.jit(lambda carry: jax.lax.scan(arrive, carry, (contributions, steps)))(start)
    carry = start
    for given in zip(contributions, steps, strict=True):
        carry, _ = arrive(carry, given, update)
    assert update._cache_size() == 1
    assert counts(carry[1]) == counts(scanned[1]) == (0, 5, 2, 6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), carry, scanned)


def test_vmap_lets_each_round_go_its_own_way():
    transform, _ = compiled(2, 3)
    states = jax.vmap(transform.init)({"w": jnp.ones((3, 2))})
    given = {"w": jnp.arange(6.0).reshape(3, 2)}
    many = jnp.array([0, 1, 2])
    update = jax.vmap(
        lambda gradients, state, count: transform.update(gradients, state, contributions=count)
    )
    updates, states = update(given, states, many)
    np.testing.assert_array_equal(updates["w"], [[0, 0], [0, 0], [4, 5]])
    assert arrivals(states).waiting.tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes_stay_and_sums_are_wide(dtype):
    params = {"w": jnp.ones(2, dtype)}
    transform = sync_replicas(optimizers.adam(0.1), 1024, averages=0.5)

    def arrive(state, _):
        updates, state = transform.update({"w": jnp.array([1.0, -1.0], dtype)}, state, params)
        return state, updates

    state, updates = jax.lax.scan(arrive, transform.init(params), None, length=1024)
    assert updates["w"].dtype == dtype
    wide = (state.sums["w"], averaged_params(state)["w"], get_slot(state, "w", "m"))
    assert {leaf.dtype for leaf in wide} == {jnp.dtype(jnp.float32)}
    assert not updates["w"][:-1].any()
    np.testing.assert_allclose(np.float32(get_slot(state, "w", "m")), [0.1, -0.1], rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(2.0, 2), (1.9999999, 2), (0.4, 0), (-3.0, 0), (np.nan, 0), (True, 1), (False, 0)],
)
def test_contributions_that_the_device_knows(given, wanted):
    transform, _ = compiled(4)
    update = jax.jit(
        lambda count: transform.update(PARAMS, transform.init(PARAMS), contributions=count)[1]
    )
    assert counts(update(jnp.asarray(given)))[0] == wanted


@pytest.mark.parametrize("ramp", [True, False])
def test_averages_follow_updates_and_not_arrivals(ramp):
    transform = sync_replicas(
        optimizers.gradient_descent(0.5), 2, averages=0.99, averages_ramp=ramp
    )
    params = PARAMS
    state = transform.init(PARAMS)
    expected = PARAMS
    for n in range(1, 9):
        updates, state = transform.update({"w": jnp.full(2, float(n))}, state, params)
        params = apply_updates(params, updates)
        if n % 2 == 0:
            expected = update_averages(expected, params, 0.99, n // 2 if ramp else None)
        np.testing.assert_allclose(averaged_params(state)["w"], expected["w"], rtol=1e-6)


def test_readers_find_it_in_a_chain_and_nothing_elsewhere():
    chain = optax.chain(
        optax.clip(1.0), sync_replicas(optimizers.momentum(0.3, 0.9), 2, averages=0.9)
    )
    state = chain.init(PARAMS)
    _, state = chain.update(PARAMS, state, PARAMS, contributions=2)
    assert counts(state) == (0, 2, 1, 0)
    assert averaged_params(state)["w"].shape == (2,)
    assert float(current_learning_rate(state)) == pytest.approx(0.3)
    assert slot_names(state) == ["momentum"]
    assert skipped_updates(state) is None
    assert (
        arrivals(optax.adam(0.1).init(PARAMS))
        is averaged_params(optax.adam(0.1).init(PARAMS))
        is None
    )
    assert averaged_params(sync_replicas(IDENTITY, 2).init(PARAMS)) is None


def test_a_checkpoint_in_the_middle_of_a_round(tmp_path):
    transform = sync_replicas(optimizers.adam(0.1), 3, averages=0.9)
    sequence = [gradients_of(step, NESTED) for step in range(9)]
    params, state = run(transform, NESTED, sequence[:5])
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, (params, state))
        params, again = manager.restore(like=(NESTED, transform.init(NESTED)))
    assert_same(again, state)
    assert counts(again) == (2, 3, 1, 0)
    update = jax.jit(transform.update)
    for gradients in sequence[5:]:
        updates, again = update(gradients, again, params)
        params = apply_updates(params, updates)
    assert_same((params, again), run(transform, NESTED, sequence))


def test_a_round_that_was_begun_for_more_replicas_ends_when_fewer_are_wanted():
    _, state = run(
        sync_replicas(IDENTITY, 4),
        PARAMS,
        [{"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([3.0, 2.0])}],
    )
    updates, state = compiled(2)[1]({"w": jnp.full(2, np.nan)}, state, PARAMS, contributions=0)
    assert updates["w"].tolist() == [2.0, 2.0]
    assert counts(state) == (0, 2, 1, 0)


def test_sharded_on_four_devices_equals_single():
    placed = NamedSharding(make_mesh(), PartitionSpec("data"))
    params = {"w": jnp.linspace(-1, 1, 32).reshape(8, 4)}
    transform = sync_replicas(optimizers.adam(0.1), 2, averages=0.9)
    sequence = [gradients_of(step, params) for step in range(5)]
    single, _ = run(transform, params, sequence)
    spread, state = run(transform, jax.device_put(params, placed), jax.device_put(sequence, placed))
    np.testing.assert_allclose(spread["w"], single["w"], rtol=1e-6)
    for tree in (transform.init(jax.device_put(params, placed)), state):
        for leaf in (tree.sums["w"], averaged_params(tree)["w"], get_slot(tree, "w", "m")):
            assert leaf.sharding.is_equivalent_to(placed, 2)


def test_state_and_parameters_share_no_memory_and_can_be_given_away():
    transform = sync_replicas(optimizers.adam(0.1), 2, averages=0.9)

    def arrive(params, state):
        updates, state = transform.update(gradients_of(1, params), state, params)
        return apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, NESTED)
    carry = (params, transform.init(params))
    step = jax.jit(arrive, donate_argnums=(0, 1))
    for _ in range(3):
        carry = step(*carry)
    assert counts(carry[1]) == (1, 2, 1, 0)


def test_a_step_is_an_arrival():
    transform = sync_replicas(optimizers.gradient_descent(0.5), 2)
    step = jax.jit(
        make_step(lambda params, batch, rng: jnp.sum(params["w"] * batch["x"]), transform)
    )
    state = TrainState.create(PARAMS, transform)
    seen = []
    for x in (1.0, 3.0, 5.0):
        state, metrics = step(state, {"x": jnp.full(2, x)})
        seen.append(float(state.params["w"][0]))
    assert seen == [1.0, 0.0, 0.0]
    assert int(state.step) == 3
    assert float(metrics["learning_rate"]) == 0.5
    assert "update_skipped" not in metrics  # waiting is not skipping


def test_guards_before_and_behind():
    bad = {"w": jnp.array([np.nan, 1.0])}
    good = {"w": jnp.array([2.0, 4.0])}
    params, state = run(
        guard(sync_replicas(optimizers.gradient_descent(1.0), 2)), PARAMS, [good, bad, good]
    )
    assert params["w"].tolist() == [-1.0, -6.0]  # the bad gradient was ignored
    assert (int(skipped_updates(state)), *counts(state)) == (1, 0, 2, 1, 0)
    params, state = run(
        sync_replicas(guard(optimizers.gradient_descent(1.0)), 2), PARAMS, [bad, good]
    )
    assert params["w"].tolist() == [1.0, -2.0]  # the whole round was bad
    assert (int(skipped_updates(state)), *counts(state)) == (1, 0, 2, 1, 0)
    assert state.sums["w"].tolist() == [0.0, 0.0]  # and leaves no NaN behind


def test_a_leaf_without_a_gradient_stays():
    transform = sync_replicas(optimizers.momentum(0.1, 0.9), 2)
    start = transform.init(NESTED)
    params, state = run(transform, NESTED, [{"a": jnp.ones((2, 2)), "b": {"c": None}}] * 2)
    assert params["b"]["c"] == NESTED["b"]["c"]
    assert_same(get_slot(state, "b/c", "momentum"), get_slot(start, "b/c", "momentum"))
    np.testing.assert_allclose(params["a"], NESTED["a"] - 0.1, rtol=1e-6)


def test_an_empty_tree_works():
    params, state = run(sync_replicas(optimizers.adam(0.1), 2, averages=0.9), {}, [{}] * 3)
    assert params == {}
    assert counts(state) == (1, 2, 1, 0)


# Rows.

TABLES = {"t": jnp.linspace(-1, 1, 10).reshape(5, 2)}
READ = {"t": Rows(jnp.array([3, 1, 3]), jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))}


def looked_up(params, batch, rng):
    return jnp.sum(lookup(params["t"], batch["ids"]) ** 2)


@pytest.mark.parametrize("averages", [None, 0.9])
def test_rows_pass_if_one_replica_is_enough(averages):
    transform = sync_replicas(optimizers.adam(0.1), 1, 3, averages=averages)
    expected, expected_state = run(optimizers.adam(0.1), TABLES, [READ] * 3)
    params, state = run(transform, TABLES, [READ] * 3, contributions=2)
    assert_same(params, expected)
    assert_same(state.inner, expected_state)
    updates, _ = jax.jit(transform.update)(READ, state, params, local_step=0)  # stale
    assert isinstance(updates["t"], Rows)
    assert_same(apply_updates(params, updates), params)
    state = TrainState.create(TABLES, transform)
    state, _ = jax.jit(make_step(looked_up, transform))(
        state, {"ids": jnp.array([1, 3])}
    )  # no warning
    np.testing.assert_array_equal(state.params["t"][0], TABLES["t"][0])
    assert (state.params["t"][1] != TABLES["t"][1]).all()


def test_rows_are_not_summed_but_may_be_made_whole():
    transform = sync_replicas(optimizers.gradient_descent(0.1), 2)
    with pytest.raises(
        TypeError,
        match=r"gradient of t is Rows, which sync_replicas cannot sum.*densify\(\) before",
    ):
        transform.update(READ, transform.init(TABLES), TABLES)
    params, _ = run(optax.chain(densify(), transform), TABLES, [READ] * 2)
    np.testing.assert_allclose(
        params["t"], TABLES["t"] - 0.1 * READ["t"].to_dense(TABLES["t"]), rtol=1e-6
    )
    step = make_step(looked_up, transform)
    with pytest.warns(
        UserWarning, match="does not support Rows, so the gradients of tables are made dense"
    ):
        step(TrainState.create(TABLES, transform), {"ids": jnp.array([1, 3])})


# Errors.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "replicas_to_aggregate must be a whole number >= 1, got 0"),
        ((2.0,), "replicas_to_aggregate must be a whole number >= 1, got 2.0"),
        ((True,), "replicas_to_aggregate must be a whole number >= 1, got True"),
        ((None,), "replicas_to_aggregate must be a whole number >= 1, got None"),
        ((2, 0), "total_num_replicas must be a whole number >= 1, got 0"),
        ((2, "4"), "total_num_replicas must be a whole number >= 1, got '4'"),
    ],
)
def test_numbers_of_replicas_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        sync_replicas(IDENTITY, *arguments)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"contributions": 6},
            "contributions must be a whole number of replicas from 0 to 5, got 6",
        ),
        (
            {"contributions": -1},
            "contributions must be a whole number of replicas from 0 to 5, got -1",
        ),
        ({"contributions": 0.5}, "contributions must be a whole number .* got 0.5"),
        ({"contributions": np.float32(np.nan)}, "contributions must be a whole number .* got nan"),
        (
            {"contributions": jnp.ones(3)},
            r"contributions must be one number, got an array of shape \(3,\)",
        ),
        (
            {"local_step": -1},
            "local_step must be a whole number of updates, or None for the newest, got -1",
        ),
        ({"local_step": np.inf}, "local_step must be a whole number .* got inf"),
        (
            {"local_step": jnp.zeros((1, 2))},
            r"local_step must be one number, got an array of shape \(1, 2\)",
        ),
    ],
)
def test_arguments_of_an_arrival_are_checked(extra, message):
    transform, _ = compiled(2, 5)
    with pytest.raises(ValueError, match=message):
        transform.update(PARAMS, transform.init(PARAMS), PARAMS, **extra)


def test_what_does_not_fit_is_named():
    with pytest.raises(TypeError, match=r"optimizer must be an optax.GradientTransformation"):
        sync_replicas(optimizers.adam, 2)
    for decay in (1.0, -0.1, np.nan):
        with pytest.raises(ValueError, match=r"averages must be in \[0, 1\), got"):
            sync_replicas(IDENTITY, 2, averages=decay)
    transform = sync_replicas(IDENTITY, 2)
    averaging = sync_replicas(IDENTITY, 2, averages=0.9)
    state = transform.init(PARAMS)
    with pytest.raises(
        ValueError,
        match=r"must be a SyncReplicasState, got EmptyState; init\(params\) makes a new one",
    ):
        transform.update(PARAMS, IDENTITY.init(PARAMS), PARAMS)
    with pytest.raises(
        ValueError,
        match="has sums and no averages, expected sums and averages: it was made with other arg",
    ):
        averaging.update(PARAMS, state, PARAMS)
    with pytest.raises(
        ValueError, match=r"averages need the parameters: call update\(gradients, state, params\)"
    ):
        averaging.update(PARAMS, averaging.init(PARAMS))
    with pytest.raises(ValueError, match="gradients and parameters differ: gradients have no w"):
        transform.update({"v": jnp.ones(2)}, state, PARAMS)
    with pytest.raises(
        ValueError, match=r"differ at w: gradient has shape \(3,\), parameter \(2,\)"
    ):
        transform.update({"w": jnp.ones(3)}, state, PARAMS)


def test_the_names_of_the_reference_lead_here():
    for name in (
        "SyncReplicas",
        "tf.compat.v1.train.SyncReplicasOptimizer",
        "SyncReplicasOptimizerV2",
    ):
        assert find(name)[1].ours == ("ftrain.optimizers.sync_replicas",)
    assert find("SyncReplicasOptimizer.get_init_tokens_op")[1].ours == (
        "ftrain.optimizers.arrivals",
    )
