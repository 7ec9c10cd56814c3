"""Bundles: the index of a TensorFlow checkpoint, a sorted table of protocol messages.

The table has LevelDB's format. Its values describe tensors, slices of them and objects.
"""

import functools
import math
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from ftrain.formats.records.encoding import masked_crc

Box = tuple[slice, ...]  # the place of a slice in its tensor

_MESSAGES = {
    "VersionDef": {"min_consumer": "int32 2"},
    "BundleHeaderProto": {
        "num_shards": "int32 1",
        "endianness": "int32 2",
        "version": "VersionDef 3",
    },
    "Dim": {"size": "int64 1"},
    "TensorShapeProto": {"dim": "repeated Dim 2", "unknown_rank": "bool 3"},
    "Extent": {"start": "int64 1", "length": "optional int64 2"},
    "TensorSliceProto": {"extent": "repeated Extent 1"},
    "BundleEntryProto": {
        "dtype": "int32 1",
        "shape": "TensorShapeProto 2",
        "shard_id": "int32 3",
        "offset": "int64 4",
        "size": "int64 5",
        "crc32c": "fixed32 6",
        "slices": "repeated TensorSliceProto 7",
    },
    "ObjectReference": {"node_id": "int32 1", "local_name": "string 2"},
    "SerializedTensor": {"name": "string 1", "checkpoint_key": "string 3"},
    "SlotVariableReference": {
        "original_variable_node_id": "int32 1",
        "slot_name": "string 2",
        "slot_variable_node_id": "int32 3",
    },
    "TrackableObject": {
        "children": "repeated ObjectReference 1",
        "attributes": "repeated SerializedTensor 2",
        "slot_variables": "repeated SlotVariableReference 3",
    },
    "TrackableObjectGraph": {"nodes": "repeated TrackableObject 1"},
    "CheckpointState": {
        "model_checkpoint_path": "string 1",
        "all_model_checkpoint_paths": "repeated string 2",
        "all_model_checkpoint_timestamps": "repeated double 3",
        "last_preserved_timestamp": "double 4",
    },
}
# The position of a name is TensorFlow's number of the dtype.
_DTYPE_NAMES = """
    invalid float32 float64 int32 uint8 int16 int8 string complex64 int64 bool
    qint8 quint8 qint32 bfloat16 qint16 quint16 uint16 complex128 float16
    resource variant uint32 uint64 float8_e5m2 float8_e4m3fn float8_e4m3fnuz
    float8_e4m3b11fnuz float8_e5m2fnuz int4 uint4 int2 uint2
"""
_DTYPES = _DTYPE_NAMES.split()
_UNSUPPORTED = {"invalid", "qint8", "quint8", "qint32", "qint16", "quint16", "resource", "variant"}
_MAX_RANK = 64  # numpy's limit
_MAX_ELEMENTS = 1 << 59  # of 16 bytes each, numpy's limit
_MAX_PATH_EXPANSION = 64  # ratio of all paths to their graph; valid files stay below 10
_SMALL = 1 << 24  # characters of paths that need no check

_FOOTER_SIZE = 48  # two block handles, padding, magic number
_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
_TRAILER = struct.Struct("<BI")  # compression, masked checksum of the block and the compression
_PLAIN = 0
_SNAPPY = 1
# Keys share prefixes, so a small block can expand to a huge one. TensorFlow writes every 16th key
# in full, which keeps valid blocks below 16 times their size.
_MAX_KEY_EXPANSION = 64


