import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.vocabulary import (
    VocabInfo,
    describe_misfit,
    read_vocabularies,
    remap,
    transfer,
)

WORDS = st.lists(st.text(min_size=1, max_size=3), unique=True, max_size=12)


def words_of(new, old, **settings):
    """The words that are read for a VocabInfo with no buckets."""
    info = VocabInfo(new, settings.pop("new_vocab_size", 2), 0, old, **settings)
    vocabs = read_vocabularies(info)
    return vocabs.new_words, vocabs.old_words


def naive_remap(old, old_words, new_words, fresh, axis):
    old, result = (old.T, fresh.T.copy()) if axis == 1 else (old, fresh.copy())
    for new_row, word in enumerate(new_words):
        for old_row, old_word in enumerate(old_words):
            if word == old_word:
                result[new_row] = old[old_row]
    return result.T if axis == 1 else result


@given(WORDS, WORDS, st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 1]))
def test_remap_is_what_a_loop_over_the_rows_gives(
    old_words, new_words, old_buckets, new_buckets, axis
):
    old = np.arange(3 * (len(old_words) + old_buckets), dtype=np.float32).reshape(-1, 3)
    fresh = -1 - np.arange(3 * (len(new_words) + new_buckets), dtype=np.float32).reshape(-1, 3)
    if axis == 1:
        old = old.T
        fresh = fresh.T
    before = fresh.copy()
    found = remap(old, old_words, new_words, fresh=fresh, axis=axis)
    np.testing.assert_array_equal(found, naive_remap(old, old_words, new_words, fresh, axis))
    np.testing.assert_array_equal(fresh, before)  # it is not written to


@given(st.permutations(["a", "b", "c", "d"]))
def test_remap_to_another_order_and_back_changes_nothing(words):
    table = np.arange(8.0).reshape(4, 2)
    there = remap(table, ["a", "b", "c", "d"], words, fresh=np.zeros((4, 2)))
    np.testing.assert_array_equal(
        remap(there, words, ["a", "b", "c", "d"], fresh=np.zeros((4, 2))), table
    )


def test_remap_works_on_vectors_and_on_the_middle_axis_of_three():
    np.testing.assert_array_equal(
        remap(np.array([1, 2]), ["a", "b"], ["b", "c"], fresh=np.array([8, 9])), [2, 9]
    )
    old = np.arange(12).reshape(2, 2, 3)
    found = remap(old, ["a", "b"], ["b", "a"], fresh=np.zeros_like(old), axis=1)
    np.testing.assert_array_equal(found, old[:, ::-1])


def test_a_vocabulary_is_a_file_of_lines_or_the_words_themselves(tmp_path):
    (tmp_path / "new").write_text("the\ncat\n")
    (tmp_path / "old").write_text("cat\nthe")  # the last line needs no newline
    from_files = words_of(tmp_path / "new", str(tmp_path / "old"))
    assert (
        from_files == words_of(("the", "cat"), ["cat", "the"]) == (["the", "cat"], ["cat", "the"])
    )


def test_only_newlines_end_a_word_and_carriage_returns_before_them_are_dropped(tmp_path):
    path = tmp_path / "words"
    path.write_bytes(
        "two words\r\ncarriage\rreturn\nline\u2028separator\x0b\n\n \n".encode() + b"\xff\xfe\n"
    )
    new, _ = words_of(path, ["a"], new_vocab_size=6)
    assert new == [
        "two words",
        "carriage\rreturn",
        "line\u2028separator\x0b",
        "",
        " ",
        "\udcff\udcfe",
    ]


def test_sizes_limit_the_words_of_both_vocabularies(tmp_path):
    path = tmp_path / "words"
    path.write_text("a\nb\nc\n")
    assert words_of(path, path, new_vocab_size=2, old_vocab_size=1) == (["a", "b"], ["a"])
    assert words_of(path, path, new_vocab_size=3, old_vocab_size=-1) == (
        ["a", "b", "c"],
        ["a", "b", "c"],
    )


