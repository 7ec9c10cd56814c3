import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain import optimizers
from ftrain.gradients import (
    Rows,
    clip_by_global_norm,
    densify,
    global_norm,
    map_values,
    update_with_rows,
)
from ftrain.gradients.rows import first_positions
from ftrain.gradients.rows_fallback import RowsNotSupportedError, from_opaque, to_opaque
from ftrain.optimizers import apply_updates

# Few lengths, because each is compiled separately.
IDS = st.sampled_from([0, 1, 2, 24]).flatmap(
    lambda n: st.lists(st.integers(-3, 12), min_size=n, max_size=n)
)


def rows_of(ids, width=2, seed=0) -> Rows:
    values = np.random.default_rng(seed).normal(size=(len(ids), width)).astype(np.float32)
    return Rows(jnp.array(ids, jnp.int32), jnp.asarray(values))


def dense_of(rows, length=10):
    table = np.zeros((length, rows.values.shape[1]))
    for index, value in zip(
        np.asarray(rows.indices), np.asarray(rows.values, np.float64), strict=True
    ):
        if 0 <= index < length:
            table[index] += value
    return table


@given(IDS)
def test_rows_are_a_table_and_rows_out_of_it_are_dropped(ids):
    rows = rows_of(ids)
    np.testing.assert_allclose(
        rows.to_dense(jnp.zeros((10, 2))), dense_of(rows), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        rows.add_to(jnp.ones((10, 2))), dense_of(rows) + 1, rtol=1e-5, atol=1e-6
    )


@given(IDS)
def test_summing_duplicates_keeps_the_table_and_names_each_row_once(ids):
    rows = rows_of(ids)
    summed = rows.sum_duplicates()
    assert summed.unique
    assert len(set(np.asarray(summed.indices).tolist())) == len(ids)
    assert {i for i in np.asarray(summed.indices).tolist() if i <= 12} == set(ids)
    np.testing.assert_allclose(dense_of(summed), dense_of(rows), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(summed.sum_duplicates().indices, summed.indices)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint32, np.int32])
def test_ids_of_any_integer_type(dtype):
    rows = Rows(jnp.asarray(np.array([3, 1, 3] * 50, dtype)), jnp.ones((150, 1)))
    table = rows.sum_duplicates().to_dense(jnp.zeros((200, 1)))
    assert {n: float(v) for n, v in enumerate(table[:, 0]) if v} == {1: 50.0, 3: 100.0}


