import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftrain.gradients import Rows, lookup, value_and_grad

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(7, 3)), jnp.float32)


def assert_same_gradients(function, params, *args):
    """Assert that our gradients, made dense, equal jax's; return ours."""
    value, gradients = value_and_grad(function)(params, *args)
    expected_value, expected = jax.value_and_grad(function)(params, *args)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for name, leaf in gradients.items():
        whole = leaf.to_dense(params[name]) if isinstance(leaf, Rows) else leaf
        np.testing.assert_allclose(whole, expected[name], rtol=1e-5, atol=1e-6)
    return gradients


@pytest.mark.parametrize("shape", [(), (1,), (0,), (5,), (2, 3), (2, 0, 3), (2, 1, 4)], ids=str)
def test_ids_of_any_shape(shape):
    ids = np.random.default_rng(1).integers(0, 7, size=shape, dtype=np.int32)
    np.testing.assert_array_equal(lookup(TABLE, ids), np.asarray(TABLE)[ids])
    gradients = assert_same_gradients(
        lambda p: jnp.sum(jnp.sin(lookup(p["table"], ids))), {"table": TABLE}
    )
    assert isinstance(gradients["table"], Rows)
    assert gradients["table"].values.shape == (ids.size, 3)


def several(p, ids):
    one, other = lookup(p["table"], ids), lookup(p["table"], 6 - ids)
    return jnp.sum(one * other @ p["dense"]) + jnp.sum(one**2)


def under_vmap(p, ids):
    return jnp.sum(
        jax.vmap(lambda i: jax.vmap(lambda j: lookup(p["table"], j))(i), in_axes=1)(ids) ** 2
        @ p["dense"]
    )


def under_jit(p, ids):
    return jnp.sum(jax.jit(lambda t, i: jnp.tanh(lookup(t, i)))(p["table"], ids) @ p["dense"])


def under_jit_closed_over(p, ids):
    return jnp.sum(
        jax.jit(lambda i: jax.jit(lambda: jnp.tanh(lookup(p["table"], i)))())(ids) @ p["dense"]
    )


def under_checkpoint(p, ids):
    first = jax.checkpoint(lambda i: jnp.sin(lookup(p["table"], i)) ** 2)(ids)
    return jnp.sum(first @ p["dense"] * lookup(p["table"], ids)[..., 0])


def with_ids_made_inside(p, ids):
    return jnp.sum(lookup(p["table"], (ids * 2 + 1) % 7) ** 2 @ p["dense"])


def cast_first(p, ids):
    return jnp.sum(lookup(p["table"].astype(jnp.bfloat16).astype(jnp.float32), ids) ** 2)


def cast_inside_and_outside(p, ids):
    def read(table):
        return lookup(table.astype(jnp.float32), ids) @ p["dense"]

    narrow = p["table"].astype(jnp.bfloat16)
    return jnp.sum(jax.checkpoint(read)(narrow) ** 2) + jnp.sum(jax.jit(read)(p["table"]))


@pytest.mark.parametrize(
    "function",
    [
        several,
        under_vmap,
        under_jit,
        under_jit_closed_over,
        under_checkpoint,
        with_ids_made_inside,
        cast_first,
        cast_inside_and_outside,
    ],
)
@pytest.mark.parametrize("compile_it", [False, True])
def test_the_gradient_of_a_table_is_rows(function, compile_it):
    params = {"table": TABLE, "dense": jnp.array([1.0, -2.0, 0.5]), "unused": jnp.ones(2)}
    ids = jnp.array([[0, 3, 3], [6, 1, 0]])
    gradients = assert_same_gradients(jax.jit(function) if compile_it else function, params, ids)
    assert isinstance(gradients["table"], Rows)
    assert isinstance(gradients["dense"], jax.Array)
    named = np.asarray(gradients["table"].indices)
    assert len(set(named.tolist())) == len(named)


def tied(p, ids):
    return jnp.sum(lookup(p["table"], ids) @ p["table"].T)


def scaled_first(p, ids):
    return jnp.sum(lookup(p["table"] * 2, ids) ** 2)


def cast_and_used(p, ids):
    narrow = p["table"].astype(jnp.bfloat16)
    return jnp.sum(lookup(narrow, ids).astype(jnp.float32)) + jnp.sum(narrow.astype(jnp.float32))


def inside_a_scan(p, ids):
    return jax.lax.scan(
        lambda total, i: (total + jnp.sum(lookup(p["table"], i) ** 2), None), 0.0, ids
    )[0]


def returned(p, ids):
    return jax.jit(lambda t: (jnp.sum(lookup(t, ids) ** 2), t))(p["table"])[1].sum() + jnp.sum(
        lookup(p["table"], ids)
    )


