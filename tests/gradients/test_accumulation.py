import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftrain.gradients import Rows, accumulate, lookup, value_and_grad

RNG = np.random.default_rng(0)


def batch_of(examples):
    return {
        "x": jnp.asarray(RNG.normal(size=(examples, 3)), jnp.float32),
        "ids": jnp.asarray(RNG.integers(0, 8, size=(examples, 2)), jnp.int32),
    }


def loss_fn(params, batch):
    rows = lookup(params["table"], batch["ids"]).sum(1)
    outputs = jnp.tanh(batch["x"] @ params["w"] + rows)
    return jnp.mean(outputs**2), {
        "mean": jnp.mean(outputs),
        "largest": jnp.max(batch["ids"]) * 0 + 3,
    }


DIFFERENTIATE = value_and_grad(loss_fn, has_aux=True)


def params():
    return {"w": jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32), "table": jnp.ones((8, 4)) * 0.1}


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 12, 13, 50])
def test_parts_give_what_the_whole_gives(microbatches):
    start = params()
    batch = batch_of(13)
    (value, aux), gradients = jax.jit(accumulate(DIFFERENTIATE, microbatches))(start, batch)
    (expected, expected_aux), whole = jax.jit(DIFFERENTIATE)(start, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(aux["mean"], expected_aux["mean"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(aux["largest"], 3.0, rtol=1e-6)
    np.testing.assert_allclose(gradients["w"], whole["w"], rtol=1e-6, atol=1e-6)
    assert isinstance(gradients["table"], Rows)
    table = start["table"]
    np.testing.assert_allclose(
        gradients["table"].to_dense(table), whole["table"].to_dense(table), rtol=1e-6, atol=1e-6
    )


def test_sums_of_low_precision_are_kept_in_float32():
    def differentiate(params, batch):
        return jnp.mean(batch["x"]).astype(jnp.bfloat16), {
            "w": jnp.mean(batch["x"]).astype(jnp.bfloat16)
        }

    x = jnp.array([256.0] + [1.0] * 511)
    value, gradients = accumulate(differentiate, 512)(None, {"x": x})
    assert gradients["w"].dtype == value.dtype == jnp.bfloat16
    np.testing.assert_allclose(float(value), float(x.mean()), rtol=0.01)


@pytest.mark.optimized
def test_memory_does_not_grow_with_the_number_of_parts():
    def wide(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w"])
        for _ in range(4):
            hidden = jnp.tanh(hidden @ params["h"])
        return jnp.mean(hidden**2)

    width = 64
    start = {"w": jnp.ones((3, width)) * 0.01, "h": jnp.eye(width)}

    def temporary_bytes(parts, examples):
        step = jax.jit(accumulate(value_and_grad(wide), parts))
        analysis = step.lower(start, {"x": jnp.ones((examples, 3))}).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    one, many, whole = (
        temporary_bytes(1, 512),
        temporary_bytes(16, 512 * 16),
        temporary_bytes(1, 512 * 16),
    )
    assert many <= 1.3 * one < whole


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"x": jnp.ones(4), "y": jnp.ones(5)}, "x 4, y 5"),
        ({"x": jnp.ones(4), "y": jnp.float32(0)}, "x 4, y none"),
        ({}, "no leaves"),
    ],
)
def test_a_batch_that_cannot_be_divided(batch, found):
    with pytest.raises(ValueError, match=f"must have the same number of examples, got {found}"):
        accumulate(lambda p, b: (jnp.float32(0), {}), 2)({}, batch)


def test_numbers_that_are_no_arrays_are_averaged_too():
    def with_numbers(params, batch):
        return jnp.mean(batch["x"] * params), {"weight": 0.5, "examples": batch["x"].shape[0]}

    (value, aux), _ = accumulate(value_and_grad(with_numbers, has_aux=True), 2)(
        jnp.float32(2.0), {"x": np.ones(4)}
    )
    assert (float(value), float(aux["weight"]), float(aux["examples"])) == (2.0, 0.5, 2.0)


def test_the_number_of_parts_is_checked():
    for wrong in (0, 1.5, "2", True):
        with pytest.raises(
            ValueError, match=f"microbatches must be a whole number >= 1, got {wrong!r}"
        ):
            accumulate(value_and_grad(loss_fn), wrong)


def test_what_comes_with_the_value_must_be_scalars():
    def with_ids(params, batch):
        return jnp.mean(batch["x"] * params), {"ids": batch["x"]}

    with pytest.raises(ValueError, match=r"1/ids has shape \(2,\): take its mean"):
        accumulate(value_and_grad(with_ids, has_aux=True), 2)(jnp.float32(2.0), {"x": np.ones(4)})
