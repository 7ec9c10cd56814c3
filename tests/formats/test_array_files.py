"""Safetensors and .npz files as checkpoints: read leaf by leaf; hostile ones are refused."""

import json
import math
import os
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
from bundles import assert_same, little_memory
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ftrain.formats import (
    NpzError,
    NpzFile,
    SafetensorsError,
    SafetensorsFile,
    ShardedSafetensors,
    open_safetensors,
)

DTYPES = ["bool", "uint8", "int8", "uint16", "int32", "int64", "float16", "float32", "float64"]
OURS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def entry(dtype="F32", shape=(1,), offsets=(0, 4)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def packed(header: dict | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def filled(shape, dtype) -> np.ndarray:
    return np.arange(math.prod(shape)).astype(dtype).reshape(shape)


# Good files.


@given(st.dictionaries(names, st.tuples(shapes, st.sampled_from([*DTYPES, "bfloat16"]))))
def test_what_the_library_writes_is_read(tmp_path_factory, arrays):
    path = tmp_path_factory.getbasetemp() / "written.safetensors"
    expected = {name: filled(*each) for name, each in arrays.items()}
    save_file(expected, path, metadata={"format": "np"})
    file = SafetensorsFile(path)
    assert sorted(file.variables) == sorted(expected)
    for name, value in expected.items():
        assert file.variables[name] == (value.shape, value.dtype.name)
        assert_same(file.read(name), value)


@pytest.mark.parametrize("dtype", OURS)
def test_float8_is_read_which_the_library_cannot(tmp_path, dtype):
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed({"w": entry(dtype, (2,), (0, 2))}, b"\x38\x40"))
    value = SafetensorsFile(path).read("w")
    assert_same(value, np.frombuffer(b"\x38\x40", getattr(ml_dtypes, OURS[dtype])))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives_of_numpy_are_read(tmp_path, save):
    arrays = {
        "dense/kernel": filled((2, 3), "float32"),
        "fortran": np.asfortranarray(filled((2, 3, 2), "int16")),
        "swapped": filled((3,), ">f8"),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 4)),
        "text": np.array(["a", "bc"]),
    }
    save(tmp_path / "m.npz", **arrays)
    file = NpzFile(tmp_path / "m.npz")
    assert list(file.variables) == sorted(arrays)
    for name, value in arrays.items():
        found = file.read(name)
        np.testing.assert_array_equal(found, value)
        assert file.variables[name].shape == found.shape == value.shape
        assert found.dtype.isnative
        assert found.flags.c_contiguous


def test_shards_are_one_checkpoint(tmp_path):
    first, second = {"a": filled((2,), "float32")}, {"b": filled((3,), "bfloat16")}
    save_file(first, tmp_path / "model-1.safetensors")
    save_file(second, tmp_path / "model-2.safetensors")
    index = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    for given_path in (tmp_path, path):
        file = open_safetensors(given_path)
        assert isinstance(file, ShardedSafetensors)
        assert_same(file.read("b"), second["b"])
        assert list(file.variables) == ["a", "b"]


def test_a_directory_with_one_file_is_that_file(tmp_path):
    save_file({"a": filled((2,), "float32")}, tmp_path / "other.safetensors")
    with pytest.raises(SafetensorsError, match=r"neither model.safetensors nor .*, such as other"):
        open_safetensors(tmp_path)
    save_file({"b": filled((2,), "float32")}, tmp_path / "model.safetensors")
    assert list(open_safetensors(tmp_path).variables) == ["b"]


# Hostile files.

