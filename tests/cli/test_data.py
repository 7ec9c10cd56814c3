"""ftrain data: what it shows, what it converts, and what it says to mistakes."""

import contextlib
import csv
import io
import json
import os
import pty
import signal
import sys
import time
import warnings
from base64 import b64encode
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from command import start
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain import formats
from ftrain.cli import main
from ftrain.cli.data.convert import convert
from ftrain.formats.examples.messages import decode_example, encode_example, encode_sequence_example
from ftrain.formats.examples.parsing import parse_examples
from ftrain.formats.examples.sequences import parse_sequence_examples
from ftrain.formats.records.reading import read_records
from ftrain.formats.records.writing import RecordWriter

EVENT = b"\x09\x00\x00\x00\x00\x00\x00\xf0\x3f\x1a\rbrain.Event:2"


def data(*arguments, code: int = 0) -> str:
    """What the command prints, run in this process; on the standard error if it was a mistake."""
    out, err = io.StringIO(), io.StringIO()
    words = ["ftrain", "data", *map(str, arguments)]
    kept = patch.multiple(sys, argv=words, unraisablehook=sys.unraisablehook, path=[*sys.path])
    handler = signal.getsignal(signal.SIGINT)
    with kept, patch.object(warnings, "showwarning", warnings.showwarning):
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ending:
                main()
        finally:
            signal.signal(signal.SIGINT, handler)
    assert (ending.value.code or 0) == code, err.getvalue()
    return err.getvalue() or out.getvalue()


def write(path: Path, records, **options) -> Path:
    with RecordWriter(path, **options) as writer:
        for record in records:
            writer.write(record)
    return writer.paths[0]


def features_of(path: Path) -> list[dict]:
    return [decode_example(record) for record in read_records(path)]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def example(number: int) -> bytes:
    values = {"x": np.arange(64) / 2 + number, "label": number, "words": np.arange(number % 3 + 1), "name": b"zebra"}
    return encode_example(values)


@pytest.fixture
def records(tmp_path) -> Path:
    return write(tmp_path / "train.tfrecord", [example(number) for number in range(20)])


def damage(path: Path, *places: int) -> Path:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 1
    path.write_bytes(content)
    return path


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
        write(tmp_path / f"{number}.tfrecord", [example(n) for n in range(number + 1)], compression=compression)
    lines = data("show", tmp_path / "*.tfrecord", "--examples", 0).splitlines()
    assert [line.split()[1:3] for line in lines[1:4]] == [["none", "1"], ["GZIP", "2"], ["ZLIB", "3"]]
    assert lines[4].split()[:3] == ["3", "files", "6"]


def test_show_of_sequences(tmp_path):
    lists = {"frames": [np.ones(4), np.zeros(4)], "tags": [[b"a"], [b"b", b"c"]]}
    path = write(tmp_path / "s.tfrecord", [encode_sequence_example({"id": n}, lists) for n in range(3)])
    text = data("show", path, "--examples", 1)
    assert "context, from 3 records" in text
    assert "  frames: 2 steps, the first: [1, 1, 1, 1]" in text
    scope = pasted(text)
    context, steps = parse_sequence_examples(list(read_records(path)), scope["spec"], scope["sequence"])
    assert context["id"].tolist() == [0, 1, 2]
    assert steps["frames"].shape == (3, 2, 4)


def test_show_of_what_is_no_example(tmp_path):
    text = data("show", write(tmp_path / "events.out.tfevents.1", [EVENT, bytes(range(40)), b"some text"]))
    assert "the records are no Examples" in text
    assert "00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f ... 40 bytes" in text
    assert '"some text"' in text
    mixed = write(tmp_path / "mixed.tfrecord", [example(0), EVENT, encode_example({"x": 1, "none": None})])
    text = data("show", mixed)
    assert "from 3 records; 1 of them are no Examples" in text
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
    assert "  and 5 more, which --all tells" in data("verify", worse, code=1)
    assert data("verify", worse, "--all", code=1).count("does not match") == 25
    packed = damage(write(tmp_path / "packed.tfrecord.gz", [os.urandom(1000)] * 9, compression="GZIP"), 900)
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


