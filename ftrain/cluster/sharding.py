"""Sharding: how a state is split over a mesh, by ordered rules from leaf names to axes."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftrain.cluster.mesh import FSDP
from ftrain.packed import Packed, is_packed
from ftrain.suggestions import nearest
from ftrain.tree import Tree, leaves_with_names

OPTIMIZER_LEAVES = ("opt_state/", "averages/")  # how the names of the optimizer's leaves begin
_KEYS = {"leaf", "axes"}
Leaf = jax.Array | jax.ShapeDtypeStruct | np.ndarray


class _Rule(NamedTuple):
    leaf: re.Pattern[str]
    axes: tuple[tuple[str, ...], ...]  # for each dimension, the axes that it is split over

    def matches(self, name: str) -> bool:
        """True if the rule is for the leaf of this name."""
        return any(self.leaf.fullmatch(name, start) for start in _starts(name))


class Sharding:
    """Splits the leaves of a state over the axes of a mesh.

        sharding = Sharding([{"leaf": "mlp_in", "axes": ["fsdp", "model"]}])
        state = jax.device_put(state, sharding.shardings(state, make_mesh(fsdp=4, model=2)))

    Leaves of at least `min_size` elements are split over the axis fsdp, along their largest
    dimension that it divides. All others are replicated on every device. Random keys are never
    split.

    Args:
      rules: exceptions, such as `{"leaf": "dense/kernel", "axes": ["", "model"]}`. `leaf` is a
        regular expression for the whole name, or for its end after a slash: this one matches
        params/dense/kernel, its optimizer slots and its average; ^ matches the beginning of the
        whole name. `axes` has an entry for each dimension, up to the last one that is split: "" for
        not split, an axis, or several, "fsdp+model". The first rule that matches a leaf wins.
      zero1: replicate the parameters, and split only the leaves of the optimizer.
      min_size: elements from which a leaf is split without a rule.
    """

    def __init__(
        self, rules: Sequence[dict[str, Any]] = (), *, zero1: bool = False, min_size: int = 65_536
    ):
        if min_size < 1:
            raise ValueError(f"min_size must be >= 1 element, got {min_size}")
        self._rules = [_parse(number, rule) for number, rule in enumerate(rules)]
        self.zero1 = zero1
        self.min_size = min_size

    def specs(self, tree: Tree, axes: Mapping[str, int]) -> Tree:
        """Return the PartitionSpec of each leaf, for axes of these sizes; only shapes matter."""
        leaves = leaves_with_rule_names(tree)
        self._check_rules([name for name, leaf in leaves if not _is_key(leaf)])
        return jax.tree.structure(tree).unflatten(
            [self._spec(name, leaf, axes) for name, leaf in leaves]
        )

    def shardings(self, tree: Tree, mesh: Mesh) -> Tree:
        """Return the NamedSharding of each leaf: for `jax.device_put`, and for `jax.jit`."""
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.specs(tree, mesh.shape))

    def undivided(self, tree: Tree, axes: Mapping[str, int]) -> list[str]:
        """Describe each large leaf without a rule that the axis fsdp cannot split evenly."""
        return [
            _describe_undivided(name, leaf, axes[FSDP])
            for name, leaf in leaves_with_rule_names(tree)
            if self._rule(name) is None
            and self._is_split(name, leaf, axes)
            and _longest(leaf, axes[FSDP]) is None
        ]

    def _spec(self, name: str, leaf: Leaf, axes: Mapping[str, int]) -> PartitionSpec:
        rule = None if _is_key(leaf) else self._rule(name)
        if rule is not None:
            _check(rule, name, leaf, axes)
            return _as_spec(rule.axes, axes)
        dimension = _longest(leaf, axes[FSDP]) if self._is_split(name, leaf, axes) else None
        return PartitionSpec() if dimension is None else PartitionSpec(*[None] * dimension, FSDP)

    def _is_split(self, name: str, leaf: Leaf, axes: Mapping[str, int]) -> bool:
        """True if a leaf without a rule is to be split."""
        is_large = leaf.ndim > 0 and leaf.size >= self.min_size and not _is_key(leaf)
        return (
            is_large
            and axes.get(FSDP, 1) > 1
            and (not self.zero1 or name.startswith(OPTIMIZER_LEAVES))
        )

    def _rule(self, name: str) -> _Rule | None:
        return next((rule for rule in self._rules if rule.matches(name)), None)

    def _check_rules(self, names: Sequence[str]) -> None:
        """Raise ValueError for a rule that matches no leaf: it is a mistake."""
        for rule in self._rules:
            if not any(map(rule.matches, names)):
                raise ValueError(
                    f"the rule for {rule.leaf.pattern!r} matches no leaf{_nearest(rule, names)}"
                )


def leaves_with_rule_names(tree: Tree) -> list[tuple[str, Leaf]]:
    """Return every leaf with the name that rules match.

    An unpacked leaf of a packed tree has its original name; the vectors of a packed tree are named
    packed/float32 and so on.
    """
    named: list[tuple[str, Leaf]] = []
    for name, node in leaves_with_names(tree, is_leaf=is_packed):
        named += _unpacked_names(name, node) if isinstance(node, Packed) else [(name, node)]
    return named


def bytes_per_device(tree: Tree, specs: Tree, axes: Mapping[str, int]) -> int:
    """Return the bytes of a tree on each device, for axes of these sizes."""
    return sum(leaf_bytes_per_device(tree, specs, axes))


def leaf_bytes_per_device(tree: Tree, specs: Tree, axes: Mapping[str, int]) -> list[int]:
    """Return the bytes of each leaf on each device, in the order of the tree."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True)
    return [leaf.size * leaf.dtype.itemsize // _parts(spec, axes) for leaf, spec in pairs]


def entries(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Return the axes that each dimension is split over."""
    return [
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for entry in spec
    ]


def _parts(spec: PartitionSpec, axes: Mapping[str, int]) -> int:
    return math.prod(axes[axis] for entry in entries(spec) for axis in entry)


def _parse(number: int, rule: Any) -> _Rule:
    which = f"rule {number + 1} in rules"  # a config finds its key in this text
    if not isinstance(rule, Mapping) or rule.keys() != _KEYS or not isinstance(rule["leaf"], str):
        raise ValueError(
            f'{which} must be like {{leaf = "dense/kernel", axes = ["", "model"]}}, got {rule!r}'
        )
    leaf = rule["leaf"]
    axes = rule["axes"]
    if not isinstance(axes, (list, tuple)):
        raise ValueError(
            f"axes of {which} must be a list with an entry for each dimension, got {axes!r}"
        )
    try:
        return _Rule(re.compile(leaf), tuple(_parse_entry(which, entry) for entry in axes))
    except re.error as error:
        raise ValueError(
            f"leaf of {which} must be a regular expression, got {leaf!r}: {error}"
        ) from None


def _parse_entry(which: str, entry: Any) -> tuple[str, ...]:
    names = [] if entry in (None, "") else entry.split("+") if isinstance(entry, str) else entry
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(name, str) and name.strip() for name in names
    ):
        raise ValueError(
            f'an entry in axes of {which} must be "", "fsdp" or "fsdp+model", got {entry!r}'
        )
    return tuple(name.strip() for name in names)


def _check(rule: _Rule, name: str, leaf: Leaf, axes: Mapping[str, int]) -> None:
    """Raise ValueError, with a way out, unless a rule fits a leaf."""
    problem = (
        f"the rule for {rule.leaf.pattern!r} does not fit leaf {name} of shape {list(leaf.shape)}"
    )
    other = f"put a rule for this leaf before it: {{leaf = '{re.escape(name)}', axes = []}}"
    used = [axis for entry in rule.axes for axis in entry]
    for axis in used:
        if axis not in axes:
            near = nearest(axis, axes)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(axes)}"
            raise ValueError(f"{problem}: there is no axis {axis!r}; {hint}")
        if used.count(axis) > 1:
            raise ValueError(
                f"{problem}: it names the axis {axis} twice; "
                "a leaf can be split over an axis only once"
            )
    if len(rule.axes) > leaf.ndim:
        raise ValueError(
            f"{problem}: it has entries for {len(rule.axes)} dimensions, the leaf has {leaf.ndim}; "
            f"{other}"
        )
    for dimension, (entry, length) in enumerate(zip(rule.axes, leaf.shape, strict=False)):
        size = math.prod(axes[axis] for axis in entry)
        if length % size:
            over = " x ".join(f"{axis}={axes[axis]}" for axis in entry)
            padded = -(-length // size) * size
            raise ValueError(
                f"{problem}: dimension {dimension}, {length}, does not divide over {over}; "
                f"pad it to {padded}, or {other}"
            )


def _as_spec(rule_axes: Sequence[tuple[str, ...]], axes: Mapping[str, int]) -> PartitionSpec:
    """Return the normal form: without axes of size 1, and without unsplit dimensions at the end."""
    split = [tuple(axis for axis in entry if axes[axis] > 1) for entry in rule_axes]
    while split and not split[-1]:
        split.pop()
    return PartitionSpec(
        *[None if not entry else entry[0] if len(entry) == 1 else entry for entry in split]
    )


def _longest(leaf: Leaf, size: int) -> int | None:
    """Return the largest dimension that `size` divides, the first of equals."""
    fitting = [dimension for dimension, length in enumerate(leaf.shape) if length % size == 0]
    return max(fitting, key=lambda dimension: leaf.shape[dimension], default=None)


def _describe_undivided(name: str, leaf: Leaf, size: int) -> str:
    length = max(leaf.shape)
    smaller = [n for n in range(size - 1, 1, -1) if any(each % n == 0 for each in leaf.shape)]
    other = f", choose {FSDP}={smaller[0]}" if smaller else ""
    return (
        f"{name} of shape {list(leaf.shape)} is replicated on every device, "
        f"as {FSDP}={size} divides none of its dimensions; "
        f"pad {length} to {-(-length // size) * size}{other}, or give it a rule"
    )


def _nearest(rule: _Rule, names: Sequence[str]) -> str:
    ends = dict.fromkeys(name[start:] for name in names for start in _starts(name))
    near = nearest(rule.leaf.pattern, ends, count=3) or list(names[:3])
    return f"; there are {', '.join(near)}" if near else ""


def _starts(name: str) -> Iterator[int]:
    """Yield where a rule may match a name: at its beginning, and after each slash."""
    yield 0
    yield from (slash.end() for slash in re.finditer("/", name))


def _unpacked_names(name: str, packed: Packed) -> list[tuple[str, Leaf]]:
    layout = packed.layout
    prefix = f"{name}/" if name else ""
    own = [
        end
        for end, _ in leaves_with_names(
            layout.structure.unflatten([0] * layout.structure.num_leaves)
        )
    ]
    ends = [*layout.apart(own), *(f"packed/{group}" for group in layout.groups())]
    return [(prefix + end, array) for end, array in zip(ends, packed.arrays, strict=True)]


def _is_key(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
