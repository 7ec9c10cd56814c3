"""The fuzzed readers: how inputs of each format are made and read, and the documented errors."""

import gzip
import io
import json
import random
import struct
import tomllib
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bundles
import numpy as np
import tomli_w
from mutations import TEXTS, mutate_bytes, mutate_json, mutate_message, mutate_text, mutate_tree
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from ftrain.checkpoints.catalog import read_catalog
from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.manifest import crc32c_of_text, format_manifest, read_manifest, verify
from ftrain.cli.ckpt import list_checkpoints
from ftrain.cluster import ClusterSpec, membership
from ftrain.config import ConfigError, load, plan
from ftrain.data import ArraySource
from ftrain.formats import (
    DamagedRecordError,
    Example,
    Fixed,
    NpzError,
    NpzFile,
    Padded,
    Ragged,
    Raw,
    SafetensorsError,
    SequenceExample,
    SpecError,
    TfCheckpoint,
    TfCheckpointError,
    decode_example,
    decode_sequence_example,
    encode_example,
    encode_sequence_example,
    frame_record,
    index_records,
    open_safetensors,
    parse_examples,
    parse_sequence_examples,
    parse_state,
    read_records,
)
from ftrain.formats.conversion import encode_rows
from ftrain.formats.numpy_files import read_npz
from ftrain.formats.records.encoding import masked_crc
from ftrain.formats.records.index import sidecar_path
from ftrain.formats.tables import TableError
from ftrain.formats.text_tables import read_csv, read_jsonl
from ftrain.summaries import MetricsFile, read_events, read_metrics

CONFIGS = Path(__file__).parents[2] / "configs"
MOST_RECORD_BYTES = 1 << 24  # low enough that inputs reach the limit


class Format(NamedTuple):
    """`make` an input, and `read` it with a scratch directory; a reader may raise `errors`."""

    make: Callable[[random.Random], Any]
    read: Callable[[Any, Path], None]
    errors: tuple[type[Exception], ...]
    weight: int = 10  # the share of the inputs of a campaign


class WrongAnswerError(AssertionError):
    """Two ways to read the same bytes do not agree."""


def check(agrees: bool, what: str) -> None:
    if not agrees:
        raise WrongAnswerError(what)


# Records

PAYLOADS = [b"", b"one", b"\0" * 40, bytes(range(256)), frame_record(b"nested"), b"y" * 20_000]
PACK = {
    "plain": bytes,
    "gzip": lambda data: gzip.compress(data, 1, mtime=0),
    "zlib": lambda data: zlib.compress(data, 1),
}


def header(length: int) -> bytes:
    packed = struct.pack("<Q", length)
    return packed + struct.pack("<I", masked_crc(packed))


def make_frames(rng: random.Random) -> bytes:
    parts = []
    for _ in range(rng.randrange(1, 6)):
        frame = frame_record(rng.choice(PAYLOADS))
        kind = rng.randrange(9)
        if kind == 0:
            frame = header(
                rng.choice(
                    (0, 1, 30, 10**4, 1 << 20, MOST_RECORD_BYTES + 1, 1 << 40, (1 << 64) - 1)
                )
            )
        elif kind == 1:
            frame = frame[: rng.randrange(len(frame))]
        elif kind == 2:
            frame = mutate_bytes(rng, frame)
        parts.append(frame)
    return b"".join(parts)


def make_records(pack: str) -> Callable[[random.Random], bytes]:
    def make(rng: random.Random) -> bytes:
        data = PACK[pack](make_frames(rng))
        return mutate_bytes(rng, data) if pack != "plain" and rng.randrange(2) else data

    return make


def read_skipping(path: Path) -> tuple[list[bytes], list[DamagedRecordError]]:
    damages: list[DamagedRecordError] = []
    options = {"max_record_bytes": MOST_RECORD_BYTES}
    return list(read_records(path, on_damage="skip", damages=damages, **options)), damages


def read_record_file(data: bytes, home: Path) -> None:
    path = home / "records"
    path.write_bytes(data)
    found, damages = read_skipping(path)
    try:
        whole = list(read_records(path, max_record_bytes=MOST_RECORD_BYTES))
    except DamagedRecordError as error:
        check(str(error) == str(damages[0]), "raise and skip report different damage")
        raise
    check(whole == found and not damages, "raise and skip read different records")


