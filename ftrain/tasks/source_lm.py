"""A language model of Python source: predicts the bytes of the standard library's files.

The model is a decoder-only transformer: pre-norm blocks, rotary positions, tied embeddings and
token shift.
"""

import functools
import hashlib
import math
import sysconfig
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ftrain.data import WindowSource
from ftrain.tasks.task import Task
from ftrain.tree import Tree, widen

VOCABULARY = 256  # bytes
HELD_OUT = 0.05  # share of the files, chosen by a digest of their names
EVALUATION_BATCH = 32
PROMPT = b"def "

Logits = Callable[[Tree, jax.Array], jax.Array]  # parameters, tokens -> logits


def source_lm(
    *,
    width: int = 128,
    layers: int = 3,
    heads: int = 2,
    context: int = 128,
    evaluation_windows: int = 1024,
    sample_bytes: int = 120,
) -> Task:
    """Predict the next byte; evaluation measures bits per byte on held-out files, with a sample.

    Args:
      context: the number of bytes that a prediction depends on.
      evaluation_windows: the number of windows, spread evenly over the held-out files.
      sample_bytes: length of the text that each evaluation writes; 0 for none.
    """
    sizes = {"width": width, "layers": layers, "heads": heads, "context": context}
    for name, value in (sizes | {"evaluation_windows": evaluation_windows}).items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    if sample_bytes < 0:
        raise ValueError(f"sample_bytes must be >= 0, got {sample_bytes}")
    if width % (2 * heads):
        raise ValueError(f"width must be a multiple of 2 * heads = {2 * heads}, got {width}")
    logits = functools.partial(transformer_logits, heads=heads)
    train, test = load_source()
    windows = _spread(WindowSource(test, context + 1, stride=context + 1), evaluation_windows)
    measure = jax.jit(functools.partial(_cross_entropy, logits))
    write = jax.jit(functools.partial(_write, logits, context=context, length=sample_bytes))

    def loss_fn(params: Tree, batch: Tree, rng: jax.Array):
        loss = _cross_entropy(logits, params, batch["tokens"])
        return loss, {"bits_per_byte": loss / math.log(2)}

    def evaluate(params: Tree) -> dict[str, float | str]:
        parts = [
            windows[at : at + EVALUATION_BATCH] for at in range(0, len(windows), EVALUATION_BATCH)
        ]
        loss = sum(float(measure(params, part)) * len(part) for part in parts) / len(windows)
        measured: dict[str, float | str] = {"loss": loss, "bits_per_byte": loss / math.log(2)}
        if not sample_bytes:
            return measured
        text = bytes(np.asarray(write(params))).decode("utf-8", errors="replace")
        return measured | {"sample": text}

    def predict(params: Tree, batch: Tree) -> dict[str, jax.Array]:
        return {"logits": logits(params, jnp.asarray(batch["tokens"], jnp.int32))}

    init = functools.partial(init_transformer, vocabulary=VOCABULARY, width=width, layers=layers)
    source = WindowSource(train, context + 1)
    return Task(init, loss_fn, source, evaluate, predict=predict)


def load_source() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of the standard library's files to train on, and of those held out."""
    root = Path(sysconfig.get_path("stdlib"))
    train = []
    test = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if "site-packages" in name.parts or "test" in name.parts:  # not of the library itself
            continue
        digest = hashlib.sha256(name.as_posix().encode()).digest()
        (test if digest[0] < 256 * HELD_OUT else train).append(path.read_bytes())
    return np.frombuffer(b"".join(train), np.uint8), np.frombuffer(b"".join(test), np.uint8)


def _spread(source: WindowSource, count: int) -> np.ndarray:
    chosen = np.linspace(0, len(source) - 1, min(count, len(source))).astype(int)
    return source.read(chosen)["tokens"]


def _cross_entropy(logits: Logits, params: Tree, tokens: jax.Array) -> jax.Array:
    """Return the mean nats of each token but the first, given those before it."""
    tokens = jnp.asarray(tokens, jnp.int32)
    predicted = widen(logits(params, tokens[:, :-1]))  # in float32, also if the model is narrower
    return optax.softmax_cross_entropy_with_integer_labels(predicted, tokens[:, 1:]).mean()


