"""TensorFlow checkpoints, valid and hostile, made by a small writer of our own."""

import math
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from bundles import (
    FLOAT,
    FLOATS,
    FULL,
    HEADER,
    STRING,
    assert_same,
    block,
    entry,
    finish,
    little_memory,
    message,
    pack_strings,
    sealed,
    table,
    varint,
    write,
)
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from ftrain.formats.tf_checkpoint import (
    TfCheckpoint,
    TfCheckpointError,
    is_tf_checkpoint,
)

names = st.text(min_size=1).filter(lambda name: not name.startswith("\0"))
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(
    st.dictionaries(
        names, st.tuples(shapes, st.sampled_from([(1, "float32"), (9, "int64"), (14, "bfloat16")]))
    ),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 3),
)
def test_what_is_written_is_read_in_any_blocks_and_shards(
    tmp_path_factory, tensors, rows, interval, shards
):
    entries = {}
    files = [b""] * shards
    wanted = {}
    for number, (name, (shape, (dtype, kind))) in enumerate(tensors.items()):
        shard = number % shards
        value = np.arange(math.prod(shape)).astype(getattr(ml_dtypes, kind, kind))
        data = value.tobytes()
        entries[name.encode()] = entry(
            dtype, shape, shard=shard, offset=len(files[shard]), data=data
        )
        files[shard] += data
        wanted[name] = value.reshape(shape)
    header = message((1, shards))
    folder = tmp_path_factory.mktemp("written")
    checkpoint = TfCheckpoint(
        write(folder, entries, *files, header=header, per_block=rows, interval=interval)
    )
    assert [*checkpoint.variables] == sorted(wanted)
    for name, value in wanted.items():
        assert_same(checkpoint.read(name), value)


@given(st.lists(st.binary() | st.just(b"x" * 200)))
def test_strings_of_any_bytes_and_lengths_are_read(tmp_path_factory, strings):
    data, crc = pack_strings(strings)
    prefix = write(
        tmp_path_factory.mktemp("s"),
        {b"s": entry(STRING, (len(strings),), data=data, crc=crc)},
        data,
    )
    read = TfCheckpoint(prefix).read("s")
    assert read.shape == (len(strings),)
    assert read.tolist() == strings


def test_every_byte_of_the_data_is_covered_and_without_verification_none_is(tmp_path):
    packed, crc = pack_strings([b"one", b"", b"three"])
    entries = {b"s": entry(STRING, (3,), offset=16, data=packed, crc=crc), b"w": FULL}
    data = FLOATS + packed
    for place in range(len(data)):
        flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        checkpoint = TfCheckpoint(write(tmp_path, entries, flipped))
        hurt, whole = ("w", "s") if place < len(FLOATS) else ("s", "w")
        with pytest.raises(
            TfCheckpointError, match=f"model.index: variable '{hurt}': it is damaged"
        ):
            checkpoint.read(hurt)
        checkpoint.read(whole)
    assert checkpoint.read("s", verify=False).tolist() == [b"one", b"", b"thred"]


def test_opening_needs_no_data_and_reading_only_what_a_variable_has(tmp_path):
    entries = {
        b"a": entry(FLOAT, (2,), data=FLOATS[:8]),
        b"b": entry(FLOAT, (2,), offset=8, data=FLOATS[8:]),
    }
    checkpoint = TfCheckpoint(write(tmp_path, entries))
    assert checkpoint.variables == {"a": ((2,), "float32"), "b": ((2,), "float32")}
    path = tmp_path / "model.data-00000-of-00001"
    with pytest.raises(TfCheckpointError, match=f"data file is missing: {path}"):
        checkpoint.read("a")
    path.write_bytes(FLOATS[:12])
    assert checkpoint.read("a").tolist() == [1, 2]
    with pytest.raises(TfCheckpointError, match=f"takes bytes 8 to 16 of {path}, which has 12"):
        checkpoint.read("b")
    path.unlink()
    os.mkfifo(path)  # opening it would block forever
    with pytest.raises(TfCheckpointError, match="missing"):
        checkpoint.read("a")


def test_a_tensor_of_no_strings_may_have_no_bytes_at_all(tmp_path):
    prefix = write(tmp_path, {b"s": entry(STRING, (2, 0), data=b"")}, b"")
    assert_same(TfCheckpoint(prefix).read("s"), np.empty((2, 0), object))


