"""Examples: TensorFlow's messages of named features, encoded and decoded.

data = encode_example({"x": np.zeros(64, np.float32), "label": 3, "name": b"zebra"})
decode_example(data)["label"]  # array([3])
"""

from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

FeatureArrays = dict[str, np.ndarray | None]

# In the order of their field numbers 1, 2, 3.
_LISTS = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}
_INT64 = np.iinfo(np.int64)


def _make_pool() -> descriptor_pool.DescriptorPool:
    # A separate pool does not collide with that of TensorFlow in the same process.
    file = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="tensorflow", syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, kind in zip(
        _LISTS.values(), (kinds.TYPE_BYTES, kinds.TYPE_FLOAT, kinds.TYPE_INT64), strict=True
    ):
        values = file.message_type.add(name=name).field
        values.add(name="value", number=1, label=kinds.LABEL_REPEATED, type=kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, message) in enumerate(_LISTS.items(), start=1):
        _add_message(feature, name, number, message).oneof_index = 0
    _add_map(file.message_type.add(name="Features"), "feature", "Feature")
    steps = _add_message(file.message_type.add(name="FeatureList"), "feature", 1, "Feature")
    steps.label = steps.LABEL_REPEATED
    _add_map(file.message_type.add(name="FeatureLists"), "feature_list", "FeatureList")
    _add_message(file.message_type.add(name="Example"), "features", 1, "Features")
    sequence = file.message_type.add(name="SequenceExample")
    _add_message(sequence, "context", 1, "Features")
    _add_message(sequence, "feature_lists", 2, "FeatureLists")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _add_message(
    message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str
) -> descriptor_pb2.FieldDescriptorProto:
    field = message.field.add(name=name, number=number, type_name=f".tensorflow.{kind}")
    field.label = field.LABEL_OPTIONAL
    field.type = field.TYPE_MESSAGE
    return field


def _add_map(message: descriptor_pb2.DescriptorProto, name: str, kind: str) -> None:
    # A map is a repeated message of key and value, whose name protobuf prescribes.
    entry = message.nested_type.add(
        name="".join(word.capitalize() for word in name.split("_")) + "Entry"
    )
    entry.options.map_entry = True
    field = entry.field.add(name="key", number=1)
    field.label = field.LABEL_OPTIONAL
    field.type = field.TYPE_STRING
    _add_message(entry, "value", 2, kind)
    entries = _add_message(message, name, 1, f"{message.name}.{entry.name}")
    entries.label = entries.LABEL_REPEATED


def _message_class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"tensorflow.{name}"))


_POOL = _make_pool()
BytesList = _message_class("BytesList")
FloatList = _message_class("FloatList")
Int64List = _message_class("Int64List")
Feature = _message_class("Feature")
Features = _message_class("Features")
FeatureList = _message_class("FeatureList")
FeatureLists = _message_class("FeatureLists")
Example = _message_class("Example")
SequenceExample = _message_class("SequenceExample")


def encode_example(features: Mapping[str, Any]) -> bytes:
    """Encode floats, integers or bytes by name as an Example; None is a feature without values.

    Entries are ordered by name, so equal features give equal bytes. Floats are stored as float32.
    """
    example = Example()
    example.features.SetInParent()
    _fill_features(example.features, features)
    return example.SerializeToString(deterministic=True)


def decode_example(data: bytes) -> FeatureArrays:
    """Return the features of an Example by name: float32, int64, or an object array of bytes.

    None is a feature without values.
    """
    return _arrays(parse_message(Example, data).features)


def encode_sequence_example(
    context: Mapping[str, Any], feature_lists: Mapping[str, Iterable[Any]]
) -> bytes:
    """Encode context features, and by name one feature per step, as a SequenceExample."""
    example = SequenceExample()
    example.context.SetInParent()
    example.feature_lists.SetInParent()
    _fill_features(example.context, context)
    for name, steps in feature_lists.items():
        messages = _entry(example.feature_lists.feature_list, name).feature
        for number, step in enumerate(steps):
            _fill(messages.add(), step, f"step {number} of feature list {name}")
    return example.SerializeToString(deterministic=True)


def decode_sequence_example(
    data: bytes,
) -> tuple[FeatureArrays, dict[str, list[np.ndarray | None]]]:
    """Return the context of a SequenceExample, and the steps of each feature list."""
    example = parse_message(SequenceExample, data)
    lists = example.feature_lists.feature_list
    return _arrays(example.context), {
        name: [_array(step) for step in lists[name].feature] for name in sorted(lists)
    }


