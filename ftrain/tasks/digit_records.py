"""The digits as record files, written on first use."""

import shutil
import uuid
from pathlib import Path

import numpy as np

from ftrain.data import MapSource, RecordSource, Source
from ftrain.formats import Fixed, Raw, RecordWriter, encode_example
from ftrain.paths import absolute

SPEC = {"image": Raw((8, 8, 1), "uint8"), "label": Fixed(dtype="int32")}
SHARD = 500  # records in a file


def digit_records(directory: str | Path, images: np.ndarray, labels: np.ndarray) -> Source:
    """Images of numbers from 0 to 1, and their labels, read from files in `directory`, which are written if need be."""
    home = absolute(directory)
    if not home.exists():
        _write(home, images, labels)
    return MapSource(RecordSource(str(home / "train-*.tfrecord"), SPEC), scale)


def scale(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return batch | {"image": batch["image"].astype(np.float32) / 16}


def _write(home: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write elsewhere first: the directory appears all at once, whoever else is at it too."""
    aside = home.with_name(f"{home.name}.{uuid.uuid4().hex}")
    with RecordWriter(aside / "train.tfrecord", shard_records=SHARD) as writer:
        for image, label in zip((images * 16).astype(np.uint8), labels, strict=True):
            writer.write(encode_example({"image": image.tobytes(), "label": label}))
    try:
        aside.rename(home)
    except OSError:
        shutil.rmtree(aside)
        if not home.exists():  # else another process was first
            raise