def test_strings_whose_lengths_have_another_checksum_are_refused(tmp_path):
    data, _ = pack_strings([b"ab"])
    wrong = data[:1] + bytes(4) + data[5:]
    crc = masked_crc32c(struct.pack("<I", 2) + wrong[1:])
    checkpoint = TfCheckpoint(
        write(tmp_path, {b"s": entry(STRING, (), data=wrong, crc=crc)}, wrong)
    )
    with pytest.raises(TfCheckpointError, match="the checksum of the lengths"):
        checkpoint.read("s")
    assert checkpoint.read("s", verify=False).item() == b"ab"


def test_a_data_file_that_changes_or_fails_while_it_is_read_is_an_error_of_the_checkpoint(
    tmp_path, monkeypatch
):
    checkpoint = TfCheckpoint(write(tmp_path, {b"w": FULL}, FLOATS[:8]))
    monkeypatch.setattr(os.path, "getsize", lambda path: 16)
    with pytest.raises(TfCheckpointError, match=r"'w': .*became shorter while it was read"):
        checkpoint.read("w")

    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os.path, "getsize", fail)
    with pytest.raises(
        OSError, match="Input/output error"
    ):  # which may pass, and says nothing about the checkpoint
        checkpoint.read("w")
    with pytest.raises(OSError, match="Input/output error"):
        TfCheckpoint(tmp_path / "model")


def test_an_unknown_name_is_an_error_that_names_the_nearest(tmp_path):
    checkpoint = TfCheckpoint(
        write(tmp_path, {b"layer/kernel": entry(), b"\0hidden": entry()}, b"")
    )
    for wrong, wanted in [
        ("layer/kernal", "no variable 'layer/kernal'; did you mean layer/kernel[?]$"),
        ("", "no variable '' among its 1$"),
        ("\0hidden", "no variable"),
    ]:
        with pytest.raises(KeyError, match=wanted) as caught:
            checkpoint.read(wrong)
        assert isinstance(caught.value, TfCheckpointError)


def test_a_dtype_that_cannot_be_read_is_listed_and_does_not_hinder_others(tmp_path):
    entries = {b"q": entry(11, (1,), data=b"x"), b"u": entry(99, data=b""), b"w": FULL}
    checkpoint = TfCheckpoint(write(tmp_path, entries, FLOATS))
    assert [variable.dtype for variable in checkpoint.variables.values()] == [
        "qint8",
        "dtype 99",
        "float32",
    ]
    assert checkpoint.read("w").tolist() == [1, 2, 3, 4]
    for name, dtype in [("q", "qint8"), ("u", "dtype 99")]:
        with pytest.raises(
            TfCheckpointError, match=f"'{name}': its dtype is {dtype}, which is unsupported"
        ):
            checkpoint.read(name)


def test_a_bool_is_true_for_any_byte_but_zero(tmp_path):
    data = b"\0\1\2"
    read = TfCheckpoint(write(tmp_path, {b"b": entry(10, (3,), data=data)}, data)).read("b")
    assert read.view(np.uint8).tolist() == [0, 1, 1]


# Partitioned variables: a slice is [(start, length), ...]; () as an extent is a whole dimension.


def sliced(shape, slices):
    """Return entries and data of w = 0, 1, 2, ...; `slices` maps the end of each key to extents."""
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    entries = {}
    data = b""
    for tail, extents in slices.items():
        box = tuple(slice(e[0], e[0] + e[1]) if e else slice(None) for e in extents)
        part = whole[box]
        entries[b"\0w\0\1\1" + bytes([len(shape)]) + tail] = entry(
            FLOAT, part.shape, offset=len(data), data=part.tobytes()
        )
        data += part.tobytes()
    return whole, entries | {b"w": entry(FLOAT, shape, slices=slices.values())}, data


