"""Sources of files: records of TFRecord and ArrayRecord files, parsed by a spec; lines of text."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ftrain.data.source import Batch
from ftrain.formats import (
    DamagedRecordError,
    ExampleParser,
    Fixed,
    Image,
    Padded,
    Ragged,
    Raw,
    RecordFiles,
    Steps,
    decode_example,
    match_files,
    parse_sequence_examples,
)
from ftrain.formats.examples.columns import as_objects
from ftrain.formats.records.encoding import MAX_RECORD_BYTES
from ftrain.formats.records.files import MappedFiles
from ftrain.formats.records.reading import OnDamage
from ftrain.paths import absolute

_CHUNK = 16 << 20  # bytes searched for line ends at once
_CHECKED = 32  # records that are checked for misspelt feature names

Files = str | Path | Sequence[str | Path]
Spec = Mapping[str, Fixed | Padded | Ragged | Raw | Image]
Lists = Mapping[str, Steps | Ragged]


class RecordSource:
    """The records of TFRecord files with random access, verified and parsed.

    spec = {"image": Raw((28, 28), "uint8"), "label": Fixed(dtype="int32")}
    source = RecordSource("data/train-*.tfrecord", spec)

    Args:
      files: a path, a pattern, or several.
      spec: the features of each record, an Example; None for the raw bytes as feature "record".
      sequence: the feature lists of SequenceExamples; `spec` then describes their context.
      on_damage: "raise" when a damaged record is read, or "skip": read all records once, leave out
        damaged ones and list them in `damages`.
      verify: verify the checksum of every record that is read.
      cache: a directory for plain copies of compressed files, which have no random access.
      sidecar: keep the index of each file beside it, as FILE.index, for the next run.
      max_record_bytes: a longer record counts as damaged; 256 MiB by default.
    """

    def __init__(
        self,
        files: Files,
        spec: Spec | None = None,
        *,
        sequence: Lists | None = None,
        on_damage: OnDamage = "raise",
        verify: bool = True,
        cache: str | Path | None = None,
        sidecar: bool = True,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ):
        self._decode = _Decoder(spec, sequence)
        self.files = RecordFiles(
            files,
            on_damage=on_damage,
            verify=verify,
            cache=cache,
            sidecar=sidecar,
            max_record_bytes=max_record_bytes,
        )
        if self.damages:
            warnings.warn(
                f"skipped {len(self.damages)} damaged records; the first: {self.damages[0]}",
                stacklevel=2,
            )
        if spec and sequence is None:
            self._warn_if_misspelt(spec)

    @property
    def damages(self) -> list[DamagedRecordError]:
        """The damaged records that were left out, as errors."""
        return self.files.damages

    def __len__(self) -> int:
        return len(self.files)

    def __repr__(self) -> str:
        return f"RecordSource({_describe_paths(self.files.paths)})"

    def where(self, index: int) -> str:
        """Return the file and the number of a record for messages."""
        return self.files.where(index)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the parsed records at `indices`."""
        try:
            records = self.files.read(indices)
        except DamagedRecordError as error:
            error.add_note("RecordSource(..., on_damage='skip') leaves damaged records out")
            raise
        return self._decode(records, lambda row: self.where(int(indices[row])))

    def _warn_if_misspelt(self, spec: Spec) -> None:
        """Warn if the first records lack a feature: a default would hide a misspelt name."""
        try:
            first = [
                decode_example(record)
                for record in self.files.read(np.arange(min(len(self), _CHECKED)))
            ]
        except ValueError:  # raised again when these records are read
            return
        found = sorted({name for record in first for name in record})
        unknown = [name for name in spec if name not in found]
        if first and unknown:
            warnings.warn(
                f"{self!r}: none of the first {len(first)} records has {', '.join(unknown)}; "
                f"they have {', '.join(found) or 'nothing'}",
                stacklevel=3,
            )


class ArrayRecordSource:
    """The records of ArrayRecord files, parsed as by RecordSource; needs array_record."""

    def __init__(self, files: Files, spec: Spec | None = None, *, sequence: Lists | None = None):
        self._decode = _Decoder(spec, sequence)
        self.paths = match_files(files)
        self._open()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"ArrayRecordSource({_describe_paths(self.paths)})"

    def where(self, index: int) -> str:
        """Return the file and the number of a record for messages."""
        file = int(np.searchsorted(self._starts, index, "right")) - 1
        return f"{self.paths[file]}: record {index - int(self._starts[file])}"

    def read(self, indices: np.ndarray) -> Batch:
        """Return the parsed records at `indices`."""
        indices = np.asarray(indices)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"{self!r} has {len(self)} records, but {indices.max()} was requested")
        files = np.searchsorted(self._starts, indices, "right") - 1
        records = [b""] * len(indices)
        for file in np.unique(files).tolist():
            rows = np.flatnonzero(files == file)
            found = self._readers[file].read((indices[rows] - self._starts[file]).tolist())
            for row, record in zip(rows.tolist(), found, strict=True):
                records[row] = record
        return self._decode(records, lambda row: self.where(int(indices[row])))

    def _open(self) -> None:
        try:
            from array_record.python.array_record_module import ArrayRecordReader
        except ImportError:
            raise ModuleNotFoundError(
                "ArrayRecord files need the package array_record: "
                "pip install 'ftrain[array-record]'"
            ) from None
        options = "readahead_buffer_size:0,max_parallelism:0"  # for random access
        self._readers = [_open_reader(ArrayRecordReader, path, options) for path in self.paths]
        self._starts = np.cumsum([0, *(reader.num_records() for reader in self._readers)])

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name not in ("_readers", "_starts")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()


