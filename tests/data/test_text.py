import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.data import TextSource

LINES = st.lists(
    st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=9),
    max_size=20,
)


def read_all(source: TextSource) -> list:
    return source.read(np.arange(len(source)))["text"].tolist()


@given(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_lines_are_those_of_the_file(tmp_path_factory, lines, end, has_last_end):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes((end.join(lines) + (end if has_last_end and lines else "")).encode())
    expected = lines if has_last_end or not lines or lines[-1] else lines[:-1]
    assert read_all(TextSource(path)) == expected
    assert read_all(TextSource(path, skip_empty=True)) == [line for line in expected if line]
    assert read_all(TextSource(path, encoding=None)) == [line.encode() for line in expected]


def test_files_follow_each_other_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b.txt").write_text("three\nfour\n")
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "c.txt").write_text("")
    source = TextSource(str(tmp_path / "*.txt"))
    assert read_all(source) == ["one", "two", "three", "four"]
    assert source.where(3) == f"{tmp_path / 'b.txt'}: line 2"
    assert read_all(pickle.loads(pickle.dumps(source))) == [
        "one",
        "two",
        "three",
        "four",
    ]  # as workers are sent it


def test_what_is_not_text_is_told_with_file_and_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\nfine\n\xff\xfe\n")
    with pytest.raises(
        ValueError, match=r"a\.txt: line 3 is not utf-8: .*; encoding=None returns bytes"
    ):
        TextSource(tmp_path / "a.txt", skip_empty=True).read(np.array([1]))


def test_lines_that_are_not_there_and_files_that_are_not(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(IndexError, match="has 1 lines, but line 1 was requested"):
        TextSource(tmp_path / "a.txt").read(np.array([1]))
    with pytest.raises(FileNotFoundError, match=r"\*\.csv"):
        TextSource(str(tmp_path / "*.csv"))