@pytest.mark.parametrize(
    ("shape", "slices"),
    [
        # The keys are written out: 0x80 + n up to 63, then 0xc000 + n and 0xe00000 + n; -1 is 0x7f.
        ((63,), {b"\x80\xbf": [(0, 63)]}),
        ((200,), {b"\x80\xc0\x40": [(0, 64)], b"\xc0\x40\xc0\x88": [(64, 136)]}),
        ((20000,), {b"\x80\xdf\xff": [(0, 8191)], b"\xdf\xff\xe0\x2e\x21": [(8191, 11809)]}),
        ((4, 3), {b"\x80\x83\x80\x7f": [(0, 3), ()], b"\x83\x81\x80\x7f": [(3, 1), ()]}),
        (
            (3, 3),  # a pinwheel, which no cuts along whole rows or columns would make
            {
                b"\x80\x81\x80\x82": [(0, 1), (0, 2)],
                b"\x80\x82\x82\x81": [(0, 2), (2, 1)],
                b"\x82\x81\x81\x82": [(2, 1), (1, 2)],
                b"\x81\x82\x80\x81": [(1, 2), (0, 1)],
                b"\x81\x81\x81\x81": [(1, 1), (1, 1)],
            },
        ),
    ],
    ids=["one", "two bytes", "three bytes", "whole dimension", "pinwheel"],
)
def test_slices_are_found_by_their_keys_and_put_in_place(tmp_path, shape, slices):
    whole, entries, data = sliced(shape, slices)
    checkpoint = TfCheckpoint(write(tmp_path, entries, data))
    assert checkpoint.variables == {"w": (shape, "float32")}
    assert_same(checkpoint.read("w"), whole)


def test_a_zero_byte_in_the_name_of_a_partitioned_variable_is_escaped_in_the_key(tmp_path):
    entries = {b"a\0b": entry(FLOAT, (4,), slices=[[(0, 4)]]), b"\0a\0\xffb\0\1\1\1\x80\x84": FULL}
    assert TfCheckpoint(write(tmp_path, entries, FLOATS)).read("a\0b").tolist() == [1, 2, 3, 4]


HALVES = {b"\x80\x82": [(0, 2)], b"\x82\x82": [(2, 2)]}


def halves(**changed):
    _, entries, data = sliced((4,), HALVES)
    return entries | {
        b"\0w\0\1\1\1" + bytes.fromhex(key): value for key, value in changed.items()
    }, data


def whole(shape, *slices):
    entries, data = halves()
    return entries | {b"w": entry(FLOAT, shape, slices=slices)}, data


SHARED = {b"\x80\x82": [(0, 2)], b"\x82\x82": [(2, 2)], b"\x84\x82": [(4, 2)]}
OVERLAP = sliced((4,), {b"\x80\x82": [(0, 2)], b"\x81\x82": [(1, 2)]})[1:]
BAD_SLICES = {
    "a slice is missing": (*whole((4,), [(0, 2)], [(1, 2)]), "slice with key .* is missing"),
    "they do not cover": (
        *whole((4,), [(0, 2)]),
        "its slices have 2 elements together, expected 4",
    ),
    "they cover too much": (
        *whole((4,), [(0, 2)], [(2, 2)], [(2, 2)]),
        "more bytes together|6 elements together",
    ),
    "one is there twice": (*whole((4,), [(0, 2)], [(0, 2)]), "overlaps another"),
    "they overlap": (*OVERLAP, "overlaps another"),
    "one has another rank": (*whole((4,), [(0, 2), (0, 1)]), "slice of rank 2, expected 1"),
    "one goes beyond": (*whole((3,), [(0, 2)], [(2, 2)]), "slice from 2 to 4 in a dimension of 3"),
    "one starts before": (*whole((4,), [(-1, 2)]), "slice from -1 to 1"),
    "one is negative": (*whole((4,), [(2, -1)]), "slice from 2 to 1"),
    "one is gigantic": (*whole((4,), [(2**62, 2**62)]), "in a dimension of 4"),
    "one has another shape": (*halves(**{"8082": FULL}), r"shape \(4,\), expected \(2,\)"),
    "one has another dtype": (
        *halves(**{"8082": entry(9, (1,), data=FLOATS[:8])}),
        "dtype int64, not float32",
    ),
    "one is sliced again": (
        *halves(**{"8082": entry(FLOAT, (2,), slices=[[(0, 2)]])}),
        "sliced again",
    ),
    "a gigantic whole": (*whole((2**40,), [(0, 2)], [(2, 2**40 - 2)]), "is missing"),
    "they share bytes": (
        {key: entry(FLOAT, (2,), data=FLOATS[:8]) for key in sliced((6,), SHARED)[1] if key != b"w"}
        | {b"w": entry(FLOAT, (6,), slices=SHARED.values())},
        FLOATS,
        "its slices have more bytes together",
    ),
}


@pytest.mark.parametrize(("entries", "data", "reason"), BAD_SLICES.values(), ids=BAD_SLICES)
def test_slices_that_do_not_make_a_tensor_are_refused(tmp_path, entries, data, reason):
    checkpoint = TfCheckpoint(write(tmp_path, entries, data))
    with pytest.raises(TfCheckpointError, match=rf"model.index: variable 'w': .*({reason})"):
        checkpoint.read("w")


