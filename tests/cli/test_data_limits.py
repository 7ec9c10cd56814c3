"""ftrain data with hostile files, huge, invalid or slow to read: two lines and exit code 2."""

import csv
import json
import re
import subprocess
import sys
import textwrap
import zipfile

import numpy as np
import pytest
from command import ROOT
from data_command import data, features_of, write

from ftrain.data import ArraySource
from ftrain.formats import encode_example


def npy(descr: str, shape: str, body: bytes = b"", order: str = "False", version: int = 1) -> bytes:
    text = (
        f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode().ljust(117)
        + b"\n"
    )
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(width, "little") + text + body


def archive(
    path, members: dict[str, bytes] | list[tuple[str, bytes]], compression=zipfile.ZIP_DEFLATED
):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items() if isinstance(members, dict) else members:
            file.writestr(name, content)
    return path


def refused(path, *options) -> str:
    """What is said of a file that cannot be converted; nothing is left of what was written."""
    message = data("convert", path, path.with_name("x.tfrecord"), *options, code=2)
    assert len(message.strip().splitlines()) <= 2
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    return message


CLAIMS = {
    "no bytes": (npy("'|S0'", "(1000000000000,)"), "1000000000000 entries of 0 elements each"),
    "no width": (npy("'<f4'", "(1000000000000, 0)"), "1000000000000 entries of 0 elements each"),
    "negative": (
        npy("'<f4'", "(-5,)"),
        r"its shape is \(-5,\), expected up to 64 sizes of at least 0",
    ),
    "beyond memory": (npy("'<f4'", "(99999999999999999999,)"), "too large for any memory"),
    "cut": (npy("'<f4'", "(1000000000,)", bytes(8)), "is cut short: its shape"),
    "true": (npy("'<f4'", "(True,)", bytes(8)), "expected up to 64 sizes of at least 0"),
    "not closed": (npy("'<f4'", "(3"), "its header cannot be parsed"),
    "nested": (npy("'<f4'", "(" * 5000 + ")" * 5000), "its header"),
    "an unknown dtype": (npy("'<x9'", "(3,)"), "its header cannot be parsed"),
    "a dtype without fields": (npy("{}", "(3,)"), "array x is of dtype"),
    "an unhashable key": (b"\x93NUMPY\x01\x00\x0a\x00{[]: 1}   \n", "its header cannot be parsed"),
    "another version": (npy("'<f4'", "(3,)", version=9), r"its format has version \(9, 0\)"),
    "no header": (
        b"\x93NUMPY\x02\x00\xff\xff\xff\x7f",
        "its header has 2147483647 bytes, expected at most 10000",
    ),
}


@pytest.mark.parametrize(("content", "expected"), CLAIMS.values(), ids=CLAIMS.keys())
def test_npz_headers_that_make_no_sense_are_refused(tmp_path, content, expected):
    path = archive(tmp_path / "a.npz", {"x.npy": content})
    assert re.search(expected, refused(path))


def test_a_header_with_nothing_behind_it_is_refused_as_a_source_too(tmp_path):
    for name in ("negative", "nested", "an unhashable key", "no header"):
        with pytest.raises(ValueError, match=r"a\.npz: array x\.npy cannot be read"):
            ArraySource.open(archive(tmp_path / "a.npz", {"x.npy": CLAIMS[name][0]}))
        (tmp_path / "a.npy").write_bytes(CLAIMS[name][0])
        with pytest.raises(ValueError, match=r"a\.npy cannot be mapped as an \.npy file"):
            ArraySource.open(tmp_path / "a.npy")


def test_names_of_members_are_shown_in_one_line_and_stand_for_one_array(tmp_path):
    array = npy("'<f4'", "(1,)", bytes(4))
    path = tmp_path / "a.npz"
    assert r"array a\nb cannot be read" in refused(archive(path, {"a\nb.npy": b"nothing"}))
    assert "two of its arrays have the same name" in refused(
        archive(path, [("a.npy", array), ("a", array)])
    )
    assert "or one has none" in refused(archive(path, {".npy": array}))
    assert "not Unicode text" not in data(
        "convert", archive(path, {"é.npy": array}), tmp_path / "x.tfrecord"
    )


