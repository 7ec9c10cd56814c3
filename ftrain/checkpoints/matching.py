"""Matching: how the leaves of a checkpoint differ from those that are wanted."""

from collections.abc import Mapping
from typing import Any

SHOWN = 8  # differences listed before the rest is only counted


def describe_differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One phrase for each leaf that is missing, unexpected, or of another shape or dtype."""
    missing = [f"leaf {name} is missing" for name in wanted if name not in found]
    unexpected = [f"leaf {name} is not expected" for name in found if name not in wanted]
    other = [
        f"leaf {name} is {_describe(found[name])}, expected {_describe(wanted[name])}"
        for name in wanted
        if name in found and _describe(found[name]) != _describe(wanted[name])
    ]
    phrases = missing + unexpected + other
    if len(phrases) > SHOWN:
        return [*phrases[:SHOWN], f"and {len(phrases) - SHOWN} more"]
    return phrases


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
