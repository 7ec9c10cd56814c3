"""Mutations that know the structure of an input, so that they pass the first check of a reader."""

import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

NUMBERS = [
    0,
    1,
    -1,
    2,
    7,
    127,
    128,
    255,
    256,
    65535,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    1 << 62,
    1 << 63,
    (1 << 64) - 1,
]
VALUES = [
    *(None, True, False, 0, -1, 1, 3, 1.5, -0.0, 1e300, 10**18, 10**19, -(10**19), 10**400),
    *(float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "x",
        "é",
        "\0",
        "a\nb",
        "..",
        "/",
        "../x",
        "\ud800",
        "NaN",
        "1e999",
        "x" * 300,
        "0:1",
        "worker",
        "a:1",
    ),
    *([], {}, [[]], [None], {"": None}, [1, [2]], {"x": {"y": 0}}, [0] * 70, {"shape": [-5]}),
]
TEXTS = [
    *(
        "",
        "0",
        "-1",
        "1.5",
        "nan",
        "-inf",
        "1e999",
        "007",
        "9" * 20,
        "9" * 5000,
        "1" * 300 + "x",
        "a,b",
        '"',
        '""',
        "'",
    ),
    *(
        "\0",
        "\r",
        "\n",
        "\t",
        "é",
        "\ufeff",
        "{",
        "}",
        "[",
        "]",
        "[[",
        "]]",
        "=",
        ":",
        ";",
        "#",
        "\\",
        "\\u",
        "%",
        "@",
    ),
    *(
        "x" * 300,
        "1-",
        "-1",
        "[1-3]",
        "[3-1]",
        "[0-99999999]",
        "(x2)",
        "(x999999999)",
        "inf",
        "true",
        "null",
        "NaN",
    ),
    *(
        "[" * 2000,
        "{" * 2000,
        '{"a":' * 2000,
        "1" * 5000,
        "1979-05-27",
        "0x10",
        "1_000",
        "'''",
        '"""',
        "a.b.c",
        "[a]",
    ),
]


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, set, cut, double, move and insert bytes, and overwrite numbers; some of these."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        place = rng.randrange(len(content) + 1)
        size = min(rng.choice((1, 1, 2, 4, 8, 12, 16, 64)), len(content) - place)
        kind = rng.randrange(8)
        if kind == 0 and size:
            content[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content[place : place + size] = bytes(
                rng.choice((0, 0xFF, 0x80, rng.randrange(256))) for _ in range(size)
            )
        elif kind == 2:
            del content[place : place + size]
        elif kind == 3:
            del content[place:]
        elif kind == 4:
            content[place:place] = content[place : place + size] * rng.choice((1, 2, 50))
        elif kind == 5:
            other = rng.randrange(len(content) + 1)
            content[place : place + size] = content[other : other + size]
        elif kind == 6:
            content[place:place] = rng.randbytes(rng.choice((1, 4, 16, 100)))
        else:
            width = rng.choice((1, 2, 4, 8))
            number = rng.choice(NUMBERS) & (1 << 8 * width) - 1
            content[place : place + width] = number.to_bytes(
                width, rng.choice(("little", "little", "big"))
            )
    return bytes(content)


def mutate_text(rng: random.Random, text: str) -> str:
    """Change words, lines and marks of a text."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        kind = rng.randrange(5)
        if kind == 0:
            lines = text.splitlines(keepends=True) or [""]
            number = rng.randrange(len(lines))
            lines[number : number + rng.randrange(2)] = [rng.choice(lines)] * rng.randrange(3)
            text = "".join(lines)
        else:
            words = [match.span() for match in re.finditer(r"\w+|[^\w\s]|\s", text)] or [(0, 0)]
            start, end = rng.choice(words)
            other = text[slice(*rng.choice(words))]
            new = rng.choice((rng.choice(TEXTS), other, "", text[start:end] * 2))
            text = text[:start] + new + text[end if kind < 4 else start :]
    return text


def mutate_tree(rng: random.Random, tree: Any, values: Sequence[Any] = VALUES) -> Any:
    """Change values and keys of nested lists and dicts."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(tree)
        if not places:
            return rng.choice(values)
        parent, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind < 4:
            parent[key] = copy.deepcopy(rng.choice(values))
        elif kind == 4:
            del parent[key]
        elif kind == 5:
            parent[key] = copy.deepcopy(_value(*rng.choice(places)))
        elif kind == 6 and isinstance(parent, dict):
            parent[rng.choice([*map(str, parent), "x", "", "é", "x" * 300, "../x"])] = parent.pop(
                key
            )
        elif isinstance(parent, list):
            parent[key:key] = [parent[key]] * rng.choice((1, 2, 40))
        else:
            parent[key] = [parent[key]]
    return tree


def mutate_json(rng: random.Random, tree: Any) -> bytes:
    """Return a changed tree as JSON; sometimes change some of its bytes too."""
    text = json.dumps(mutate_tree(rng, tree)) if rng.randrange(10) else json.dumps(tree)
    if rng.randrange(4) == 0:
        text = mutate_text(rng, text)
    data = text.encode(errors="surrogatepass")
    return mutate_bytes(rng, data) if rng.randrange(8) == 0 else data


def varint(number: int, padding: int = 0) -> bytes:
    """Return a varint with `padding` bytes more than it needs."""
    parts = []
    while number > 127 or padding:
        parts.append(number & 127 | 128)
        number >>= 7
        padding = max(padding - 1, 0)
    return bytes([*parts, number & 127])


def mutate_message(rng: random.Random, data: bytes, depth: int = 0) -> bytes:
    """Change the fields of a message: their numbers, kinds, lengths, order and contents."""
    fields = _fields(data)
    if not fields or depth > 6 or rng.randrange(12) == 0:
        return mutate_bytes(rng, data)
    number = rng.randrange(len(fields))
    key, kind, value = fields[number]
    change = rng.randrange(9)
    if change < 4 and kind == 2:
        fields[number] = key, kind, mutate_message(rng, value, depth + 1)
    elif change == 4:
        fields[number] = (
            rng.choice((key, 1, 2, 3, 4, 15, 16, 2**29 - 1, 0)),
            rng.randrange(8),
            value,
        )
    elif change == 5:
        fields[number:number] = [fields[number]] * rng.choice((1, 2, 30))
    elif change == 6:
        del fields[number]
    elif change == 7:
        rng.shuffle(fields)
    elif kind == 0:
        fields[number] = (
            key,
            kind,
            varint(rng.choice(NUMBERS) & (1 << 64) - 1, rng.choice((0, 0, 1, 9))),
        )
    else:
        fields[number] = key, kind, rng.randbytes(rng.choice((0, 1, 4, 8, 30)))
    lie = rng.choice((0, 0, 0, 0, 0, 0, 1, -1, 1 << 31)) if rng.randrange(4) == 0 else 0
    padding = rng.choice((0, 0, 0, 1, 4)) if rng.randrange(6) == 0 else 0
    parts = []
    for key, kind, value in fields:
        parts.append(varint(key << 3 | kind, padding))
        if kind == 2:
            parts.append(varint(max(len(value) + lie, 0), padding))
        parts.append(value)
    return b"".join(parts)


def _fields(data: bytes) -> list[tuple[int, int, bytes]]:
    """The fields of a message as number, kind and bytes; none if it is not one."""
    fields = []
    at = 0
    try:
        while at < len(data):
            tag, at = _read_varint(data, at)
            kind = tag & 7
            start = at
            if kind == 0:
                _, at = _read_varint(data, at)
            elif kind == 2:
                size, start = _read_varint(data, at)
                at = start + size
            else:
                at += {1: 8, 5: 4}[kind]
            if at > len(data):
                return []
            fields.append((tag >> 3, kind, data[start:at]))
    except (IndexError, KeyError):
        return []
    return fields


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 127) << shift
        at += 1
        shift += 7
        if byte < 128:
            return number, at
        if shift > 63:
            raise IndexError


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys."""
    if not isinstance(tree, dict | list):
        return []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [place for key, value in items for place in [(tree, key), *_places(value)]]


def _value(parent: Any, key: Any) -> Any:
    return parent[key]


Mutation = Callable[[random.Random], Any]
