"""A minimal writer of TensorFlow checkpoints, for tests that need unusual or invalid ones."""

import contextlib
import struct
import tracemalloc

import numpy as np
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from ftrain.formats.tf_checkpoint import TfCheckpointError


def assert_same(ours, wanted):
    assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
    if ours.dtype.kind in "Oiub":
        assert ours.tolist() == wanted.tolist()
        return
    wide = complex if ours.dtype.kind == "c" else float
    ours, wanted = (array.astype(wide).reshape(-1).view(float) for array in (ours, wanted))
    np.testing.assert_array_equal(ours, wanted)
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(ours[numbers]), np.signbit(wanted[numbers]))


def attempt(action):
    """Return the result of an action, or the error that refuses it; other exceptions propagate."""
    try:
        return action()
    except TfCheckpointError as error:
        return error


@contextlib.contextmanager
def little_memory(limit=1 << 20):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def varint(number):
    low = []
    number &= (1 << 64) - 1
    while number > 0x7F:
        low.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*low, number])


def message(*fields):
    """A message of fields (number, value), where bytes are strings and messages."""
    whole = b""
    for number, value in fields:
        if isinstance(value, bytes):
            whole += varint(number << 3 | 2) + varint(len(value)) + value
        else:
            whole += varint(number << 3) + varint(value)
    return whole


def block(entries, interval=16):
    body = b""
    restarts = []
    last = b""
    for number, (key, value) in enumerate(entries):
        shared = 0
        if number % interval == 0:
            restarts.append(len(body))
        else:
            shared = next(
                (n for n, pair in enumerate(zip(last, key, strict=False)) if pair[0] != pair[1]),
                len(last),
            )
        body += (
            varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        )
        last = key
    restarts = restarts or [0]
    return body + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def sealed(block, compression=0):
    return (
        block
        + bytes([compression])
        + struct.pack("<I", masked_crc32c(block + bytes([compression])))
    )


def table(entries, *, per_block=1000, interval=16, blocks=None, compression=0):
    """A sorted table; `blocks`, in place of entries, are raw bytes."""
    blocks = blocks or [
        block(entries[i : i + per_block], interval) for i in range(0, len(entries), per_block)
    ]
    file = b""
    handles = []
    for body in blocks:
        handles.append((b"%09d" % len(file), varint(len(file)) + varint(len(body))))
        file += sealed(body, compression)
    return finish(file, block(handles))


def finish(file, index):
    meta = varint(len(file)) + varint(len(block([])))
    file += sealed(block([]))
    footer = meta + varint(len(file)) + varint(len(index))
    return file + sealed(index) + footer.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")


HEADER = message((1, 1), (3, message((1, 1))))
FLOAT, STRING = 1, 7


def entry(dtype=FLOAT, shape=(), *, shard=0, offset=0, size=0, data=None, slices=(), crc=None):
    """A BundleEntryProto; `data` gives checksum and size."""
    dims = message(*((2, message((1, size))) for size in shape))
    size = size if data is None else len(data)
    crc = masked_crc32c(data or b"") if crc is None else crc
    fields = message((1, dtype), (2, dims), (3, shard), (4, offset), (5, size))
    parts = message(
        *(
            (7, message(*((1, message(*enumerate(extent, 1))) for extent in part)))
            for part in slices
        )
    )
    return fields + b"\x35" + struct.pack("<I", crc) + parts


def write(folder, entries, *data, header=HEADER, **how):
    """Write a checkpoint of these entries and data files; return its prefix."""
    folder.mkdir(exist_ok=True)
    (folder / "model.index").write_bytes(table([(b"", header), *sorted(entries.items())], **how))
    for shard, content in enumerate(data):
        (folder / f"model.data-{shard:05d}-of-{len(data):05d}").write_bytes(content)
    return folder / "model"


def pack_strings(strings):
    """The bytes of a tensor of strings and its checksum."""
    lengths = struct.pack(f"<{len(strings)}I", *map(len, strings))
    check = struct.pack("<I", masked_crc32c(lengths))
    rest = check + b"".join(strings)
    return b"".join(varint(len(string)) for string in strings) + rest, masked_crc32c(lengths + rest)


FLOATS = struct.pack("<4f", 1, 2, 3, 4)
FULL = entry(FLOAT, (4,), data=FLOATS)
