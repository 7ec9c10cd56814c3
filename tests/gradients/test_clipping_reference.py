"""Clipping against values that the reference implementation computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import array, cases

from ftrain import gradients

pytestmark = pytest.mark.reference


def is_dense(case) -> bool:
    """Neither slices of a table nor the bare tensor that the reference refuses and a pytree may well be."""
    arguments = case["arguments"]
    given = arguments.get("t", arguments.get("t_list"))
    entries = given if isinstance(given, list) and "t_list" in arguments else [given]
    return not any(isinstance(entry, dict) for entry in entries)


# What the reference refuses, such as float64 in clip_by_average_norm, has no value to compare with.
CASES = [
    (case, dtype)
    for case in cases("clipping")
    for dtype in ("float32", "float64")
    if is_dense(case) and "value" in case[dtype]
]


def to_tree(entries, dtype):
    return [None if entry is None else jnp.asarray(array(entry, dtype)) for entry in entries]


def assert_equal(ours, recorded, dtype):
    tolerance = {"rtol": 1e-12} if dtype == "float64" else {"rtol": 1e-6, "atol": 1e-6}
    np.testing.assert_allclose(np.asarray(ours, dtype), array(recorded, dtype), **tolerance)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=[f"{n}-{case['function']}" for n, (case, _) in enumerate(CASES)])
def test_values_are_those_of_the_reference(case, dtype):
    recorded = case[dtype]["value"]
    arguments = dict(case["arguments"])
    function = getattr(gradients, case["function"])
    with jax.enable_x64(dtype == "float64"):
        if "t" in arguments:
            axes = arguments.pop("axes", None)
            bounds = {name: array(value, dtype) for name, value in arguments.items() if name != "t"}
            options = {"axes": tuple(axes) if isinstance(axes, list) else axes} if axes is not None else {}
            assert_equal(function(jnp.asarray(array(arguments["t"], dtype)), **bounds, **options), recorded, dtype)
        elif case["function"] == "global_norm":
            assert_equal(function(to_tree(arguments["t_list"], dtype)), recorded, dtype)
        else:
            tree = to_tree(arguments.pop("t_list"), dtype)
            limits = {name: array(value, dtype) for name, value in arguments.items() if value is not None}
            clipped, norm = function(tree, **limits)
            assert_equal(norm, recorded["global_norm"], dtype)
            assert [leaf is None for leaf in clipped] == [leaf is None for leaf in tree]
            kept = [leaf for leaf in clipped if leaf is not None]
            for ours, wanted in zip(kept, recorded["list_clipped_without_none"], strict=True):
                assert_equal(ours, wanted, dtype)
