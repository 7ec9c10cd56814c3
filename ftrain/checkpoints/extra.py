"""Extra values: a small mapping that is stored in the manifest of a checkpoint, as strict JSON."""

import math
from collections.abc import Mapping
from typing import Any

from ftrain.checkpoints.errors import CheckpointError

_NUMBER = "$float"  # the key of an object that stands for a number JSON has no word for: {"$float": "inf"}


def encode(value: Any, name: str = "extra") -> Any:
    """`value` in what JSON has words for; a CheckpointError names what cannot be stored.

    >>> encode({"best": float("-inf"), "looks": 3})
    {'best': {'$float': '-inf'}, 'looks': 3}
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a scalar of numpy or jax
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NUMBER: str(value)}
    if isinstance(value, (list, tuple)):
        return [encode(each, f"{name}/{place}") for place, each in enumerate(value)]
    if isinstance(value, Mapping):
        return {_key(key, name): encode(each, f"{name}/{key}") for key, each in value.items()}
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which cannot be stored beside a checkpoint's leaves; "
        "expected numbers, strings, booleans, None, lists or mappings"
    )


def decode(value: Any) -> Any:
    """What `encode` was given; tuples have become lists."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if isinstance(value, dict):
        return (
            float(value[_NUMBER])
            if value.keys() == {_NUMBER}
            else {key: decode(value[key]) for key in value}
        )
    return value


def _key(key: Any, name: str) -> str:
    if not isinstance(key, str) or key == _NUMBER:
        raise CheckpointError(
            f"{name} has the key {key!r}; expected a string other than {_NUMBER!r}"
        )
    return key
