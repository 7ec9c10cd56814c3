"""Suggestions: the known names nearest to one that is unknown, for error messages."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return up to `count` known names similar to `name`, the most similar first.

    `cutoff` is the smallest similarity, from 0 to 1.

    >>> nearest("learning_rat", ["momentum", "learning_rate"])
    ['learning_rate']
    """
    return difflib.get_close_matches(name, known, n=count, cutoff=cutoff)


def suggest(name: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> str:
    """Return the end of an error message that suggests the nearest names; empty if none is near.

    >>> "there is no key learning_rat" + suggest("learning_rat", ["momentum", "learning_rate"])
    'there is no key learning_rat; did you mean learning_rate?'
    """
    found = nearest(name, known, count, cutoff)
    return f"; did you mean {' or '.join(found)}?" if found else ""