class DamagedTableError(ValueError):
    """A table that is damaged or compressed."""


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a whole file in the order of the keys, checksums verified."""
    last_key = None
    last_end = 0
    for _, value in _read_entries(_read_block(data, *_parse_footer(data))):
        offset, size = _parse_handle(value)
        # With increasing offsets and keys the work is linear in the size of the file.
        if offset < last_end:
            raise DamagedTableError(
                f"the block at byte {offset} starts before byte {last_end}, the end of another"
            )
        last_end = offset + size + _TRAILER.size
        for entry in _read_entries(_read_block(data, offset, size)):
            if last_key is not None and entry[0] <= last_key:
                raise DamagedTableError(
                    f"key {entry[0]!r} follows {last_key!r}, "
                    "expected sorted keys without repetition"
                )
            last_key = entry[0]
            yield entry


def read_varint(data: bytes, at: int, bits: int = 64) -> tuple[int, int]:
    """Return the number of up to `bits` bits at byte `at`, and the place after it."""
    value = 0
    for shift in range(0, bits, 7):
        if at >= len(data):
            raise DamagedTableError(f"a number is cut short at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 and value >> bits == 0:
            return value, at
    raise DamagedTableError(f"a number before byte {at} has more than {bits} bits")


def _parse_footer(data: bytes) -> tuple[int, int]:
    if len(data) < _FOOTER_SIZE:
        raise DamagedTableError(f"it has {len(data)} bytes, a table has at least {_FOOTER_SIZE}")
    footer = data[-_FOOTER_SIZE:]
    if not footer.endswith(_MAGIC):
        raise DamagedTableError(
            f"it ends in {footer[-len(_MAGIC) :].hex()}, a table in {_MAGIC.hex()}"
        )
    # The first handle is that of the metaindex, which TensorFlow leaves empty.
    _, at = read_varint(footer, 0)
    _, at = read_varint(footer, at)
    return _parse_handle(footer[at : -len(_MAGIC)])


def _parse_handle(value: bytes) -> tuple[int, int]:
    offset, at = read_varint(value, 0)
    size, _ = read_varint(value, at)
    return offset, size


def _read_block(data: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    limit = len(data) - _FOOTER_SIZE
    if end + _TRAILER.size > limit:
        raise DamagedTableError(
            f"the block of {size} bytes at byte {offset} runs into the footer at byte {limit}"
        )
    compression, checksum = _TRAILER.unpack_from(data, end)
    if checksum != masked_crc(data[offset : end + 1]):
        raise DamagedTableError(
            f"the block at byte {offset} of {size} bytes is damaged: its checksum does not match"
        )
    if compression == _SNAPPY:
        raise DamagedTableError(
            f"the block at byte {offset} is compressed with snappy, which is unsupported; load and "
            "save it with TensorFlow, which writes the index of a checkpoint uncompressed"
        )
    if compression != _PLAIN:
        raise DamagedTableError(
            f"the block at byte {offset} has compression {compression}, expected 0 (none)"
        )
    return data[offset:end]


def _read_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    # The restart points at the end serve binary search; only their start matters here.
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * restarts
    if end < 0:
        raise DamagedTableError(
            f"a block of {len(block)} bytes has no room for its {restarts} restart points"
        )
    at = 0
    key = b""
    expanded = 0
    while at < end:
        shared, at = read_varint(block, at, 32)
        rest, at = read_varint(block, at, 32)
        length, at = read_varint(block, at, 32)
        if shared > len(key) or rest + length > end - at:
            raise DamagedTableError(
                f"an entry shares {shared} bytes and has {rest} + {length}, "
                "beyond the end of its block"
            )
        key = key[:shared] + block[at : at + rest]
        expanded += len(key)
        if expanded > _MAX_KEY_EXPANSION * len(block):
            raise DamagedTableError(
                f"a block of {len(block)} bytes has keys of more than {expanded} bytes"
            )
        at += rest + length
        yield key, block[at - length : at]


class BundleEntry(NamedTuple):
    """The entry of one tensor or slice in the index."""

    shape: tuple[int, ...]
    dtype: str
    proto: Any  # the rest: the place of the bytes, or the list of slices

    @classmethod
    def parse(cls, key: bytes, value: bytes) -> "BundleEntry":
        """Parse the value of a key; ValueError if it is damaged."""
        try:
            proto = parse_message("BundleEntryProto", value)
            dtype = (
                _DTYPES[proto.dtype] if 0 <= proto.dtype < len(_DTYPES) else f"dtype {proto.dtype}"
            )
            return cls(_parse_shape(proto.shape), dtype, proto)
        except ValueError as error:
            raise ValueError(f"key {key!r}: {error}") from None

    def numpy_dtype(self) -> np.dtype:
        """Return the numpy dtype, object for strings; ValueError if it is unsupported."""
        if self.dtype not in _DTYPES or self.dtype in _UNSUPPORTED:
            raise ValueError(f"its dtype is {self.dtype}, which is unsupported")
        return np.dtype(
            object if self.dtype == "string" else getattr(ml_dtypes, self.dtype, self.dtype)
        )

    def check_size(self) -> None:
        """Raise ValueError unless the number of bytes fits the shape and dtype."""
        dtype = self.numpy_dtype()
        elements = math.prod(self.shape)
        size = self.proto.size
        if self.dtype == "string":
            if size < elements:  # at least one byte each, for the length
                raise ValueError(f"it has {size} bytes, too few for {elements} strings")
        elif size != elements * dtype.itemsize:
            raise ValueError(
                f"it has {size} bytes, expected {elements} elements of {dtype.itemsize}"
            )


@functools.cache
def message_class(name: str) -> Any:
    """Return the class of one of TensorFlow's messages, with the fields used here."""
    return message_factory.GetMessageClass(
        _make_message_pool().FindMessageTypeByName(f"tensorflow.{name}")
    )