@pytest.mark.parametrize("function", [tied, scaled_first, cast_and_used, inside_a_scan, returned])
def test_a_table_used_in_another_way_gets_an_ordinary_gradient(function):
    gradients = assert_same_gradients(function, {"table": TABLE}, jnp.array([[0, 3, 3], [6, 1, 0]]))
    assert isinstance(gradients["table"], jax.Array)


def test_auxiliaries_arguments_and_structure_are_those_of_jax():
    def function(scale, params, ids, *, power):
        rows = lookup(params["table"], ids)
        return scale * jnp.sum(rows**power), {"mean": rows.mean()}

    arguments = (jnp.float32(2.0), {"table": TABLE}, jnp.array([1, 1]))
    (value, aux), (by_scale, by_params) = value_and_grad(function, argnums=(0, 1), has_aux=True)(
        *arguments, power=2
    )
    (expected, expected_aux), expected_gradients = jax.value_and_grad(
        function, argnums=(0, 1), has_aux=True
    )(*arguments, power=2)
    np.testing.assert_allclose([value, aux["mean"]], [expected, expected_aux["mean"]], rtol=1e-6)
    np.testing.assert_allclose(by_scale, expected_gradients[0], rtol=1e-6)
    np.testing.assert_allclose(
        by_params["table"].to_dense(TABLE), expected_gradients[1]["table"], rtol=1e-6
    )


def test_ids_out_of_range_are_an_error():
    with pytest.raises(
        IndexError, match=r"id 7 is not in a table of 7 rows; out_of_range=\"drop\" reads zeros"
    ):
        lookup(TABLE, jnp.array([[0, 7]]))
    with pytest.raises(IndexError, match="id -1 is not in a table"):
        lookup(TABLE, -1)
    compiled = jax.jit(lookup)(TABLE, jnp.array([-1, 7, 2]))
    assert jnp.isnan(compiled[:2]).all()
    np.testing.assert_array_equal(compiled[2], TABLE[2])


def test_ids_out_of_range_can_be_dropped():
    ids = jnp.array([-1, 2, 7, 2])
    np.testing.assert_array_equal(lookup(TABLE, ids, out_of_range="drop")[::2], jnp.zeros((2, 3)))
    _, rows = value_and_grad(lambda t: jnp.sum(lookup(t, ids, out_of_range="drop") * 3))(TABLE)
    expected = np.zeros((7, 3))
    expected[2] = 6
    np.testing.assert_array_equal(rows.to_dense(TABLE), expected)
    assert (
        float(jnp.sum(rows.values)) == 18
    )  # nothing is left in the dropped places that a norm would count


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match='out_of_range must be "error" or "drop", got \'clip\''):
        lookup(TABLE, 0, out_of_range="clip")
    with pytest.raises(TypeError, match="ids must be integers, got float32"):
        lookup(TABLE, jnp.array([0.5]))
    with pytest.raises(ValueError, match="needs a table of rows, got a scalar"):
        lookup(jnp.float32(0), 0)


def test_a_batch_of_tables_is_looked_up_one_by_one():
    tables = jnp.stack([TABLE, TABLE + 1])
    np.testing.assert_array_equal(
        jax.vmap(lookup)(tables, jnp.array([1, 2])), [TABLE[1], TABLE[2] + 1]
    )


def test_it_can_be_differentiated_twice():
    hessian = jax.hessian(lambda t: jnp.sum(lookup(t, jnp.array([1, 1])) ** 3))(TABLE)
    np.testing.assert_allclose(hessian[1, 0, 1, 0], 12 * TABLE[1, 0], rtol=1e-6)
    assert float(jnp.abs(hessian[0]).max()) == 0


@pytest.mark.parametrize("rows", [0, 3])
def test_an_empty_table_has_no_row(rows):
    table = jnp.ones((0, 2))
    ids = np.zeros(rows, np.int32)
    np.testing.assert_array_equal(lookup(table, ids, out_of_range="drop"), np.zeros((rows, 2)))
    assert jnp.isnan(jax.jit(lookup)(table, ids)).all()
    if rows:
        with pytest.raises(IndexError, match="id 0 is not in a table of 0 rows"):
            lookup(table, ids)
    _, gradient = value_and_grad(lambda table: lookup(table, ids, out_of_range="drop").sum())(table)
    assert gradient.to_dense(table).shape == (0, 2)


def test_a_table_of_integers_cannot_mark_what_is_out_of_range():
    table = jnp.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(lookup(table, [2]), [[4, 5]])
    np.testing.assert_array_equal(
        jax.jit(lambda ids: lookup(table, ids, out_of_range="drop"))(np.array([2, 9]))[1], [0, 0]
    )
    with pytest.raises(TypeError, match='a table of int32 has none; pass out_of_range="drop"'):
        jax.jit(lookup)(table, np.array([2]))
