"""ftrain data: what it shows, verifies and indexes, and what it says to mistakes."""

import os
import pty
from pathlib import Path

import numpy as np
import pytest
from command import start
from data_command import EVENT, damage, data, example, names, write, write_examples

from ftrain import formats
from ftrain.formats.examples.messages import encode_example, encode_sequence_example
from ftrain.formats.examples.parsing import parse_examples, parse_sequence_examples
from ftrain.formats.records.reading import read_records


@pytest.fixture
def records(tmp_path) -> Path:
    return write_examples(tmp_path)


def pasted(text: str) -> dict:
    """The names that the printed lines of Python define."""
    lines = text[text.index("from ftrain.formats import") :].split("\n", 1)[1]
    scope = dict(vars(formats))
    exec(lines[: lines.rindex("\n}") + 3], scope)
    return scope


def test_show_tells_features_and_a_spec_to_paste(records):
    text = data("show", records, "--examples", 1)
    figures = "none 20 6.84 KB 325 B 326 B 327 B"
    assert text.splitlines()[1].split() == [str(records), *figures.split()]
    assert "features, from 20 records" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["label", "int64", "1", "0", "to", "19", "Fixed((),", '"int64")'] in rows
    assert ["words", "int64", "1", "to", "3", "0", "to", "2", 'Ragged("int64")'] in rows
    assert ["x", "float", "64", "0", "to", "50.5", "Fixed((64,),", '"float32")'] in rows
    assert "  x: [0, 0.5, 1, 1.5, 2, 2.5, ... 64 values]" in text
    assert '  name: "zebra"' in text
    assert text.count(": record ") == 1
    arrays = parse_examples(list(read_records(records)), pasted(text)["spec"])
    assert arrays["x"].shape == (20, 64)
    assert names(records.parent) == ["train.tfrecord"]


def test_show_of_several_files_adds_them_up(tmp_path):
    for number, compression in enumerate([None, "GZIP", "ZLIB"]):
        write(
            tmp_path / f"{number}.tfrecord",
            [example(n) for n in range(number + 1)],
            compression=compression,
        )
    lines = data("show", tmp_path / "*.tfrecord", "--examples", 0).splitlines()
    assert [line.split()[1:3] for line in lines[1:4]] == [
        ["none", "1"],
        ["GZIP", "2"],
        ["ZLIB", "3"],
    ]
    assert lines[4].split()[:3] == ["3", "files", "6"]


def test_show_of_sequences(tmp_path):
    lists = {"frames": [np.ones(4), np.zeros(4)], "tags": [[b"a"], [b"b", b"c"]]}
    path = write(
        tmp_path / "s.tfrecord", [encode_sequence_example({"id": n}, lists) for n in range(3)]
    )
    text = data("show", path, "--examples", 1)
    assert "context, from 3 records" in text
    assert "  frames: 2 steps, the first: [1, 1, 1, 1]" in text
    scope = pasted(text)
    context, steps = parse_sequence_examples(
        list(read_records(path)), scope["spec"], scope["sequence"]
    )
    assert context["id"].tolist() == [0, 1, 2]
    assert steps["frames"].shape == (3, 2, 4)


def test_show_of_what_is_no_example(tmp_path):
    text = data(
        "show", write(tmp_path / "events.out.tfevents.1", [EVENT, bytes(range(40)), b"some text"])
    )
    assert "the records are not Examples" in text
    assert "00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f ... 40 bytes" in text
    assert '"some text"' in text
    mixed = write(
        tmp_path / "mixed.tfrecord", [example(0), EVENT, encode_example({"x": 1, "none": None})]
    )
    text = data("show", mixed)
    assert "from 3 records; 1 of them are not Examples" in text
    assert '    # "x": its values are float or int64' in text
    assert '    # "none": it has no values' in text
    (tmp_path / "empty.tfrecord").touch()
    assert "there are no records" in data("show", tmp_path / "empty.tfrecord")


def test_verify_finds_all_damage(tmp_path, records):
    assert data("verify", records) == f"{records}: 20 records, 6.84 KB, good\n"
    bad = damage(write(tmp_path / "bad.tfrecord", [bytes(100)] * 50), 150, 930, 3000)
    lines = data("verify", records, bad, code=1).splitlines()
    assert lines[1:] == [
        f"{bad}: 47 records, 5.8 KB, DAMAGED in 3 places",
        "  record 1 at byte 116: the checksum of its data does not match",
        "  record 8 at byte 928: the checksum of its length does not match",
        "  record 25 at byte 2,900: the checksum of its data does not match",
        "67 good records in 2 files, damage in 3 places of 1 file",
    ]
    worse = damage(write(tmp_path / "worse.tfrecord", [bytes(100)] * 50), *range(50, 5800, 232))
    assert "  and 5 more, listed with --all" in data("verify", worse, code=1)
    assert data("verify", worse, "--all", code=1).count("does not match") == 25
    packed = damage(
        write(tmp_path / "packed.tfrecord.gz", [os.urandom(1000)] * 9, compression="GZIP"), 900
    )
    assert "of the uncompressed data: " in data("verify", packed, code=1)


