"""Warm starts: leaves of a tree that begin with what a checkpoint has, under the same names or others."""

import difflib
import re
import reprlib
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.vocabulary import VocabInfo, Vocabularies, describe_misfit, read_vocabularies, transfer
from ftrain.packed import pack_like, unpack
from ftrain.tree import Tree, leaves_with_names, named_leaves

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)  # a value is cast within its kind only
_SUGGESTED = 8  # missing names for which near ones are looked up: among many names that takes its time


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


Checkpoint = str | Path | Readable


def init_from_checkpoint(
    params: Tree, checkpoint: Checkpoint, assignment_map: Mapping[str, str] | Sequence[tuple[str, str]]
) -> Tree:
    """`params` with the leaves that the map names read from a checkpoint: {name in the checkpoint: name in the tree}.

        init_from_checkpoint(params, "old/model.ckpt", {"encoder/": "backbone/", "logits/w": "head/kernel"})

    Two names that end in a slash are scopes: every leaf under the tree's is read from the same name under the
    checkpoint's; "/" is the root. A leaf that several entries are about is read as the one says that names it, or that
    names its innermost scope. A list of pairs may read one name of the checkpoint into several leaves.

    A leaf keeps its dtype, and its place on the devices. Scopes pass over random keys and what else is not numbers.
    """
    reader = _open(checkpoint)
    leaves = named_leaves(unpack(params))
    sources: dict[str, str] = {}
    for source, target in _outermost_first(assignment_map):
        sources |= _expand(source, target, leaves)
    return _load(params, reader, sources, "assignment_map may name only what both have")


def warm_start(
    params: Tree,
    checkpoint: Checkpoint,
    *,
    vars_to_warm_start: str | Sequence[str] | None = ".*",
    var_name_to_vocab_info: Mapping[str, VocabInfo] | None = None,
    var_name_to_prev_var_name: Mapping[str, str] | None = None,
    key: jax.Array | None = None,
) -> Tree:
    r"""`params` with the leaves whose names match read from a checkpoint, and rows moved to where their words are.

        warm_start(params, "runs/old", vars_to_warm_start="dense", var_name_to_prev_var_name={"(.*)": r"params/\1"})

    vars_to_warm_start: regular expressions for how a name begins, as `re.match` takes them; each must match a leaf.
        None is for the leaves alone that have a VocabInfo.
    var_name_to_prev_var_name: what a leaf is called in the checkpoint, if not the same. A key that is no leaf's name is
        a regular expression for whole names, and what it maps to may refer to its groups.
    key: for the backup initializers; every leaf draws its own from it.
    """
    reader = _open(checkpoint)
    leaves = named_leaves(unpack(params))
    infos, renames = var_name_to_vocab_info or {}, var_name_to_prev_var_name or {}
    chosen = _choose(vars_to_warm_start, infos, leaves)
    patterns = {name: _compile(name, "var_name_to_prev_var_name") for name in renames if name not in leaves}
    found = {name: _old_name(name, renames, patterns) for name in chosen}
    _check_used("var_name_to_prev_var_name", renames, [entry for _, entry in found.values()], leaves)
    _check_used("var_name_to_vocab_info", infos, chosen, leaves)
    vocabs = {name: _read_vocabularies(name, info) for name, info in infos.items()}
    way_out = "vars_to_warm_start can leave leaves out, var_name_to_prev_var_name rename them"
    return _load(params, reader, {name: old for name, (old, _) in found.items()}, way_out, vocabs, key)


def _open(checkpoint: Checkpoint) -> Readable:
    if not isinstance(checkpoint, (str, Path)):
        return checkpoint
    from ftrain.checkpoints.reader import open_reader  # heavy: it knows every format

    return open_reader(checkpoint)


