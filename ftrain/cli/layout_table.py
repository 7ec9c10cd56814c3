"""The layout of a state on a mesh, as a table: how each leaf is split, and what it takes on a device."""

import math
from collections.abc import Mapping
from typing import Any

from ftrain.cli.tables import print_table, show_bytes


def print_layout(state: Any, specs: Any, axes: Mapping[str, int]) -> None:
    """Print a row for each leaf of a state, and a line for all of them."""
    import jax
    from rich.table import Table

    from ftrain.cluster.sharding import leaf_bytes_per_device, leaves_with_rule_names

    table = Table(box=None)
    table.add_column("leaf", overflow="fold")
    for column in ("shape", "dtype", "split over"):
        table.add_column(column)
    table.add_column("a device", justify="right", no_wrap=True)
    leaves, parts = leaves_with_rule_names(state), jax.tree.leaves(specs)
    for (name, leaf), spec, size in zip(
        leaves, parts, leaf_bytes_per_device(state, specs, axes), strict=True
    ):
        table.add_row(
            name,
            f"{list(leaf.shape)}",
            f"{leaf.dtype}",
            _show_split(spec, leaf.ndim),
            show_bytes(size),
        )
    print_table(table)
    count = sum(any(spec) for spec in parts)
    print(f"state {show_size(state, specs, axes)}; {count:,} of {len(parts):,} leaves are split")


def show_size(tree: Any, specs: Any, axes: Mapping[str, int]) -> str:
    """What a tree takes in all, and on each device."""
    from ftrain.cluster.sharding import bytes_per_device
    from ftrain.tree import count_bytes

    return f"{show_bytes(count_bytes(tree))}, {show_bytes(bytes_per_device(tree, specs, axes))} a device"


def show_axes(axes: Mapping[str, int], devices: int) -> str:
    """The axes of a mesh, and how many of the devices they leave unused."""
    shown, used = (
        ", ".join(f"{axis} {size}" for axis, size in axes.items()),
        math.prod(axes.values()),
    )
    return f"{shown}; {devices - used} of {devices} devices unused" if used < devices else shown


def _show_split(spec: Any, dimensions: int) -> str:
    """The axes of each dimension, as a rule would say them; nothing for a leaf that is whole on every device."""
    from ftrain.cluster.sharding import entries

    split = ["+".join(entry) or "-" for entry in entries(spec)]
    return ", ".join(split + ["-"] * (dimensions - len(split))) if split else ""
