"""Plain copies of compressed record files, made once and kept in a cache directory."""

import hashlib
import json
import os
import uuid
from pathlib import Path

from ftrain.formats.records.compression import ByteStream, Compression, StreamError
from ftrain.formats.records.reading import OnDamage, read_records
from ftrain.formats.records.resync import CHUNK
from ftrain.formats.records.sidecar import identity


def unpack(path: Path, cache: str | Path, compression: Compression, on_damage: OnDamage) -> Path:
    """The plain copy of a compressed file in `cache`, of the file as it is now."""
    target = Path(cache) / _name(path)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may unpack a file at once: each writes its own, and the last one stays.
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.writing")
    try:
        _inflate(path, temporary, compression, on_damage)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _name(path: Path) -> str:
    known_by = json.dumps({"path": os.path.abspath(path)} | identity(path, os.stat(path)))
    return f"{path.name[:100]}-{hashlib.sha256(known_by.encode()).hexdigest()[:16]}.tfrecord"


def _inflate(path: Path, target: Path, compression: Compression, on_damage: OnDamage) -> None:
    with ByteStream(path, compression) as stream, open(target, "xb") as file:
        try:
            while data := stream.read(CHUNK):
                file.write(data)
        except StreamError:
            if on_damage == "raise":
                _raise_damage(path, compression)
            # A stream that breaks off between two records would look whole; a byte more shows that it was not.
            file.write(b"\0")


def _raise_damage(path: Path, compression: Compression) -> None:
    """Reads the file as records, which fails with the number of the record."""
    for _ in read_records(path, compression=compression, verify=False):
        pass