def read_plain_file(data: bytes, home: Path) -> None:
    try:
        read_record_file(data, home)
    finally:
        path = home / "records"
        found, damages = read_skipping(path)
        if path.stat().st_size and not data.startswith((b"\x1f\x8b", b"\x78")):
            index = index_records(
                path, on_damage="skip", sidecar=False, max_record_bytes=MOST_RECORD_BYTES
            )
            places = zip(index.offsets.tolist(), index.lengths.tolist(), strict=True)
            check(
                [data[at + 12 : at + 12 + size] for at, size in places] == found,
                "the index has other records",
            )
            check(len(index.damages) == len(damages), "the index has other damages")


SIDECAR = b"".join(map(frame_record, PAYLOADS[:4]))


def make_sidecar(rng: random.Random) -> tuple[bytes, bool]:
    """Return mutated bytes, and whether to append a valid checksum."""
    return rng.randbytes(8), bool(rng.randrange(4))


def read_sidecar(change: tuple[bytes, bool], home: Path) -> None:
    path = home / "indexed"
    path.write_bytes(SIDECAR)
    sidecar_path(path).unlink(missing_ok=True)
    index_records(path)
    rng = random.Random(change[0])
    content = mutate_bytes(rng, sidecar_path(path).read_bytes()[:-4])
    import google_crc32c

    end = struct.pack("<I", google_crc32c.value(content)) if change[1] else rng.randbytes(4)
    sidecar_path(path).write_bytes(content + end)
    index = index_records(path)
    places = zip(index.offsets.tolist(), index.lengths.tolist(), strict=True)
    check(
        [SIDECAR[at + 12 : at + 12 + size] for at, size in places] == PAYLOADS[:4],
        "a damaged sidecar was believed",
    )


# Examples

EXAMPLES = [
    encode_example(
        {
            "x": np.arange(4, dtype=np.float32),
            "n": 3,
            "s": b"text",
            "w": np.arange(3),
            "r": bytes(8),
        }
    ),
    encode_example(
        {"x": np.ones(4, np.float32), "n": -1, "s": b"", "w": np.array([], np.int64), "r": bytes(8)}
    ),
    encode_example({"n": 2**62, "x": np.zeros(4, np.float32), "r": b"\xff" * 8}),
    encode_example({"r": bytes(8)}),
]
SPEC = {
    "x": Fixed((4,), "float32", default=np.zeros(4)),
    "n": Fixed((), "int64", default=0),
    "s": Fixed((), "bytes", default=b""),
    "w": Ragged("int64"),
    "r": Raw((8,), "uint8"),
}
SEQUENCES = [
    encode_sequence_example(
        {"n": 3, "x": np.ones(4, np.float32)}, {"f": [np.arange(2.0), np.arange(2.0)], "w": [b"a"]}
    ),
    encode_sequence_example({}, {"f": []}),
]
LISTS = {"f": Fixed((2,), "float32", default=np.zeros(2)), "w": Ragged("bytes")}


def make_examples(rng: random.Random) -> list[bytes]:
    """Twenty records, so that they are parsed together; one or two of them changed."""
    records = [EXAMPLES[0]] * 10 + [rng.choice(EXAMPLES) for _ in range(10)]
    for _ in range(rng.choice((1, 1, 2))):
        records[rng.randrange(20)] = mutate_message(rng, rng.choice(EXAMPLES))
    return records


def read_example_batch(records: list[bytes], home: Path) -> None:
    """Compare the parser of many records with that of few, and both with protobuf."""
    singly: list[Any] = []
    for number, record in enumerate(records):
        try:
            singly.append(parse_examples([record], SPEC))
            Example.FromString(record)
        except SpecError:
            singly.append(None)
        try:
            decode_example(record)
        except ValueError:
            check(singly[number] is None, "decode_example refuses what parse_examples takes")
    try:
        together = parse_examples(records, SPEC)
    except SpecError:
        check(None in singly, "records that are good one by one are refused together")
        raise
    check(None not in singly, "a record that is refused by itself is taken among others")
    for name, values in together.items():
        for number, value in enumerate(values):
            same = np.array_equal(
                np.asarray(value), np.asarray(singly[number][name][0]), equal_nan=name == "x"
            )
            check(same, f"feature {name} of record {number} differs")