def test_index_is_made_once(records):
    first = data("index", records)
    assert first.startswith(f"{records}: 20 records, 6.84 KB; train.tfrecord.index written, ")
    assert data("index", records).endswith("train.tfrecord.index was up to date\n")
    os.utime(records, ns=(1, 1))
    assert "train.tfrecord.index written" in data("index", records)
    damage(records, 50)
    assert "20 records" in data("index", records)  # only headers are read
    assert "19 records, 1 damaged left out" in data("index", records, "--skip-damaged")
    damage(records, 3)
    text = data("index", records, code=1)
    assert "record 0 at byte 0 is damaged" in text
    assert text.splitlines()[1] == "--skip-damaged leaves damaged records out of the index"


def test_a_bar_is_drawn_on_a_terminal_and_the_rest_printed(tmp_path, records):
    leader, follower = pty.openpty()
    process = start("data", "verify", records, stderr=follower)
    out, _ = process.communicate(timeout=60)
    os.close(follower)
    drawn = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert out == f"{records}: 20 records, 6.84 KB, good\n"
    assert "verifying" in drawn


SOURCES = {
    "cells.csv": "a,b\n1,2\n1,2,3\n",
    "large.csv": "a,b\n1,99999999999999999999\n",
    "beyond.csv": "a\n1e300\n",
    "quote.csv": 'a,b\n1,"2\n3,4\n',
    "latin.csv": b"a\n1\n\xe9\n",
    "twice.csv": "a,b,a\n",
    "unnamed.csv": "a,\n",
    "empty.csv": "",
    "other.csv": "c\n1\n",
    "one.csv": "a\n1\n",
    "bad.jsonl": '{"a": 1}\n{"a": }\n',
    "list.jsonl": "[1]\n",
    "changing.jsonl": '{"a": 1}\n{"a": "x"}\n',
    "mixed.jsonl": '{"a": [1, "x"]}\n',
    "object.jsonl": '{"a": {"b": 1}}\n',
    "null.jsonl": '{"a": [1, null]}\n',
    "ragged.jsonl": '{"a": [[1, 2], [3]]}\n',
    "deep.jsonl": '{"a": ' + "[" * 100_000 + "\n",
    "base64.jsonl": '{"a": {"base64": "$"}}\n',
    "surrogate.jsonl": '{"a": "\\ud800"}\n',
    "name.jsonl": '{"\\ud800": 1}\n',
    "large.jsonl": '{"a": 9223372036854775808}\n',
    "digits.jsonl": '{"a": ' + "1" * 5000 + "}\n",
    "bad.npz": "no archive",
    "notes.txt": "these are no records",
}
MISTAKES = [
    ("convert cells.csv x.tfrecord", "cells.csv: line 3 has 3 cells, the first line 2"),
    (
        "convert large.csv x.tfrecord",
        "line 2: feature b has the value 99999999999999999999, beyond int64",
    ),
    ("convert beyond.csv x.tfrecord", "line 2: feature a has the value 1e+300, beyond float32"),
    ("convert quote.csv x.tfrecord", "quote.csv: line 2 cannot be read"),
    ("convert latin.csv x.tfrecord", "latin.csv: line 3 is not UTF-8 (byte 1 is 0xe9)"),
    ("convert twice.csv x.tfrecord", "a second column is named a"),
    ("convert unnamed.csv x.tfrecord", "column 2 has no name"),
    ("convert empty.csv x.tfrecord", "empty.csv is empty"),
    ("convert one.csv other.csv x.tfrecord", "only one has a column a"),
    ("convert bad.jsonl x.tfrecord", "bad.jsonl: line 2 is not JSON: Expecting value at column 7"),
    ("convert list.jsonl x.tfrecord", "line 1 is a list, expected an object"),
    (
        "convert changing.jsonl x.tfrecord",
        "line 2: feature a is text, expected numbers as in the lines before",
    ),
    ("convert mixed.jsonl x.tfrecord", "text and numbers in one list"),
    ("convert object.jsonl x.tfrecord", "feature a is an object"),
    ("convert null.jsonl x.tfrecord", "null in a list"),
    ("convert ragged.jsonl x.tfrecord", "lists of different lengths"),
    ("convert deep.jsonl x.tfrecord", "nested too deeply"),
    ("convert base64.jsonl x.tfrecord", "neither text nor base64"),
    ("convert surrogate.jsonl x.tfrecord", "line 1: feature a is neither text nor base64"),
    ("convert name.jsonl x.tfrecord", "is not Unicode text"),
    ("convert large.jsonl x.tfrecord", "line 1: feature a has the value 9223372036854775808"),
    ("convert digits.jsonl x.tfrecord", "too many digits"),
    ("convert bad.npz x.tfrecord", "bad.npz is not an .npz file, or damaged"),
    ("convert objects.npz x.tfrecord", "array a is of dtype object"),
    ("convert lengths.npz x.tfrecord", "different lengths, {'a': 2, 'b': 3}"),
    ("convert scalar.npz x.tfrecord", "array a is a single value"),
    ("convert surrogate.npz x.tfrecord", "array a has text that is not Unicode"),
    ("convert none.npz x.tfrecord", "none.npz has no arrays"),
    ("convert scalar.npz lengths.npz x.tfrecord", "a single value"),
    (
        "convert vectors.tfrecord x.csv",
        "vectors.tfrecord: record 1: feature a has 2 values, and a cell holds one",
    ),
    (
        "convert raw.tfrecord x.csv",
        "record 0: feature a has bytes that are not UTF-8 text; write .jsonl",
    ),
    ("convert raw.tfrecord x.npz", "record 0: feature a ends with a zero byte"),
    (
        "convert vectors.tfrecord x.npz",
        "record 1: feature a has 2 values, 1 in the records before; write .jsonl",
    ),
    ("convert missing.tfrecord x.npz", "record 1: feature b is missing"),
    ("convert kinds.tfrecord x.npz", "record 1: feature a differs in kind"),
    ("convert sequences.tfrecord x.jsonl", "record 0 is a SequenceExample"),
    ("convert events.tfrecord x.jsonl", "record 0 is not an Example"),
    ("convert one.csv x.parquet", "known suffixes are .csv, .tsv, .jsonl, .npz, and .tfrecord"),
    ("convert notes.txt x.tfrecord", "its suffix is unknown, and it does not begin with a record"),
    ("convert one.csv x.jsonl", "convert to .tfrecord first"),
    ("convert one.csv bad.jsonl x.tfrecord", "convert one kind at a time"),
    (
        "convert raw.tfrecord raw.tfrecord --overwrite",
        "raw.tfrecord would overwrite the source raw.tfrecord",
    ),
    ("convert raw.tfrecord .", ". is a directory"),
    ("convert one.csv notes.txt/x.tfrecord", "notes.txt is a file, not a directory"),
    (
        "convert raw.tfrecord x.csv --shard-records 2",
        "--shard-records needs a record file as TARGET",
    ),
    (
        "convert raw.tfrecord x.tfrecord.gz --compression zlib",
        "the suffix of x.tfrecord.gz means GZIP, but",
    ),
    ("convert raw.tfrecord x.tfrecord --shard-records 0", "shard-records"),
    ("convert raw.tfrecord", "expected SOURCE... TARGET"),
    ("convert nowhere.csv x.tfrecord", "there is no such file"),
    ("show nowhere.tfrecord", "nowhere.tfrecord: there is no such file"),
    ("show .", ".: is a directory"),
    ("show *.nothing", "*.nothing: matches no file"),
    ("show notes.txt", "notes.txt is not a record file, or damaged from its first byte on"),
    ("show", "FILES"),
    (
        "index packed.tfrecord.gz",
        "make a plain one with: ftrain data convert packed.tfrecord.gz packed.tfrecord",
    ),
]


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("mistakes")
    for name, content in SOURCES.items():
        (home / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    surrogate = np.frombuffer(b"\x00\xd8\x00\x00", "<U1")
    archives = {
        "objects": {"a": np.array([None])},
        "lengths": {"a": np.zeros(2), "b": np.zeros(3)},
        "scalar": {"a": np.array(3)},
        "surrogate": {"a": surrogate},
        "none": {},
    }
    for name, arrays in archives.items():
        np.savez(home / f"{name}.npz", **arrays)
    rows = {
        "vectors": [{"a": 1.0}, {"a": [1.0, 2.0]}],
        "raw": [{"a": b"\xff\0"}],
        "missing": [{"a": 1, "b": 2}, {"a": 1}],
        "kinds": [{"a": 1}, {"a": 1.0}],
    }
    for name, examples in rows.items():
        write(home / f"{name}.tfrecord", map(encode_example, examples))
    write(home / "sequences.tfrecord", [encode_sequence_example({}, {"a": [1]})])
    write(home / "events.tfrecord", [EVENT])
    write(home / "packed.tfrecord.gz", [EVENT], compression="GZIP")
    return home


@pytest.mark.parametrize(("command", "said"), MISTAKES)
def test_mistakes_are_told_in_two_lines(mistakes, monkeypatch, command, said):
    monkeypatch.chdir(mistakes)
    before = names(mistakes)
    text = data(*command.split(), code=2)
    assert said in text
    assert len(text.strip().splitlines()) <= 2
    assert names(mistakes) == before
