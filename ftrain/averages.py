"""Exponential moving averages of parameters: often better to evaluate than the parameters themselves."""

import jax
import jax.numpy as jnp

from ftrain.tree import Tree


def update_averages(averages: Tree, params: Tree, decay: float, num_updates: jax.Array) -> Tree:
    """averages -= (1 - d) * (averages - params), with d = min(decay, (1 + n) / (10 + n)).

    The smaller decay of the first updates lets the averages leave the initial values quickly.
    """
    now = jnp.minimum(decay, (1.0 + num_updates) / (10.0 + num_updates))
    return jax.tree.map(lambda mean, new: mean - (1 - now).astype(mean.dtype) * (mean - new), averages, params)