def make_sequence(rng: random.Random) -> list[bytes]:
    return [rng.choice(SEQUENCES), mutate_message(rng, rng.choice(SEQUENCES))]


def read_sequence(records: list[bytes], home: Path) -> None:
    for record in records:
        try:
            decode_sequence_example(record)
        except ValueError:
            check(
                not _is_message(SequenceExample, record),
                "decode_sequence_example refuses a message",
            )
    parse_sequence_examples(
        records, {"n": Fixed((), "int64", default=0), "p": Padded(dtype="float32")}, LISTS
    )


def _is_message(kind: Any, data: bytes) -> bool:
    try:
        kind.FromString(data)
    except Exception:  # noqa: BLE001 - whatever protobuf raises
        return False
    return True


# Event files

EVENTS = [
    Event(file_version="brain.Event:2", wall_time=1.0).SerializeToString(),
    Event(
        step=3, summary=Summary(value=[Summary.Value(tag="loss", simple_value=0.5)])
    ).SerializeToString(),
]


def make_events(rng: random.Random) -> bytes:
    payloads = [rng.choice(EVENTS) for _ in range(3)]
    payloads[rng.randrange(3)] = mutate_message(rng, rng.choice(EVENTS))
    data = b"".join(map(frame_record, payloads))
    return mutate_bytes(rng, data) if rng.randrange(3) == 0 else data


def read_event_file(data: bytes, home: Path) -> None:
    (home / "events").write_bytes(data)
    for _ in read_events(home / "events"):
        pass


# Tables

CELLS = [
    ["a", "b", "c"],
    ["1", "2.5", "x"],
    ["-3", "", 'q"q'],
    ["", "nan", "é"],
    ["7", "1e3", "a,b"],
]


def make_csv(rng: random.Random) -> bytes:
    cells = [[*row] for row in CELLS]
    for _ in range(rng.randrange(3)):
        row = rng.choice(cells)
        row[rng.randrange(3)] = rng.choice(TEXTS)
    quoted = [
        [
            f'"{cell.replace(chr(34), chr(34) * 2)}"' if set(cell) & set('",\r\n') else cell
            for cell in row
        ]
        for row in cells
    ]
    text = "\n".join(",".join(row) for row in quoted) + "\n"
    data = (mutate_text(rng, text) if rng.randrange(2) else text).encode(errors="surrogatepass")
    return mutate_bytes(rng, data) if rng.randrange(4) == 0 else data


def read_csv_file(data: bytes, home: Path) -> None:
    (home / "t.csv").write_bytes(data)
    for _ in encode_rows(read_csv([home / "t.csv"], ",", 1 << 16)):
        pass


LINES = [
    {"a": 1, "b": [1.5, 2], "c": "x"},
    {"a": None, "b": [], "c": "é"},
    {"b": [[1, 2]], "c": {"base64": "AAA="}},
]


def make_jsonl(rng: random.Random) -> bytes:
    lines = [json.dumps(line).encode() for line in LINES]
    lines[rng.randrange(3)] = mutate_json(rng, rng.choice(LINES))
    return b"\n".join(lines)


def read_jsonl_file(data: bytes, home: Path) -> None:
    (home / "t.jsonl").write_bytes(data)
    for _ in encode_rows(read_jsonl([home / "t.jsonl"], 1 << 16)):
        pass


SHAPES = [
    "(3,)",
    "(3, 2)",
    "()",
    "(-5,)",
    "(0,)",
    "(3, 0)",
    "(10**12,)",
    "(1000000000000,)",
    "(3, -1)",
    "(True,)",
    "(3.0,)",
]
SHAPES += [
    "(3",
    "3",
    "(99999999999999999999,)",
    "(" * 90 + ")" * 90,
    "(3,) * 2",
    "(3,) if 1 else 2",
    "('3',)",
    "[3]",
    "(1,) " * 20,
]
DTYPES = [
    "'<f4'",
    "'<f8'",
    "'<i8'",
    "'|b1'",
    "'|S3'",
    "'|S0'",
    "'<U2'",
    "'<U0'",
    "'|O'",
    "'<M8[s]'",
    "'|V4'",
    "'>f2'",
    "'<c8'",
]
DTYPES += [
    "'<f3'",
    "'x'",
    "3",
    "None",
    "[('a', '<f4')]",
    "('<f4', (2,))",
    "'<f4,<f4'",
    "'|S-1'",
    "'|S99999999999'",
    "''",
    "b'<f4'",
]
NAMES = [
    "a.npy",
    "b.npy",
    "a",
    ".npy",
    "dir/",
    "../x.npy",
    "é.npy",
    "x" * 300 + ".npy",
    "a\nb.npy",
    "a.txt",
    "con\0.npy",
]


