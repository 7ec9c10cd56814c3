"""ftrain data convert: there and back, and nothing left behind."""

import csv
import json
import signal
import subprocess
import sys
import time
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest
from command import environment, start
from data_command import EVENT, damage, data, example, features_of, names, write, write_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.cli.data_convert import convert
from ftrain.formats.examples.messages import encode_example
from ftrain.formats.records.reading import read_records


@pytest.fixture
def records(tmp_path) -> Path:
    return write_examples(tmp_path)


def test_records_are_compressed_and_resharded_as_they_are(tmp_path, records):
    content = list(read_records(records))
    data("convert", records, tmp_path / "a.tfrecord.gz")
    data("convert", records, tmp_path / "b.tfrecord", "--compression", "zlib")
    text = data(
        "convert", tmp_path / "a.tfrecord.gz", tmp_path / "b.tfrecord", tmp_path / "c.tfrecord"
    )
    assert text == f"{tmp_path}/c.tfrecord: 40 records, 13.7 KB\n"
    assert list(read_records(tmp_path / "a.tfrecord.gz", compression="GZIP")) == content
    assert list(read_records(tmp_path / "b.tfrecord", compression="ZLIB")) == content
    assert list(read_records(tmp_path / "c.tfrecord", compression=None)) == content * 2
    text = data("convert", tmp_path / "c.tfrecord", tmp_path / "d.tfrecord", "--shard-records", 15)
    assert (
        text == f"{tmp_path}/d-00000-of-00003.tfrecord to d-00002-of-00003.tfrecord: "
        "40 records, 13.7 KB\n"
    )
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
    rows = [
        {name: values.tolist() for name, values in row.items()}
        for row in features_of(tmp_path / "t.tfrecord")
    ]
    assert rows == [
        {"id": [1], "share": [0.5], "name": [" é".encode()], "mixed": [b"3"]},
        {"id": [-2], "name": [b"a,\nb"], "mixed": [b"x"]},
        {"share": [1000.0], "name": [b"c"], "mixed": [b"nan"]},
        {"share": [7.0]},
    ]
    data("convert", tmp_path / "t.tfrecord", tmp_path / "t.tsv")
    assert (tmp_path / "t.tsv").read_text().splitlines()[:2] == [
        "id\tmixed\tname\tshare",
        "1\t3\t é\t0.5",
    ]


def test_a_long_cell_is_taken(tmp_path):
    (tmp_path / "a.csv").write_text(f"a\n{'x' * 300_000}\n")
    before = csv.field_size_limit()
    data("convert", tmp_path / "a.csv", tmp_path / "a.tfrecord")
    assert csv.field_size_limit() == before
    assert len(features_of(tmp_path / "a.tfrecord")[0]["a"][0]) == 300_000


def test_jsonl_takes_numbers_text_and_lists(tmp_path):
    lines = [
        {
            "n": 1,
            "x": 2,
            "grid": [[1, 2], [3, 4]],
            "flag": True,
            "text": "é",
            "list": ["a", "b"],
            "gone": None,
        },
        {
            "n": [],
            "x": 2.5,
            "grid": [1, 0.5],
            "flag": [False, 2],
            "text": {"base64": "/w=="},
            "empty": [],
        },
    ]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    data("convert", tmp_path / "a.jsonl", tmp_path / "a.tfrecord")
    first, second = features_of(tmp_path / "a.tfrecord")
    assert sorted(first) == ["flag", "grid", "list", "n", "text", "x"]
    assert first["grid"].dtype == first["x"].dtype == np.float32
    assert first["n"].dtype == second["n"].dtype == first["flag"].dtype == np.int64
    assert (first["grid"].tolist(), first["flag"].tolist(), first["text"][0]) == (
        [1, 2, 3, 4],
        [1],
        "é".encode(),
    )
    assert (second["n"].tolist(), second["flag"].tolist(), second["text"][0]) == (
        [],
        [0, 2],
        b"\xff",
    )
    assert second["empty"] is None
    data("convert", tmp_path / "a.tfrecord", tmp_path / "b.jsonl")
    back = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert back[1] == {
        "n": [],
        "x": 2.5,
        "grid": [1, 0.5],
        "flag": [0, 2],
        "text": {"base64": "/w=="},
        "empty": [],
    }
    assert back[0]["flag"] == [1]  # a list where it is one elsewhere


