"""A decoder-only transformer: pre-norm blocks, rotary positions, tied embeddings, token shift."""

import jax
import jax.numpy as jnp

from ftrain.tree import Tree


def init_transformer(rng: jax.Array, *, vocabulary: int, width: int, layers: int) -> Tree:
    """Initial parameters: an embedding, `layers` blocks and a last norm."""
    key, *keys = jax.random.split(rng, layers + 1)
    return {
        "embedding": jax.random.normal(key, (vocabulary, width)) * width**-0.5,
        "blocks": [_init_block(key, width, layers) for key in keys],
        "norm": jnp.ones(width),
    }


def transformer_logits(params: Tree, tokens: jax.Array, *, heads: int) -> jax.Array:
    """Logits (batch, length, vocabulary) of the token that follows each position."""
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
        "shift": jnp.linspace(
            0.0, 0.5, width
        ),  # how much of each feature comes from the token before
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

    def split(
        features: jax.Array,
    ) -> jax.Array:  # (batch, length, width) -> (batch, heads, length, head width)
        return features.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)

    query, key, value = map(split, jnp.split(hidden @ block["qkv"], 3, axis=-1))
    query, key = _rotate(query, angles), _rotate(key, angles)
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) * (width // heads) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jax.nn.softmax(scores) @ value
    return mixed.transpose(0, 2, 1, 3).reshape(batch, length, width) @ block["attention_out"]


def _mlp(block: Tree, hidden: jax.Array) -> jax.Array:
    # The squared ReLU learns faster than GELU here, and its gradient is cheaper.
    return jnp.square(jax.nn.relu(hidden @ block["mlp_in"])) @ block["mlp_out"]


def _rms_norm(hidden: jax.Array, scale: jax.Array) -> jax.Array:
    return hidden * scale * jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + 1e-6)


def _rotation_angles(length: int, head_width: int) -> jax.Array:
    """The angles (length, head_width / 2) by which rotary embedding turns each pair of features."""
    frequencies = 10_000.0 ** -(jnp.arange(0, head_width, 2) / head_width)
    return jnp.arange(length)[:, None] * frequencies


def _rotate(features: jax.Array, angles: jax.Array) -> jax.Array:
    first, second = jnp.split(features, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