# Hostile indexes


BAD_ENTRIES = {
    "more bytes than the shape": (
        entry(FLOAT, (3,), data=FLOATS),
        "has 16 bytes, expected 3 elements of 4",
    ),
    "fewer bytes than the shape": (
        entry(FLOAT, (5,), data=FLOATS),
        "has 16 bytes, expected 5 elements of 4",
    ),
    "no bytes for a gigantic shape": (entry(FLOAT, (2**58,)), "has 0 bytes"),
    "a gigantic size": (entry(FLOAT, (2**57,), size=2**59), "takes bytes 0 to .*, which has 28"),
    "a negative size": (entry(STRING, (), size=-1), "has -1 bytes"),
    "more strings than bytes": (entry(STRING, (2**50,), size=16), "too few for"),
    "a negative offset": (entry(FLOAT, (4,), data=FLOATS, offset=-4), "takes bytes -4 to 12"),
    "a gigantic offset": (entry(FLOAT, (4,), data=FLOATS, offset=2**63 - 1), "takes bytes"),
    "a data file that is not": (
        entry(FLOAT, (4,), data=FLOATS, shard=1),
        "data file 1, expected less than 1",
    ),
    "a negative data file": (entry(FLOAT, (4,), data=FLOATS, shard=-1), "data file -1"),
    "strings that are too long": (entry(STRING, (2,), size=16), "its strings take"),
    "a length without end": (entry(STRING, (1,), offset=16, size=12), "bits"),
    "lengths that are cut": (entry(STRING, (4,), offset=16, size=4), "cut short"),
}


