"""Parameters that an optimizer freezes do not count in norms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ftrain import TrainState, make_step, optimizers
from ftrain.gradients import guard, lookup, loss_scaling
from ftrain.optimizers.frozen import frozen_leaves

PARAMS = {"frozen": jnp.ones(4), "trained": jnp.zeros(2)}
LABELS = {"frozen": "freeze", "trained": "train"}


def partly(optimizer):
    return optax.multi_transform({"train": optimizer, "freeze": optax.set_to_zero()}, LABELS)


FREEZING = {
    "multi_transform": lambda: partly(optimizers.gradient_descent(1.0)),
    "adam": lambda: partly(optimizers.adam(0.1)),
    "scaled": lambda: optax.chain(partly(optax.adam(1.0)), optax.scale(-0.5)),
    "masked": lambda: optax.chain(
        optimizers.momentum(0.1, 0.9),
        optax.masked(optax.set_to_zero(), {"frozen": True, "trained": False}),
    ),
    "guard": lambda: guard(partly(optimizers.adam(0.1)), spike=5.0),
    "loss_scaling": lambda: loss_scaling(partly(optax.sgd(0.1))),
    "apply_if_finite": lambda: optax.apply_if_finite(partly(optax.sgd(0.1)), 3),
    "MultiSteps": lambda: optax.MultiSteps(partly(optax.sgd(0.1)), 2).gradient_transformation(),
    "schedule": lambda: partly(optax.adamw(optax.cosine_decay_schedule(0.1, 10))),
    "jitted": lambda: optax.GradientTransformation(
        partly(optax.sgd(0.1)).init, jax.jit(partly(optax.sgd(0.1)).update)
    ),
}


@pytest.mark.standard_promotion  # optax
@pytest.mark.parametrize("name", FREEZING)
def test_frozen_leaves_are_found(name):
    optimizer = FREEZING[name]()
    assert frozen_leaves(optimizer, PARAMS, optimizer.init(PARAMS), PARAMS) == [True, False]


NOT_FREEZING = {
    "decay": lambda: optax.chain(partly(optax.sgd(0.1)), optax.add_decayed_weights(0.1)),
    "masked": lambda: optax.masked(
        optax.sgd(0.1), {"frozen": False, "trained": True}
    ),  # returns gradients unchanged
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optimizers.adam(0.1),
}


@pytest.mark.parametrize("name", NOT_FREEZING)
def test_leaves_that_move_are_not_frozen(name):
    optimizer = NOT_FREEZING[name]()
    assert frozen_leaves(optimizer, PARAMS, optimizer.init(PARAMS), PARAMS) == [False, False]


def steep(params, batch, rng):
    """The gradient of the frozen leaf is 3,000 times that of the trained one."""
    return 3000 * jnp.sum(params["frozen"]) / 2 + jnp.sum(params["trained"]) * batch["slope"][0]


BATCH = {"slope": np.full(4, 2.0, np.float32)}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_scales_what_is_trained_by_its_own_norm(accumulate):
    optimizer = partly(optimizers.gradient_descent(1.0))
    state = TrainState.create(PARAMS, optimizer)
    step = jax.jit(make_step(steep, optimizer, clip_global_norm=1.0, accumulate=accumulate))
    after, metrics = step(state, BATCH)
    np.testing.assert_allclose(after.params["trained"], -np.sqrt(0.5), rtol=1e-5)
    np.testing.assert_array_equal(after.params["frozen"], PARAMS["frozen"])
    assert float(metrics["gradient_norm"]) == pytest.approx(2 * np.sqrt(2), rel=1e-5)


def test_a_frozen_gradient_that_is_not_finite_does_no_harm():
    def loss(params, batch, rng):
        return jnp.sum(jnp.sqrt(params["frozen"] - 1)) + jnp.sum(
            params["trained"]
        )  # its slope is infinite

    optimizer = guard(partly(optimizers.gradient_descent(1.0)))
    after, metrics = jax.jit(make_step(loss, optimizer))(
        TrainState.create(PARAMS, optimizer), BATCH
    )
    assert float(metrics["gradient_norm"]) == pytest.approx(np.sqrt(2))
    assert float(metrics["update_skipped"]) == 0
    np.testing.assert_array_equal(after.params["trained"], [-1, -1])


def test_frozen_tables_count_for_nothing():
    params = {"frozen": jnp.ones((6, 2)), "trained": jnp.zeros(2)}

    def loss(params, batch, rng):
        return 100 * jnp.sum(lookup(params["frozen"], batch["ids"])) + jnp.sum(params["trained"])

    optimizer = partly(optimizers.gradient_descent(1.0))
    state = TrainState.create(params, optimizer)
    with pytest.warns(UserWarning, match="does not support Rows"):
        after, metrics = jax.jit(make_step(loss, optimizer))(state, {"ids": np.array([1, 4, 1])})
    assert float(metrics["gradient_norm"]) == pytest.approx(np.sqrt(2))
    np.testing.assert_array_equal(after.params["frozen"], params["frozen"])