def make_npy(rng: random.Random) -> bytes:
    odd = rng.randrange(5)
    order = rng.choice(("True", "0", "None")) if odd == 0 else "False"
    shape = rng.choice(SHAPES) if odd == 1 else rng.choice(("(3,)", "(3,)", "(3, 2)"))
    dtype = rng.choice(DTYPES) if odd == 2 else rng.choice(("'<f4'", "'<i8'", "'|S3'"))
    text = f"{{'descr': {dtype}, 'fortran_order': {order}, 'shape': {shape}, }}"
    if rng.randrange(8) == 0:
        text = mutate_text(rng, text)
    head = text.encode("utf-8", "surrogatepass").ljust(118) + b"\n"
    version = rng.choice((1, 2, 3, 4, 0)) if odd == 3 else 1
    size = struct.pack("<H" if version < 2 else "<I", len(head) & 0xFFFF)
    data = (
        b"\x93NUMPY"
        + bytes([version, 0])
        + size
        + head
        + rng.randbytes(rng.choice((48, 48, 48, 12, 0)))
    )
    return mutate_bytes(rng, data) if rng.randrange(6) == 0 else data


def make_npz(rng: random.Random) -> bytes:
    file = io.BytesIO()
    kinds = (
        *[zipfile.ZIP_STORED] * 4,
        *[zipfile.ZIP_DEFLATED] * 4,
        zipfile.ZIP_BZIP2,
        zipfile.ZIP_LZMA,
    )
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", rng.choice(kinds)) as archive:
        warnings.simplefilter("ignore")  # duplicate names
        for name in ("a.npy", *rng.choices(NAMES, k=rng.randrange(4) == 0)):
            archive.writestr(name, make_npy(rng))
    data = file.getvalue()
    return mutate_bytes(rng, data) if rng.randrange(3) == 0 else data


def read_npz_arrays(data: bytes, home: Path) -> None:
    (home / "checkpoint.npz").write_bytes(data)
    file = NpzFile(home / "checkpoint.npz")
    for name, (shape, dtype) in file.variables.items():
        value = file.read(name)
        check((value.shape, value.dtype.name) == (shape, dtype), "an array is not as listed")


# Safetensors

TENSORS = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b/c": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "e": {"dtype": "F8_E5M2", "shape": [0, 5], "data_offsets": [32, 32]},
    "f": {"dtype": "BOOL", "shape": [], "data_offsets": [32, 33]},
}
WEIGHT_MAP = {"metadata": {"total_size": 33}, "weight_map": {"a": "1.safetensors"}}


def make_safetensors(rng: random.Random) -> bytes:
    text = json.dumps(TENSORS).encode() if rng.randrange(3) == 0 else mutate_json(rng, TENSORS)
    length = len(text) if rng.randrange(8) else rng.choice((0, 1, 33, 10**7, 1 << 40, 1 << 63))
    data = struct.pack("<Q", length) + text + rng.randbytes(rng.choice((33, 33, 33, 24, 0, 99)))
    return mutate_bytes(rng, data) if rng.randrange(4) == 0 else data


def read_safetensors(data: bytes, home: Path) -> None:
    path = home / "t.safetensors"
    path.write_bytes(data)
    file = open_safetensors(path)
    total = 0
    for name, (shape, dtype) in file.variables.items():
        value = file.read(name)
        check((value.shape, value.dtype.name) == (shape, dtype), "an array is not as listed")
        total += value.nbytes
    check(total < len(data), "the arrays have more bytes than the file")


