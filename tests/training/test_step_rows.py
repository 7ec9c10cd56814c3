"""Steps of models that read tables through `lookup`."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ftrain import TrainState, compile_step, make_step, optimizers
from ftrain.cluster import make_mesh
from ftrain.gradients import (
    as_transform,
    clip_by_global_norm,
    clip_by_value,
    densify,
    guard,
    lookup,
    loss_scaling,
)

ROWS = 40
WIDTH = 3


def loss_fn(params, batch, rng):
    outputs = jnp.tanh(lookup(params["table"], batch["ids"]).sum(1) @ params["w"])
    return jnp.mean((outputs - batch["y"]) ** 2)


def dense_loss_fn(params, batch, rng):
    outputs = jnp.tanh(params["table"][batch["ids"]].sum(1) @ params["w"])
    return jnp.mean((outputs - batch["y"]) ** 2)


def make_params(rows=ROWS):
    rng = np.random.default_rng(0)
    return {
        "table": jnp.asarray(rng.normal(size=(rows, WIDTH)), jnp.float32),
        "w": jnp.asarray(rng.normal(size=WIDTH), jnp.float32),
    }


def batches(count, examples=8):
    rng = np.random.default_rng(1)
    for _ in range(count):
        ids = rng.integers(0, ROWS // 2, size=(examples, 4)).astype(np.int32)
        yield {"ids": ids, "y": rng.normal(size=examples).astype(np.float32)}


def run(loss, optimizer, steps=5, mesh=None, params=None, **options):
    step = compile_step(make_step(loss, optimizer, **options), mesh)
    state = TrainState.create(params or make_params(), optimizer)
    for batch in batches(steps):
        state, metrics = step(state, batch)
    return state, metrics


def assert_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), left, right)


# Where untouched rows have no state that moves them, rows and whole tables give the same.
SAME_AS_DENSE = {
    "gradient_descent": lambda: optimizers.gradient_descent(0.1),
    "adagrad": lambda: optimizers.adagrad(0.1),
    "adam not lazy": lambda: optimizers.adam(0.1, lazy=False),
    "chain": lambda: optax.chain(
        as_transform(clip_by_value, -0.5, 0.5),
        as_transform(clip_by_global_norm, 0.3),
        optimizers.adagrad(0.1),
    ),
    "masked": lambda: optax.masked(optimizers.adagrad(0.1), {"table": True, "w": False}),
    "multi_transform": lambda: optax.multi_transform(
        {"t": optimizers.adagrad(0.1), "w": optax.sgd(0.1)}, {"table": "t", "w": "w"}
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optimizers.adagrad)(learning_rate=0.1),
    "guard": lambda: guard(optimizers.adagrad(0.1), spike=100.0),
    "loss_scaling": lambda: loss_scaling(guard(optimizers.adagrad(0.1))),
    "densify": lambda: optax.chain(densify(), optax.adam(0.1)),
}


@pytest.mark.standard_promotion  # optax.adam
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in SAME_AS_DENSE),
        ("adagrad", {"clip_global_norm": 0.1}),
        ("masked", {"accumulate": 3}),
        *(
            pytest.param(name, {"clip_global_norm": 0.1}, marks=pytest.mark.campaign)
            for name in ("chain", "loss_scaling")
        ),
        *(
            pytest.param(name, {"accumulate": 3}, marks=pytest.mark.campaign)
            for name in ("adagrad", "guard")
        ),
    ],
    ids=str,
)
def test_rows_give_what_whole_tables_give(name, options):
    state, metrics = run(loss_fn, SAME_AS_DENSE[name](), **options)
    expected, expected_metrics = run(dense_loss_fn, SAME_AS_DENSE[name](), **options)
    assert_close(state.params, expected.params)
    assert_close(metrics, expected_metrics)


@pytest.mark.standard_promotion  # optax.adam
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.1),
        optax.chain(optax.clip_by_global_norm(0.3), optimizers.adagrad(0.1)),
        optax.chain(optimizers.adagrad(0.1), optax.scale(0.5)),
        optax.apply_if_finite(optimizers.adagrad(0.1), 3),
        optax.MultiSteps(optimizers.adagrad(0.1), 2).gradient_transformation(),
        guard(optax.adam(0.1)),
    ],
    ids=["adam", "clip first", "scale last", "apply_if_finite", "MultiSteps", "guard"],
)
def test_transforms_that_do_not_know_rows_get_whole_tables_and_say_so(optimizer):
    with pytest.warns(UserWarning, match="does not support Rows"):
        state, _ = run(loss_fn, optimizer)
    expected, _ = run(dense_loss_fn, optimizer)
    assert_close(state.params, expected.params)


def test_lazy_adam_leaves_other_rows_and_their_slots_alone():
    state, _ = run(loss_fn, optimizers.adam(0.1), steps=6)
    start = make_params()["table"]
    np.testing.assert_array_equal(state.params["table"][ROWS // 2 :], start[ROWS // 2 :])
    moments = optimizers.get_slot(state.opt_state, "table", "m")
    assert not moments[ROWS // 2 :].any()
    assert moments[: ROWS // 2].any()


def copies_of_the_table(loss, optimizer, rows=50_000, **options):
    """How many times the compiled step copies something as large as the table."""
    state = TrainState.create(make_params(rows), optimizer)
    compiled = (
        compile_step(make_step(loss, optimizer, **options)).lower(state, next(batches(1))).compile()
    )
    table = rf"f32\[{rows},{WIDTH}\]"
    return len(
        re.findall(rf"= {table}\S* copy\(", compiled.as_text())
    ), compiled.memory_analysis().temp_size_in_bytes


def linear_loss(params, batch, rng):
    """Its gradient does not depend on the rows that it reads."""
    return jnp.mean(lookup(params["table"], batch["ids"]).sum((1, 2)) * batch["y"]) + jnp.sum(
        params["w"]
    )


@pytest.mark.parametrize("loss", [loss_fn, pytest.param(linear_loss, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    "optimizer",
    [
        optimizers.gradient_descent(0.1),
        optimizers.adam(0.1),
        optimizers.ftrl(0.1),
        optimizers.rmsprop(0.1, centered=True, momentum=0.9),
        guard(optimizers.adagrad(0.1), spike=10.0),
        loss_scaling(optimizers.adam(0.1)),
    ],
    ids=["gradient_descent", "adam", "ftrl", "rmsprop", "guard", "loss_scaling"],
)
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"clip_global_norm": 1.0, "accumulate": 2}, marks=pytest.mark.campaign)],
    ids=str,
)
@pytest.mark.optimized
def test_a_table_is_updated_in_place(loss, optimizer, options):
    copies, temporary = copies_of_the_table(loss, optimizer, **options)
    assert copies == 0
    assert temporary < 50_000 * WIDTH


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded by rows"])
@pytest.mark.parametrize(
    "name",
    ["adam", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("adagrad", "ftrl"))],
)
def test_on_a_mesh_it_is_the_same(sharded, name):
    mesh = make_mesh()
    optimizer = getattr(optimizers, name)(0.1)
    expected, _ = run(loss_fn, optimizer)
    if not sharded:
        state, _ = run(loss_fn, optimizer, mesh=mesh)
    else:
        rows = NamedSharding(mesh, PartitionSpec("data"))
        whole = NamedSharding(mesh, PartitionSpec())
        state = TrainState.create(make_params(), optimizer)
        placed = jax.tree.map(lambda leaf: rows if leaf.shape == (ROWS, WIDTH) else whole, state)
        step = jax.jit(make_step(loss_fn, optimizer), donate_argnums=0, in_shardings=(placed, rows))
        state = jax.device_put(state, placed)
        for batch in batches(5):
            state, _ = step(state, jax.device_put(batch, rows))
            state = jax.device_put(state, placed)
    assert_close(state.params, expected.params)


def test_nothing_is_warned_of_when_rows_are_taken():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(loss_fn, optimizers.adam(0.1), steps=1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_rows_read_twice_count_once_or_as_in_tensorflow(accumulate):
    """The norm of the table's gradient, or of TensorFlow 1's IndexedSlices, which repeat a row."""
    table = {"table": jnp.zeros((5, 2))}
    batch = {"ids": np.array([3, 1, 3, 3]), "slope": np.array([1.0, 2.0, 3.0, 4.0], np.float32)}

    def loss(params, batch, rng):
        return jnp.mean(lookup(params["table"], batch["ids"]).sum(1) * batch["slope"])

    norms = {}
    for merge_rows in (True, False):
        optimizer = optimizers.gradient_descent(1.0)
        step = jax.jit(
            make_step(
                loss, optimizer, clip_global_norm=0.5, merge_rows=merge_rows, accumulate=accumulate
            )
        )
        after, metrics = step(TrainState.create(table, optimizer), batch)
        norms[merge_rows] = float(metrics["gradient_norm"])
        moved = np.array([[0, 0], [2, 2], [0, 0], [8, 8], [0, 0]], np.float32) / 4
        np.testing.assert_allclose(
            after.params["table"], -moved * 0.5 / norms[merge_rows], rtol=1e-5
        )
    assert norms[True] == pytest.approx(np.sqrt(2 * (2**2 + 8**2)) / 4)
    assert norms[False] == pytest.approx(np.sqrt(2 * (1 + 4 + 9 + 16)) / 4)


def test_rows_outside_of_the_table_have_no_norm():
    def loss(params, batch, rng):
        return jnp.sum(lookup(params["table"], batch["ids"], out_of_range="drop"))

    for merge_rows in (True, False):
        step = make_step(loss, optimizers.gradient_descent(1.0), merge_rows=merge_rows)
        state = TrainState.create({"table": jnp.zeros((5, 2))}, optimizers.gradient_descent(1.0))
        _, metrics = jax.jit(step)(state, {"ids": np.array([7, -1, 2])})
        assert float(metrics["gradient_norm"]) == pytest.approx(np.sqrt(2))