def test_records_are_compressed_and_resharded_as_they_are(tmp_path, records):
    content = list(read_records(records))
    data("convert", records, tmp_path / "a.tfrecord.gz")
    data("convert", records, tmp_path / "b.tfrecord", "--compression", "zlib")
    text = data("convert", tmp_path / "a.tfrecord.gz", tmp_path / "b.tfrecord", tmp_path / "c.tfrecord")
    assert text == f"{tmp_path}/c.tfrecord: 40 records, 13.7 KB\n"
    assert list(read_records(tmp_path / "a.tfrecord.gz", compression="GZIP")) == content
    assert list(read_records(tmp_path / "b.tfrecord", compression="ZLIB")) == content
    assert list(read_records(tmp_path / "c.tfrecord", compression=None)) == content * 2
    text = data("convert", tmp_path / "c.tfrecord", tmp_path / "d.tfrecord", "--shard-records", 15)
    assert text == f"{tmp_path}/d-00000-of-00003.tfrecord to d-00002-of-00003.tfrecord: 40 records, 13.7 KB\n"
    data("convert", tmp_path / "d-*", tmp_path / "d.tfrecord")
    assert list(read_records(tmp_path / "d.tfrecord")) == content * 2
    write(tmp_path / "events.out.tfevents.1", [EVENT])
    data("convert", tmp_path / "events.out.tfevents.1", tmp_path / "e.record")
    assert list(read_records(tmp_path / "e.record")) == [EVENT]


def test_csv_gives_each_column_a_kind(tmp_path):
    table = '\ufeffid,share,name,mixed,none\n1,0.5, é,3,\n\n-2,,"a,\nb",x,\n,1e3,c,nan,\n'
    (tmp_path / "a.csv").write_text(table, encoding="utf-8")
    (tmp_path / "b.csv").write_text("none,mixed,name,share,id\n,,,7,\n", encoding="utf-8")
    data("convert", tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "t.tfrecord")
    rows = [{name: values.tolist() for name, values in row.items()} for row in features_of(tmp_path / "t.tfrecord")]
    assert rows == [
        {"id": [1], "share": [0.5], "name": [" é".encode()], "mixed": [b"3"]},
        {"id": [-2], "name": [b"a,\nb"], "mixed": [b"x"]},
        {"share": [1000.0], "name": [b"c"], "mixed": [b"nan"]},
        {"share": [7.0]},
    ]
    data("convert", tmp_path / "t.tfrecord", tmp_path / "t.tsv")
    assert (tmp_path / "t.tsv").read_text().splitlines()[:2] == ["id\tmixed\tname\tshare", "1\t3\t é\t0.5"]


def test_a_long_cell_is_taken(tmp_path):
    (tmp_path / "a.csv").write_text(f"a\n{'x' * 300_000}\n")
    before = csv.field_size_limit()
    data("convert", tmp_path / "a.csv", tmp_path / "a.tfrecord")
    assert csv.field_size_limit() == before
    assert len(features_of(tmp_path / "a.tfrecord")[0]["a"][0]) == 300_000


def test_jsonl_takes_numbers_text_and_lists(tmp_path):
    lines = [
        {"n": 1, "x": 2, "grid": [[1, 2], [3, 4]], "flag": True, "text": "é", "list": ["a", "b"], "gone": None},
        {"n": [], "x": 2.5, "grid": [1, 0.5], "flag": [False, 2], "text": {"base64": "/w=="}, "empty": []},
    ]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    data("convert", tmp_path / "a.jsonl", tmp_path / "a.tfrecord")
    first, second = features_of(tmp_path / "a.tfrecord")
    assert sorted(first) == ["flag", "grid", "list", "n", "text", "x"]
    assert first["grid"].dtype == first["x"].dtype == np.float32
    assert first["n"].dtype == second["n"].dtype == first["flag"].dtype == np.int64
    assert (first["grid"].tolist(), first["flag"].tolist(), first["text"][0]) == ([1, 2, 3, 4], [1], "é".encode())
    assert (second["n"].tolist(), second["flag"].tolist(), second["text"][0]) == ([], [0, 2], b"\xff")
    assert second["empty"] is None
    data("convert", tmp_path / "a.tfrecord", tmp_path / "b.jsonl")
    back = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert back[1] == {"n": [], "x": 2.5, "grid": [1, 0.5], "flag": [0, 2], "text": {"base64": "/w=="}, "empty": []}
    assert back[0]["flag"] == [1]  # a list where it is one elsewhere