def make_shards(rng: random.Random) -> tuple[bytes, bytes]:
    index = json.dumps(WEIGHT_MAP).encode()
    shard = struct.pack("<Q", len(text := json.dumps(TENSORS).encode())) + text + bytes(33)
    if rng.randrange(4):
        return mutate_json(rng, WEIGHT_MAP), shard
    return index, make_safetensors(rng)


def read_shards(files: tuple[bytes, bytes], home: Path) -> None:
    shards = home / "shards"
    shards.mkdir(exist_ok=True)
    (shards / "model.safetensors.index.json").write_bytes(files[0])
    (shards / "1.safetensors").write_bytes(files[1])
    file = open_safetensors(shards)
    for name in file.variables:
        file.read(name)


def read_npz_file(data: bytes, home: Path) -> None:
    (home / "t.npz").write_bytes(data)
    for _ in encode_rows(read_npz([home / "t.npz"], 1 << 16)):
        pass


def open_arrays(name: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, home: Path) -> None:
        (home / name).write_bytes(data)
        source = ArraySource.open(home / name, max_unpacked_bytes=1 << 16)
        if len(source):
            source.read(np.array([0, len(source) - 1]))

    return read


# TensorFlow's checkpoints

STRINGS, STRINGS_CRC = bundles.pack_strings([b"ab", b"", b"xyz"])
VARIABLES = {
    b"w": bundles.FULL,
    b"s": bundles.entry(bundles.STRING, (3,), offset=16, size=len(STRINGS), crc=STRINGS_CRC),
    b"z": bundles.entry(bundles.FLOAT, (0,)),
}


def make_bundle(rng: random.Random) -> tuple[bytes, bytes]:
    """The index and the data file."""
    entries = [(b"", bundles.HEADER), *sorted(VARIABLES.items())]
    if rng.randrange(4):
        number = rng.randrange(len(entries))
        key, value = entries[number]
        entries[number] = (
            (mutate_bytes(rng, key) if rng.randrange(6) == 0 else key),
            mutate_message(rng, value),
        )
    entries = sorted(entries) if rng.randrange(4) else entries
    index = bundles.table(entries, per_block=rng.choice((1, 2, 1000)), interval=rng.choice((1, 16)))
    data = bundles.FLOATS + STRINGS
    if rng.randrange(4) == 0:
        blocks = [mutate_bytes(rng, bundles.block(entries))]
        index = bundles.table([], blocks=blocks)
    return (mutate_bytes(rng, index) if rng.randrange(4) == 0 else index), (
        mutate_bytes(rng, data) if rng.randrange(4) == 0 else data
    )


def read_bundle(files: tuple[bytes, bytes], home: Path) -> None:
    (home / "model.index").write_bytes(files[0])
    (home / "model.data-00000-of-00001").write_bytes(files[1])
    checkpoint = TfCheckpoint(home / "model")
    refused = None
    for name in checkpoint.variables:
        try:
            checkpoint.read(name)
        except TfCheckpointError as error:
            refused = error
    checkpoint.objects()
    if refused:
        raise refused


STATE = (
    'model_checkpoint_path: "model-5"\n'
    'all_model_checkpoint_paths: "model-3"\nall_model_checkpoint_paths: "model-5"\n'
)


def read_state(text: str, home: Path) -> None:
    parse_state(text)


# Checkpoints

MANIFEST = {
    "step": 7,
    "time": 1.7e9,
    "metrics": {"loss": 0.5},
    "not_finite": [],
    "leaves": {
        "w": {"shape": [2, 3], "dtype": "float32", "pieces": {"0:2,0:3": "x"}, "key": None},
        "e": {"shape": [0], "dtype": "bfloat16", "pieces": {}, "key": None},
    },
    "files": {
        "a/data": {"size": 3, "crc32c": "00000000"},
        "commit_success.txt": {"size": 0, "crc32c": "00000000"},
    },
}
RECORD = {"step": 7, "time": 1.7e9, "metrics": {"loss": 0.5}, "role": "newest", "pinned": False}
RETENTION = {
    "keep": 3,
    "every_steps": None,
    "every_hours": None,
    "best": 1,
    "metric": "loss",
    "mode": "min",
}
CATALOG = {"latest": 7, "keep_after": None, "retention": RETENTION, "checkpoints": [RECORD]}