def _outermost_first(assignments: Mapping[str, str] | Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs of an assignment map, in an order in which each may replace what those before it said."""
    pairs = list(assignments.items() if isinstance(assignments, Mapping) else assignments)
    targets: dict[str, str] = {}
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
            raise CheckpointError(f"assignment_map has {reprlib.repr(pair)}, expected the names of leaves or of scopes")
        source, target = pair
        if source.endswith("/") != target.endswith("/"):
            way_out = "end both in a slash for scopes, neither for leaves"
            raise CheckpointError(f"assignment_map has {source!r} for {target!r}, where only one is a scope; {way_out}")
        if targets.setdefault(target, source) != source:
            raise CheckpointError(f"assignment_map has {targets[target]!r} and {source!r} for {target!r}; keep one")
    return sorted(pairs, key=lambda pair: len(_prefix(pair[1])))


def _expand(source: str, target: str, leaves: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoint's name of each leaf that an entry of an assignment map is about."""
    if not target.endswith("/"):
        _check_loadable(target, leaves, "assignment_map")
        return {target: source}
    inside = [name for name in _loadable(leaves) if name.startswith(_prefix(target))]
    if not inside:
        scopes = {name[: slash.end()] for name in leaves for slash in re.finditer("/", name)}
        raise CheckpointError(f"assignment_map: the tree has no leaf to load under {target}{_near(target, scopes)}")
    # A tree that is one array has a leaf without a name; then the scope, less its slash, is all of the name.
    return {name: (_prefix(source) + name.removeprefix(_prefix(target))).removesuffix("/") for name in inside}


def _prefix(scope: str) -> str:
    return "" if scope == "/" else scope


def _choose(
    patterns: str | Sequence[str] | None, infos: Mapping[str, VocabInfo], leaves: Mapping[str, Any]
) -> list[str]:
    """The leaves to warm-start."""
    loadable = _loadable(leaves)
    if patterns is None:
        if not infos:
            raise CheckpointError("vars_to_warm_start is None, and there is no VocabInfo: nothing would be loaded")
        return [name for name in loadable if name in infos]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for name in leaves.keys() & set(patterns):
        _check_loadable(name, leaves, "vars_to_warm_start")
    matched = {text: set(filter(_compile(text, "vars_to_warm_start").match, loadable)) for text in patterns}
    idle = [repr(text) for text, names in matched.items() if not names]
    if idle or not matched:
        there = ", ".join([*loadable[:_SUGGESTED], "..."] if len(loadable) > _SUGGESTED else loadable)
        raise CheckpointError(f"vars_to_warm_start: no leaf matches {', '.join(idle) or '[]'}; there are {there}")
    return [name for name in loadable if any(name in names for names in matched.values())]


def _old_name(name: str, renames: Mapping[str, str], patterns: Mapping[str, re.Pattern[str]]) -> tuple[str, str | None]:
    """What the checkpoint calls a leaf, and the entry that says so."""
    if name in renames:
        return renames[name], name
    for entry, pattern in patterns.items():
        if match := pattern.fullmatch(name):
            try:
                return match.expand(renames[entry]), entry
            except (re.error, IndexError) as error:  # IndexError: a group by a name that there is not
                template = f"{entry!r}: {renames[entry]!r}"
                raise CheckpointError(f"var_name_to_prev_var_name has {template}: {error}") from None
    return name, None


def _compile(pattern: str, argument: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{argument} has {pattern!r}, which is no regular expression: {error}") from None


def _check_used(argument: str, given: Mapping[str, Any], used: Collection[str | None], leaves: Collection[str]) -> None:
    """An entry for a leaf that is not loaded is a slip: its name, or the choice of leaves, is not what was meant."""
    idle = [name for name in given if name not in used]
    if idle:
        why = "is not among vars_to_warm_start" if idle[0] in leaves else f"is no leaf to load{_near(idle[0], leaves)}"
        raise CheckpointError(f"{argument}: {', '.join(idle)} were not used; {idle[0]} {why}")


def _read_vocabularies(name: str, info: VocabInfo) -> Vocabularies:
    try:
        return read_vocabularies(info)
    except CheckpointError as error:
        raise CheckpointError(f"leaf {name}: {error}") from error


def _load(
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
        array, source = _as_array(leaf), sources[name]
        if name not in vocabs:
            return _place(_cast(reader.read(source), array.dtype, name), leaf)
        own_key = jax.random.fold_in(jax.random.key(0) if key is None else key, zlib.crc32(name.encode()))
        old = _cast(reader.read(source), array.dtype, name, copy=False)
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
        array, source = _as_array(leaf), sources[name]
        called = f"leaf {name}" if source == name else f"leaf {name} (there {source})"
        if source not in variables:
            missing.append(f"{called} is missing" + (_near(source, variables) if len(missing) < _SUGGESTED else ""))
            continue
        found = variables[source]
        misfit = None
        if name in vocabs:
            misfit = describe_misfit(vocabs[name], tuple(found.shape), array.shape)
        if _kind(found.dtype) != _kind(array.dtype) or (name not in vocabs and tuple(found.shape) != array.shape):
            misfit = f"is {found.dtype}{list(found.shape)}, expected {array.dtype}{list(array.shape)}"
        if misfit:
            misfits.append(f"{called} {misfit}")
    return missing + misfits


def _as_array(leaf: Any) -> Any:
    """Something with the shape and the dtype of a leaf, also of a plain number."""
    is_array = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))
    return leaf if is_array else np.asarray(leaf)


def _kind(dtype: Any) -> type | None:
    """Booleans, integers, reals or complex numbers; None for keys, text and objects."""
    try:
        return next((kind for kind in _KINDS if jnp.issubdtype(np.dtype(dtype), kind)), None)
    except TypeError:  # not a dtype of numpy's
        return None


def _loadable(leaves: Mapping[str, Any]) -> list[str]:
    return [name for name, leaf in leaves.items() if _kind(_as_array(leaf).dtype)]


def _check_loadable(name: str, leaves: Mapping[str, Any], argument: str) -> None:
    if name not in leaves:
        raise CheckpointError(f"{argument}: the tree has no leaf {name}{_near(name, leaves)}")
    dtype = _as_array(leaves[name]).dtype
    if not _kind(dtype):
        raise CheckpointError(f"{argument}: leaf {name} is {dtype}; only numbers are loaded, and no random keys")


def _cast(value: np.ndarray, dtype: np.dtype, name: str, *, copy: bool = True) -> np.ndarray:
    """The value in a leaf's dtype. A copy, because jax on a CPU may go on using the memory that it is given."""
    with np.errstate(over="ignore", invalid="ignore"):
        cast = value.astype(dtype, copy=copy)
    if cast.dtype == value.dtype:
        return cast
    is_lost = cast != value if _kind(dtype) is np.integer else np.isfinite(cast) != np.isfinite(value)
    if np.any(is_lost):
        raise CheckpointError(f"leaf {name} is {value.dtype} in the checkpoint, with values too large for {dtype}")
    return cast


def _place(value: np.ndarray, leaf: Any) -> Any:
    """The value where the leaf is, and of its type."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        # What jax has placed by itself it may also move, to meet other arrays of a computation; that stays so.
        is_free = isinstance(leaf, jax.Array) and not leaf.committed
        return jax.device_put(value, None if is_free else leaf.sharding)
    if isinstance(leaf, np.ndarray):
        return value
    return value[()] if isinstance(leaf, np.generic) else value.item()


def _near(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or sorted(names)[:3]
    return f", nearest are {', '.join(near)}" if near else ""
