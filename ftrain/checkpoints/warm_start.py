"""Warm starts: initialize leaves of a tree from a checkpoint, under the same or other names."""

import re
import reprlib
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.matching import cast, kind_of
from ftrain.checkpoints.reader import open_reader
from ftrain.checkpoints.restore import put
from ftrain.checkpoints.vocabulary import (
    VocabInfo,
    Vocabularies,
    describe_misfit,
    read_vocabularies,
    transfer,
)
from ftrain.packed import pack_like, unpack
from ftrain.suggestions import nearest
from ftrain.tree import Tree, leaves_with_names, named_leaves

_SUGGESTED = 8  # missing names to find similar ones for: it is slow among many names


class VariableLike(Protocol):
    """The shape and dtype of a variable."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        ...


class ReaderLike(Protocol):
    """A checkpoint of any format; messages name it by its `str`, the path."""

    @property
    def variables(self) -> Mapping[str, VariableLike]:
        """The shape and dtype of each variable."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return the values of a variable."""
        ...


Checkpoint = str | Path | ReaderLike


def init_from_checkpoint(
    params: Tree,
    checkpoint: Checkpoint,
    assignment_map: Mapping[str, str] | Sequence[tuple[str, str]],
) -> Tree:
    """Return `params` with leaves read from a checkpoint: {checkpoint name: name in the tree}.

        mapping = {"encoder/": "backbone/", "logits/w": "head/kernel"}
        init_from_checkpoint(params, "old/model.ckpt", mapping)

    Names that end in a slash are scopes: every leaf under the tree's scope is read from the same
    name under the checkpoint's; "/" is the root. If several entries apply to a leaf, its own name
    wins, then its innermost scope. A list of pairs may read one name of the checkpoint into several
    leaves.

    A leaf keeps its dtype and its device placement. Scopes skip random keys and other non-numbers.
    """
    reader = _open(checkpoint)
    leaves = named_leaves(unpack(params))
    sources: dict[str, str] = {}
    for source, target in _outermost_first(assignment_map):
        sources |= _expand(source, target, leaves)
    return _assign(params, reader, sources, "assignment_map may name only what both have")


def warm_start(
    params: Tree,
    checkpoint: Checkpoint,
    *,
    vars_to_warm_start: str | Sequence[str] | None = ".*",
    var_name_to_vocab_info: Mapping[str, VocabInfo] | None = None,
    var_name_to_prev_var_name: Mapping[str, str] | None = None,
    key: jax.Array | None = None,
) -> Tree:
    r"""Return `params` with leaves read from a checkpoint, and rows moved to a new vocabulary.

        renames = {"(.*)": r"params/\1"}
        warm_start(params, "runs/old", var_name_to_prev_var_name=renames)

    Args:
      vars_to_warm_start: regular expressions for the beginning of a name, as for `re.match`; each
        must match a leaf. None selects only the leaves that have a VocabInfo.
      var_name_to_prev_var_name: the name of a leaf in the checkpoint, if it differs. A key that is
        not the name of a leaf is a regular expression for whole names, whose groups the value may
        use.
      key: for the backup initializers; every leaf folds its name into it.
    """
    reader = _open(checkpoint)
    leaves = named_leaves(unpack(params))
    infos = var_name_to_vocab_info or {}
    renames = var_name_to_prev_var_name or {}
    chosen = _choose(vars_to_warm_start, infos, leaves)
    patterns = {
        name: _compile(name, "var_name_to_prev_var_name") for name in renames if name not in leaves
    }
    found = {name: _old_name(name, renames, patterns) for name in chosen}
    _check_used(
        "var_name_to_prev_var_name", renames, [entry for _, entry in found.values()], leaves
    )
    _check_used("var_name_to_vocab_info", infos, chosen, leaves)
    vocabs = {name: read_words(name, info) for name, info in infos.items()}
    way_out = "vars_to_warm_start can leave leaves out, var_name_to_prev_var_name rename them"
    return _assign(
        params, reader, {name: old for name, (old, _) in found.items()}, way_out, vocabs, key
    )


def _open(checkpoint: Checkpoint) -> ReaderLike:
    if isinstance(checkpoint, (str, Path)):
        return open_reader(checkpoint)
    if not hasattr(checkpoint, "variables") or not hasattr(checkpoint, "read"):
        got = type(checkpoint).__name__
        raise CheckpointError(
            f"checkpoint must be a path, or a reader with `variables` and `read`, got a {got}"
        )
    return checkpoint