HOSTILE = {
    "empty": (b"", "has 0 bytes, expected a header"),
    "short": (b"\x01\x00", "has 2 bytes, expected a header"),
    "long header": (
        struct.pack("<Q", 1 << 62) + b"{}",
        "its header would have 4611686018427387904",
    ),
    "header beyond": (struct.pack("<Q", 50) + b"{}", "would have 50 bytes, but the file has 10"),
    "no JSON": (packed(b"{x}", b""), "its header cannot be parsed"),
    "no UTF-8": (packed(b"\xff", b""), "its header cannot be parsed"),
    "no table": (packed(b"[]", b""), "its header is not a table"),
    "deep": (packed(b"[" * 100_000, b""), "its header cannot be parsed"),
    "no entry": (packed({"w": 3}, b""), "'w' has no dtype, shape and data_offsets"),
    "twice": (
        packed(b'{"w":{"dtype":"U8"},"w":{"dtype":"U8"}}', b""),
        "'w' is listed twice",
    ),
    "dtype": (packed({"w": entry("F4")}, bytes(4)), "has dtype 'F4'; supported are BOOL"),
    "no dtype": (packed({"w": entry([])}, bytes(4)), r"has dtype \[\]"),
    "negative": (packed({"w": entry(shape=(-1,))}, bytes(4)), r"has shape \[-1\]"),
    "boolean": (packed({"w": entry(shape=(True,))}, bytes(4)), r"has shape \[True\]"),
    "rank": (packed({"w": entry(shape=(1,) * 65)}, bytes(4)), "expected up to 64 sizes"),
    "absurd": (packed({"w": entry(shape=(1 << 61, 8))}, bytes(4)), "too large for any memory"),
    "absurd and empty": (
        packed({"w": entry(shape=(0, 1 << 61, 8), offsets=(0, 0))}, b""),
        "too large for any memory",
    ),
    "size": (
        packed({"w": entry(shape=(2,))}, bytes(4)),
        r"is at \[0, 4\], but float32\[2\] needs 8",
    ),
    "offsets": (packed({"w": entry(offsets=(4, 0))}, bytes(4)), r"is at \[4, 0\]"),
    "three": (packed({"w": entry(offsets=(0, 4, 8))}, bytes(4)), r"is at \[0, 4, 8\]"),
    "cut off": (
        packed({"w": entry()}, bytes(3)),
        "ends at data byte 4, but there are 3: ",
    ),
    "surplus": (packed({"w": entry()}, bytes(5)), "take 4 bytes, but it has 5 after the header"),
    "gap": (
        packed({"w": entry(offsets=(4, 8))}, bytes(8)),
        "begins at data byte 4 and leaves a gap",
    ),
    "overlap": (
        packed({"v": entry(), "w": entry(offsets=(2, 6))}, bytes(6)),
        "'w' begins at data byte 2 and overlaps",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_cannot_be_true_is_one_error(tmp_path, case):
    data, message = HOSTILE[case]
    (tmp_path / "m.safetensors").write_bytes(data)
    with little_memory(), pytest.raises(SafetensorsError, match=message) as raised:
        SafetensorsFile(tmp_path / "m.safetensors")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path):
    save_file({"a": filled((1000,), "float32")}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    with open(tmp_path / "m.safetensors", "r+b") as opened:
        opened.truncate(500)
    with pytest.raises(SafetensorsError, match="array 'a' was cut short while it was read"):
        file.read("a")


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(SafetensorsError, match="is not a regular file"):
        SafetensorsFile(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "missing.safetensors"}}, "lists missing.safetensors, which is miss"),
        ({"weight_map": {"a": "../m.safetensors"}}, "expected the name of a .safetensors file in"),
        ({"weight_map": {"a": "/m.safetensors"}}, "expected the name of a .safetensors file in"),
        ({"weight_map": {"a": 3}}, "is in 3, expected the name"),
        ({"weight_map": {"a": "\0.safetensors"}}, "which is missing"),
        (
            {"weight_map": {"x": "1.safetensors"}},
            "lists array 'x' in 1.safetensors, which does not",
        ),
        ({"weight_map": {}}, "it has no weight_map"),
        ({}, "it has no weight_map"),
        ([], "it is not a table"),
    ],
)
def test_an_index_that_cannot_be_true_is_one_error(tmp_path, index, message):
    save_file({"a": filled((2,), "float32")}, tmp_path / "1.safetensors")
    save_file({"a": filled((2,), "float32")}, tmp_path.parent / "m.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SafetensorsError, match=message):
        open_safetensors(tmp_path)


def test_archives_that_cannot_be_true_are_one_error(tmp_path):
    path = tmp_path / "m.npz"
    np.savez(path, a=filled((4,), "float32"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(NpzError, match=r"is not an .npz file, or damaged"):
        NpzFile(path)
    at = whole.index(filled((4,), "float32").tobytes())
    path.write_bytes(whole[: at + 5] + b"\xff" + whole[at + 6 :])
    with pytest.raises(NpzError, match="damaged: Bad CRC-32"):
        NpzFile(path).read("a")
    with zipfile.ZipFile(path, "w") as archive:
        header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }\n"
        archive.writestr(
            "w.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
        )
    with little_memory(), pytest.raises(NpzError, match="needs 4000000000000 bytes, but the archi"):
        NpzFile(path)


def test_arrays_without_a_meaning_are_listed_but_not_read(tmp_path):
    np.savez(tmp_path / "m.npz", half=filled((2,), "bfloat16"), objects=np.array([None, 1]))
    file = NpzFile(tmp_path / "m.npz")
    assert file.variables["half"].dtype == "void16"
    for name in ("half", "objects"):
        with pytest.raises(NpzError, match=rf"array '{name}' has dtype .*such as bfloat16"):
            file.read(name)