def parse_message(name: str, data: bytes) -> Any:
    """Parse a message; ValueError if the bytes are not one."""
    try:
        return message_class(name).FromString(data)
    except DecodeError:
        raise ValueError(f"its {len(data)} bytes are not a valid {name}") from None


def slice_box(part: Any, shape: tuple[int, ...]) -> Box:
    """Return the place of a slice in its tensor; an extent without length is a full dimension."""
    if len(part.extent) != len(shape):
        raise ValueError(f"it has a slice of rank {len(part.extent)}, expected {len(shape)}")
    box = []
    for extent, size in zip(part.extent, shape, strict=True):
        stop = extent.start + extent.length if extent.HasField("length") else size
        if not 0 <= extent.start <= stop <= size:
            raise ValueError(
                f"it has a slice from {extent.start} to {stop} in a dimension of {size}"
            )
        box.append(slice(extent.start, stop))
    return tuple(box)


def slice_key(name: str, part: Any) -> bytes:
    """Return the key of a slice: 0, name, rank, and each start and length, in ordered code."""
    escaped = name.encode().replace(b"\0", b"\0\xff")  # \xff needs no escape: it is not in UTF-8
    numbers = [
        (extent.start, extent.length if extent.HasField("length") else -1) for extent in part.extent
    ]
    extents = b"".join(
        _encode_ordered_signed(start) + _encode_ordered_signed(length) for start, length in numbers
    )
    return _encode_ordered(0) + escaped + b"\0\1" + _encode_ordered(len(numbers)) + extents


