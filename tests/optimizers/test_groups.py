"""Parameter groups: settings for parameters whose names match a pattern."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from optimizer_table import TABLE

import ftrain
from ftrain import TrainState, compile_step, make_step, optimizers, schedules
from ftrain.checkpoints import CheckpointManager, LeafMismatchError
from ftrain.cluster import make_mesh
from ftrain.data import ArraySource, Pipeline
from ftrain.gradients import Rows, guard, lookup, loss_scaling
from ftrain.optimizers import (
    Group,
    GroupError,
    apply_updates,
    current_learning_rate,
    get_slot,
    group_learning_rates,
    groups,
    slot_names,
)
from ftrain.training.record import RunMismatchError
from ftrain.tree import named_leaves

PARAMS = {
    "encoder": {"bias": jnp.array([0.1, -0.3]), "kernel": jnp.array([[1.0, -2.0], [3.0, 0.5]])},
    "head": {"bias": jnp.array([0.2]), "kernel": jnp.array([[0.5], [-0.25]])},
}
MANY = {
    f"layer{n}": {"w": jnp.full((2, n + 1), jnp.float32(0.1 * n)), "b": jnp.ones(3)}
    for n in range(6)
}
BATCH = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)}


@pytest.fixture(params=TABLE)
def make(request):
    return TABLE[request.param]


def gradients_of(step, params):
    return jax.tree.map(lambda leaf: jnp.cos(leaf * (step + 1)).astype(leaf.dtype), params)


def run(transform, params, steps=4, update=None):
    state = transform.init(params)
    update = update or transform.update
    for step in range(steps):
        updates, state = update(gradients_of(step, params), state, params)
        params = apply_updates(params, updates)
    return params, state


def assert_close(left, right, rtol=1e-5):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), left, right)


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def loss(params, batch, rng):
    hidden = jnp.tanh(batch["x"] @ params["encoder"]["kernel"] + params["encoder"]["bias"])
    return jnp.mean((hidden @ params["head"]["kernel"] + params["head"]["bias"] - 1) ** 2)


# Reference values: groups compute what separate optimizers do.


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "group",
    [
        Group("encoder/.*", learning_rate_scale=0.1),
        Group("encoder/.*", learning_rate=0.01),
        Group("encoder/.*", learning_rate=lambda count: 0.01),
    ],
    ids=["scale", "rate", "schedule"],
)
def test_a_learning_rate_equals_that_of_a_separate_optimizer(make, group, packed):
    grouped, state = run(groups(make(0.1, packed=packed), [group]), PARAMS)
    slow, _ = run(make(0.01), {"encoder": PARAMS["encoder"]})
    usual, _ = run(make(0.1), {"head": PARAMS["head"]})
    assert_close(grouped, slow | usual)
    assert float(current_learning_rate(state)) == pytest.approx(0.1)
    assert float(group_learning_rates(state)["encoder"]) == pytest.approx(0.01)


def test_a_group_may_have_another_optimizer(make):
    own = Group("head/.*", optimizer=optimizers.momentum(0.05, 0.9))
    grouped, state = run(groups(make(0.1), [own]), PARAMS)
    assert_close(grouped["encoder"], run(make(0.1), PARAMS["encoder"])[0])
    assert_close(grouped["head"], run(optimizers.momentum(0.05, 0.9), PARAMS["head"])[0])
    assert float(group_learning_rates(state)["head"]) == pytest.approx(0.05)
    assert get_slot(state, "head/kernel", "momentum").shape == (2, 1)


def test_frozen_parameters_stay_and_have_no_slots(make):
    optimizer = groups(make(0.1), [Group("encoder/.*", freeze=True)])
    grouped, state = run(optimizer, PARAMS)
    assert_equal(grouped["encoder"], PARAMS["encoder"])
    assert_close(grouped["head"], run(make(0.1), PARAMS["head"])[0])
    assert not [name for name in named_leaves(state) if "encoder" in name]
    for slot in slot_names(state):
        assert get_slot(state, "head/bias", slot).shape == (1,)


DECAYING = [name for name in TABLE if not name.startswith(("ftrl", "proximal", "adagrad_da"))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", DECAYING)
def test_weight_decay_is_a_part_of_the_update(name, packed):
    params, _ = run(TABLE[name](0.1, weight_decay=0.5, packed=packed), PARAMS, steps=1)
    plain, _ = run(TABLE[name](0.1), PARAMS, steps=1)
    expected = jax.tree.map(lambda new, old: new - 0.1 * 0.5 * old, plain, PARAMS)
    assert_close(params, expected)
    exempt = groups(
        TABLE[name](0.1, weight_decay=0.5, packed=packed),
        [Group(".*/bias", weight_decay=0.0), Group("head/kernel", weight_decay=lambda n: 2.0)],
    )
    params, _ = run(exempt, PARAMS, steps=1)
    assert_close(params["encoder"]["kernel"], expected["encoder"]["kernel"])
    for layer in ("encoder", "head"):
        assert_close(params[layer]["bias"], plain[layer]["bias"])
    kernel = plain["head"]["kernel"] - 0.1 * 2.0 * PARAMS["head"]["kernel"]
    assert_close(params["head"]["kernel"], kernel)


@pytest.mark.standard_promotion  # optax
def test_adam_with_weight_decay_is_adamw():
    ours, _ = run(optimizers.adam(0.1, epsilon=0.0, weight_decay=0.3), PARAMS, steps=6)
    theirs, _ = run(optax.adamw(0.1, eps=0.0, weight_decay=0.3), PARAMS, steps=6)
    assert_close(ours, theirs, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in TABLE if name not in DECAYING])
def test_rules_with_regularization_refuse_weight_decay(name):
    optimizer = groups(TABLE[name](0.1), [Group("head/.*", weight_decay=0.1)])
    with pytest.raises(GroupError, match="use its l2_regularization_strength"):
        run(optimizer, PARAMS)


def test_a_group_without_weight_decay_keeps_that_of_the_optimizer():
    grouped, _ = run(
        groups(optimizers.adam(0.1, weight_decay=0.3), [Group("head/.*", learning_rate_scale=0.5)]),
        PARAMS,
    )
    slow, _ = run(optimizers.adam(0.05, weight_decay=0.3), PARAMS["head"])
    assert_close(grouped["head"], slow)


def test_without_groups_nothing_changes(make):
    grouped, state = run(groups(make(0.1), []), PARAMS)
    plain, plain_state = run(make(0.1), PARAMS)
    assert_equal(grouped, plain)
    assert_equal(jax.tree.leaves(state), jax.tree.leaves(plain_state))


def test_parameters_in_no_group_are_updated_as_without_groups(make):
    grouped, _ = run(groups(make(0.1), [Group("encoder/bias", learning_rate_scale=3.0)]), PARAMS)
    plain, _ = run(make(0.1), PARAMS)
    assert_equal(grouped["head"], plain["head"])
    assert_equal(grouped["encoder"]["kernel"], plain["encoder"]["kernel"])


# Conformance: what holds for every optimizer holds with groups.

MIXED = [
    Group("layer0/.*", freeze=True),
    Group("layer[12]/w", learning_rate_scale=0.1),
    Group("layer5/.*", optimizer=optimizers.adagrad(0.2)),
]


@pytest.mark.parametrize("packed", [None, False, True])
def test_it_compiles_once_and_packing_changes_nothing(make, packed):
    transform = groups(make(0.1, packed=packed), MIXED)
    compiled = jax.jit(transform.update)
    jitted, _ = run(transform, MANY, update=compiled)
    plain, _ = run(groups(make(0.1, packed=False), MIXED), MANY)
    assert_close(jitted, plain)
    if (
        packed is False
    ):  # the first state of a packed vector has a device, so there are two programs
        assert compiled._cache_size() == 1


@pytest.mark.parametrize("packed", [False, True])
def test_rows_equal_a_dense_gradient(make, packed):
    table = {"slow": jnp.linspace(-1, 1, 8).reshape(4, 2), "t": jnp.ones((4, 2))}
    transform = groups(make(0.1, packed=packed), [Group("slow", learning_rate_scale=0.5)])

    def train(as_gradient):
        params, state = table, transform.init(table)
        for step in range(3):
            values = jnp.cos(jnp.arange(10.0).reshape(-1, 2) * (step + 1))
            rows = Rows(jnp.array([2, 0, 1, 3, 0]), values)
            given = {name: as_gradient(rows) for name in table}
            updates, state = jax.jit(transform.update)(given, state, params)
            params = apply_updates(params, updates)
        return params, state

    assert_close(train(lambda rows: rows), train(lambda rows: rows.to_dense(table["t"])))


def test_sharded_on_four_devices_equals_single(make):
    mesh = make_mesh()
    params = {"w": jnp.linspace(-1, 1, 32).reshape(8, 4), "b": jnp.linspace(0, 1, 4)}
    placed = {
        "w": NamedSharding(mesh, PartitionSpec("data")),
        "b": NamedSharding(mesh, PartitionSpec()),
    }
    transform = groups(make(0.1), [Group("w", learning_rate_scale=0.1)])
    single, _ = run(transform, params)
    spread, state = run(transform, jax.device_put(params, placed), update=jax.jit(transform.update))
    assert_close(jax.device_get(spread), jax.device_get(single))
    for slot in slot_names(state):
        assert get_slot(state, "w", slot).sharding.is_equivalent_to(placed["w"], 2)


def test_a_checkpoint_brings_the_state_back(make, tmp_path):
    transform = groups(make(0.1, packed=True), MIXED)
    _, state = run(transform, MANY)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        again = manager.restore(like=transform.init(MANY))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert_equal(again, state)


def test_a_state_without_groups_is_refused(tmp_path):
    plain = optimizers.adam(0.1)
    grouped = groups(plain, [Group("encoder/.*", freeze=True)])
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, plain.init(PARAMS))
        with pytest.raises(LeafMismatchError, match="base/count"):
            manager.restore(like=grouped.init(PARAMS))
    with pytest.raises(ValueError, match="the state is not one of these groups"):
        grouped.update(PARAMS, plain.init(PARAMS), PARAMS)


@pytest.mark.standard_promotion  # optax
def test_optax_optimizers_take_a_scale_that_multiplies_their_updates():
    members = [
        Group("encoder/.*", learning_rate_scale=0.1),
        Group("head/bias", freeze=True),
    ]
    grouped, state = run(groups(optax.adam(0.1), members), PARAMS)
    assert_close(grouped["encoder"], run(optax.adam(0.01), PARAMS["encoder"])[0])
    assert_equal(grouped["head"]["bias"], PARAMS["head"]["bias"])
    assert group_learning_rates(state) == {}  # optax hides its rate
    injected = optax.inject_hyperparams(optax.adam)(learning_rate=lambda count: 0.1)
    _, state = run(groups(injected, members), PARAMS)
    assert float(group_learning_rates(state)["encoder"]) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("numbers", "wrong"),
    [
        ({"learning_rate": 0.1}, "learning_rate"),
        ({"weight_decay": 0.1}, "weight_decay"),
        ({"learning_rate_scale": lambda count: 0.5}, "a schedule as learning_rate_scale"),
    ],
)
def test_optax_optimizers_refuse_other_numbers(numbers, wrong):
    transform = groups(optax.adam(0.1), [Group("head/.*", **numbers)])
    with pytest.raises(GroupError, match=f"a group cannot have {wrong}; give the group its own"):
        transform.init(PARAMS)


def test_a_global_norm_in_the_optimizer_sees_all_of_its_parameters():
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optimizers.gradient_descent(1.0))
    grouped = groups(clipped, [Group("head/.*", learning_rate_scale=2.0)])
    updates, _ = grouped.update(gradients_of(0, PARAMS), grouped.init(PARAMS), PARAMS)
    plain, _ = clipped.update(gradients_of(0, PARAMS), clipped.init(PARAMS), PARAMS)
    assert_close(updates["encoder"], plain["encoder"])
    assert_close(updates["head"], jax.tree.map(lambda leaf: 2 * leaf, plain["head"]))


def test_gradually_unfrozen_by_a_scheduled_scale():
    scale = schedules.join([0.0, 1.0], [2])
    optimizer = groups(
        optimizers.gradient_descent(0.1), [Group("encoder/.*", learning_rate_scale=scale)]
    )
    early, state = run(optimizer, PARAMS, steps=2)
    assert_equal(early["encoder"], PARAMS["encoder"])
    assert float(group_learning_rates(state)["encoder"]) == 0
    later, state = run(optimizer, PARAMS, steps=3)
    assert (later["encoder"]["kernel"] != PARAMS["encoder"]["kernel"]).any()
    assert float(group_learning_rates(state)["encoder"]) == pytest.approx(0.1)


@pytest.mark.standard_promotion  # optax's line search
def test_line_searches_work_on_a_part_of_the_parameters():
    optimizer = groups(optax.lbfgs(), [Group("encoder/.*", freeze=True)])
    state = TrainState.create(PARAMS, optimizer)
    step = jax.jit(make_step(loss, optimizer))
    losses = []
    for _ in range(4):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] / 2
    assert_equal(state.params["encoder"], PARAMS["encoder"])


def with_arguments(wrapper):
    return optax.GradientTransformationExtraArgs(wrapper.init, wrapper.update)


INSIDE = {
    "guard": guard,
    "loss_scaling": loss_scaling,
    "sync_replicas": lambda optimizer: optimizers.sync_replicas(optimizer, 1),
    "chain": lambda optimizer: optax.chain(optax.clip(100.0), optimizer, optax.scale(1.0)),
    "apply_if_finite": lambda optimizer: optax.apply_if_finite(optimizer, 3),
    "masked": lambda optimizer: optax.masked(optimizer, {"encoder": True, "head": True}),
    "MultiSteps": lambda optimizer: with_arguments(optax.MultiSteps(optimizer, 1)),
}


@pytest.mark.standard_promotion  # optax.MultiSteps
@pytest.mark.parametrize("wrapper", INSIDE)
def test_numbers_reach_the_optimizer_through_others(wrapper):
    adam = optimizers.adam(0.1)
    members = [Group("encoder/.*", learning_rate_scale=0.1), Group("head/.*", weight_decay=0.5)]
    grouped, state = run(groups(INSIDE[wrapper](adam), members), PARAMS)
    assert_close(grouped, run(groups(adam, members), PARAMS)[0])
    assert float(group_learning_rates(state)["encoder"]) == pytest.approx(0.01)


HIDING = {
    "flatten": optax.flatten,
    "MultiSteps": lambda optimizer: optax.MultiSteps(optimizer, 1).gradient_transformation(),
}


@pytest.mark.standard_promotion  # optax.MultiSteps
@pytest.mark.parametrize("hide", HIDING.values(), ids=HIDING)
def test_numbers_that_do_not_reach_the_optimizer_are_an_error(hide):
    transform = groups(hide(optimizers.adam(0.1)), [Group("head/.*", learning_rate_scale=0.1)])
    with pytest.raises(GroupError, match="do not reach the optimizer of parameter head/bias"):
        run(transform, PARAMS)


def test_train_resumes_with_groups_and_refuses_others(tmp_path):
    def train(steps, scale=0.1, directory="a"):
        optimizer = groups(
            optimizers.adam(0.1),
            [Group("encoder/bias", freeze=True), Group("head/.*", learning_rate_scale=scale)],
        )
        result = ftrain.train(
            loss,
            jax.tree.map(jnp.copy, PARAMS),
            Pipeline(ArraySource({"x": BATCH["x"]}), batch_size=2),
            steps=steps,
            optimizer=optimizer,
            directory=tmp_path / directory,
        )
        return jax.device_get((result.params, result.opt_state))

    train(3)
    assert_equal(train(6), train(6, directory="whole"))
    with pytest.raises(RunMismatchError, match="the optimizer differs"):
        train(8, scale=0.2)


def test_groups_in_groups():
    inner = groups(optimizers.gradient_descent(1.0), [Group("head/bias", learning_rate_scale=2.0)])
    outer = groups(inner, [Group("encoder/.*", learning_rate_scale=3.0)])
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    updates, state = outer.update(ones, outer.init(PARAMS), PARAMS)
    sizes = {name: -float(leaf.max()) for name, leaf in named_leaves(updates).items()}
    assert sizes == {"encoder/bias": 3, "encoder/kernel": 3, "head/bias": 2, "head/kernel": 1}
    assert {name: float(rate) for name, rate in group_learning_rates(state).items()} == {
        "head_bias": 2,
        "encoder": 3,
    }
    twice = groups(inner, [Group("head/.*", learning_rate_scale=3.0)])
    with pytest.raises(GroupError, match="parameter head/bias matches this group, and a group"):
        twice.update(ones, twice.init(PARAMS), PARAMS)


# The step: frozen parameters have no gradient and no part in norms.


def count_products(step, state):
    """The matrix products of a compiled step: two forward, and those of the backward pass."""
    text = str(jax.make_jaxpr(step)(state, BATCH))
    return text.count("dot_general")


WRAPPERS = {
    "plain": lambda optimizer: optimizer,
    "guard": lambda optimizer: guard(optimizer, spike=100.0),
    "loss_scaling": lambda optimizer: loss_scaling(guard(optimizer)),
    "chain": lambda optimizer: optax.chain(optax.clip(100.0), optimizer),
    "sync_replicas": lambda optimizer: optimizers.sync_replicas(optimizer, 1),
    "momentum": lambda optimizer: optax.chain(optax.trace(0.5), optimizer, optax.ema(0.5)),
    "MultiSteps": lambda optimizer: optax.MultiSteps(optimizer, 1).gradient_transformation(),
}


@pytest.mark.standard_promotion  # optax.MultiSteps
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_gradient_is_computed_for_frozen_parameters(wrapper):
    wrap = WRAPPERS[wrapper]
    plain = wrap(optimizers.adam(0.1))
    frozen = wrap(groups(optimizers.adam(0.1), [Group("encoder/.*", freeze=True)]))
    usual_state = TrainState.create(PARAMS, plain)
    state = TrainState.create(PARAMS, frozen, averages=True)
    assert count_products(make_step(loss, plain), usual_state) == 5
    step = make_step(loss, frozen, averages=0.9, clip_global_norm=10.0)
    assert count_products(step, state) == 3  # two forward, and the gradient of head/kernel
    compiled = jax.jit(step)
    for _ in range(3):
        state, metrics = compiled(state, BATCH)
    assert compiled._cache_size() == 1
    assert_equal(state.params["encoder"], PARAMS["encoder"])
    assert_equal(state.averages["encoder"], PARAMS["encoder"])
    assert (state.params["head"]["kernel"] != PARAMS["head"]["kernel"]).all()

    def head_loss(head):
        return loss({"encoder": PARAMS["encoder"], "head": head}, BATCH, None)

    _, metrics = compiled(TrainState.create(PARAMS, frozen, averages=True), BATCH)
    expected = optax.tree.norm(jax.grad(head_loss)(PARAMS["head"]))
    np.testing.assert_allclose(metrics["gradient_norm"], expected, rtol=1e-5)


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"clip_global_norm": 0.1}])
def test_a_step_equals_that_of_the_trained_part_alone(options):
    frozen = groups(optimizers.adam(0.1), [Group("encoder/.*", freeze=True)])
    state = TrainState.create(PARAMS, frozen)
    step = jax.jit(make_step(loss, frozen, **options))

    def head_loss(params, batch, rng):
        return loss({"encoder": PARAMS["encoder"], "head": params}, batch, rng)

    alone = TrainState.create(PARAMS["head"], optimizers.adam(0.1))
    alone_step = jax.jit(make_step(head_loss, optimizers.adam(0.1), **options))
    for _ in range(3):
        state, metrics = step(state, BATCH)
        alone, alone_metrics = alone_step(alone, BATCH)
        np.testing.assert_allclose(
            metrics["gradient_norm"], alone_metrics["gradient_norm"], rtol=1e-6
        )
    assert_close(state.params["head"], alone.params, rtol=1e-6)


def test_the_model_state_of_frozen_layers_still_changes():
    def counting(params, batch, rng, model_state):
        mean = jnp.mean(batch["x"] @ params["encoder"]["kernel"])
        return loss(params, batch, rng), {}, {"mean": 0.9 * model_state["mean"] + 0.1 * mean}

    frozen = groups(optimizers.adam(0.1), [Group("encoder/.*", freeze=True)])
    state = TrainState.create(PARAMS, frozen, model_state={"mean": jnp.zeros(())})
    after, _ = jax.jit(make_step(counting, frozen, clip_global_norm=1.0))(state, BATCH)
    expected = 0.1 * jnp.mean(BATCH["x"] @ PARAMS["encoder"]["kernel"])
    np.testing.assert_allclose(after.model_state["mean"], expected, atol=1e-7)
    assert_equal(after.params["encoder"], PARAMS["encoder"])


def test_replicas_reduce_what_is_trained():
    frozen = groups(optimizers.momentum(0.1, 0.9), [Group("encoder/.*", freeze=True)])
    waiting = optimizers.sync_replicas(frozen, 4)
    state = TrainState.create(PARAMS, waiting)
    assert jax.tree.leaves(state.opt_state.sums["encoder"]) == []
    mesh = make_mesh()
    step = compile_step(make_step(loss, waiting, replicas="data"), mesh=mesh, parallel="shard_map")
    after, _ = step(jax.tree.map(jnp.copy, state), BATCH)
    alone, _ = jax.jit(make_step(loss, frozen))(TrainState.create(PARAMS, frozen), BATCH)
    assert_close(jax.device_get(after.params), jax.device_get(alone.params))


def test_arrivals_are_summed_for_trained_parameters_only():
    frozen = groups(optimizers.gradient_descent(1.0), [Group("encoder/.*", freeze=True)])
    waiting = optimizers.sync_replicas(frozen, 2)
    state = waiting.init(PARAMS)
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    updates, state = waiting.update(ones, state, PARAMS)
    assert_equal(apply_updates(PARAMS, updates), PARAMS)
    updates, state = waiting.update(ones, state, PARAMS)
    after = apply_updates(PARAMS, updates)
    assert_equal(after["encoder"], PARAMS["encoder"])
    assert_close(after["head"], jax.tree.map(lambda leaf: leaf - 1, PARAMS["head"]))


def test_frozen_tables_are_read_without_a_gradient():
    params = {"table": jnp.linspace(-1, 1, 12).reshape(6, 2), "w": jnp.ones(2)}

    def read(params, batch, rng):
        return jnp.mean((lookup(params["table"], batch["ids"]) @ params["w"] - 1) ** 2)

    batch = {"ids": np.array([1, 4, 1, 0])}
    frozen = groups(optimizers.adam(0.1), [Group("table", freeze=True)])
    step = make_step(read, frozen)
    state = TrainState.create(params, frozen)
    assert "scatter" not in str(jax.make_jaxpr(step)(state, batch))
    after, _ = jax.jit(step)(state, batch)
    assert_equal(after.params["table"], params["table"])
    assert (after.params["w"] != params["w"]).all()
    trained = groups(optimizers.adam(0.1), [Group("w", freeze=True)])
    after, _ = jax.jit(make_step(read, trained))(TrainState.create(params, trained), batch)
    changed = (after.params["table"] != params["table"]).all(axis=1)
    assert changed.tolist() == [True, True, False, False, True, False]


def test_metrics_show_the_rates_of_groups():
    rate = schedules.polynomial_decay(0.1, 10, 0.0)
    optimizer = groups(
        optimizers.adam(rate),
        [
            Group("encoder/.*", learning_rate_scale=0.5),
            Group("head/bias", weight_decay=0.1),
            Group("head/kernel", optimizer=optimizers.adagrad(0.3), name="output"),
        ],
    )
    state = TrainState.create(PARAMS, optimizer)
    step = jax.jit(make_step(loss, optimizer))
    state, _ = step(state, BATCH)
    state, metrics = step(state, BATCH)
    shown = {name: float(value) for name, value in metrics.items() if "rate" in name}
    assert shown == {
        "learning_rate": pytest.approx(0.09),
        "learning_rate/encoder": pytest.approx(0.045),
        "learning_rate/output": pytest.approx(0.3),
    }


# Mistakes.


@pytest.mark.parametrize(
    ("members", "match", "message"),
    [
        (
            [Group("decoder/.*", freeze=True)],
            "decoder/.*",
            "pattern 'decoder/.*' matches no parameter; "
            "it must match a whole name, such as encoder/bias, encoder/kernel",
        ),
        ([Group("encoder", freeze=True)], "encoder", "pattern 'encoder' matches no parameter"),
        ([Group(".*", freeze=True)], ".*", "all parameters are frozen, so there is nothing"),
        (
            [Group("encoder/.*", freeze=True), Group(".*/bias", weight_decay=0.0)],
            ".*/bias",
            "parameter encoder/bias matches two groups, 'encoder/.*' and '.*/bias'; exclude it",
        ),
    ],
)
def test_patterns_that_match_nothing_or_twice_are_named(members, match, message):
    with pytest.raises(GroupError) as caught:
        groups(optimizers.adam(0.1), members).init(PARAMS)
    assert message in str(caught.value)
    assert caught.value.match == match


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"match": "a["}, "match must be a regular expression, got 'a\\['"),
        ({"match": 3, "freeze": True}, "match must be a regular expression, got 3"),
        ({"match": "a"}, "group 'a' changes nothing"),
        ({"match": "a", "freeze": True, "learning_rate": 0.1}, "has freeze and learning_rate"),
        (
            {"match": "a", "freeze": True, "optimizer": optimizers.adam()},
            "has freeze and optimizer",
        ),
        (
            {"match": "a", "optimizer": optimizers.adam(), "weight_decay": 0.1},
            "has optimizer and weight_decay",
        ),
        (
            {"match": "a", "learning_rate": 0.1, "learning_rate_scale": 0.1},
            "has learning_rate and learning_rate_scale: choose one",
        ),
        ({"match": "a", "learning_rate_scale": -1.0}, "learning_rate_scale must be >= 0"),
        ({"match": "a", "learning_rate": float("nan")}, "learning_rate must be a finite number"),
        ({"match": "a", "weight_decay": -1.0}, "weight_decay must be >= 0"),
        ({"match": "a", "freeze": True, "name": "a/b"}, "name must consist of letters"),
    ],
)
def test_settings_that_do_not_fit_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        Group(**given)


def test_other_mistakes_are_named():
    with pytest.raises(TypeError, match=r"must be a list of ftrain\.optimizers\.Group"):
        groups(optimizers.adam(0.1), [{"match": "a"}])
    transform = groups(optimizers.adam(0.1), [Group("head/.*", freeze=True)])
    with pytest.raises(ValueError, match="groups need the parameters"):
        transform.update(PARAMS, transform.init(PARAMS))


def test_groups_of_one_name_are_told_apart():
    optimizer = groups(
        optimizers.adam(0.1),
        [
            Group("head/(?!bias).*", learning_rate=0.2),
            Group("head/(?!kernel).*", learning_rate=0.3),
        ],
    )
    shown = group_learning_rates(optimizer.init(PARAMS))
    assert {name: pytest.approx(float(rate)) for name, rate in shown.items()} == {
        "head": 0.2,
        "head_2": 0.3,
    }
