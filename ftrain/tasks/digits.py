"""Handwritten digits: scikit-learn's 1,797 images of 8 x 8 pixels, a convolutional classifier."""

import functools
import importlib.util
import shutil
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ftrain.data import ArraySource, MapSource, RecordSource, Source
from ftrain.formats import Fixed, Raw, RecordWriter, encode_example
from ftrain.metrics import accuracy, cross_entropy
from ftrain.paths import absolute
from ftrain.tasks.task import Task
from ftrain.tree import Tree, widen

CLASSES = 10
TEST_SHARE = 5  # every fifth example of a fixed permutation is held out
RECORD_SPEC = {"image": Raw((8, 8, 1), "uint8"), "label": Fixed(dtype="int32")}
RECORDS_PER_FILE = 500


def digits(
    *, channels: int = 32, hidden: int = 128, dropout: float = 0.25, records: str = ""
) -> Task:
    """Classify digits; evaluation measures loss and accuracy on the images held out.

    Args:
      channels: of the first convolution; the second has twice as many.
      hidden: width of the dense layer.
      dropout: share of the dense layer's features that a training step drops.
      records: a directory of record files to read the training images from; written on first use.
    """
    for name, value in (("channels", channels), ("hidden", hidden)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    train, test = load_digits()

    def loss_fn(params: Tree, batch: Tree, rng: jax.Array):
        # The loss is computed in float32, whatever the model computes in.
        logits = widen(classify(params, batch["image"], dropout=dropout, rng=rng))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        is_right = jnp.argmax(logits, axis=-1) == batch["label"]
        return losses.mean(), {"accuracy": jnp.mean(is_right)}

    init = functools.partial(init_classifier, channels=channels, hidden=hidden)
    source = (
        digit_records(records, train["image"], train["label"]) if records else ArraySource(train)
    )
    return Task(
        init,
        loss_fn,
        source,
        evaluation_source=ArraySource(test),
        predict=predict,
        metrics={"loss": cross_entropy(), "accuracy": accuracy()},
    )


def load_digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return training and test images, with values from 0 to 1, and their labels."""
    images, labels = _read_digits()
    arrays = {
        "image": (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32),
        "label": labels.astype(np.int32),
    }
    held_out = np.zeros(len(labels), bool)
    held_out[np.random.default_rng(0).permutation(len(labels))[::TEST_SHARE]] = True
    return {k: v[~held_out] for k, v in arrays.items()}, {k: v[held_out] for k, v in arrays.items()}


def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Read scikit-learn's images, flat, and labels without importing it, which is slow."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            "the task digits needs scikit-learn: pip install 'ftrain[examples]'"
        )
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.exists():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1], table[:, -1]
    from sklearn import datasets

    bunch: Any = datasets.load_digits()
    return bunch.data, bunch.target


def digit_records(directory: str | Path, images: np.ndarray, labels: np.ndarray) -> Source:
    """Read images, with values from 0 to 1, and labels from record files, written if missing."""
    home = absolute(directory)
    if not home.exists():
        _write_records(home, images, labels)
    return MapSource(RecordSource(str(home / "train-*.tfrecord"), RECORD_SPEC), scale)


def scale(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert pixels from 0 to 16 to numbers from 0 to 1."""
    return batch | {"image": batch["image"].astype(np.float32) / 16}


def _write_records(home: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write to a temporary directory and rename it: other processes see all files or none."""
    temporary = home.with_name(f"{home.name}.{uuid.uuid4().hex}")
    with RecordWriter(temporary / "train.tfrecord", shard_records=RECORDS_PER_FILE) as writer:
        for image, label in zip((images * 16).astype(np.uint8), labels, strict=True):
            writer.write(encode_example({"image": image.tobytes(), "label": label}))
    try:
        temporary.rename(home)
    except OSError:
        shutil.rmtree(temporary)
        if not home.exists():  # else another process was first
            raise


def init_classifier(rng: jax.Array, *, channels: int, hidden: int) -> Tree:
    """Return the parameters of two convolutions, a dense layer and the class scores."""
    shapes = {
        "conv1": (3, 3, 1, channels),
        "conv2": (3, 3, channels, 2 * channels),
        "dense": (4 * 4 * 2 * channels, hidden),
        "scores": (hidden, CLASSES),
    }
    he_normal = jax.nn.initializers.he_normal()
    return {
        name: {"kernel": he_normal(key, shape), "bias": jnp.zeros(shape[-1])}
        for key, (name, shape) in zip(
            jax.random.split(rng, len(shapes)), shapes.items(), strict=True
        )
    }


def classify(
    params: Tree, images: jax.Array, *, dropout: float = 0.0, rng: jax.Array | None = None
) -> jax.Array:
    """Return the logits (batch, classes) of images (batch, 8, 8, 1), in the parameters' dtype."""
    images = images.astype(params["conv1"]["kernel"].dtype)
    features = jax.nn.relu(_convolve(params["conv1"], images, stride=1))
    features = jax.nn.relu(_convolve(params["conv2"], features, stride=2))
    features = jax.nn.relu(_dense(params["dense"], features.reshape(len(images), -1)))
    if dropout and rng is not None:
        kept = jax.random.bernoulli(rng, 1 - dropout, features.shape)
        features = jnp.where(kept, features / (1 - dropout), 0)
    return _dense(params["scores"], features)


def _convolve(layer: Tree, images: jax.Array, stride: int) -> jax.Array:
    result = jax.lax.conv_general_dilated(
        images,
        layer["kernel"],
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return result + layer["bias"]


def _dense(layer: Tree, features: jax.Array) -> jax.Array:
    return features @ layer["kernel"] + layer["bias"]


def predict(params: Tree, batch: Tree) -> dict[str, jax.Array]:
    """Return the logits of the images of a batch."""
    return {"logits": classify(params, batch["image"])}