@pytest.mark.parametrize("compression", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_compression_that_numpy_does_not_write_is_refused(tmp_path, compression):
    """The header of an LZMA member can claim 4 GB for its dictionary."""
    path = archive(tmp_path / "a.npz", {"x.npy": npy("'<f4'", "(1,)", bytes(4))}, compression)
    assert "expected 0 (stored) or 8 (deflated)" in refused(path)
    with pytest.raises(ValueError, match=r"expected 0 \(stored\) or 8 \(deflated\)"):
        ArraySource.open(path)


def test_an_entry_or_an_array_by_columns_has_a_limit_that_can_be_set(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((2, 1000), np.float32))
    assert "has entries of 4000 bytes, more than 3999; raise the limit" in refused(
        path, "--max-record-bytes", 3999
    )
    np.savez_compressed(path, x=np.asfortranarray(np.zeros((200, 10), np.float32)))
    assert "takes 8000 bytes, more than 7999" in refused(path, "--max-record-bytes", 7999)
    assert "200 records" in data(
        "convert", path, tmp_path / "x.tfrecord", "--max-record-bytes", 8000
    )
    with pytest.raises(ValueError, match="it takes 8000 bytes, more than max_unpacked_bytes=7999"):
        ArraySource.open(path, max_unpacked_bytes=7999)


def test_lines_rows_and_records_have_a_limit_that_can_be_set(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"x": "y" * 1000}) + "\n")
    assert "line 1 has more than 1000 bytes" in refused(path, "--max-record-bytes", 1000)
    assert "1 record" in data("convert", path, tmp_path / "long.tfrecord")
    expected = "more than max_record_bytes=1000"
    assert expected in data(
        "convert",
        tmp_path / "long.tfrecord",
        tmp_path / "b.jsonl",
        "--max-record-bytes",
        1000,
        code=1,
    )
    assert expected in data(
        "verify", tmp_path / "long.tfrecord", "--max-record-bytes", 1000, code=1
    )
    path = tmp_path / "csv" / "a.csv"
    path.parent.mkdir()
    path.write_text('a,b\n1,"' + "never closed\n" * 100)
    expected = "the row from line 2 on has more than 1000 bytes; is a quotation mark missing?"
    assert expected in refused(path, "--max-record-bytes", 1000)


def test_a_table_that_is_much_larger_than_its_records_is_refused(tmp_path):
    records = [encode_example({f"f{number}": 1}) for number in range(5000)]
    path = write(tmp_path / "a.tfrecord", records)
    expected = (
        "a table of 5,000 rows of 5,000 columns would be nearly empty, with 5,000 values; "
        "write .jsonl"
    )
    assert expected in data("convert", path, tmp_path / "a.csv", code=2)
    records = [encode_example({"a": b"x" * 100_000}), *[encode_example({"a": b"y"})] * 1000]
    path = write(tmp_path / "b.tfrecord", records)
    expected = (
        "feature a would take 100100000 bytes for 101000, "
        "as all values get the length of the longest"
    )
    assert expected in data("convert", path, tmp_path / "b.npz", code=2)


class CountedText(str):
    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        CountedText.comparisons += 1
        return str.__eq__(self, other)


class CountedReader:
    """csv.reader, with text that counts how often it is compared."""

    def __init__(self, *arguments, **options):
        self._reader = READER(*arguments, **options)

    def __iter__(self):
        return self

    def __next__(self):
        return [CountedText(cell) for cell in next(self._reader)]

    @property
    def line_num(self):
        return self._reader.line_num


READER = csv.reader


def test_many_columns_take_time_in_proportion_to_their_number(tmp_path, monkeypatch):
    monkeypatch.setattr(csv, "reader", CountedReader)
    path = tmp_path / "a.csv"
    path.write_text(
        ",".join(f"c{number}" for number in range(2000)) + "\n" + ",".join(["1"] * 2000) + "\n"
    )
    data("convert", path, tmp_path / "a.tfrecord")
    assert len(features_of(tmp_path / "a.tfrecord")[0]) == 2000
    assert CountedText.comparisons < 50 * 2000


PROGRAM = """
    import resource, sys
    from ftrain.cli import main
    # It takes a second or two; older versions took hours.
    resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
    main()
"""


def test_digits_and_nested_lists_take_time_in_proportion_to_their_length(tmp_path):
    (tmp_path / "a.csv").write_text("a\n" + "1" * 2_000_000 + "x\n")
    nested = "[" * 300 + "1" + ", 2" * 500_000 + "]" * 300
    (tmp_path / "b.jsonl").write_text(f'{{"a": {nested}}}\n')
    for name in ("a.csv", "b.jsonl"):
        words = ["data", "convert", name, f"{name}.tfrecord"]
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), *words]
        done = subprocess.run(
            command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert done.returncode in (0, 2), done.stderr
        assert "Traceback" not in done.stderr


def test_limits_of_zero_are_refused(tmp_path):
    assert "--max-record-bytes" in data("verify", tmp_path / "x", "--max-record-bytes", 0, code=2)