class _Decoder:
    """Decodes the bytes of records to a batch, by a spec."""

    def __init__(self, spec: Spec | None, sequence: Lists | None):
        for mapping in (spec, sequence):
            if mapping is not None and not isinstance(mapping, Mapping):
                raise TypeError(
                    f"a spec must map names to Fixed(...), Ragged(...) or others, got {mapping!r}"
                )
        for name, entry in [*(spec or {}).items(), *(sequence or {}).items()]:
            _check_independent(name, entry)
        for name, entry in (sequence or {}).items():
            if isinstance(entry, Fixed):
                raise ValueError(
                    f"{name}: a feature list cannot be Fixed; "
                    f"write Steps({entry}, length=...), or Ragged"
                )
        _check_outputs(spec or {}, sequence or {})
        self._spec = spec
        self._sequence = sequence
        self._parser = ExampleParser(spec or {})

    def __call__(self, records: list[bytes], where: Callable[[int], str]) -> Batch:
        if self._sequence is not None:
            context, lists = parse_sequence_examples(
                records, self._spec or {}, self._sequence, where=where
            )
            return context | lists
        if self._spec is None:
            return {"record": as_objects(records)}
        return self._parser(records, where=where)


def _check_outputs(spec: Spec, sequence: Lists) -> None:
    entries = [*spec.items(), *sequence.items()]
    made = [output for name, entry in entries for output in entry.outputs(name)]
    twice = [output for output in made if made.count(output) > 1]
    if twice:
        raise ValueError(
            f"spec and sequence both make {twice[0]}; rename its lengths, or remove one of them"
        )


def _check_independent(name: str, entry: Any) -> None:
    """Raise if a parsed example would depend on the examples that are read together with it."""
    lacks_length = isinstance(entry, Padded | Steps) and entry.length is None
    if lacks_length or (isinstance(entry, Ragged) and entry.flat):
        raise ValueError(
            f"{name}: {entry} depends on which records are read together; set its length, "
            f"or let the pipeline pad: Ragged here, and Pipeline(..., pad={{{name!r}: Pad()}})"
        )


def _open_reader(reader: Any, path: Path, options: str) -> Any:
    opened = reader(str(path), options)
    if not opened.ok():
        raise ValueError(
            f"{path} cannot be read as an ArrayRecord file: it is damaged, or another kind of file"
        )
    return opened


def _describe_paths(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


class TextSource:
    """The lines of text files, without line ends, as feature "text".

    They are str objects, or bytes with `encoding=None`. `files` is a path, a pattern such as
    "data/*.txt", or several. The files are scanned once for line starts, which takes 16 bytes of
    memory per line; the lines themselves are read on demand.
    """

    def __init__(
        self,
        files: Files,
        *,
        encoding: str | None = "utf-8",
        skip_empty: bool = False,
        name: str = "text",
    ):
        self.paths = [absolute(path) for path in match_files(files)]
        self.encoding = encoding
        self.name = name
        self._marks = [
            (status.st_size, status.st_mtime_ns) for status in (path.stat() for path in self.paths)
        ]
        self._lines = [_find_lines(path, skip_empty) for path in self.paths]
        self._starts = np.cumsum([0, *map(len, self._lines)])
        self._maps = MappedFiles()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"TextSource({_describe_paths(self.paths)})"

    def where(self, index: int) -> str:
        """Return the file and the number of a line for messages."""
        number = self._file_of(index)
        first = int(self._lines[number][index - self._starts[number]][0])
        line = self._bytes(number, 0, first).count(b"\n") + 1
        return f"{self.paths[number]}: line {line}"

    def read(self, indices: np.ndarray) -> Batch:
        """Return the lines at `indices`."""
        return {self.name: as_objects([self._line(int(index)) for index in indices])}

    def _line(self, index: int) -> str | bytes:
        number = self._file_of(index)
        start, end = self._lines[number][index - self._starts[number]]
        line = self._bytes(number, start, end)
        if self.encoding is None:
            return line
        try:
            return line.decode(self.encoding)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.where(index)} is not {self.encoding}: {error}; encoding=None returns bytes"
            ) from None

    def _file_of(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"{self!r} has {len(self)} lines, but line {index} was requested")
        return int(np.searchsorted(self._starts, index, "right")) - 1

    def _bytes(self, number: int, start: int, end: int) -> bytes:
        if end <= start:  # an empty file has no map
            return b""
        return self._maps.get(self.paths[number], *self._marks[number])[start:end]


def _find_lines(path: Path, skip_empty: bool) -> np.ndarray:
    """Return the start and the end of each line, without the line end."""
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    parts = [
        np.flatnonzero(data[at : at + _CHUNK] == ord("\n")) + at
        for at in range(0, len(data), _CHUNK)
    ]
    ends = np.concatenate([np.empty(0, np.int64), *parts])
    if len(data) and data[-1] != ord("\n"):
        ends = np.append(ends, len(data))
    starts = np.concatenate([np.zeros(min(len(ends), 1), np.int64), ends[:-1] + 1])
    if len(ends):  # a carriage return is part of the line end
        ends -= (ends > starts) & (data[np.maximum(ends, 1) - 1] == ord("\r"))
    lines = np.stack([starts, ends], axis=1)
    return lines[lines[:, 1] > lines[:, 0]] if skip_empty else lines
