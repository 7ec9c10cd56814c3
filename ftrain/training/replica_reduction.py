"""Means over the replicas of a step, each with a part of the batch; late ones are left out."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ftrain.gradients.accumulation import Differentiated
from ftrain.gradients.means import Axis, WeightedMean, mean_over_replicas, replicas_of
from ftrain.training.loss import Batch
from ftrain.tree import Tree

# An entry of a batch: a weight for each example, all 0 if the replica does not contribute.
CONTRIBUTES = "ftrain.contributes"


class Reduction:
    """How a step that runs alone uses its batch: as it is, and nothing is averaged."""

    def __init__(self, batch: Batch):
        self.batch = batch
        self.arguments: dict[str, jax.Array | int] = {}  # further arguments for the optimizer
        self.metrics: dict[str, jax.Array] = {}  # further metrics

    def rng(self, rng: jax.Array) -> jax.Array:
        """Return the random key of this replica."""
        return rng

    def loss(self, loss: jax.Array | WeightedMean) -> jax.Array | WeightedMean:
        """Return the loss of all replicas."""
        return loss

    def all(
        self, found: Differentiated, model_state: Tree, before: Tree, *, merge_rows: bool
    ) -> tuple[Differentiated, Tree]:
        """Return loss, metrics and gradients of all replicas, and their model state.

        `before` is the model state before the step.
        """
        del before, merge_rows
        return found, model_state


class ReplicaReduction(Reduction):
    """Takes means over the replicas along `axis`; those with weight 0 are left out."""

    def __init__(self, batch: Batch, axis: Axis):
        weight = None
        if isinstance(batch, Mapping) and CONTRIBUTES in batch:
            weight = jnp.min(batch[CONTRIBUTES]).astype(jnp.float32)
            batch = {name: leaf for name, leaf in batch.items() if name != CONTRIBUTES}
        super().__init__(batch)
        self._axis = axis
        self._weight = weight
        contributions = replicas_of(axis) if weight is None else jax.lax.psum(weight, axis)
        self.arguments["contributions"] = contributions
        if weight is not None:
            self.metrics["replicas"] = jnp.asarray(contributions)

    def rng(self, rng: jax.Array) -> jax.Array:
        return jax.random.fold_in(rng, jax.lax.axis_index(self._axis))

    def loss(self, loss: jax.Array | WeightedMean) -> jax.Array | WeightedMean:
        return mean_over_replicas(loss, self._axis, self._weight)

    def all(
        self, found: Differentiated, model_state: Tree, before: Tree, *, merge_rows: bool
    ) -> tuple[Differentiated, Tree]:
        value, auxiliary, means = mean_over_replicas(
            (found.value, found.auxiliary, model_state), self._axis, self._weight
        )
        share = self._weight
        if isinstance(found.value, WeightedMean):
            share = jnp.asarray(found.value.weight, jnp.float32)
            if self._weight is not None:
                share = share * self._weight
        gradients = mean_over_replicas(found.gradients, self._axis, share, merge_rows=merge_rows)
        # Counts, which means would turn into other types, are the same in each replica.
        model_state = jax.tree.map(
            lambda own, mean: mean if mean.dtype == own.dtype else own, model_state, means
        )
        if self._weight is not None:  # without any contribution the statistics stay
            is_any = self.arguments["contributions"] > 0
            model_state = jax.tree.map(
                lambda new, old: jnp.where(is_any, new, old), model_state, before
            )
        return Differentiated(value, auxiliary, gradients), model_state


def make_reduction(batch: Batch, axis: Axis | None) -> Reduction:
    """Return how a step uses its batch: along an axis of replicas, or alone if that is None."""
    return Reduction(batch) if axis is None else ReplicaReduction(batch, axis)