def make_manifest(rng: random.Random) -> bytes:
    if rng.randrange(5) == 0:
        return mutate_bytes(rng, format_manifest(MANIFEST).encode())
    try:
        body = json.dumps(
            mutate_tree(rng, MANIFEST), sort_keys=True
        )  # with NaN, which format_manifest refuses
        return f'{{"crc32c": "{crc32c_of_text(body)}",\n"manifest": {body}}}\n'.encode(
            errors="surrogatepass"
        )
    except (TypeError, UnicodeEncodeError):  # no text of it has a checksum
        return mutate_json(rng, {"crc32c": "00000000", "manifest": MANIFEST})


def _step(home: Path) -> Path:
    step = home / "checkpoints" / "7"
    if not step.exists():
        step.mkdir(parents=True)
        (step / "commit_success.txt").touch()
    return step


def read_manifest_file(data: bytes, home: Path) -> None:
    step = _step(home)
    (step / "manifest.json").write_bytes(data)
    (home / "checkpoints" / "checkpoints.json").unlink(missing_ok=True)
    verify(step)
    list_checkpoints(home)
    read_manifest(step)


def read_catalog_file(data: bytes, home: Path) -> None:
    step = _step(home)
    (step / "manifest.json").write_text(format_manifest(MANIFEST))
    (step.parent / "checkpoints.json").write_bytes(data)
    check(len(read_catalog(step.parent).records) == 1, "a damaged catalog hides a checkpoint")
    list_checkpoints(home)


# Metrics, configs and clusters

METRICS = [b'{"step": 1, "loss": 0.5}\n', b'{"step": 2, "text": "x"}\n']


def make_metrics(rng: random.Random) -> bytes:
    return mutate_json(rng, {"step": 1, "time": 1.5, "loss": "nan", "x": [1]}).replace(b"\n", b" ")


def read_metrics_file(line: bytes, home: Path) -> None:
    path = home / "metrics.jsonl"
    path.write_bytes(METRICS[0] + line + b"\n" + METRICS[1])
    path.with_name("metrics.jsonl.bad").unlink(missing_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = read_metrics(path)
        MetricsFile(path, start_step=1 << 62).close()
    check([fields["step"] for fields in (found[0], found[-1])] == [1, 2], "good lines are lost")
    kept = path.read_bytes()
    aside = path.with_name("metrics.jsonl.bad")
    check(kept.startswith(METRICS[0]) and kept.endswith(METRICS[1]), "good lines are changed")
    if aside.exists():
        check(aside.read_bytes() == line + b"\n", "a bad line is lost")
        raise ValueError("a bad line")


TOMLS = [path.read_text(encoding="utf-8") for path in sorted(CONFIGS.glob("*.toml"))]
TOML_VALUES = [
    0,
    -1,
    1.5,
    "",
    "x",
    "nan",
    True,
    [],
    [3],
    {},
    {"name": ""},
    {"name": 3},
    [{"name": "x"}],
    2**63 - 1,
    float("nan"),
]
OVERRIDES = [
    "seed=1",
    "steps=3",
    "optimizer.learning_rate=0.1",
    "data.batch_size=8",
    "optimizer.name=adam",
    "hooks.0.name=x",
]


def make_config(rng: random.Random) -> tuple[bytes, list[str]]:
    text = rng.choice(TOMLS)
    if rng.randrange(3):
        tree = mutate_tree(rng, tomllib.loads(text), TOML_VALUES)
        text = tomli_w.dumps(tree if isinstance(tree, dict) else {"task": tree})
    else:
        text = mutate_text(rng, text)
    overrides = [mutate_text(rng, rng.choice(OVERRIDES)) for _ in range(rng.randrange(3))]
    data = text.encode(errors="surrogatepass")
    return (mutate_bytes(rng, data) if rng.randrange(10) == 0 else data), overrides


def read_config(config: tuple[bytes, list[str]], home: Path) -> None:
    (home / "job.toml").write_bytes(config[0])
    try:
        plan(load(home / "job.toml", config[1]))
    except ConfigError as error:
        check(
            0 < len(str(error).splitlines()) <= 2,
            f"a refusal of {len(str(error).splitlines())} lines",
        )
        raise


CLUSTER = {"chief": ["c:1"], "worker": ["a:1", "b:1"]}
CLUSTER_TOML = 'worker = ["a:1", "b:1"]\n\n[ps]\n0 = "p:1"\n3 = "q:1"\n'
CLUSTER_DEF = {"job": [{"name": "worker", "tasks": {"0": "a:1", "1": "b:1"}}]}
DESCRIBED = {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02],big",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "2",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "2",
    "FTRAIN_PROCESSES": "3",
    "FTRAIN_CHIEF": "digits-0.digits:8476",
}


