"""Assigning: leaves of a tree replaced by variables of a checkpoint, if all of them fit."""

import difflib
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from ftrain.checkpoints.casting import cast, kind_of
from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.vocabulary import Vocabularies, describe_misfit, transfer
from ftrain.packed import pack_like, unpack
from ftrain.tree import Tree, leaves_with_names

SUGGESTED = (
    8  # missing names for which near ones are looked up: among many names that takes its time
)


class Variable(Protocol):
    """What a checkpoint tells of an array before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


class Readable(Protocol):
    """A checkpoint of any format. Messages call it by its `str`: its path."""

    @property
    def variables(self) -> Mapping[str, Variable]: ...
    def read(self, name: str) -> np.ndarray: ...


def assign(
    params: Tree,
    reader: Readable,
    sources: Mapping[str, str],
    way_out: str,
    vocabs: Mapping[str, Vocabularies] | None = None,
    key: jax.Array | None = None,
) -> Tree:
    """`params` with each leaf in `sources` read from its name there; nothing is read unless all of it fits."""
    tree, vocabs = unpack(params), vocabs or {}
    named = leaves_with_names(tree)
    wanted = [(name, leaf) for name, leaf in named if name in sources]
    misfits = _describe_misfits(wanted, reader.variables, sources, vocabs)
    if misfits:
        raise CheckpointError(f"{reader} does not fit: {'; '.join(misfits)}\n{way_out}")

    def load(name: str, leaf: Any) -> Any:
        array, source = as_array(leaf), sources[name]
        if name not in vocabs:
            # A copy, because jax on a CPU may go on using the memory that it is given.
            return _place(cast(reader.read(source), array.dtype, name, copy=True), leaf)
        own_key = jax.random.fold_in(
            jax.random.key(0) if key is None else key, zlib.crc32(name.encode())
        )
        old = cast(reader.read(source), array.dtype, name)
        return _place(transfer(vocabs[name], old, array.shape, own_key), leaf)

    leaves = [load(name, leaf) if name in sources else leaf for name, leaf in named]
    return pack_like(jax.tree.structure(tree).unflatten(leaves), params)


def _describe_misfits(
    wanted: Sequence[tuple[str, Any]],
    variables: Mapping[str, Variable],
    sources: Mapping[str, str],
    vocabs: Mapping[str, Vocabularies],
) -> list[str]:
    """One phrase for each leaf that the checkpoint has not, or has in another shape or kind."""
    missing, misfits = [], []
    for name, leaf in wanted:
        array, source = as_array(leaf), sources[name]
        called = f"leaf {name}" if source == name else f"leaf {name} (there {source})"
        if source not in variables:
            missing.append(
                f"{called} is missing"
                + (near(source, variables) if len(missing) < SUGGESTED else "")
            )
            continue
        found = variables[source]
        misfit = None
        if name in vocabs:
            misfit = describe_misfit(vocabs[name], tuple(found.shape), array.shape)
        if kind_of(found.dtype) != kind_of(array.dtype) or (
            name not in vocabs and tuple(found.shape) != array.shape
        ):
            misfit = (
                f"is {found.dtype}{list(found.shape)}, expected {array.dtype}{list(array.shape)}"
            )
        if misfit:
            misfits.append(f"{called} {misfit}")
    return missing + misfits


def as_array(leaf: Any) -> Any:
    """Something with the shape and the dtype of a leaf, also of a plain number."""
    is_array = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))
    return leaf if is_array else np.asarray(leaf)


def _place(value: np.ndarray, leaf: Any) -> Any:
    """The value where the leaf is, and of its type."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        # What jax has placed by itself it may also move, to meet other arrays of a computation; that stays so.
        is_free = isinstance(leaf, jax.Array) and not leaf.committed
        return jax.device_put(value, None if is_free else leaf.sharding)
    if isinstance(leaf, np.ndarray):
        return value
    return value[()] if isinstance(leaf, np.generic) else value.item()


def near(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or sorted(names)[:3]
    return f", nearest are {', '.join(near)}" if near else ""
