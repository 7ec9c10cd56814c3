"""The precision policy: what is cast, what is not, and that nothing is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core.primitives import dot_general_p
from regression import WEIGHTS, init_params, loss_fn, make_arrays

import ftrain
from ftrain import Precision, TrainState, make_step
from ftrain.cluster import make_mesh
from ftrain.data import ArraySource, Pipeline
from ftrain.gradients import Rows, guard, lookup, loss_scaling
from ftrain.gradients.loss_scaling import LossScaleState
from ftrain.jaxpr import equations_of
from ftrain.optimizers import adam, gradient_descent, momentum
from ftrain.training import PrecisionError
from ftrain.training.compiled_step import CompiledStep
from ftrain.training.optimizer_precision import StoredSlots
from ftrain.tree import named_leaves

POLICIES = {
    "bfloat16": Precision("bfloat16"),
    "float16": Precision("float16"),
    "narrow params": Precision("bfloat16", params="bfloat16"),
    "narrow slots": Precision("bfloat16", slots="bfloat16"),
    "float32": Precision("float32"),
}


def batch_of(pipeline, step: int = 0):
    return {name: jnp.asarray(array) for name, array in pipeline.batch(step).items()}


def created(optimizer, precision, **options):
    state = TrainState.create(init_params(), optimizer, precision=precision, **options)
    return state, make_step(loss_fn, optimizer, precision=precision)


def dtypes_of(tree) -> dict[str, str]:
    return {name: str(leaf.dtype) for name, leaf in named_leaves(tree).items()}


def products(step, *arguments) -> list[str]:
    """The dtypes in which a step multiplies matrices."""
    jaxpr = jax.make_jaxpr(step)(*arguments).jaxpr
    return [
        str(equation.invars[0].aval.dtype)
        for equation in equations_of(jaxpr)
        if equation.primitive is dot_general_p
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_are_computed_in_the_dtype_of_the_policy(pipeline, dtype):
    state, step = created(gradient_descent(0.1), dtype)
    found = products(step, state, batch_of(pipeline))
    assert set(found) == {dtype}
    plain, step = created(gradient_descent(0.1), None)
    assert set(products(step, plain, batch_of(pipeline))) == {"float32"}


@pytest.mark.parametrize("name", POLICIES)
def test_a_step_keeps_every_dtype_of_its_state(pipeline, name):
    state, step = created(adam(0.01), POLICIES[name])
    after, metrics = jax.jit(step)(state, batch_of(pipeline))
    assert dtypes_of(after) == dtypes_of(state)
    assert {str(value.dtype) for value in metrics.values()} <= {"float32", "int32"}
    assert dtypes_of(after.params) == dict.fromkeys(["b", "w"], str(POLICIES[name].params))
    assert dtypes_of(step.differentiate(state, batch_of(pipeline))[3]) == dtypes_of(state.params)


def test_master_weights_add_up_updates_below_the_resolution_of_the_computation():
    def loss(params, batch, rng):
        return -jnp.sum(params["w"] * batch["x"])

    params = {"w": jnp.ones(2)}
    batch = {"x": jnp.ones(2)}
    optimizer = gradient_descent(1e-4)  # of which bfloat16 near 1 has nothing: its step is 0.0078
    step = jax.jit(make_step(loss, optimizer, precision="bfloat16"))
    state = TrainState.create(params, optimizer, precision="bfloat16")
    for _ in range(100):
        state, _ = step(state, batch)
    assert state.params["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.params["w"], 1.01, rtol=1e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_learns(pipeline, name):
    state = ftrain.train(
        loss_fn,
        init_params(),
        pipeline,
        optimizer=momentum(0.05, 0.9),
        steps=150,
        precision=POLICIES[name],
    )
    np.testing.assert_allclose(state.params["w"].astype(jnp.float32), WEIGHTS, atol=0.02)


def test_loss_metrics_and_statistics():
    seen = {}

    def loss(params, batch, rng, model_state):
        seen.update(dtypes_of({"params": params, "batch": batch, "state": model_state}))
        hidden = batch["x"] * params["w"]
        mean = jnp.mean(hidden).astype(jnp.bfloat16)
        metrics = {"hidden": jnp.max(hidden), "count": jnp.sum(batch["label"])}
        return jnp.mean(hidden**2), metrics, {"mean": mean, "seen": model_state["seen"] + 1}

    batch = {"x": jnp.ones(4), "label": jnp.arange(4), "weight": jnp.ones(4)}
    policy = Precision("bfloat16", keep=["batch/weight"])
    optimizer = gradient_descent(0.1)
    state = TrainState.create(
        {"w": jnp.ones(4)},
        optimizer,
        precision=policy,
        model_state={"mean": jnp.zeros(()), "seen": jnp.zeros((), jnp.int32)},
    )
    after, metrics = jax.jit(make_step(loss, optimizer, precision=policy))(state, batch)
    assert seen == {
        "params/w": "bfloat16",
        "batch/x": "bfloat16",
        "batch/label": "int32",
        "batch/weight": "float32",
        "state/mean": "float32",
        "state/seen": "int32",
    }
    assert metrics["loss"].dtype == metrics["hidden"].dtype == jnp.float32
    assert metrics["count"].dtype == jnp.int32
    assert dtypes_of(after.model_state) == {"mean": "float32", "seen": "int32"}


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_a_table_read_by_lookup_keeps_its_row_sparse_gradient(compute):
    def loss(params, batch, rng):
        return jnp.sum(lookup(params["table"], batch["ids"]) * batch["x"][:, None])

    policy = Precision(compute)
    optimizer = adam(0.1)
    params = {"table": jnp.ones((50, 3))}
    batch = {"ids": jnp.array([4, 7, 4]), "x": jnp.array([0.25, 0.5, 0.125])}
    state = TrainState.create(params, optimizer, precision=policy)
    step = make_step(loss, optimizer, precision=policy)
    gradient = step.differentiate(state, batch)[3]["table"]
    assert isinstance(gradient, Rows)
    assert gradient.values.dtype == jnp.float32
    np.testing.assert_allclose(gradient.to_dense(params["table"])[4], 0.375)
    whole = (50, 3)
    converted = [
        equation
        for equation in equations_of(jax.make_jaxpr(step)(state, batch).jaxpr)
        if equation.primitive.name == "convert_element_type"
        and equation.outvars[0].aval.shape == whole
    ]
    assert not converted
    after, _ = jax.jit(step)(state, batch)
    changed = np.flatnonzero(np.any(np.asarray(after.params["table"] != 1), axis=1))
    assert changed.tolist() == [4, 7]


def test_float16_scales_its_loss_by_itself():
    def loss(params, batch, rng):
        return jnp.sum(params["w"] * batch["x"])  # the gradient of w is x

    batch = {"x": jnp.full(4, 1e-7)}  # of which float16 has one bit
    params = {"w": jnp.ones(4)}
    policy = Precision("float16", keep=["batch/x"])
    with pytest.raises(PrecisionError, match="no loss scale"):
        make_step(loss, gradient_descent(1.0), precision=policy)(
            TrainState.create(params, gradient_descent(1.0)), batch
        )
    optimizer = gradient_descent(1.0)
    state = TrainState.create(params, optimizer, precision=policy)
    assert isinstance(state.opt_state, LossScaleState)
    step = make_step(loss_in_float16, optimizer, precision="float16")
    after, metrics = jax.jit(step)(state, {"x": jnp.full(4, 1e-3)})
    assert float(metrics["loss_scale"]) == 2.0**15
    np.testing.assert_allclose(1 - after.params["w"], 1e-6, rtol=0.05)


def loss_in_float16(params, batch, rng):
    small = jnp.asarray(1e-3, params["w"].dtype)
    return jnp.sum(params["w"] * batch["x"] * small)


def test_a_scale_of_the_users_own_is_kept():
    optimizer = loss_scaling(guard(gradient_descent(0.1)), scale=8.0)
    state, step = created(optimizer, "float16")
    assert float(state.opt_state.loss_scale) == 8.0
    assert not isinstance(state.opt_state.inner, LossScaleState)
    after, metrics = step(state, {"x": jnp.ones((4, 3)), "y": jnp.ones(4)})
    assert float(metrics["loss_scale"]) == 8.0
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_an_overflow_is_skipped_and_halves_the_scale():
    state, step = created(guard(gradient_descent(0.1)), "float16")
    huge = {"x": jnp.full((4, 3), 6e4), "y": jnp.zeros(4)}
    state = state.replace(params={"w": jnp.ones(3), "b": jnp.zeros(())})
    after, metrics = jax.jit(step)(state, huge)
    assert float(metrics["update_skipped"]) == 1
    assert float(metrics["loss_scale"]) == 2.0**14
    np.testing.assert_array_equal(after.params["w"], state.params["w"])


@pytest.mark.standard_promotion  # optax.adam
def test_slots_of_any_optimizer():
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    policy = Precision("float32", slots="bfloat16")
    for optimizer in (adam(0.1), optax.adam(0.1), guard(optax.sgd(0.1, 0.9))):
        state = policy.wrap(optimizer).init(params)
        wide = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim and leaf.dtype == jnp.float32]
        assert not wide
        updates, after = jax.jit(policy.wrap(optimizer).update)(params, state, params)
        assert dtypes_of(after) == dtypes_of(state)
        expected, _ = optimizer.update(params, optimizer.init(params), params)
        for update, like in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(update, like, rtol=1e-2)
    assert isinstance(policy.wrap(optax.adam(0.1)).init(params), StoredSlots)
    assert not isinstance(policy.wrap(adam(0.1)).init(params), StoredSlots)


@pytest.mark.standard_promotion  # optax.sgd
def test_narrow_slots_of_optax_do_not_stop_moving():
    slow = optax.ema(0.999, debias=False)
    optimizer = Precision("float32", slots="bfloat16").wrap(slow)
    params = {"w": jnp.zeros(2000)}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for _ in range(300):
        _, state = update({"w": jnp.ones(2000)}, state, params)
    mean = float(jnp.mean(state.inner.ema["w"].astype(jnp.float32)))
    assert mean == pytest.approx(1 - 0.999**300, rel=0.05)


def test_apply_is_for_predictions():
    policy = Precision("bfloat16")
    seen = {}

    def predict(params, batch, model_state):
        seen.update(dtypes_of({"params": params, "batch": batch, "state": model_state}))
        return {"score": batch["x"] @ params["w"], "label": batch["label"]}

    out = jax.jit(policy.apply(predict))(
        {"w": jnp.ones(3)}, {"x": jnp.ones((2, 3)), "label": jnp.arange(2)}, {"m": jnp.ones(1)}
    )
    assert seen == {
        "params/w": "bfloat16",
        "batch/x": "bfloat16",
        "batch/label": "int32",
        "state/m": "float32",
    }
    assert dtypes_of(out) == {"score": "float32", "label": "int32"}
    assert policy.apply(predict).__name__ == "predict"


@pytest.mark.parametrize("name", ["bfloat16", "float16", "narrow params", "narrow slots"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_resumed_run_has_the_same_bits(pipeline, tmp_path, name, accumulate):
    train = functools.partial(
        ftrain.train,
        noisy_loss,
        init_params(),
        pipeline,
        optimizer=adam(0.01),
        precision=POLICIES[name],
        accumulate=accumulate,
    )
    straight = train(steps=9)
    train(steps=4, directory=tmp_path / "run")
    resumed = train(steps=9, directory=tmp_path / "run")
    for one, other in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        assert one.dtype == other.dtype
        assert jnp.array_equal(one, other)


def noisy_loss(params, batch, rng):
    kept = jax.random.bernoulli(rng, 0.8, batch["x"].shape)
    return loss_fn(params, {"x": jnp.where(kept, batch["x"], 0), "y": batch["y"]}, rng)


def test_another_precision_is_another_run(pipeline, tmp_path):
    train = functools.partial(
        ftrain.train, loss_fn, init_params(), pipeline, optimizer=adam(0.01), directory=tmp_path
    )
    train(steps=2, precision="bfloat16")
    with pytest.raises(ftrain.training.RunMismatchError, match="precision was 'compute bfloat16, "):
        train(steps=4, precision="float32")


@pytest.mark.parametrize("parallel", ["jit", "shard_map"])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "narrow params"])
def test_on_a_mesh(parallel, name):
    mesh = make_mesh(data=2)
    source = ArraySource(make_arrays())
    train = functools.partial(
        ftrain.train,
        loss_fn,
        init_params(),
        Pipeline(source, batch_size=8, seed=3),
        # A scale that never overflows: replicas of a batch would skip other updates.
        optimizer=loss_scaling(momentum(0.05, 0.9), scale=256.0),
        steps=20,
        precision=POLICIES[name],
        clip_global_norm=10.0,
    )
    alone = train()
    spread = train(mesh=mesh, parallel=parallel)
    for one, other in zip(
        jax.tree.leaves(alone.params), jax.tree.leaves(spread.params), strict=True
    ):
        np.testing.assert_allclose(
            one.astype(jnp.float32), other.astype(jnp.float32), atol=0.02, rtol=0.02
        )


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["bfloat16", "float16", "narrow params", "narrow slots"])
def test_fused_steps_have_the_same_bits(pipeline, name):
    train = functools.partial(
        ftrain.train,
        loss_fn,
        init_params(),
        pipeline,
        optimizer=adam(0.01),
        precision=POLICIES[name],
        steps=12,
    )
    single = train(fuse=1)
    fused = train(fuse=4)
    for one, other in zip(jax.tree.leaves(single), jax.tree.leaves(fused), strict=True):
        assert jnp.array_equal(one, other)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compute": "int8"}, "compute must be one of bfloat16, float16, float32, float64, got"),
        ({"compute": "float12"}, "compute must be one of"),
        ({"compute": None}, "compute must be one of"),
        ({"compute": "bfloat16", "params": jnp.int32}, "params must be one of"),
        ({"compute": "bfloat16", "slots": "bool"}, "slots must be one of"),
        ({"compute": "float64"}, "compute is float64, which JAX only has with JAX_ENABLE_X64=1"),
        ({"compute": "bfloat16", "keep": ["("]}, "keep: '.' is not a regular expression"),
    ],
)
def test_an_unknown_dtype_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Precision(**given)


def test_dtypes_may_be_those_of_jax():
    assert Precision(jnp.bfloat16, np.float32) == Precision("bfloat16", "float32")
    assert str(Precision(jnp.bfloat16)) == "compute bfloat16, params float32, output float32"


def test_parameters_of_another_dtype_are_named(pipeline):
    state = TrainState.create(init_params(), adam(0.1))
    step = make_step(loss_fn, adam(0.1), precision=POLICIES["narrow params"])
    with pytest.raises(
        PrecisionError, match=r"params/b is float32, .* stores parameters in bfloat"
    ):
        step(state, batch_of(pipeline))


def test_labels_in_float64_are_not_rounded_silently():
    with jax.enable_x64(True):
        batch = {"x": jnp.ones((4, 3), jnp.float32), "y": jnp.ones(4, jnp.float64)}
        optimizer = gradient_descent(0.1)
        params = {"w": jnp.zeros(3, jnp.float32), "b": jnp.zeros((), jnp.float32)}
        state = TrainState.create(params, optimizer)
        with pytest.raises(PrecisionError, match=r"batch/y is float64, .*keep=\[\"batch/y\"\]"):
            make_step(loss_fn, optimizer, precision="bfloat16")(state, batch)


def test_a_pattern_that_matches_nothing_is_refused(pipeline):
    policy = Precision("bfloat16", keep=["batch/label"])
    state, step = created(gradient_descent(0.1), policy)
    with pytest.raises(PrecisionError, match="keep: pattern 'batch/label' matches no leaf"):
        step(state, batch_of(pipeline))


@pytest.mark.standard_promotion  # optax.sgd
@pytest.mark.parametrize(
    ("optimizer", "rate", "is_held"),
    [
        (optax.sgd(1e-4), 1e-4, False),
        (optax.sgd(1e-4), lambda step: 1e-4 * step / (step + 10), False),
        (optax.sgd(0.1), 0.1, True),
        (gradient_descent(1e-4, rounding="nearest"), 1e-4, False),
        (gradient_descent(1e-4, rounding="stochastic"), 1e-4, True),
        (gradient_descent(1e-4), 1e-4, True),
        (guard(gradient_descent(1e-4)), 1e-4, True),
    ],
)
def test_a_policy_that_cannot_hold_the_learning_rate_is_refused(pipeline, optimizer, rate, is_held):
    policy = Precision("bfloat16", params="bfloat16")
    state = TrainState.create(init_params(), optimizer, precision=policy)
    step = jax.jit(make_step(loss_fn, optimizer, precision=policy, learning_rate=rate))
    if is_held:
        step(state, batch_of(pipeline))
        return
    with pytest.raises(PrecisionError, match=r"cannot hold a learning rate of 0\.0001") as caught:
        step(state, batch_of(pipeline))
    assert "\n" not in str(caught.value)


def test_the_compiled_step_accepts_every_policy(pipeline):
    for policy in POLICIES.values():
        state, step = created(adam(0.1), policy, averages=False)
        compiled = CompiledStep(step)
        assert compiled.trace(state, batch_of(pipeline)) is not None
