"""Clipping against values that the reference implementation computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import array, cases

from ftrain import gradients

pytestmark = pytest.mark.reference


# What the reference refuses, such as float64 in clip_by_average_norm, has no value to compare with.
CASES = [
    (case, dtype)
    for case in cases("clipping")
    for dtype in ("float32", "float64")
    if "value" in case[dtype]
]


def to_leaf(entry, dtype):
    if isinstance(entry, dict):
        return gradients.Rows(
            jnp.asarray(entry["indices"]), jnp.asarray(array(entry["values"], dtype))
        )
    return None if entry is None else jnp.asarray(array(entry, dtype))


def assert_equal(ours, recorded, dtype):
    if isinstance(recorded, dict):
        np.testing.assert_array_equal(ours.indices, recorded["indices"])
        ours = ours.values
        recorded = recorded["values"]
    tolerance = {"rtol": 1e-12} if dtype == "float64" else {"rtol": 1e-6, "atol": 1e-6}
    np.testing.assert_allclose(np.asarray(ours, dtype), array(recorded, dtype), **tolerance)


@pytest.mark.parametrize(
    ("case", "dtype"), CASES, ids=[f"{n}-{case['function']}" for n, (case, _) in enumerate(CASES)]
)
def test_values_are_those_of_the_reference(case, dtype):
    recorded = case[dtype]["value"]
    arguments = dict(case["arguments"])
    function = getattr(gradients, case["function"])
    with jax.enable_x64(dtype == "float64"):
        if "t" in arguments:
            axes = arguments.pop("axes", None)
            bounds = {name: array(value, dtype) for name, value in arguments.items() if name != "t"}
            options = (
                {"axes": tuple(axes) if isinstance(axes, list) else axes}
                if axes is not None
                else {}
            )
            assert_equal(
                function(to_leaf(arguments["t"], dtype), **bounds, **options), recorded, dtype
            )
        elif case["function"] == "global_norm":
            assert_equal(
                function([to_leaf(entry, dtype) for entry in arguments["t_list"]]), recorded, dtype
            )
        else:
            tree = [to_leaf(entry, dtype) for entry in arguments.pop("t_list")]
            limits = {
                name: array(value, dtype) for name, value in arguments.items() if value is not None
            }
            clipped, norm = function(tree, **limits)
            assert_equal(norm, recorded["global_norm"], dtype)
            assert [leaf is None for leaf in clipped] == [leaf is None for leaf in tree]
            kept = [leaf for leaf in clipped if leaf is not None]
            for ours, wanted in zip(kept, recorded["list_clipped_without_none"], strict=True):
                assert_equal(ours, wanted, dtype)