def test_npz_arrays_become_features(tmp_path):
    grid = np.asfortranarray(np.arange(12.0).reshape(2, 3, 2))
    arrays = {
        "grid": grid,
        "half": np.ones(2, np.float16),
        "big": np.array([1, 2], ">i2"),
        "flag": np.array([True, False]),
    }
    np.savez_compressed(tmp_path / "a.npz", **arrays, text=np.array(["é", "zebra"]), raw=np.array([b"\xff", b"a"]))
    data("convert", tmp_path / "a.npz", tmp_path / "a.npz", tmp_path / "a.tfrecord")
    rows = features_of(tmp_path / "a.tfrecord")
    assert len(rows) == 2  # a file that is named twice is one
    np.testing.assert_array_equal(rows[1]["grid"], grid[1].ravel())
    assert [row["text"][0] for row in rows] == ["é".encode(), b"zebra"]
    assert [row["raw"][0] for row in rows] == [b"\xff", b"a"]
    assert [row["flag"].tolist() + row["big"].tolist() for row in rows] == [[1, 1], [0, 2]]
    data("convert", tmp_path / "a.tfrecord", tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz") as archive:
        back = dict(archive)
    assert {name: (array.dtype, array.shape) for name, array in back.items()} == {
        "big": (np.int64, (2,)),
        "flag": (np.int64, (2,)),
        "grid": (np.float32, (2, 6)),
        "half": (np.float32, (2,)),
        "raw": ("S1", (2,)),
        "text": ("S5", (2,)),
    }


def there_and_back(directory: Path, suffix: str) -> Path:
    """t converted to records and those back to what is called back."""
    convert([f"{directory}/t{suffix}", f"{directory}/r.tfrecord"])
    convert([f"{directory}/r.tfrecord", f"{directory}/back{suffix}"])
    return directory / f"back{suffix}"


FLOATS = st.floats(width=32).map(np.float32)
INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
CELLS = {"a": INTEGERS.map(str), "b": FLOATS.map(str), "c": TEXT.map("t{}".format)}


@settings(max_examples=60)
@given(st.sampled_from([".csv", ".tsv"]), st.lists(st.tuples(*(st.just("") | CELLS[name] for name in "abc"))))
def test_csv_there_and_back(tmp_path_factory, suffix, rows):
    directory = tmp_path_factory.mktemp("csv")
    # Whatever is in the column, there is a value that decides on its kind.
    rows = [("1", "0.5", "t"), *rows]
    with open(directory / f"t{suffix}", "x", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=",\t"[suffix == ".tsv"], quoting=csv.QUOTE_ALL).writerows(["abc", *rows])
    with open(there_and_back(directory, suffix), newline="", encoding="utf-8") as file:
        assert [tuple(row) for row in csv.reader(file, delimiter=",\t"[suffix == ".tsv"])] == [tuple("abc"), *rows]


SHORTEST = FLOATS.map(lambda value: float(str(value)))
NO_TEXT = st.binary(max_size=4).map(lambda value: {"base64": b64encode(b"\xff" + value).decode()})
BYTES = TEXT | NO_TEXT
KINDS = [INTEGERS, SHORTEST, BYTES]


@st.composite
def json_lines(draw):
    """Lines in which a name stands for one kind, and always for one value or never for a list of one."""
    schema = {}
    for name in draw(st.lists(TEXT, max_size=4, unique=True)):
        kind = draw(st.sampled_from(KINDS))
        several = st.lists(kind, max_size=3).filter(lambda values: len(values) != 1)
        schema[name] = draw(st.sampled_from([kind, several]))
    return draw(st.lists(st.fixed_dictionaries({}, optional=schema), max_size=6))


@settings(max_examples=60)
@given(json_lines())
def test_jsonl_there_and_back(tmp_path_factory, lines):
    directory = tmp_path_factory.mktemp("jsonl")
    (directory / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    back = there_and_back(directory, ".jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    # As text, since NaN is not equal to itself.
    assert [json.dumps(json.loads(line), sort_keys=True) for line in back] == [
        json.dumps(line, sort_keys=True) for line in lines
    ]


@settings(max_examples=40)
@given(st.data(), st.integers(1, 4), st.sampled_from([(), (0,), (2,)]))
def test_npz_there_and_back(tmp_path_factory, source, length, width):
    def array(values, dtype):
        count = length * int(np.prod(width))
        return np.array(source.draw(st.lists(values, min_size=count, max_size=count)), dtype).reshape(length, *width)

    text = st.binary(max_size=5).filter(lambda value: not value.endswith(b"\0"))
    arrays = {"x": array(FLOATS, np.float32), "number": array(INTEGERS, np.int64), "a/b": array(text, "S5")}
    directory = tmp_path_factory.mktemp("npz")
    np.savez(directory / "t.npz", **arrays)
    with np.load(there_and_back(directory, ".npz")) as back:
        assert sorted(back) == sorted(arrays)
        for name, values in arrays.items():
            np.testing.assert_array_equal(back[name], values)
            assert back[name].shape == values.shape


def test_a_target_is_replaced_only_if_that_is_asked_for(tmp_path, records):
    for name in ("a.tfrecord", "a.jsonl"):
        data("convert", records, tmp_path / name)
        assert "already there" in data("convert", records, tmp_path / name, code=2)
        data("convert", records, records.parent / name, "--overwrite")
    data("convert", records, tmp_path / "new" / "s.tfrecord", "--shard-records", 9)
    assert "shards of" in data("convert", records, tmp_path / "new" / "s.tfrecord", "--shard-records", 5, code=2)
    shard = tmp_path / "new" / "s-00000-of-00003.tfrecord"
    text = data("convert", shard, tmp_path / "new" / "s.tfrecord", "--shard-records", 2, "--overwrite", code=2)
    assert "would be read" in text


@pytest.mark.parametrize("target", ["x.tfrecord", "x.tfrecord.gz", "x.jsonl", "x.csv", "x.npz"])
@pytest.mark.parametrize("options", [(), ("--shard-records", "2")])
def test_damage_leaves_nothing_behind(tmp_path, target, options):
    if options and "tfrecord" not in target:
        return
    bad = damage(write(tmp_path / "bad.tfrecord", [encode_example({"a": n}) for n in range(9)]), 200)
    text = data("convert", bad, tmp_path / target, *options, code=1)
    assert "is damaged" in text
    assert text.splitlines()[1] == f"`ftrain data verify {bad}` tells what is damaged in it and what is not"
    assert names(tmp_path) == ["bad.tfrecord"]


def test_a_full_disk_is_told(tmp_path, records, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    assert data("convert", records, tmp_path / "x.tfrecord", code=2) == (
        f"ftrain: {tmp_path}/x.tfrecord: No space left on device\n"
    )
    assert names(tmp_path) == ["train.tfrecord"]


@pytest.mark.parametrize("target", ["out.tfrecord", "out.jsonl"])
def test_an_interrupt_leaves_nothing_behind(tmp_path, target):
    source = tmp_path / "in.jsonl"
    source.write_text('{"a": [1, 2, 3], "b": "text"}\n' * 100_000)
    if target == "out.jsonl":
        source = write(tmp_path / "in.tfrecord", [encode_example({"a": [1, 2, 3]})] * 100_000)
    process = start("data", "convert", source, tmp_path / target)
    while not list(tmp_path.glob("out*.writing")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not list(tmp_path.glob("out*"))


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
    ("convert large.csv x.tfrecord", "line 2: feature b has the value 99999999999999999999, and integers are int64"),
    ("convert beyond.csv x.tfrecord", "line 2: feature a has the value 1e+300, beyond float32"),
    ("convert quote.csv x.tfrecord", "quote.csv: line 2 cannot be read"),
    ("convert latin.csv x.tfrecord", "latin.csv: line 3 is no UTF-8 (byte 1 is 0xe9)"),
    ("convert twice.csv x.tfrecord", "a second column is named a"),
    ("convert unnamed.csv x.tfrecord", "column 2 has no name"),
    ("convert empty.csv x.tfrecord", "empty.csv is empty"),
    ("convert one.csv other.csv x.tfrecord", "only one has a column a"),
    ("convert bad.jsonl x.tfrecord", "bad.jsonl: line 2 is no JSON: Expecting value at column 7"),
    ("convert list.jsonl x.tfrecord", "line 1 is a list, wanted an object"),
    ("convert changing.jsonl x.tfrecord", "line 2: feature a is text, and numbers in the lines before"),
    ("convert mixed.jsonl x.tfrecord", "text and numbers in one list"),
    ("convert object.jsonl x.tfrecord", "feature a is an object"),
    ("convert null.jsonl x.tfrecord", "null in a list"),
    ("convert ragged.jsonl x.tfrecord", "lists of different lengths"),
    ("convert deep.jsonl x.tfrecord", "too deep"),
    ("convert base64.jsonl x.tfrecord", "no base64"),
    ("convert surrogate.jsonl x.tfrecord", "line 1: feature a is no text"),
    ("convert name.jsonl x.tfrecord", "is no Unicode text"),
    ("convert large.jsonl x.tfrecord", "line 1: feature a has the value 9223372036854775808"),
    ("convert digits.jsonl x.tfrecord", "too many digits"),
    ("convert bad.npz x.tfrecord", "bad.npz is no .npz file, or damaged"),
    ("convert objects.npz x.tfrecord", "array a is of dtype object"),
    ("convert lengths.npz x.tfrecord", "different lengths, {'a': 2, 'b': 3}"),
    ("convert scalar.npz x.tfrecord", "array a is a single value"),
    ("convert surrogate.npz x.tfrecord", "array a has text that is no Unicode"),
    ("convert none.npz x.tfrecord", "none.npz has no arrays"),
    ("convert scalar.npz lengths.npz x.tfrecord", "a single value"),
    ("convert vectors.tfrecord x.csv", "vectors.tfrecord: record 1: feature a has 2 values, and a cell holds one"),
    ("convert raw.tfrecord x.csv", "record 0: feature a has bytes that are no UTF-8 text; write .jsonl"),
    ("convert raw.tfrecord x.npz", "record 0: feature a ends with a zero byte"),
    ("convert vectors.tfrecord x.npz", "record 1: feature a has 2 values, 1 in the records before; write .jsonl"),
    ("convert missing.tfrecord x.npz", "record 1: feature b is missing"),
    ("convert kinds.tfrecord x.npz", "record 1: feature a has another kind"),
    ("convert sequences.tfrecord x.jsonl", "record 0 is a SequenceExample"),
    ("convert events.tfrecord x.jsonl", "record 0 is no Example"),
    ("convert one.csv x.parquet", "known are .csv, .tsv, .jsonl, .npz, and .tfrecord"),
    ("convert notes.txt x.tfrecord", "neither its suffix nor how it begins say what it is"),
    ("convert one.csv x.jsonl", "convert to .tfrecord first"),
    ("convert one.csv bad.jsonl x.tfrecord", "convert one kind at a time"),
    ("convert raw.tfrecord raw.tfrecord --overwrite", "would be read"),
    ("convert raw.tfrecord .", ". is a directory"),
    ("convert one.csv notes.txt/x.tfrecord", "notes.txt is a file, not a directory"),
    ("convert raw.tfrecord x.csv --shard-records 2", "--shard-records is for files of records"),
    ("convert raw.tfrecord x.tfrecord.gz --compression zlib", "would be GZIP by its suffix"),
    ("convert raw.tfrecord x.tfrecord --shard-records 0", "shard-records"),
    ("convert raw.tfrecord", "wanted SOURCE... TARGET"),
    ("convert nowhere.csv x.tfrecord", "there is no such file"),
    ("show nowhere.tfrecord", "nowhere.tfrecord: there is no such file"),
    ("show .", ".: is a directory"),
    ("show *.nothing", "*.nothing: matches no file"),
    ("show notes.txt", "notes.txt is no file of records, or damaged from its first byte on"),
    ("show", "FILES"),
    ("index packed.tfrecord.gz", "make a plain one with: ftrain data convert packed.tfrecord.gz packed.tfrecord"),
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
