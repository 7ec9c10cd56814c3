"""Vocabularies: move the rows of a table from an old vocabulary to a new one."""

import os
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import jax
import numpy as np
from jax.nn.initializers import Initializer

from ftrain.checkpoints.errors import CheckpointError
from ftrain.paths import expanded

Words = str | os.PathLike[str] | Sequence[str]  # a file with one word a line, or the words
Shape = tuple[int, ...]


class VocabInfo(NamedTuple):
    """The words of one axis of a leaf, and those of the checkpoint that it is warm-started from.

    The leaf has a row for each of the first `new_vocab_size` words of `new_vocab`, then one for
    each of `num_oov_buckets`. The checkpoint has a row for each of the first `old_vocab_size` words
    of `old_vocab` (-1: all of them); further rows are ignored. Rows of new words and of buckets
    come from `backup_initializer`, called with the shape of the whole leaf, or are zero if it is
    None.
    """

    new_vocab: Words
    new_vocab_size: int
    num_oov_buckets: int
    old_vocab: Words
    old_vocab_size: int = -1
    backup_initializer: Initializer | None = None
    axis: int = 0  # 0: rows, as of embeddings; 1: columns, as of an output layer


class Vocabularies(NamedTuple):
    """A VocabInfo and its words."""

    info: VocabInfo
    old_words: list[str]
    new_words: list[str]


def remap(
    old: np.ndarray,
    old_words: Sequence[str],
    new_words: Sequence[str],
    *,
    fresh: np.ndarray,
    axis: int = 0,
) -> np.ndarray:
    """Return a copy of `fresh` with the rows of `old` for words of both vocabularies.

    >>> remap(np.array([1, 2, 3]), ["a", "b", "c"], ["c", "d", "a"], fresh=np.array([7, 8, 9, 10]))
    array([ 3,  8,  1, 10])
    """
    places = {word: place for place, word in enumerate(old_words)}
    sources = np.fromiter((places.get(word, -1) for word in new_words), np.intp, len(new_words))
    known = np.flatnonzero(sources >= 0)
    result = fresh.copy()
    np.moveaxis(result, axis, 0)[known] = np.moveaxis(old, axis, 0)[sources[known]]
    return result


def read_vocabularies(info: VocabInfo) -> Vocabularies:
    """Read both vocabularies; an error if a size is wrong, or a word occurs twice in one."""
    if info.new_vocab_size < 1:
        raise CheckpointError(f"new_vocab_size is {info.new_vocab_size}, expected at least 1")
    if info.old_vocab_size < 1 and info.old_vocab_size != -1:
        raise CheckpointError(
            f"old_vocab_size is {info.old_vocab_size}, expected at least 1, or -1 for every word"
        )
    if info.num_oov_buckets < 0:
        raise CheckpointError(f"num_oov_buckets is {info.num_oov_buckets}, expected at least 0")
    old_words = _read_words(info.old_vocab, info.old_vocab_size, "old_vocab")
    return Vocabularies(
        info, old_words, _read_words(info.new_vocab, info.new_vocab_size, "new_vocab")
    )


def describe_misfit(vocabs: Vocabularies, old: Shape, new: Shape) -> str | None:
    """Return why a leaf of shape `new` cannot come from a table of shape `old`; None if it can."""
    info = vocabs.info
    axis = info.axis
    if not 0 <= axis < len(new):
        return f"is {list(new)} and has no axis {axis}"
    expected = info.new_vocab_size + info.num_oov_buckets
    if new[axis] != expected:
        parts = f"new_vocab_size {info.new_vocab_size} and num_oov_buckets {info.num_oov_buckets}"
        return f"is {list(new)}, expected {expected} along axis {axis}: {parts}"
    if len(old) != len(new) or old[:axis] != new[:axis] or old[axis + 1 :] != new[axis + 1 :]:
        like = ", ".join("*" if place == axis else str(size) for place, size in enumerate(new))
        return f"is {list(old)} in the checkpoint, expected [{like}]"
    if old[axis] < len(vocabs.old_words):
        words = (
            f"at least {len(vocabs.old_words)} along axis {axis}, one for each word of old_vocab"
        )
        return f"is {list(old)} in the checkpoint, expected {words}; old_vocab_size limits them"
    return None


def transfer(vocabs: Vocabularies, old: np.ndarray, shape: Shape, key: jax.Array) -> np.ndarray:
    """Return the table for the new vocabulary, with this shape and the dtype of the old table."""
    fresh = _make_fresh(vocabs.info.backup_initializer, shape, old.dtype, key)
    return remap(old, vocabs.old_words, vocabs.new_words, fresh=fresh, axis=vocabs.info.axis)


def _make_fresh(
    initializer: Initializer | None, shape: Shape, dtype: np.dtype, key: jax.Array
) -> np.ndarray:
    if initializer is None:
        return np.zeros(shape, dtype)
    # jax warns if it is asked for 64 bits that are not enabled.
    return np.asarray(initializer(key, shape, jax.dtypes.canonicalize_dtype(dtype))).astype(
        dtype, copy=False
    )


def _read_words(vocab: Words, size: int, argument: str) -> list[str]:
    """Return the first `size` words; all of them if it is -1."""
    limit = None if size == -1 else size
    if isinstance(vocab, (str, os.PathLike)):
        where = f"{argument} {os.fspath(vocab)}"
        words = _read_lines(vocab, limit, where)
    else:
        where = argument
        words = list(vocab[:limit])
    if len(words) < size:
        raise CheckpointError(
            f"{where} has {len(words)} words, expected {size}; lower {argument}_size"
        )
    _check_unique(words, where)
    return words


def _read_lines(path: str | os.PathLike[str], limit: int | None, where: str) -> list[str]:
    try:
        # Only "\n" ends a line, unlike in `splitlines`; and words need not be valid UTF-8.
        with open(expanded(path), encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return [line.rstrip("\r\n") for line in islice(file, limit)]
    except OSError as error:
        raise CheckpointError(
            f"{where} cannot be read: {error.strerror}; expected a file with a word a line"
        ) from error


def _check_unique(words: Sequence[str], where: str) -> None:
    lines: dict[str, int] = {}
    for line, word in enumerate(words, start=1):
        first = lines.setdefault(word, line)
        if first != line:
            raise CheckpointError(
                f"{where} has {word!r} in lines {first} and {line}; keep one of them"
            )