def parse_message(kind: Any, data: bytes) -> Any:
    """Parse a message; ValueError if the bytes are not one."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ValueError(f"its {len(data)} bytes are not a valid {kind.DESCRIPTOR.name}") from None


def _fill_features(message: Any, features: Mapping[str, Any]) -> None:
    for name, value in features.items():
        _fill(_entry(message.feature, name), value, f"feature {name}")


def _entry(entries: Any, name: str) -> Any:
    if not isinstance(name, str):
        raise TypeError(f"feature name {name!r} is a {type(name).__name__}, expected a str")
    try:
        return entries[name]
    except UnicodeEncodeError:
        raise ValueError(f"feature name {name!r} is not Unicode text, as names must be") from None


def _fill(feature: Any, value: Any, what: str) -> None:
    if value is None:
        return
    if isinstance(value, list | tuple) and not value:
        raise TypeError(
            f"{what} is an empty list of unknown kind; pass np.array([], np.float32), int or 'S'"
        )
    if isinstance(value, bytes | bytearray | memoryview):
        value = [bytes(value)]
    array = _as_array(value, what)
    kind = number_kind(array.dtype)
    if kind == "":
        array, kind = _convert_objects(array, what)
    if kind == "bytes":
        message = feature.bytes_list
        values = array.tolist()
    elif kind == "integer":
        message = feature.int64_list
        values = _checked_integers(array, what)
    else:
        message = feature.float_list
        with np.errstate(over="ignore"):
            values = array.astype(np.float32).ravel().tolist()
    message.value.extend(values)
    message.SetInParent()


def _as_array(value: Any, what: str) -> np.ndarray:
    if not isinstance(value, list | tuple):
        return np.asarray(value)
    try:  # as objects, so that no value is converted to the kind of its neighbours
        return np.array(value, object)
    except ValueError as error:
        raise TypeError(
            f"{what} has values that do not fit together: {error}; pass one flat list or array"
        ) from None


def number_kind(dtype: np.dtype) -> str:
    """Return the kind of a dtype, float or integer, also of ml_dtypes; else the empty string."""
    if dtype.kind in "fiu":
        return "float" if dtype.kind == "f" else "integer"
    if dtype.kind == "V" and dtype.type.__module__ == ml_dtypes.bfloat16.__module__:
        return "integer" if "int" in dtype.name else "float"
    return ""


def _convert_objects(array: np.ndarray, what: str) -> tuple[np.ndarray, str]:
    """Return bytes, integers or floats as a flat array, with their kind; TypeError for others."""
    if array.dtype.kind not in "OSUb":
        raise TypeError(f"{what} is {array.dtype}, expected floats, integers or bytes")
    values = array.ravel().tolist()
    kinds = {kind: _object_kind(kind) for kind in set(map(type, values))}
    found = set(kinds.values()) or {"bytes"}
    # The dtype counts too: the array may have no values.
    found |= {"U": {"str"}, "b": {"bool"}}.get(array.dtype.kind, set())
    for kind, way in {"bool": ".astype(int)", "str": ".encode()"}.items():
        if kind in found:
            raise TypeError(
                f"{what} is {kind}, expected floats, integers or bytes; convert it with {way}"
            )
    if found == {"integer", "float"}:
        found = {"float"}
    if len(found) > 1 or "" in found:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(
            f"{what} has values of type {names}, "
            "expected one flat list of floats, integers or bytes"
        )
    try:
        return np.array(values, float if found == {"float"} else object), found.pop()
    except OverflowError:
        raise ValueError(f"{what} has an integer that is too large for a float") from None


def _object_kind(kind: type) -> str:
    if issubclass(kind, bool | np.bool_):
        return "bool"
    if issubclass(kind, np.generic) and not issubclass(kind, np.character):
        return number_kind(np.dtype(kind))
    names = {bytes: "bytes", str: "str", int: "integer", float: "float"}
    return next((name for base, name in names.items() if issubclass(kind, base)), "")


def _checked_integers(array: np.ndarray, what: str) -> list[int]:
    values = array.ravel().tolist()
    if array.dtype.kind not in "iu":
        values = [int(value) for value in values]
    for value in (min(values, default=0), max(values, default=0)):
        if not _INT64.min <= value <= _INT64.max:
            raise ValueError(
                f"{what} has the value {value}, "
                f"expected {_INT64.min} to {_INT64.max}: integers are int64"
            )
    return values


def _arrays(features: Any) -> FeatureArrays:
    return {name: _array(features.feature[name]) for name in sorted(features.feature)}


def _array(feature: Any) -> np.ndarray | None:
    kind = feature.WhichOneof("kind")
    if kind is None:
        return None
    dtype = {"bytes_list": object, "float_list": np.float32, "int64_list": np.int64}[kind]
    values = getattr(feature, kind).value
    return np.fromiter(values, dtype, len(values))
