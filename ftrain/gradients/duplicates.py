"""Which ids of a list are the same: by hashing, because sorting is several times slower."""

import jax
import jax.numpy as jnp

_SPREAD = 8  # buckets for each id: with these, two or three rounds place nearly every list


@jax.jit
def first_positions(ids: jax.Array) -> jax.Array:
    """For each id of a list that is not empty, the first position where the same id stands.

    Each round hashes the ids that are not placed yet into buckets. The first position of a bucket owns it, and all
    positions that hold the owner's id are placed. An owner holds its own id, so that every round places some.

    >>> first_positions(jnp.array([7, 3, 7, 7, 3])).tolist()
    [0, 1, 0, 0, 1]
    """
    count = ids.shape[0]
    positions = jnp.arange(count, dtype=jnp.int32)
    bits = (_SPREAD * count - 1).bit_length()
    buckets = 1 << bits

    def place(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        round_number, first = carry
        missing = first < 0
        bucket = _hash(ids, round_number, bits)
        owners = (
            jnp.full(buckets, count, jnp.int32)
            .at[jnp.where(missing, bucket, buckets)]
            .min(positions, mode="drop")
        )
        owner = owners[bucket]
        placed = missing & (ids[jnp.minimum(owner, count - 1)] == ids)
        return round_number + 1, jnp.where(placed, owner, first)

    nothing_placed = jnp.full_like(
        ids, -1, dtype=jnp.int32
    )  # made like ids, which may differ over a mesh
    start = (jnp.zeros((), jnp.uint32), nothing_placed)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1] < 0), place, start)[1]


def _hash(ids: jax.Array, round_number: jax.Array, bits: int) -> jax.Array:
    """The top `bits` of a product with an odd number, another one in each round."""
    factor = jnp.uint32(0x9E3779B1) + 2 * jnp.uint32(0x42F0E1EB) * round_number
    mixed = ids.astype(jnp.uint32)
    mixed = (mixed ^ (mixed >> 15)) * factor
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0x85EBCA6B)
    return (mixed >> (32 - bits)).astype(jnp.int32)
