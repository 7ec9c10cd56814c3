import os
from pathlib import Path

import pytest

from ftrain.formats.records.files import match_files


@pytest.fixture
def directory(tmp_path, monkeypatch):
    for name in (
        "b.tfrecord",
        "a.tfrecord",
        "deep/er/c.tfrecord",
        "a.tfrecord.index",
        "b.tfrecord.x.writing",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_pattern_gives_its_files_sorted(directory):
    assert match_files("*.tfrecord") == [Path("a.tfrecord"), Path("b.tfrecord")]
    assert match_files(directory / "?.tfrecord") == [
        directory / "a.tfrecord",
        directory / "b.tfrecord",
    ]
    assert match_files("**/*.tfrecord") == [
        Path("a.tfrecord"),
        Path("b.tfrecord"),
        Path("deep/er/c.tfrecord"),
    ]


def test_indices_unfinished_files_and_directories_are_no_data(directory):
    assert match_files("*") == [Path("a.tfrecord"), Path("b.tfrecord")]
    (directory / "lone.index").write_bytes(b"")
    assert match_files("*.index") == [Path("lone.index")]
    assert match_files("a.tfrecord.index") == [Path("a.tfrecord.index")]


def test_entries_keep_their_order_and_a_file_is_taken_once(directory):
    wanted = [Path("b.tfrecord"), Path("a.tfrecord")]
    assert match_files(["b.tfrecord", "*.tfrecord"]) == wanted
    assert match_files(("b.tfrecord", Path("a.tfrecord"), directory / "b.tfrecord")) == wanted


def test_a_path_that_exists_is_no_pattern(directory):
    for name in ("[ab].tfrecord", "*.tfrecord"):
        (directory / name).write_bytes(b"")
        assert match_files(name) == [Path(name)]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "c.tfrecord",
            r"^c.tfrecord: there is no such file; "
            r"\. has 4 files, the nearest name is [ab].tfrecord$",
        ),
        ("none/c.tfrecord", "its directory none does not exist"),
        ("deep/*.gz", r"^deep/\*.gz: matches no file; deep has 0 files$"),
        ("deep/er/x*", "deep/er has 1 file$"),
        ("none/**/*.gz", "its directory none does not exist"),
        ("*.writing", r"matches no file but 1 that are directories, indices or unfinished"),
        ("de*", "matches no file but 1 that"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(directory, entry, message):
    assert os.listdir(directory)
    with pytest.raises(FileNotFoundError, match=message):
        match_files(["a.tfrecord", entry])


def test_a_directory_and_nothing_at_all_are_errors(directory):
    with pytest.raises(IsADirectoryError, match=r"deep: is a directory; .* write deep/\*"):
        match_files("deep")
    with pytest.raises(ValueError, match="at least one"):
        match_files([])
