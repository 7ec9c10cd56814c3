"""Cosine schedules: a single decay, with restarts, or on top of a linear decay."""

import math

import jax
import jax.numpy as jnp

from ftrain.hyperparameters import check_finite, check_not_negative, check_positive
from ftrain.schedules.decay import Schedule, Step, as_float


def cosine_decay(learning_rate: float, decay_steps: int, alpha: float = 0.0) -> Schedule:
    """Half a cosine from `learning_rate` down to `alpha * learning_rate` over `decay_steps`.

    lr * ((1 - alpha) * (1 + cos(pi * min(step, decay_steps) / decay_steps)) / 2 + alpha)
    """
    check_positive(decay_steps=decay_steps)
    check_finite(learning_rate=learning_rate, alpha=alpha)

    def schedule(step: Step) -> jax.Array:
        fraction = jnp.minimum(as_float(step), decay_steps) / decay_steps
        return learning_rate * ((1.0 - alpha) * _half_wave(fraction) + alpha)

    return schedule


def cosine_decay_restarts(
    learning_rate: float,
    first_decay_steps: int,
    t_mul: float = 2.0,
    m_mul: float = 1.0,
    alpha: float = 0.0,
) -> Schedule:
    """`cosine_decay` with restarts, each period `t_mul` times as long and `m_mul` times as high.

    Loshchilov and Hutter 2016: after i restarts, at the fraction f of the period,
    lr * ((1 - alpha) * m_mul**i * (1 + cos(pi * f)) / 2 + alpha)
    """
    check_positive(first_decay_steps=first_decay_steps, t_mul=t_mul)
    check_finite(learning_rate=learning_rate, m_mul=m_mul, alpha=alpha)

    def schedule(step: Step) -> jax.Array:
        periods = as_float(step) / first_decay_steps
        restarts = _count_restarts(periods, t_mul)
        fraction = (periods - _start(restarts, t_mul)) / jnp.power(t_mul, restarts)
        height = jnp.power(m_mul, restarts)
        return learning_rate * ((1.0 - alpha) * height * _half_wave(fraction) + alpha)

    return schedule


def linear_cosine_decay(
    learning_rate: float,
    decay_steps: int,
    num_periods: float = 0.5,
    alpha: float = 0.0,
    beta: float = 0.001,
) -> Schedule:
    """Bello et al. 2017: a cosine that shrinks linearly. With f = min(step / decay_steps, 1):

    lr * ((alpha + 1 - f) * (1 + cos(2 pi num_periods f)) / 2 + beta)
    """
    return noisy_linear_cosine_decay(learning_rate, decay_steps, 0.0, 0.0, num_periods, alpha, beta)


def noisy_linear_cosine_decay(
    learning_rate: float,
    decay_steps: int,
    initial_variance: float = 1.0,
    variance_decay: float = 0.55,
    num_periods: float = 0.5,
    alpha: float = 0.0,
    beta: float = 0.001,
    seed: int = 0,
) -> Schedule:
    """`linear_cosine_decay` with noise of variance initial_variance / (1 + step) ** variance_decay.

    The noise is a pure function of the seed and the step, so a resumed run repeats it.
    """
    check_positive(decay_steps=decay_steps)
    check_not_negative(initial_variance=initial_variance)
    check_finite(
        learning_rate=learning_rate,
        variance_decay=variance_decay,
        num_periods=num_periods,
        alpha=alpha,
        beta=beta,
    )

    def schedule(step: Step) -> jax.Array:
        now = jnp.minimum(as_float(step), decay_steps)
        line = (decay_steps - now) / decay_steps
        if initial_variance > 0:
            deviation = jnp.sqrt(initial_variance / jnp.power(1.0 + now, variance_decay))
            line += deviation * _noise(seed, jnp.minimum(jnp.asarray(step), decay_steps))
        return learning_rate * (
            (alpha + line) * _half_wave(2.0 * num_periods * now / decay_steps) + beta
        )

    return schedule


def _half_wave(fraction: jax.Array) -> jax.Array:
    """From 1 at 0 to 0 at 1."""
    return 0.5 * (1.0 + jnp.cos(jnp.pi * fraction))


def _start(restarts: jax.Array, t_mul: float) -> jax.Array:
    """The start of a period, in lengths of the first: 1 + t_mul + ... + t_mul**(restarts - 1)."""
    return restarts if t_mul == 1.0 else (1.0 - jnp.power(t_mul, restarts)) / (1.0 - t_mul)


def _count_restarts(periods: jax.Array, t_mul: float) -> jax.Array:
    if t_mul == 1.0:
        return jnp.floor(periods)
    count = jnp.floor(jnp.log(1.0 - periods * (1.0 - t_mul)) / math.log(t_mul))
    # At the step of a restart, the logarithm may be just below a whole number.
    return jnp.where(periods >= _start(count + 1, t_mul), count + 1, count)


def _noise(seed: int, step: jax.Array) -> jax.Array:
    def draw(step: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(jax.random.key(seed), step))

    return jnp.vectorize(draw)(step.astype(jnp.uint32))
