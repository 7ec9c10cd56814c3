import errno
import os

import pytest

from ftrain.formats import match_files
from ftrain.storage import (
    TIMEOUT,
    exists,
    is_directory,
    is_transient,
    list_names,
    raise_if_transient,
    retry,
)


def failing(count, code=errno.ESTALE):
    """A function that fails `count` times, and then returns the number of its calls."""
    calls = []

    def action():
        calls.append(1)
        if len(calls) <= count:
            raise OSError(code, os.strerror(code), "some/path")
        return len(calls)

    return action


def test_a_transient_error_is_retried_with_longer_and_longer_delays():
    delays = []
    assert retry(failing(4), timeout=60, sleep=delays.append) == 5
    assert delays == [0.05, 0.1, 0.2, 0.4]


def test_other_errors_are_raised_at_once():
    with pytest.raises(FileNotFoundError):
        retry(failing(1, errno.ENOENT), sleep=pytest.fail)


def test_in_the_end_the_error_is_raised(monkeypatch):
    monkeypatch.setenv(TIMEOUT, "0")
    with pytest.raises(OSError, match="some/path"):
        retry(failing(1), sleep=pytest.fail)


def test_between_two_attempts_what_was_begun_is_removed():
    removed = []
    assert (
        retry(
            failing(2), timeout=60, sleep=lambda delay: None, before_retry=lambda: removed.append(1)
        )
        == 3
    )
    assert removed == [1, 1]


def test_an_error_is_transient_if_what_it_was_raised_from_is():
    error = ValueError("no checkpoint")
    error.__cause__ = OSError(errno.EIO, "of the disk")
    assert is_transient(error)
    assert not is_transient(ValueError("no checkpoint"))
    assert not is_transient(OSError(errno.ENOSPC, "full"))


def test_an_error_that_tensorstore_wraps_is_found(tmp_path):
    wrapped = ValueError(
        f"Error opening file [source locations='...' os_error_code='{errno.EMFILE}']"
    )
    with pytest.raises(OSError, match=f"{tmp_path}") as caught:
        raise_if_transient(wrapped, tmp_path)
    assert caught.value.errno == errno.EMFILE
    # A missing file is a definite result, not a transient error.
    raise_if_transient(ValueError(f"os_error_code='{errno.ENOENT}'"), tmp_path)


def test_only_what_is_missing_is_missing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert list_names(tmp_path / "nowhere") == []
    assert list_names(tmp_path / "file" / "below") == []
    assert not exists(tmp_path / "file" / "below")
    assert not is_directory(tmp_path / "file")

    def stale(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "stat", stale)
    monkeypatch.setattr(os, "listdir", stale)
    for question in (exists, is_directory, list_names):
        with pytest.raises(OSError, match="Stale"):
            question(tmp_path)


def test_a_pattern_does_not_lose_files_to_a_directory_that_cannot_be_listed(tmp_path, monkeypatch):
    for name in ("a/1.txt", "b/2.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    assert (
        len(match_files(tmp_path / "*" / "*.txt"))
        == len(match_files(tmp_path / "**" / "*.txt"))
        == 2
    )
    listdir = os.listdir
    scandir = os.scandir

    def stale_at_b(real):
        def listing(path="."):
            if str(path).rstrip("/").endswith("b"):
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return real(path)

        return listing

    monkeypatch.setattr(os, "listdir", stale_at_b(listdir))
    monkeypatch.setattr(os, "scandir", stale_at_b(scandir))
    monkeypatch.setenv(TIMEOUT, "0")
    for pattern in ("*/*.txt", "**/*.txt"):
        with pytest.raises(OSError, match="Stale"):
            match_files(tmp_path / pattern)