def _outermost_first(
    assignments: Mapping[str, str] | Sequence[tuple[str, str]],
) -> list[tuple[str, str]]:
    """Return the pairs of an assignment map, sorted so that later ones override earlier ones."""
    pairs = list(assignments.items() if isinstance(assignments, Mapping) else assignments)
    targets: dict[str, str] = {}
    for pair in pairs:
        if (
            isinstance(pair, str)
            or len(pair) != 2
            or not all(isinstance(name, str) for name in pair)
        ):
            raise CheckpointError(
                f"assignment_map has {reprlib.repr(pair)}; "
                "expected the names of two leaves or of two scopes"
            )
        source, target = pair
        if source.endswith("/") != target.endswith("/"):
            way_out = "end both in a slash for scopes, neither for leaves"
            raise CheckpointError(
                f"assignment_map has {source!r} for {target!r}, but only one is a scope; {way_out}"
            )
        if targets.setdefault(target, source) != source:
            raise CheckpointError(
                f"assignment_map has {targets[target]!r} and {source!r} for {target!r}; keep one"
            )
    return sorted(pairs, key=lambda pair: len(_prefix(pair[1])))


def _expand(source: str, target: str, leaves: Mapping[str, Any]) -> dict[str, str]:
    """Return the leaves that an entry applies to, with their checkpoint names."""
    if not target.endswith("/"):
        _check_loadable(target, leaves, "assignment_map")
        return {target: source}
    inside = [name for name in _loadable(leaves) if name.startswith(_prefix(target))]
    if not inside:
        scopes = {name[: slash.end()] for name in leaves for slash in re.finditer("/", name)}
        hint = suggest_names(target, scopes)
        raise CheckpointError(f"assignment_map: the tree has no leaf to load under {target}{hint}")
    # In a tree that is one array the leaf has no name; then the scope is all of the source's name.
    return {
        name: (_prefix(source) + name.removeprefix(_prefix(target))).removesuffix("/")
        for name in inside
    }


def _prefix(scope: str) -> str:
    return "" if scope == "/" else scope


def _choose(
    patterns: str | Sequence[str] | None, infos: Mapping[str, VocabInfo], leaves: Mapping[str, Any]
) -> list[str]:
    """Return the names of the leaves to warm-start."""
    loadable = _loadable(leaves)
    if patterns is None:
        if not infos:
            raise CheckpointError(
                "vars_to_warm_start is None, and there is no VocabInfo: nothing would be loaded"
            )
        return [name for name in loadable if name in infos]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for name in leaves.keys() & set(patterns):
        _check_loadable(name, leaves, "vars_to_warm_start")
    matched = {
        text: set(filter(_compile(text, "vars_to_warm_start").match, loadable)) for text in patterns
    }
    idle = [repr(text) for text, names in matched.items() if not names]
    if idle or not matched:
        there = ", ".join(
            [*loadable[:_SUGGESTED], "..."] if len(loadable) > _SUGGESTED else loadable
        )
        raise CheckpointError(
            f"vars_to_warm_start: no leaf matches {', '.join(idle) or '[]'}; there are {there}"
        )
    return [name for name in loadable if any(name in names for names in matched.values())]


def _old_name(
    name: str, renames: Mapping[str, str], patterns: Mapping[str, re.Pattern[str]]
) -> tuple[str, str | None]:
    """Return the name of a leaf in the checkpoint, and the entry that renames it."""
    if name in renames:
        return renames[name], name
    for entry, pattern in patterns.items():
        if match := pattern.fullmatch(name):
            try:
                return match.expand(renames[entry]), entry
            except (re.error, IndexError) as error:  # IndexError: unknown group name
                template = f"{entry!r}: {renames[entry]!r}"
                raise CheckpointError(
                    f"var_name_to_prev_var_name has {template}: {error}"
                ) from None
    return name, None


def _compile(pattern: str, argument: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"{argument} has {pattern!r}, which is not a regular expression: {error}"
        ) from None


def _check_used(
    argument: str, given: Mapping[str, Any], used: Collection[str | None], leaves: Collection[str]
) -> None:
    """Raise an error for an entry of a leaf that is not loaded: it is a mistake."""
    idle = [name for name in given if name not in used]
    if idle:
        why = (
            "is not among vars_to_warm_start"
            if idle[0] in leaves
            else f"is not a leaf to load{suggest_names(idle[0], leaves)}"
        )
        raise CheckpointError(f"{argument}: {', '.join(idle)} were not used; {idle[0]} {why}")