def _write(logits: Logits, params: Tree, *, context: int, length: int) -> jax.Array:
    """Draw `length` bytes that follow the prompt; the same for the same parameters."""
    prompt = jnp.frombuffer(PROMPT, jnp.uint8).astype(jnp.int32)
    text = jnp.zeros(length + len(PROMPT), jnp.int32).at[: len(PROMPT)].set(prompt)

    def extend(at: jax.Array, text: jax.Array) -> jax.Array:
        # The model sees the last `context` bytes. With fewer, those after `at` are not used.
        start = jnp.maximum(at - context, 0)
        window = jax.lax.dynamic_slice(jnp.pad(text, (0, context)), (start,), (context,))
        scores = logits(params, window[None])[0, at - start - 1]
        drawn = jax.random.categorical(jax.random.fold_in(jax.random.key(0), at), scores / 0.7)
        return text.at[at].set(drawn.astype(jnp.int32))

    return jax.lax.fori_loop(len(PROMPT), length + len(PROMPT), extend, text).astype(jnp.uint8)


def init_transformer(rng: jax.Array, *, vocabulary: int, width: int, layers: int) -> Tree:
    """Return initial parameters: an embedding, `layers` blocks and a last norm."""
    key, *keys = jax.random.split(rng, layers + 1)
    return {
        "embedding": jax.random.normal(key, (vocabulary, width)) * width**-0.5,
        "blocks": [_init_block(key, width, layers) for key in keys],
        "norm": jnp.ones(width),
    }


def transformer_logits(params: Tree, tokens: jax.Array, *, heads: int) -> jax.Array:
    """Return logits (batch, length, vocabulary) of the token after each position."""
    width = params["embedding"].shape[1]
    angles = _rotation_angles(tokens.shape[1], width // heads)
    hidden = params["embedding"][tokens] * width**0.5
    for block in params["blocks"]:
        hidden += _attention(block, _rms_norm(hidden, block["attention_norm"]), angles, heads)
        hidden += _mlp(block, _rms_norm(hidden, block["mlp_norm"]))
    return _rms_norm(hidden, params["norm"]) @ params["embedding"].T


def _init_block(rng: jax.Array, width: int, layers: int) -> Tree:
    keys = jax.random.split(rng, 4)

    def matrix(key: jax.Array, rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(key, (rows, columns)) * scale * rows**-0.5

    shrunk = (2 * layers) ** -0.5  # keeps the residual stream's variance near one at any depth
    return {
        "attention_norm": jnp.ones(width),
        # How much of each feature comes from the token before.
        "shift": jnp.linspace(0.0, 0.5, width),
        "qkv": matrix(keys[0], width, 3 * width),
        "attention_out": matrix(keys[1], width, width, shrunk),
        "mlp_norm": jnp.ones(width),
        "mlp_in": matrix(keys[2], width, 4 * width),
        "mlp_out": matrix(keys[3], 4 * width, width, shrunk),
    }


def _attention(block: Tree, hidden: jax.Array, angles: jax.Array, heads: int) -> jax.Array:
    batch, length, width = hidden.shape
    before = jnp.pad(hidden, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    hidden += block["shift"] * (before - hidden)

    def split(features: jax.Array) -> jax.Array:
        """(batch, length, width) -> (batch, heads, length, head width)."""
        return features.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)

    query, key, value = map(split, jnp.split(hidden @ block["qkv"], 3, axis=-1))
    query = _rotate(query, angles)
    key = _rotate(key, angles)
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) * (width // heads) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), widen(scores), -1e9)
    mixed = jax.nn.softmax(scores).astype(value.dtype) @ value
    return mixed.transpose(0, 2, 1, 3).reshape(batch, length, width) @ block["attention_out"]


def _mlp(block: Tree, hidden: jax.Array) -> jax.Array:
    # The squared ReLU learns faster than GELU here, and its gradient is cheaper.
    return jnp.square(jax.nn.relu(hidden @ block["mlp_in"])) @ block["mlp_out"]


def _rms_norm(hidden: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalise in float32: in half precision the squares of large features overflow."""
    exact = widen(hidden)
    size = jax.lax.rsqrt(jnp.mean(exact**2, axis=-1, keepdims=True) + 1e-6)
    return hidden * scale * size.astype(hidden.dtype)


def _rotation_angles(length: int, head_width: int) -> jax.Array:
    """Return the angles (length, head_width / 2) that rotary embedding turns feature pairs by."""
    frequencies = 10_000.0 ** -(jnp.arange(0, head_width, 2) / head_width)
    return jnp.arange(length, dtype=frequencies.dtype)[:, None] * frequencies


def _rotate(features: jax.Array, angles: jax.Array) -> jax.Array:
    first, second = jnp.split(features, 2, axis=-1)
    cos = jnp.cos(angles).astype(features.dtype)
    sin = jnp.sin(angles).astype(features.dtype)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
