"""Rounding: numbers computed in float32 and stored in fewer bits, without losing small updates.

A bfloat16 number near 1 cannot move by less than 0.004, so an update of 0.001 would round to zero
at every step. Rules therefore compute in float32 or wider, and `Rounding` defines what happens to
the bits that a parameter cannot hold.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ftrain.tree import wide_dtype

Rounding = Literal["compensated", "stochastic", "nearest"]
REMAINDER = "remainder"  # the slot of the part of a parameter that rounding removed


def check_rounding(rounding: str) -> None:
    """Raise ValueError for an unknown kind of rounding."""
    if rounding not in get_args(Rounding):
        choices = ", ".join(f'"{choice}"' for choice in get_args(Rounding))
        raise ValueError(f"rounding must be one of {choices}, got {rounding!r:.60}")


def is_narrow(dtype: DTypeLike) -> bool:
    """True for dtypes narrower than float32: bfloat16, float16 and smaller."""
    return wide_dtype(dtype) != jnp.dtype(dtype)


def store(values: jax.Array, dtype: DTypeLike, key: jax.Array | None) -> jax.Array:
    """Convert `values` to `dtype`; round stochastically if it is narrower than float32.

    Rounded to nearest, a running mean with a long memory would stop moving in bfloat16.
    """
    if is_narrow(dtype):
        assert key is not None
        values = stochastic(values, dtype, key)
    return values.astype(dtype)


def round_update(
    parameter: jax.Array, target: jax.Array, rounding: Rounding, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the update of a narrow `parameter` to `target`, in its dtype, and the remainder."""
    dtype = parameter.dtype
    start = parameter.astype(target.dtype)
    if rounding == "stochastic":
        assert key is not None
        reachable = stochastic(target, dtype, key)
    else:
        reachable = nearest(target, dtype)
    update = nearest(reachable - start, dtype)
    moved = nearest(start + update, dtype)  # as apply_updates rounds it
    return update.astype(dtype), target - moved


def nearest(values: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round `values` to the nearest numbers of `dtype`; keep the dtype of `values`.

    XLA may remove a cast to a narrower type and back. It keeps `reduce_precision`, which flushes
    subnormals.
    """
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(values, info.nexp, info.nmant)
    if info.nexp == jnp.finfo(values.dtype).nexp:
        return rounded
    quantum = float(info.smallest_subnormal)
    subnormal = jnp.round(values / quantum) * quantum
    return jnp.where(jnp.abs(values) < float(info.smallest_normal), subnormal, rounded)


def stochastic(values: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Round each value up or down at random to a number of `dtype`, correct on average."""
    info = jnp.finfo(dtype)
    values = values.astype(jnp.float32)
    dropped = jnp.finfo(jnp.float32).nmant - info.nmant  # bits of the significand
    below = jnp.uint32((1 << dropped) - 1)
    noise = jax.random.bits(key, values.shape, jnp.uint32) & below
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & ~below, jnp.float32)
    rounded = jnp.where(jnp.isfinite(values), rounded, values)
    if info.nexp == jnp.finfo(jnp.float32).nexp:
        return rounded
    quantum = float(info.smallest_subnormal)
    fraction = noise.astype(jnp.float32) / float(1 << dropped)
    subnormal = jnp.floor(values / quantum + fraction) * quantum
    return jnp.where(jnp.abs(values) < float(info.smallest_normal), subnormal, rounded)


def noise_key(count: jax.Array, number: int) -> jax.Array:
    """Return the random key for one array at one update; a resumed run repeats it."""
    key = jax.random.key(0, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, count), number)