def read_words(name: str, info: VocabInfo) -> Vocabularies:
    """Return the vocabularies of a leaf; errors name it."""
    try:
        return read_vocabularies(info)
    except CheckpointError as error:
        raise CheckpointError(f"leaf {name}: {error}") from error


def _loadable(leaves: Mapping[str, Any]) -> list[str]:
    return [name for name, leaf in leaves.items() if kind_of(as_array(leaf).dtype)]


def _check_loadable(name: str, leaves: Mapping[str, Any], argument: str) -> None:
    if name not in leaves:
        raise CheckpointError(
            f"{argument}: the tree has no leaf {name}{suggest_names(name, leaves)}"
        )
    dtype = as_array(leaves[name]).dtype
    if not kind_of(dtype):
        raise CheckpointError(
            f"{argument}: leaf {name} is {dtype}, expected a dtype of numbers; leave it out"
        )


def _assign(
    params: Tree,
    reader: ReaderLike,
    sources: Mapping[str, str],
    way_out: str,
    vocabs: Mapping[str, Vocabularies] | None = None,
    key: jax.Array | None = None,
) -> Tree:
    """Return `params` with the leaves in `sources` read from the checkpoint.

    `sources` maps names of leaves to names in the checkpoint. Nothing is read unless all of them
    fit.
    """
    tree = unpack(params)
    vocabs = vocabs or {}
    named = leaves_with_names(tree)
    chosen = [(name, leaf) for name, leaf in named if name in sources]
    misfits = _describe_misfits(chosen, reader.variables, sources, vocabs)
    if misfits:
        raise CheckpointError(f"{reader} does not fit: {'; '.join(misfits)}\n{way_out}")

    def load(name: str, leaf: Any) -> Any:
        array = as_array(leaf)
        value = reader.read(sources[name])
        if name not in vocabs:
            # A copy, because jax on a CPU may keep using the memory that it is given.
            return place_like(cast(value, array.dtype, name, copy=True), leaf)
        base_key = jax.random.key(0) if key is None else key
        own_key = jax.random.fold_in(base_key, zlib.crc32(name.encode()))
        old = cast(value, array.dtype, name)
        return place_like(transfer(vocabs[name], old, array.shape, own_key), leaf)

    leaves = [load(name, leaf) if name in sources else leaf for name, leaf in named]
    return pack_like(jax.tree.structure(tree).unflatten(leaves), params)


def _describe_misfits(
    chosen: Sequence[tuple[str, Any]],
    variables: Mapping[str, VariableLike],
    sources: Mapping[str, str],
    vocabs: Mapping[str, Vocabularies],
) -> list[str]:
    """Return one phrase for each leaf that is missing, or has another shape or kind of dtype."""
    missing: list[str] = []
    misfits: list[str] = []
    for name, leaf in chosen:
        array = as_array(leaf)
        source = sources[name]
        label = f"leaf {name}" if source == name else f"leaf {name} (there {source})"
        if source not in variables:
            hint = suggest_names(source, variables) if len(missing) < _SUGGESTED else ""
            missing.append(f"{label} is missing{hint}")
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
            misfits.append(f"{label} {misfit}")
    return missing + misfits


def as_array(leaf: Any) -> Any:
    """Return a leaf that may be a plain number as something with a shape and a dtype."""
    is_array = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))
    return leaf if is_array else np.asarray(leaf)


def place_like(value: np.ndarray, leaf: Any) -> Any:
    """Return a value with the type and the device placement of a leaf."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        # An uncommitted array stays uncommitted, so that jax may move it in a computation.
        is_free = isinstance(leaf, jax.Array) and not leaf.committed
        return put(value, None if is_free else leaf.sharding)
    if isinstance(leaf, np.ndarray):
        return value
    return value[()] if isinstance(leaf, np.generic) else value.item()


def suggest_names(name: str, names: Collection[str]) -> str:
    """Return the end of an error message: names that are similar, or any."""
    similar = nearest(name, names, count=3, cutoff=0.4) or sorted(names)[:3]
    return f", nearest are {', '.join(similar)}" if similar else ""