def make_cluster(rng: random.Random) -> tuple[str, bytes]:
    if rng.randrange(2):
        return ".json", mutate_json(rng, rng.choice((CLUSTER, CLUSTER_DEF)))
    if rng.randrange(2):
        return ".toml", mutate_text(rng, CLUSTER_TOML).encode(errors="surrogatepass")
    return ".toml", tomli_w.dumps(
        {"worker": mutate_tree(rng, CLUSTER["worker"], TOML_VALUES)}
    ).encode()


def read_cluster(file: tuple[str, bytes], home: Path) -> None:
    path = home / f"cluster{file[0]}"
    path.write_bytes(file[1])
    spec = ClusterSpec.load(path)
    check(ClusterSpec.from_json(spec.to_json()) == spec, "a spec is not what was written as JSON")
    check(ClusterSpec.from_toml(spec.to_toml()) == spec, "a spec is not what was written as TOML")


def make_environment(rng: random.Random) -> dict[str, str]:
    kind = rng.randrange(4)
    if kind < 2:
        text = mutate_json(rng, DESCRIBED).decode(errors="replace")
        return {"TF_CONFIG" if kind else "FTRAIN_CLUSTER": text}
    environ = dict(SLURM if kind == 2 else KUBERNETES)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([*environ])
        environ[name] = mutate_text(rng, environ[name])
    return environ


def read_environment(environ: dict[str, str], home: Path) -> None:
    found = membership(environ)
    if found is not None:
        check(0 <= found.process_id < found.process_count, "a process that the job does not have")


FORMATS = {
    "records, plain": Format(make_records("plain"), read_plain_file, (DamagedRecordError,), 14),
    "records, gzip": Format(make_records("gzip"), read_record_file, (DamagedRecordError,), 8),
    "records, zlib": Format(make_records("zlib"), read_record_file, (DamagedRecordError,), 8),
    "record index": Format(make_sidecar, read_sidecar, (), 4),
    "Example": Format(make_examples, read_example_batch, (SpecError,), 8),
    "SequenceExample": Format(make_sequence, read_sequence, (SpecError,), 10),
    "event file": Format(make_events, read_event_file, (DamagedRecordError,), 10),
    "csv": Format(make_csv, read_csv_file, (TableError,), 6),
    "jsonl": Format(make_jsonl, read_jsonl_file, (TableError,), 6),
    "npz": Format(make_npz, read_npz_file, (TableError,), 8),
    "npz, mapped": Format(make_npz, open_arrays("m.npz"), (ValueError,), 6),
    "npz, checkpoint": Format(make_npz, read_npz_arrays, (NpzError,), 6),
    "safetensors": Format(make_safetensors, read_safetensors, (SafetensorsError,), 8),
    "safetensors, sharded": Format(make_shards, read_shards, (SafetensorsError,), 4),
    "npy, mapped": Format(make_npy, open_arrays("m.npy"), (ValueError,), 4),
    "TensorFlow checkpoint": Format(make_bundle, read_bundle, (TfCheckpointError,), 12),
    "TensorFlow state": Format(
        lambda rng: mutate_text(rng, STATE), read_state, (TfCheckpointError,), 4
    ),
    "manifest": Format(make_manifest, read_manifest_file, (CheckpointError,), 3),
    "catalog": Format(lambda rng: mutate_json(rng, CATALOG), read_catalog_file, (), 2),
    "metrics.jsonl": Format(make_metrics, read_metrics_file, (ValueError,), 4),
    "config": Format(make_config, read_config, (ConfigError,), 2),
    "cluster spec": Format(make_cluster, read_cluster, (ValueError, TypeError), 8),
    "cluster environment": Format(make_environment, read_environment, (ValueError,), 8),
}
