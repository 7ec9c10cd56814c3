"""The hand-over from a checkpoint to a new run: parameters, model state, and slots if asked for."""

import dataclasses
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ftrain.checkpoints.errors import CheckpointError, LeafMismatchError
from ftrain.checkpoints.matching import Selection, as_patterns, cast, kind_of, list_some, rename_all
from ftrain.checkpoints.reader import CheckpointReader, open_reader
from ftrain.checkpoints.tf_names import (
    AVERAGE,
    GLOBAL_STEP,
    Count,
    as_count,
    find_count,
    parse_slot,
    slot_variables,
    slots_by_state,
)
from ftrain.checkpoints.vocabulary import (
    VocabInfo,
    Vocabularies,
    describe_misfit,
    remap,
    transfer,
)
from ftrain.checkpoints.warm_start import as_array, place_like, read_words, suggest_names
from ftrain.packed import pack_like, unpack
from ftrain.storage import write_text
from ftrain.tree import Tree, leaves_with_names, named_leaves

RECORD = "warm_start.json"  # in the directory of a run: what it was started from
_DEFAULT = ("params(/.*)?", "model_state(/.*)?")  # a tree may be a single array
# Leaves of an optimizer's state that other programs do not have, and that it can do without.
_OPTIONAL = re.compile(r"opt_state/(.*/)?(learning_rate|learning_rates/.*|slots/remainder(/.*)?)")
_SUGGESTED = 8  # missing names to find similar ones for: it is slow among many names
_WAY_OUT = (
    "include and exclude choose leaves of the new state, rename changes names of the checkpoint, "
    "cast=true converts dtypes, vocabularies moves rows to another vocabulary"
)


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Starts a run from a checkpoint: `train(..., warm_start=WarmStart("runs/a/best"))`.

    Only a run without a checkpoint of its own is started this way. By default the parameters and
    the model state are taken; all of them must be in the checkpoint, with their shapes and dtypes.
    A leaf is looked for under its name, such as params/dense/kernel; then without `params/`, also
    with dots for slashes, as PyTorch writes names; and under TensorFlow 1's names for slots,
    averages and the global step.

    As the `init_fn` of a `Scaffold` it works on any TrainState. `train` and configs also initialize
    the optimizer again, from the new parameters.

    Args:
      checkpoint: a run (its latest checkpoint), RUN/best, RUN/500, the prefix of a TensorFlow
        checkpoint, a .safetensors or .npz file, or a directory of sharded safetensors.
      include: regular expressions for whole names of leaves of the state; `.*` takes everything:
        slots, counts, averages and the step too. Random keys are never taken.
      exclude: leaves that keep their initial values.
      rename: from regular expressions to replacements: changes each name of the checkpoint by the
        first expression that it contains.
      cast: whether numbers may change their dtype, such as float32 to bfloat16.
      use_averages: take the moving averages of parameters, where there are any.
      vocabularies: for tables, by the names of their leaves. Their slots are moved likewise.
      betas: of the Adam that wrote a TensorFlow checkpoint. Its count of updates is derived from
        beta1_power or beta2_power, else it is the global step.
    """

    checkpoint: str | Path
    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cast: bool = False
    use_averages: bool = False
    vocabularies: Mapping[str, VocabInfo] = dataclasses.field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self):
        self.selection()
        if len(self.betas) != 2 or not all(0 < beta < 1 for beta in self.betas):
            raise CheckpointError(f"betas must be two numbers in (0, 1), got {self.betas!r}")

    def __call__(self, state: Tree) -> Tree:
        """Return `state` with leaves of the checkpoint; averages start from the new parameters."""
        return self.start(state, _start_averages)

    def start(self, state: Tree, renew: Callable[[Tree], Tree], record: Path | None = None) -> Tree:
        """Return the state to start from.

        `renew` gets the state with its new parameters and model state, and returns it with all that
        depends on them made again. What was taken from where is written to the file `record`.
        """
        plan = self.plan(state)
        state = plan.assign(renew(plan.assign(state, model=True)), model=False)
        if record is not None:
            plan.write(record)
        return state

    def plan(self, state: Tree) -> "HandOver":
        """Return which leaf comes from where; one error lists all that do not fit.

        `state` may consist of `jax.ShapeDtypeStruct`. No values are read, but counts.
        """
        reader = open_reader(self.checkpoint)
        finder = _Finder(self, reader, named_leaves(unpack(state)))
        return finder.find()

    def selection(self) -> Selection:
        """Return which leaves are taken."""
        include = as_patterns(self.include) or _DEFAULT
        return Selection(
            include=include,
            exclude=as_patterns(self.exclude),
            rename=dict(self.rename),
            cast=self.cast,
        )

    def summary(self) -> dict[str, Any]:
        """Return what was asked for, for the record of a run."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        defaults = WarmStart(self.checkpoint)
        asked = {name: value for name, value in fields.items() if value != getattr(defaults, name)}
        asked |= {"vocabularies": sorted(self.vocabularies)} if self.vocabularies else {}
        return {"checkpoint": str(self.checkpoint), **json.loads(json.dumps(asked, default=str))}


