"""Means that are stored as a total and a weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftrain import WeightedMean


def test_it_is_the_mean_of_what_has_weight():
    assert float(WeightedMean.of([1.0, 2.0, 6.0]).value) == 3.0
    assert float(WeightedMean.of([1.0, 2.0, 6.0], [True, False, True]).value) == 3.5
    assert float(WeightedMean.of([[1.0, 2.0], [3.0, 4.0]], [[1.0], [3.0]]).value) == pytest.approx(
        3.0
    )


def test_what_has_no_weight_does_not_count():
    masked = WeightedMean.of(jnp.array([1.0, jnp.nan, jnp.inf]), jnp.array([1, 0, 0]))
    assert float(masked.value) == 1.0
    assert float(WeightedMean.of(jnp.ones(3), jnp.zeros(3)).value) == 0.0


def test_merged_parts_are_the_whole(rng):
    values = rng.normal(size=60).astype(np.float32)
    weights = rng.uniform(size=60).astype(np.float32)
    parts = [WeightedMean.of(values[n:m], weights[n:m]) for n, m in ((0, 7), (7, 8), (8, 60))]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert float(merged.value) == pytest.approx(np.average(values, weights=weights), rel=1e-5)
    assert float(merged.weight) == pytest.approx(weights.sum(), rel=1e-5)


def test_sums_of_half_precision_are_float32():
    mean = WeightedMean.of(jnp.full(10_000, 0.1, jnp.bfloat16))
    assert mean.total.dtype == jnp.float32
    assert float(mean.value) == pytest.approx(float(jnp.bfloat16(0.1)), rel=1e-5)
    # bfloat16 has no 257: in that type the sum of two weights would stay 256.
    counted = WeightedMean(jnp.bfloat16(0), jnp.bfloat16(256)).merge(
        WeightedMean(jnp.bfloat16(0), jnp.bfloat16(1))
    )
    assert float(counted.weight) == 257.0


def test_the_weight_is_not_differentiated():
    def mean(scale):
        return WeightedMean(scale * 6.0, scale * 3.0).value

    assert float(jax.grad(mean)(1.0)) == 2.0