@pytest.mark.parametrize("ids", ["random", "one", "rising", "multiples"])
def test_first_positions_of_long_lists(ids):
    count = 5000
    rng = np.random.default_rng(1)
    values = {
        "random": rng.integers(0, 2**31 - 1, count // 2).repeat(2),
        "one": np.full(count, 2**31 - 1),
        "rising": np.arange(count),
        "multiples": np.arange(count) % 700 * 65536,
    }[ids]
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    np.testing.assert_array_equal(first_positions(jnp.asarray(values, jnp.int32)), first[inverse])


def test_rows_can_be_mapped_over():
    ids = jnp.array([[1, 1, 2], [0, 0, 0]])
    summed = jax.vmap(
        lambda i: Rows(i, jnp.ones((3, 1))).sum_duplicates().to_dense(jnp.zeros((3, 1)))
    )(ids)
    np.testing.assert_array_equal(summed[..., 0], [[0, 2, 1], [3, 0, 0]])


def test_the_norm_and_clipping_take_the_values():
    tree = {"table": rows_of([1, 5, 1]), "bias": jnp.array([3.0, 4.0]), "none": None}
    expected = np.sqrt(np.sum(np.asarray(tree["table"].values, np.float64) ** 2) + 25)
    np.testing.assert_allclose(global_norm(tree), expected, rtol=1e-6)
    clipped, _ = clip_by_global_norm(tree, 1.0)
    np.testing.assert_array_equal(clipped["table"].indices, [1, 5, 1])
    np.testing.assert_allclose(clipped["table"].values, tree["table"].values / expected, rtol=1e-5)
    assert clipped["none"] is None


@pytest.mark.standard_promotion  # optax
def test_densify_stands_before_stock_transforms():
    params = {"table": jnp.zeros((10, 2)), "bias": jnp.zeros(2)}
    gradients = {"table": rows_of([1, 5, 1]), "bias": jnp.ones(2)}
    chained = optax.chain(densify(), optax.adam(0.1))
    updates, _ = chained.update(gradients, chained.init(params), params)
    plain = optax.adam(0.1)
    whole = {"table": jnp.asarray(dense_of(gradients["table"]), jnp.float32), "bias": jnp.ones(2)}
    expected, _ = plain.update(whole, plain.init(params), params)
    np.testing.assert_allclose(updates["table"], expected["table"], rtol=1e-6)
    with pytest.raises(ValueError, match="densify needs the parameters"):
        chained.update(gradients, chained.init(params))


def test_opaque_rows_cannot_be_used_as_arrays():
    opaque = to_opaque({"table": rows_of([1, 5, 1]), "bias": jnp.ones(2)})
    with pytest.raises(
        RowsNotSupportedError,
        match=r"used Rows as an array \(shape\): put ftrain.gradients.densify\(\) before it",
    ):
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), opaque)
    with pytest.raises(RowsNotSupportedError):
        optax.scale(2.0).update(opaque, optax.EmptyState())
    with pytest.raises(RowsNotSupportedError):
        jax.jit(lambda tree: tree)(opaque)
    doubled = from_opaque(map_values(lambda leaf: 2 * leaf, opaque))
    assert jax.tree.structure(doubled) == jax.tree.structure({"table": rows_of([1]), "bias": 0})


@pytest.mark.parametrize(
    "transform",
    [optax.adagrad(0.1), optax.clip(0.5), optax.scale_by_sign()],
    ids=["checks the type", "calls a compiled function", "calls jax"],
)
def test_transforms_for_arrays_get_dense_gradients(transform):
    params = {"table": jnp.zeros((10, 2))}
    gradients = {"table": rows_of([1, 5, 1])}
    dense = {"table": jnp.asarray(dense_of(gradients["table"]), jnp.float32)}
    with pytest.warns(UserWarning, match="does not support Rows"):
        updates, _ = update_with_rows(transform, gradients, transform.init(params), params)
    expected, _ = transform.update(dense, transform.init(params), params)
    np.testing.assert_allclose(updates["table"], expected["table"], rtol=1e-6)


def test_another_error_does_not_select_dense_gradients():
    def update(gradients, state, params=None):
        if isinstance(gradients["table"], Rows):
            raise TypeError("a mistake in the code for rows")
        return gradients, state

    transform = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    params = {"table": jnp.zeros((10, 2))}
    with pytest.raises(TypeError, match="a mistake in the code for rows"):
        update_with_rows(transform, {"table": rows_of([1])}, optax.EmptyState(), params)


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_indices_outside_of_the_table_name_no_row_in_any_type(dtype):
    """Truncated to 32 bits, 2**32 + 1 would name row 1."""
    info = np.iinfo(dtype)
    wrapping = [2**32 + 1, 2**32 + 2] if info.max > 2**32 else []
    indices = np.array(
        [1, info.max, info.max - 1, info.min if info.min < 0 else 100, *wrapping], dtype
    )
    rows = Rows(indices, jnp.ones((len(indices), 2)))
    expected = [[0, 0], [1, 1], [0, 0]]
    table = jnp.zeros((3, 2))
    for each in (rows, jax.jit(lambda rows: rows)(rows), rows.sum_duplicates(table)):
        np.testing.assert_array_equal(each.to_dense(table), expected)
    params = {"t": table}
    for transform in (optimizers.gradient_descent(-1.0), optimizers.momentum(-1.0, 0.9)):
        updates, _ = jax.jit(transform.update)({"t": rows}, transform.init(params), params)
        np.testing.assert_array_equal(apply_updates(params, updates)["t"], expected)
