import jax.numpy as jnp
import numpy as np

from ftrain.averages import ZeroDebiased, update_averages


def test_averages_follow_the_formula_with_a_smaller_decay_at_first():
    mean = np.array([0.0, 1.0])
    ours = {"w": jnp.array([0.0, 1.0])}
    for n in range(30):
        new = np.array([n, -n], np.float64)
        decay = min(0.8, (1 + n) / (10 + n))
        mean = decay * mean + (1 - decay) * new
        ours = update_averages(ours, {"w": jnp.array(new, jnp.float32)}, 0.8, jnp.int32(n))
    np.testing.assert_allclose(ours["w"], mean, rtol=1e-5)


def test_averages_keep_their_dtype():
    averages = update_averages(
        {"w": jnp.zeros(2, jnp.bfloat16)}, {"w": jnp.ones(2, jnp.bfloat16)}, 0.9, jnp.int32(0)
    )
    assert averages["w"].dtype == jnp.bfloat16


def test_averages_from_zero_are_corrected_in_half_precision_too():
    averages = ZeroDebiased.create(jnp.zeros(2, jnp.bfloat16)).update(
        jnp.ones(2, jnp.bfloat16), 0.999
    )
    np.testing.assert_allclose(averages.values.astype(jnp.float32), 1.0, rtol=0.01)


def test_averages_of_values_of_another_dtype_keep_theirs():
    assert update_averages(jnp.zeros(2, jnp.bfloat16), jnp.ones(2), 0.9).dtype == jnp.bfloat16


def test_averages_of_half_precision_values_move_as_those_of_float32():
    half = update_averages(jnp.zeros(1, jnp.bfloat16), jnp.ones(1, jnp.bfloat16), 0.9)
    assert float(half[0]) == float(jnp.bfloat16(0.1))
    averages = ZeroDebiased.create(jnp.zeros(2, jnp.bfloat16))
    for _ in range(500):
        averages = averages.update(jnp.ones(2, jnp.bfloat16), 0.999)
    np.testing.assert_allclose(averages.biased, 1 - 0.999**500, rtol=1e-3)