def test_a_word_that_is_there_twice_is_named_with_both_lines(tmp_path):
    path = tmp_path / "words"
    path.write_text("a\nb\nc\nb\n")
    with pytest.raises(CheckpointError, match=r"old_vocab .*words has 'b' in lines 2 and 4"):
        words_of(["x", "y"], path)
    assert words_of(["x", "y"], path, old_vocab_size=3) == (
        ["x", "y"],
        ["a", "b", "c"],
    )  # beyond the words in use


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"new_vocab .*/missing\.txt cannot be read: No such file"
    ):
        words_of(tmp_path / "missing.txt", ["a"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"new_vocab_size": 3}, "new_vocab has 2 words, expected 3; lower new_vocab_size"),
        ({"old_vocab_size": 4}, "old_vocab has 1 words, expected 4; lower old_vocab_size"),
        ({"new_vocab_size": 0}, "new_vocab_size is 0, expected at least 1"),
        ({"old_vocab_size": 0}, "old_vocab_size is 0, expected at least 1, or -1"),
        ({"num_oov_buckets": -1}, "num_oov_buckets is -1, expected at least 0"),
    ],
)
def test_sizes_that_cannot_be_meant_are_errors(settings, message):
    info = VocabInfo(["a", "b"], 2, 0, ["a"])._replace(**settings)
    with pytest.raises(CheckpointError, match=message):
        read_vocabularies(info)


@pytest.mark.parametrize(
    ("axis", "old", "new", "message"),
    [
        (0, (3, 4), (3, 4), None),
        (0, (9, 4), (3, 4), None),  # more rows than old words: its buckets
        (1, (4, 3), (4, 3), None),
        (0, (3,), (3,), None),
        (2, (3, 4), (3, 4), r"is \[3, 4\] and has no axis 2"),
        (-1, (4, 3), (4, 3), r"has no axis -1"),
        (
            0,
            (3, 4),
            (5, 4),
            r"is \[5, 4\], expected 3 along axis 0: new_vocab_size 2 and num_oov_buckets 1",
        ),
        (0, (3, 7), (3, 4), r"is \[3, 7\] in the checkpoint, expected \[\*, 4\]"),
        (1, (7, 3), (4, 3), r"is \[7, 3\] in the checkpoint, expected \[4, \*\]"),
        (0, (), (3,), r"is \[\] in the checkpoint, expected \[\*\]"),
        (0, (1, 4), (3, 4), r"is \[1, 4\] in the checkpoint, expected at least 2 along axis 0"),
    ],
)
def test_shapes_that_do_not_fit_are_described(axis, old, new, message):
    vocabs = read_vocabularies(VocabInfo(["a", "b"], 2, 1, ["b", "c"], axis=axis))
    found = describe_misfit(vocabs, old, new)
    assert found is None if message is None else re.search(message, found)


def test_new_words_and_buckets_are_zero_without_an_initializer_and_old_buckets_are_left_behind():
    vocabs = read_vocabularies(VocabInfo(["c", "b"], 2, 1, ["b", "a"]))
    old = np.array([[1.0], [2.0], [3.0]], np.float32)  # b, a and a bucket
    np.testing.assert_array_equal(transfer(vocabs, old, (3, 1), jax.random.key(0)), [[0], [1], [0]])


def test_the_initializer_sees_the_key_the_whole_shape_and_the_dtype():
    seen = []

    def initializer(key, shape, dtype):
        seen.append((key, shape, dtype))
        return jnp.full(shape, 7, dtype)

    vocabs = read_vocabularies(VocabInfo(["c", "b"], 2, 1, ["b", "a"], -1, initializer))
    key = jax.random.key(5)
    found = transfer(vocabs, np.array([[1.0], [2.0]], "bfloat16"), (3, 1), key)
    np.testing.assert_array_equal(found, np.array([[7], [1], [7]], "bfloat16"))
    assert found.dtype == "bfloat16"
    assert seen == [(key, (3, 1), jnp.bfloat16)]


def test_a_table_of_float64_is_filled_by_an_initializer_of_32_bits_without_a_warning():
    vocabs = read_vocabularies(VocabInfo(["c", "b"], 2, 0, ["b"], -1, jax.nn.initializers.normal()))
    found = transfer(vocabs, np.array([[1 / 3]]), (2, 1), jax.random.key(0))
    assert found.dtype == np.float64
    assert found[1, 0] == 1 / 3
    assert found[0, 0] != 0