def as_warm_start(given: "WarmStart | str | Path") -> WarmStart:
    """Return a warm start; a path stands for all parameters and the model state of a checkpoint."""
    return given if isinstance(given, WarmStart) else WarmStart(given)


@dataclasses.dataclass(frozen=True)
class HandOver:
    """Which leaf of a state comes from which leaf of a checkpoint; everything fits."""

    reader: CheckpointReader
    sources: Mapping[str, str]  # names in the checkpoint, by names in the state
    counts: Mapping[str, int]  # values of leaves that are counts
    vocabularies: Mapping[str, Vocabularies]
    kept: Sequence[str]  # leaves of the state that keep their values
    unused: Sequence[str]  # leaves of the checkpoint

    def assign(self, state: Tree, *, model: bool) -> Tree:
        """Return `state` with the leaves of the model from the checkpoint, or with all others."""
        tree = unpack(state)
        leaves = [
            self._load(name, leaf) if name in self.sources and is_of_model(name) == model else leaf
            for name, leaf in leaves_with_names(tree)
        ]
        return pack_like(jax.tree.structure(tree).unflatten(leaves), state)

    def write(self, path: Path) -> None:
        """Write what was taken from where."""
        contents = {
            "checkpoint": str(self.reader.path),
            "taken": dict(self.sources),
            "kept": [*self.kept],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(contents, indent=1) + "\n")

    def __str__(self) -> str:
        return f"{len(self.sources):,} leaves from {self.reader.path}, {len(self.kept):,} kept"

    def _load(self, name: str, leaf: Any) -> Any:
        dtype = as_array(leaf).dtype
        if name in self.counts:
            value = cast(np.asarray(self.counts[name]), dtype, name, copy=True)
            return place_like(value, leaf)
        value = self.reader.read(self.sources[name])
        if name in self.vocabularies:
            return place_like(self._move_rows(name, cast(value, dtype, name), leaf), leaf)
        # A copy, because jax on a CPU may keep using the memory that it is given.
        return place_like(cast(value, dtype, name, copy=True), leaf)

    def _move_rows(self, name: str, old: np.ndarray, leaf: Any) -> np.ndarray:
        vocabs = self.vocabularies[name]
        if is_of_model(name):
            key = jax.random.fold_in(jax.random.key(0), zlib.crc32(name.encode()))
            return transfer(vocabs, old, leaf.shape, key)
        fresh = np.asarray(leaf)  # slots of new rows keep their initial values
        return remap(old, vocabs.old_words, vocabs.new_words, fresh=fresh, axis=vocabs.info.axis)


