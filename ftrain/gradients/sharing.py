"""Sharing: what every device of a mesh would compute again, because all of them hold it, each computes a part of."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_LEAST = 1 << 16  # elements that are worth it
_mesh: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


@contextmanager
def shared_over(mesh: Mesh | None) -> Iterator[None]:
    """While a step is traced here, all devices of `mesh` hold the whole of what they compute with."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def share(leaf: jax.Array) -> jax.Array:
    """The elements of an array that all devices hold, in any shape, for a sum over them: each looks at its own part."""
    mesh = _mesh.get()
    if mesh is None or leaf.size < _LEAST or leaf.size % mesh.size:
        return leaf
    return jax.lax.with_sharding_constraint(
        leaf.reshape(-1), NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    )
