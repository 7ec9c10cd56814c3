import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.gradients import (
    as_transform,
    clip_by_average_norm,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    global_norm,
)

VALUES = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6)


@given(VALUES, st.floats(0.1, 100))
def test_clipping_keeps_the_direction_and_bounds_the_length(values, limit):
    tree = {"a": jnp.array(values, jnp.float32), "b": jnp.ones((2, 2))}
    clipped, norm = clip_by_global_norm(tree, limit)
    flat = np.concatenate([np.array(values, np.float64), np.ones(4)])
    np.testing.assert_allclose(norm, np.linalg.norm(flat), rtol=1e-5)
    scale = min(1.0, limit / np.linalg.norm(flat))
    np.testing.assert_allclose(clipped["a"], flat[:-4] * scale, rtol=1e-4, atol=1e-6)
    assert global_norm(clipped) <= limit * 1.0001 or scale == 1.0


@given(VALUES, st.floats(-100, 100, width=32), st.floats(0, 100, width=32))
def test_clipping_by_value_leaves_what_is_within(values, low, width):
    clipped = np.asarray(
        clip_by_value({"a": jnp.array(values, jnp.float32)}, low, low + width)["a"]
    )
    expected = np.clip(np.array(values, np.float32), np.float32(low), np.float32(low + width))
    # Equal, except that XLA flushes subnormal numbers to zero.
    np.testing.assert_allclose(clipped, expected, rtol=0, atol=np.finfo(np.float32).tiny)
    again = clip_by_value({"a": jnp.asarray(clipped)}, low, low + width)["a"]
    np.testing.assert_array_equal(again, clipped)


@given(VALUES, st.floats(0.1, 100))
def test_clipping_by_norm_bounds_each_leaf_by_itself(values, limit):
    leaf = np.array(values, np.float64)
    clipped = clip_by_norm({"a": jnp.array(values, jnp.float32), "b": jnp.zeros(2)}, limit)
    scale = min(1.0, limit / max(np.linalg.norm(leaf), 1e-30))
    np.testing.assert_allclose(clipped["a"], leaf * scale, rtol=1e-4, atol=1e-6)
    assert not clipped["b"].any()


@given(VALUES.filter(any), st.floats(0.1, 100))
def test_clipping_by_average_norm_bounds_the_norm_for_each_element(values, limit):
    leaf = np.array(values, np.float64)
    clipped = clip_by_average_norm(jnp.array(values, jnp.float32), limit)
    scale = (
        min(1.0, limit * leaf.size / np.linalg.norm(leaf)) if np.linalg.norm(leaf) > 1e-18 else 1.0
    )
    np.testing.assert_allclose(clipped, leaf * scale, rtol=1e-4, atol=1e-6)


def test_zero_gradients_stay_zero():
    clipped, norm = clip_by_global_norm({"a": jnp.zeros(3)}, 1.0)
    assert norm == 0
    assert (clipped["a"] == 0).all()


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_norm_that_is_not_finite_cannot_pass_unseen(bad):
    clipped, _ = clip_by_global_norm({"a": jnp.array([1.0, bad]), "b": jnp.ones(2)}, 1.0)
    assert jnp.isnan(clipped["a"]).all()
    assert jnp.isnan(clipped["b"]).all()


def test_dtypes_are_kept_and_a_known_norm_is_used():
    clipped, norm = clip_by_global_norm(
        {"a": jnp.ones(4, jnp.bfloat16)}, 1.0, use_norm=jnp.float32(2.0)
    )
    assert clipped["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(clipped["a"].astype(jnp.float32), 0.5 * np.ones(4))
    assert norm == 2.0


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (clip_by_value, (-0.5, 0.5)),
        (clip_by_norm, (0.5,)),
        (clip_by_average_norm, (0.1,)),
        (clip_by_global_norm, (0.5,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_is_also_a_transform_for_a_chain(function, arguments):
    tree = {"a": jnp.array([1.0, -2.0, 0.1]), "b": None, "c": jnp.full((2, 2), 3.0)}
    chained = optax.chain(as_transform(function, *arguments), optax.scale(-1.0))
    updates, _ = chained.update(tree, chained.init(tree))
    plain = function(tree, *arguments)
    expected = plain[0] if function is clip_by_global_norm else plain
    np.testing.assert_allclose(updates["a"], -expected["a"], rtol=1e-6)
    np.testing.assert_allclose(updates["c"], -expected["c"], rtol=1e-6)
    assert updates["b"] is None


def test_the_norm_of_half_precision_does_not_overflow():
    clipped, norm = clip_by_global_norm({"a": jnp.full(4, 200.0, jnp.float16)}, 1.0)
    assert float(norm) == 400.0
    np.testing.assert_allclose(clipped["a"], 0.5, rtol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_clipped_in_float32(dtype):
    leaf = jnp.linspace(100, 300, 1000, dtype=dtype)
    wide = leaf.astype(jnp.float32)
    for function, arguments in (
        (clip_by_norm, (3.0,)),
        (clip_by_average_norm, (0.01,)),
        (clip_by_global_norm, (7.0,)),
    ):
        clipped = function(leaf, *arguments)
        expected = function(wide, *arguments)
        clipped, expected = (
            each[0] if isinstance(each, tuple) else each for each in (clipped, expected)
        )
        assert clipped.dtype == dtype
        np.testing.assert_array_equal(clipped, expected.astype(dtype))


def test_norms_along_axes():
    leaf = jnp.array([[3.0, 4.0], [0.3, 0.4]])
    np.testing.assert_allclose(clip_by_norm(leaf, 1.0, axes=1), [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)


def test_numbers_whose_squares_overflow_are_scaled_and_not_lost():
    huge = jnp.array([3e20, -4e20])
    np.testing.assert_allclose(clip_by_norm(huge, 1.0), [0.6, -0.8], rtol=1e-6)
    np.testing.assert_allclose(clip_by_average_norm(huge, 1.0), [1.2, -1.6], rtol=1e-6)
    np.testing.assert_allclose(clip_by_norm(jnp.full(4, 300.0, jnp.float16), 1.0), 0.5, rtol=1e-3)


def test_an_infinite_norm_clips_nothing():
    leaf = jnp.array([3.0, -4.0])
    for function in (
        clip_by_norm,
        clip_by_average_norm,
        lambda *given: clip_by_global_norm(*given)[0],
    ):
        np.testing.assert_array_equal(function(leaf, float("inf")), leaf)


@pytest.mark.parametrize("norm", [-1.0, float("nan"), -float("inf"), np.float32(-2)])
@pytest.mark.parametrize("function", [clip_by_norm, clip_by_average_norm, clip_by_global_norm])
def test_a_norm_that_makes_no_sense_is_refused(function, norm):
    with pytest.raises(ValueError, match=f"clip_norm must be >= 0, got {norm}"):
        function(jnp.ones(2), norm)


def test_integers_cannot_be_scaled_to_a_norm():
    with pytest.raises(
        TypeError, match="only floating-point numbers can be scaled to a norm; leaf b is int32"
    ):
        clip_by_global_norm({"a": jnp.ones(2), "b": jnp.arange(3)}, 1.0)
    with pytest.raises(TypeError, match="got int32"):
        clip_by_norm(jnp.arange(3), 1.0)