def test_npz_arrays_become_features(tmp_path):
    grid = np.asfortranarray(np.arange(12.0).reshape(2, 3, 2))
    arrays = {
        "grid": grid,
        "half": np.ones(2, np.float16),
        "big": np.array([1, 2], ">i2"),
        "flag": np.array([True, False]),
    }
    np.savez_compressed(
        tmp_path / "a.npz", **arrays, text=np.array(["é", "zebra"]), raw=np.array([b"\xff", b"a"])
    )
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
@given(
    st.sampled_from([".csv", ".tsv"]),
    st.lists(st.tuples(*(st.just("") | CELLS[name] for name in "abc"))),
)
def test_csv_there_and_back(tmp_path_factory, suffix, rows):
    directory = tmp_path_factory.mktemp("csv")
    # Whatever is in the column, there is a value that decides on its kind.
    rows = [("1", "0.5", "t"), *rows]
    with open(directory / f"t{suffix}", "x", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=",\t"[suffix == ".tsv"], quoting=csv.QUOTE_ALL).writerows(
            ["abc", *rows]
        )
    with open(there_and_back(directory, suffix), newline="", encoding="utf-8") as file:
        assert [tuple(row) for row in csv.reader(file, delimiter=",\t"[suffix == ".tsv"])] == [
            tuple("abc"),
            *rows,
        ]


SHORTEST = FLOATS.map(lambda value: float(str(value)))
NO_TEXT = st.binary(max_size=4).map(lambda value: {"base64": b64encode(b"\xff" + value).decode()})
BYTES = TEXT | NO_TEXT
KINDS = [INTEGERS, SHORTEST, BYTES]


@st.composite
def json_lines(draw):
    """Lines in which each name has one kind of value, and never both a value and a list of one."""
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
        return np.array(
            source.draw(st.lists(values, min_size=count, max_size=count)), dtype
        ).reshape(length, *width)

    text = st.binary(max_size=5).filter(lambda value: not value.endswith(b"\0"))
    arrays = {
        "x": array(FLOATS, np.float32),
        "number": array(INTEGERS, np.int64),
        "a/b": array(text, "S5"),
    }
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
        assert "exists already" in data("convert", records, tmp_path / name, code=2)
        data("convert", records, records.parent / name, "--overwrite")
    data("convert", records, tmp_path / "new" / "s.tfrecord", "--shard-records", 9)
    assert "shards of" in data(
        "convert", records, tmp_path / "new" / "s.tfrecord", "--shard-records", 5, code=2
    )
    shard = tmp_path / "new" / "s-00000-of-00003.tfrecord"
    text = data(
        "convert",
        shard,
        tmp_path / "new" / "s.tfrecord",
        "--shard-records",
        2,
        "--overwrite",
        code=2,
    )
    assert "would overwrite the source" in text


TARGETS = ["x.tfrecord", "x.tfrecord.gz", "x.jsonl", "x.csv", "x.npz"]
SHARDED = [(target, ("--shard-records", "2")) for target in TARGETS[:2]]


@pytest.mark.parametrize(("target", "options"), [*((target, ()) for target in TARGETS), *SHARDED])
def test_damage_leaves_nothing_behind(tmp_path, target, options):
    bad = damage(
        write(tmp_path / "bad.tfrecord", [encode_example({"a": n}) for n in range(9)]), 200
    )
    text = data("convert", bad, tmp_path / target, *options, code=1)
    assert "is damaged" in text
    assert text.splitlines()[1] == f"`ftrain data verify {bad}` lists what is damaged in it"
    assert names(tmp_path) == ["bad.tfrecord"]


@pytest.mark.parametrize("target", ["x.tfrecord", "x.jsonl"])
def test_a_disk_that_takes_no_more_is_told(tmp_path, target):
    source = write(tmp_path / "in.tfrecord", [example(number) for number in range(2000)])
    words = [sys.executable, "-m", "ftrain", "data", "convert", str(source), str(tmp_path / target)]
    limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "limited", *words]  # files of 64 KB at most
    ran = subprocess.run(limited, capture_output=True, text=True, check=False, env=environment())
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr == f"ftrain: {tmp_path / target}: File too large\n"
    assert names(tmp_path) == ["in.tfrecord"]


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