def check_tiling(shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raise ValueError unless each element of the shape is in exactly one of the boxes."""
    covered = sum(math.prod(side.stop - side.start for side in box) for box in boxes)
    if covered != math.prod(shape):
        raise ValueError(
            f"its slices have {covered} elements together, expected {math.prod(shape)}"
        )
    # Only the edges of slices matter, so the grid of edges is small.
    edges = [
        np.unique([(side.start, side.stop) for side in sides]) for sides in zip(*boxes, strict=True)
    ]
    taken = np.zeros([len(places) - 1 for places in edges], bool)
    for box in boxes:
        ends = [
            np.searchsorted(places, (side.start, side.stop))
            for places, side in zip(edges, box, strict=True)
        ]
        cells = tuple(slice(start, stop) for start, stop in ends)
        if taken[cells].any():
            raise ValueError(
                f"its slice {[(side.start, side.stop) for side in box]} overlaps another"
            )
        taken[cells] = True


def object_keys(data: bytes) -> dict[str, str]:
    """Return the path of each saved value in an object graph, and its key in the checkpoint."""
    nodes = parse_message("TrackableObjectGraph", data).nodes
    join = _PathJoiner(max(_MAX_PATH_EXPANSION * len(data), _SMALL))
    paths = _child_paths(nodes, join)
    keys = {}
    for node, path in (paths | _slot_paths(nodes, paths, join)).items():
        for attribute in nodes[node].attributes:
            name = path if attribute.name == "VARIABLE_VALUE" else join(path, attribute.name)
            if name in keys:
                both = f"{keys[name]!r} and {attribute.checkpoint_key!r}"
                raise ValueError(f"keys {both} belong to one object {name!r}; read them by key")
            keys[name] = attribute.checkpoint_key
    return keys


def _parse_shape(proto: Any) -> tuple[int, ...]:
    shape = tuple(dim.size for dim in proto.dim)
    if proto.unknown_rank or len(shape) > _MAX_RANK or any(size < 0 for size in shape):
        found = "unknown" if proto.unknown_rank else shape
        raise ValueError(f"its shape is {found}, expected up to {_MAX_RANK} sizes")
    # numpy rejects large dimensions even if another one is 0.
    if math.prod(max(size, 1) for size in shape) >= _MAX_ELEMENTS:
        raise ValueError(f"its shape is {shape}, too large for any memory")
    return shape


def _encode_ordered(number: int) -> bytes:
    size = (number.bit_length() + 7) // 8
    return bytes([size]) + number.to_bytes(size, "big")


def _encode_ordered_signed(number: int) -> bytes:
    # Of n bytes the first n bits encode sign and length: ones from 0 on, zeros below.
    size = (~number if number < 0 else number).bit_length() // 7 + 1
    bits = number & ((1 << 8 * size) - 1)
    return (bits ^ ((1 << size) - 1 << 7 * size)).to_bytes(size, "big")


class _PathJoiner:
    """Joins names to paths, up to a total length: a small file can hold a chain of long paths."""

    def __init__(self, limit: int):
        self.limit = self.left = limit

    def __call__(self, *names: str) -> str:
        path = "/".join(name for name in names if name)
        self.left -= len(path)
        if self.left < 0:
            raise ValueError(f"the paths of its objects have more than {self.limit} characters")
        return path


def _child_paths(nodes: Sequence[Any], join: _PathJoiner) -> dict[int, str]:
    # Breadth first, so that each object gets its shortest path, and cycles end.
    paths = {0: ""} if nodes else {}
    waiting = deque(paths)
    while waiting:
        parent = waiting.popleft()
        for child in nodes[parent].children:
            if _check_node(child.node_id, nodes) not in paths:
                paths[child.node_id] = join(paths[parent], child.local_name)
                waiting.append(child.node_id)
    return paths


def _slot_paths(nodes: Sequence[Any], paths: dict[int, str], join: _PathJoiner) -> dict[int, str]:
    slots = {}
    for optimizer, path in paths.items():
        for slot in nodes[optimizer].slot_variables:
            variable = _check_node(slot.original_variable_node_id, nodes)
            if variable in paths:
                slot_node = _check_node(slot.slot_variable_node_id, nodes)
                slots[slot_node] = join(paths[variable], path, slot.slot_name)
    return slots


def _check_node(node: int, nodes: Sequence[Any]) -> int:
    if not 0 <= node < len(nodes):
        raise ValueError(f"it refers to object {node}, expected less than {len(nodes)}")
    return node


@functools.cache
def _make_message_pool() -> descriptor_pool.DescriptorPool:
    # A separate pool does not collide with TensorFlow's or TensorBoard's in the same process.
    file = descriptor_pb2.FileDescriptorProto(
        name="tensor_bundle.proto", package="tensorflow", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, declaration in fields.items():
            _add_field(message, field, declaration)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _add_field(message: descriptor_pb2.DescriptorProto, name: str, declaration: str) -> None:
    *label, kind, number = declaration.split()
    field = message.field.add(name=name, number=int(number))
    field.label = field.LABEL_REPEATED if label == ["repeated"] else field.LABEL_OPTIONAL
    if kind in _MESSAGES:
        field.type = field.TYPE_MESSAGE
        field.type_name = f".tensorflow.{kind}"
    else:
        field.type = field.Type.Value(f"TYPE_{kind.upper()}")
    if label == ["optional"]:  # so that HasField works
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
