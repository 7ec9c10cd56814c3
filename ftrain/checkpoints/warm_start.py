"""Warm starts: leaves of a tree that begin with what a checkpoint has, under the same names or others."""

import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ftrain.checkpoints.assigning import SUGGESTED, Readable, as_array, assign, near
from ftrain.checkpoints.casting import kind_of
from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.reader import open_reader
from ftrain.checkpoints.vocabulary import VocabInfo, Vocabularies, read_vocabularies
from ftrain.packed import unpack
from ftrain.tree import Tree, named_leaves

Checkpoint = str | Path | Readable


def init_from_checkpoint(
    params: Tree,
    checkpoint: Checkpoint,
    assignment_map: Mapping[str, str] | Sequence[tuple[str, str]],
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
    return assign(params, reader, sources, "assignment_map may name only what both have")


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
    patterns = {
        name: _compile(name, "var_name_to_prev_var_name") for name in renames if name not in leaves
    }
    found = {name: _old_name(name, renames, patterns) for name in chosen}
    _check_used(
        "var_name_to_prev_var_name", renames, [entry for _, entry in found.values()], leaves
    )
    _check_used("var_name_to_vocab_info", infos, chosen, leaves)
    vocabs = {name: _read_vocabularies(name, info) for name, info in infos.items()}
    way_out = "vars_to_warm_start can leave leaves out, var_name_to_prev_var_name rename them"
    return assign(
        params, reader, {name: old for name, (old, _) in found.items()}, way_out, vocabs, key
    )


def _open(checkpoint: Checkpoint) -> Readable:
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
    """The pairs of an assignment map, in an order in which each may replace what those before it said."""
    pairs = list(assignments.items() if isinstance(assignments, Mapping) else assignments)
    targets: dict[str, str] = {}
    for pair in pairs:
        if (
            isinstance(pair, str)
            or len(pair) != 2
            or not all(isinstance(name, str) for name in pair)
        ):
            raise CheckpointError(
                f"assignment_map has {reprlib.repr(pair)}, expected the names of leaves or of scopes"
            )
        source, target = pair
        if source.endswith("/") != target.endswith("/"):
            way_out = "end both in a slash for scopes, neither for leaves"
            raise CheckpointError(
                f"assignment_map has {source!r} for {target!r}, where only one is a scope; {way_out}"
            )
        if targets.setdefault(target, source) != source:
            raise CheckpointError(
                f"assignment_map has {targets[target]!r} and {source!r} for {target!r}; keep one"
            )
    return sorted(pairs, key=lambda pair: len(_prefix(pair[1])))


def _expand(source: str, target: str, leaves: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoint's name of each leaf that an entry of an assignment map is about."""
    if not target.endswith("/"):
        _check_loadable(target, leaves, "assignment_map")
        return {target: source}
    inside = [name for name in _loadable(leaves) if name.startswith(_prefix(target))]
    if not inside:
        scopes = {name[: slash.end()] for name in leaves for slash in re.finditer("/", name)}
        raise CheckpointError(
            f"assignment_map: the tree has no leaf to load under {target}{near(target, scopes)}"
        )
    # A tree that is one array has a leaf without a name; then the scope, less its slash, is all of the name.
    return {
        name: (_prefix(source) + name.removeprefix(_prefix(target))).removesuffix("/")
        for name in inside
    }


def _prefix(scope: str) -> str:
    return "" if scope == "/" else scope


def _choose(
    patterns: str | Sequence[str] | None, infos: Mapping[str, VocabInfo], leaves: Mapping[str, Any]
) -> list[str]:
    """The leaves to warm-start."""
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
        there = ", ".join([*loadable[:SUGGESTED], "..."] if len(loadable) > SUGGESTED else loadable)
        raise CheckpointError(
            f"vars_to_warm_start: no leaf matches {', '.join(idle) or '[]'}; there are {there}"
        )
    return [name for name in loadable if any(name in names for names in matched.values())]


def _old_name(
    name: str, renames: Mapping[str, str], patterns: Mapping[str, re.Pattern[str]]
) -> tuple[str, str | None]:
    """What the checkpoint calls a leaf, and the entry that says so."""
    if name in renames:
        return renames[name], name
    for entry, pattern in patterns.items():
        if match := pattern.fullmatch(name):
            try:
                return match.expand(renames[entry]), entry
            except (
                re.error,
                IndexError,
            ) as error:  # IndexError: a group by a name that there is not
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
            f"{argument} has {pattern!r}, which is no regular expression: {error}"
        ) from None


def _check_used(
    argument: str, given: Mapping[str, Any], used: Collection[str | None], leaves: Collection[str]
) -> None:
    """An entry for a leaf that is not loaded is a slip: its name, or the choice of leaves, is not what was meant."""
    idle = [name for name in given if name not in used]
    if idle:
        why = (
            "is not among vars_to_warm_start"
            if idle[0] in leaves
            else f"is no leaf to load{near(idle[0], leaves)}"
        )
        raise CheckpointError(f"{argument}: {', '.join(idle)} were not used; {idle[0]} {why}")


def _read_vocabularies(name: str, info: VocabInfo) -> Vocabularies:
    try:
        return read_vocabularies(info)
    except CheckpointError as error:
        raise CheckpointError(f"leaf {name}: {error}") from error


def _loadable(leaves: Mapping[str, Any]) -> list[str]:
    return [name for name, leaf in leaves.items() if kind_of(as_array(leaf).dtype)]


def _check_loadable(name: str, leaves: Mapping[str, Any], argument: str) -> None:
    if name not in leaves:
        raise CheckpointError(f"{argument}: the tree has no leaf {name}{near(name, leaves)}")
    dtype = as_array(leaves[name]).dtype
    if not kind_of(dtype):
        raise CheckpointError(
            f"{argument}: leaf {name} is {dtype}; only numbers are loaded, and no random keys"
        )