class _Finder:
    """Finds the source of every leaf that is taken."""

    def __init__(self, asked: WarmStart, reader: CheckpointReader, leaves: Mapping[str, Any]):
        self._asked = asked
        self._reader = reader
        self._leaves = leaves
        self._selection = asked.selection()
        self._saved = rename_all(str(reader), reader.variables, self._selection)
        self._slots = slots_by_state(leaves)
        self._vocabs = self._read_vocabularies()

    def find(self) -> HandOver:
        loadable = [name for name in self._leaves if kind_of(as_array(self._leaves[name]).dtype)]
        self._check_patterns(loadable)
        chosen = [name for name in loadable if self._selection.takes(name)]
        sources: dict[str, str] = {}
        counts: dict[str, int] = {}
        missing: list[str] = []
        for name in chosen:
            source = self._source_of(name)
            count = self._count_of(name, source)
            if count is not None:
                sources[name] = count.source
                counts[name] = count.value
            elif source is not None:
                sources[name] = source
            elif not _OPTIONAL.fullmatch(name):
                missing.append(name)
        misfits = [
            f"leaf {name}{self._label(name, source)} {misfit}"
            for name, source in sources.items()
            if name not in counts and (misfit := self._misfit(name, source))
        ]
        if missing or misfits:
            raise LeafMismatchError(
                str(self._reader), [*self._describe_missing(missing), *misfits], _WAY_OUT
            )
        if self._asked.use_averages and not any(map(self._is_average, sources.values())):
            raise CheckpointError(f"{self._reader}: it has no averages; drop use_averages")
        if not sources:
            raise CheckpointError(f"{self._reader}: include and exclude leave no leaf to take")
        kept = [name for name in loadable if name not in sources]
        unused = [name for name in self._reader.variables if name not in sources.values()]
        return HandOver(self._reader, sources, counts, self._vocabs, kept, unused)

    def _source_of(self, name: str) -> str | None:
        """Return the name in the checkpoint of a leaf of the state."""
        names = self._names_of(name)
        return next((self._saved[each] for each in names if each in self._saved), None)

    def _names_of(self, name: str) -> Iterable[str]:
        """Yield the names under which a leaf is looked for, the best first."""
        scope, _, own = name.partition("/")
        if scope == "params" and self._asked.use_averages:
            yield from (f"averages/{own}", f"{own}/{AVERAGE}")
        yield name
        if scope in ("params", "model_state") and own:
            yield from (own, own.replace("/", "."))
        if scope == "averages":
            yield f"{own}/{AVERAGE}"
        if name == "step":
            yield GLOBAL_STEP
        slot = parse_slot(name)
        if slot is not None:
            yield from slot_variables(slot, self._slots.get(slot.state, frozenset()))

    def _count_of(self, name: str, source: str | None) -> Count | None:
        """Return the value of a leaf that counts, which may be stored as a float or not at all."""
        array = as_array(self._leaves[name])
        if array.shape != () or kind_of(array.dtype) is not np.integer:
            return None
        if source is not None:
            count = as_count(self._reader.read(source))
            return None if count is None else Count(count, source)
        return find_count(name, self._slots, self._saved, self._reader.read, self._asked.betas)

    def _misfit(self, name: str, source: str) -> str | None:
        array = as_array(self._leaves[name])
        found = self._reader.variables[source]
        if kind_of(found.dtype) != kind_of(array.dtype) or (
            name not in self._vocabs and tuple(found.shape) != array.shape
        ):
            return f"is {found.dtype}{list(found.shape)}, expected {array.dtype}{list(array.shape)}"
        if np.dtype(found.dtype) != array.dtype and not self._asked.cast:
            return f"is {found.dtype}, expected {array.dtype}"
        if name in self._vocabs:
            return describe_misfit(self._vocabs[name], tuple(found.shape), array.shape)
        return None

    def _read_vocabularies(self) -> dict[str, Vocabularies]:
        """Return the vocabularies of tables, of their slots and of their averages."""
        vocabs: dict[str, Vocabularies] = {}
        for name, info in self._asked.vocabularies.items():
            if name not in self._leaves or not self._selection.takes(name):
                hint = suggest_names(name, self._leaves)
                raise CheckpointError(f"vocabularies: {name} is not a leaf to take{hint}")
            vocabs[name] = read_words(name, info)
        for name in self._leaves:
            slot = parse_slot(name)
            parameter = slot.parameter if slot else name.removeprefix("averages/")
            if slot is not None or parameter != name:
                table = f"params/{parameter}"
                vocabs |= {name: vocabs[table]} if table in vocabs else {}
        return vocabs

    def _check_patterns(self, loadable: Sequence[str]) -> None:
        for key in ("include", "exclude"):
            for pattern in as_patterns(getattr(self._asked, key)):
                if not any(re.fullmatch(pattern, name) for name in loadable):
                    raise CheckpointError(
                        f"warm_start: {key} pattern {pattern!r} matches no leaf of the state; "
                        f"there are {list_some(loadable)}"
                    )
        for pattern in self._asked.rename:
            if not any(re.search(pattern, name) for name in self._reader.variables):
                raise CheckpointError(
                    f"warm_start: rename pattern {pattern!r} matches no leaf of {self._reader}; "
                    f"there are {list_some(self._reader.variables)}"
                )

    def _describe_missing(self, missing: Sequence[str]) -> list[str]:
        hints = [suggest_names(name, self._saved) for name in missing[:_SUGGESTED]]
        hints += [""] * (len(missing) - len(hints))
        return [f"leaf {name} is missing{hint}" for name, hint in zip(missing, hints, strict=True)]

    def _label(self, name: str, source: str) -> str:
        return "" if source == name else f" (there {source})"

    def _is_average(self, source: str) -> bool:
        return source.startswith("averages/") or source.endswith(f"/{AVERAGE}")


def is_of_model(name: str) -> bool:
    """Return True for a leaf of the parameters or of the model state."""
    return name.partition("/")[0] in ("params", "model_state")


def _start_averages(state: Tree) -> Tree:
    """Return a state whose averages are its parameters, as before a first update."""
    tree = unpack(state)
    named = leaves_with_names(tree)
    params = {name: leaf for name, leaf in named if name.partition("/")[0] == "params"}

    def follow(name: str, leaf: Any) -> Any:
        scope, slash, own = name.partition("/")
        parameter = params.get(f"params{slash}{own}")
        if scope != "averages" or parameter is None:
            return leaf
        return jax.numpy.array(parameter, dtype=leaf.dtype)

    leaves = [follow(name, leaf) for name, leaf in named]
    return pack_like(jax.tree.structure(tree).unflatten(leaves), state)