@pytest.mark.parametrize(("bad", "reason"), BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_an_entry_that_does_not_fit_its_data_is_refused_before_memory_is_spent(
    tmp_path, bad, reason
):
    entries = {b"bad": bad, b"good": FULL}
    checkpoint = TfCheckpoint(write(tmp_path, entries, FLOATS + b"\xff" * 12))
    with (
        little_memory(),
        pytest.raises(TfCheckpointError, match=f"model.index: variable 'bad': .*{reason}"),
    ):
        checkpoint.read("bad")
    assert checkpoint.read("good").tolist() == [1, 2, 3, 4]


def with_footer(index_handle):
    return (
        bytes(48) + (bytes(2) + index_handle).ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")
    )


def with_entry(value, key=b"w"):
    return table([(b"", HEADER), (key, value)])


def with_header(*fields):
    return table([(b"", message(*fields))])


def repeated_block():
    """Thousands of handles of one block."""
    body = block([])
    return finish(
        sealed(body), block([(b"%05d" % n, varint(0) + varint(len(body))) for n in range(5000)])
    )


def unfolding_keys():
    """Keys of 10 kB that share all but their end: 20 MB in a file of 30 kB."""
    keys = [b"k" * 10000 + b"%04d" % number for number in range(2000)]
    return table([(b"", HEADER), *((key, b"") for key in keys)], interval=10**9, per_block=10**9)


ONE = [(b"", HEADER), (b"w", FULL)]
BAD_INDEXES = {
    "empty": (b"", "has 0 bytes"),
    "short": (table(ONE)[-47:], "has 47 bytes, a table has at least 48"),
    "another file": (bytes(100), "ends in 0000000000000000"),
    "index beyond the file": (
        with_footer(varint(1000) + varint(10)),
        "runs into the footer",
    ),
    "index of gigantic size": (
        with_footer(varint(0) + varint(2**64 - 1)),
        "runs into the footer",
    ),
    "index at a gigantic place": (
        with_footer(varint(2**64 - 1) + varint(0)),
        "runs into the footer",
    ),
    "footer of no numbers": (with_footer(b"\xff" * 38), "more than 64 bits|cut short"),
    "block beyond the file": (
        finish(b"", block([(b"a", varint(999) + varint(1))])),
        "runs into the footer",
    ),
    "handle cut short": (finish(b"", block([(b"a", b"\x80")])), "cut short"),
    "one block many times": (repeated_block(), "starts before byte"),
    "snappy": (
        table(ONE, compression=1),
        "compressed with snappy, .*; load and save it with TensorFlow",
    ),
    "unknown compression": (table(ONE, compression=7), "compression 7, expected 0"),
    "gigantic restart count": (
        table([], blocks=[struct.pack("<I", 2**32 - 1)]),
        "no room for its 4294967295",
    ),
    "no restart count": (table([], blocks=[b"\1"]), "no room"),
    "value beyond the block": (
        table([], blocks=[b"\0\1\x7fab" + bytes(4)]),
        "beyond the end of its block",
    ),
    "key beyond the block": (
        table([], blocks=[b"\0" + varint(2**32 - 1) + b"\0" + bytes(4)]),
        "beyond the end of its block",
    ),
    "prefix of nothing": (table([], blocks=[b"\5\1\0a" + bytes(4)]), "shares 5 bytes"),
    "number of 33 bits": (
        table([], blocks=[varint(2**32) + b"\0\0" + bytes(4)]),
        "more than 32 bits",
    ),
    "keys not sorted": (table([(b"", HEADER), (b"b", FULL), (b"a", FULL)]), "expected sorted keys"),
    "a key twice": (
        table([(b"", HEADER), (b"a", FULL), (b"a", FULL)], per_block=2),
        "expected sorted keys",
    ),
    "keys that unfold": (unfolding_keys(), "has keys of more than"),
    "nothing": (table([]), "no header"),
    "no header": (table(ONE[1:]), "no header"),
    "a header of garbage": (table([(b"", b"\xff\xff")]), "not a valid BundleHeaderProto"),
    "big-endian": (with_header((1, 1), (2, 1)), "big-endian"),
    "a newer format": (
        with_header((1, 1), (3, message((1, 2), (2, 2)))),
        "format version 2, expected at most 1",
    ),
    "no data files": (with_header((1, 0)), "has 0 data files"),
    "negative data files": (with_header((1, -3)), "has -3 data files"),
    "an entry of garbage": (
        with_entry(b"\xff\xff"),
        "key b'w': its 2 bytes are not a valid BundleEntryProto",
    ),
    "a negative dimension": (
        with_entry(entry(FLOAT, (2, -1))),
        r"key b'w': its shape is \(2, -1\)",
    ),
    "too many dimensions": (with_entry(entry(FLOAT, (1,) * 65)), "expected up to 64 sizes"),
    "an unknown rank": (with_entry(message((1, 1), (2, message((3, 1))))), "its shape is unknown"),
    "a gigantic dimension": (with_entry(entry(FLOAT, (2**60,))), "too large for any memory"),
    "dimensions that overflow": (
        with_entry(entry(FLOAT, (2**32, 2**32))),
        "too large for any memory",
    ),
    "gigantic and empty": (with_entry(entry(FLOAT, (2**60, 0, 2**60))), "too large for any memory"),
    "a name that is not UTF-8": (with_entry(FULL, b"w\xff"), "is not UTF-8"),
}


@pytest.mark.parametrize(("index", "reason"), BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_a_hostile_index_is_refused_with_its_reason_before_memory_is_spent(tmp_path, index, reason):
    (tmp_path / "model.index").write_bytes(index)
    with (
        little_memory(4 << 20),
        pytest.raises(TfCheckpointError, match=rf"model.index: .*({reason})"),
    ):
        TfCheckpoint(tmp_path / "model")


def test_an_index_of_absurd_length_is_not_read(tmp_path):
    with open(tmp_path / "model.index", "wb") as file:
        file.truncate(1 << 40)  # takes no room on a disk
    with (
        little_memory(),
        pytest.raises(TfCheckpointError, match="has 1099511627776 bytes, expected at most"),
    ):
        TfCheckpoint(tmp_path / "model")


def test_what_is_not_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "folder.index").mkdir()
    os.mkfifo(tmp_path / "pipe.index")
    for name in ["folder", "pipe", "nothing", "nul\0", "x" * 5000]:
        assert not is_tf_checkpoint(tmp_path / name)
        with pytest.raises(TfCheckpointError, match=r"no such file; the prefix of a checkpoint"):
            TfCheckpoint(tmp_path / name)


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=3))
def test_blocks_of_any_bytes_under_right_checksums_raise_nothing_else(tmp_path_factory, blocks):
    prefix = tmp_path_factory.mktemp("blocks") / "model"
    prefix.with_name("model.index").write_bytes(table([], blocks=blocks))
    with pytest.raises(TfCheckpointError):
        TfCheckpoint(prefix)


def test_the_limit_of_an_index_can_be_set(tmp_path):
    prefix = write(tmp_path / "c", {b"w": FULL}, FLOATS)
    with pytest.raises(
        TfCheckpointError, match=r"model\.index: it has \d+ bytes, expected at most 10"
    ):
        TfCheckpoint(prefix, max_index_bytes=10)
    assert list(TfCheckpoint(prefix).variables) == ["w"]
