"""The training step, a pure function: gradients, clipping, update and averages."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ftrain.averages import update_averages
from ftrain.gradients import (
    clip_by_global_norm,
    global_norm,
    loss_scale,
    skipped_updates,
    update_with_rows,
)
from ftrain.gradients.guard import check_transform
from ftrain.gradients.means import Axis, value_of
from ftrain.hyperparameters import check_count, check_fraction
from ftrain.optimizers import (
    LearningRate,
    apply_updates,
    current_learning_rate,
    group_learning_rates,
)
from ftrain.optimizers.checks import check_parameters
from ftrain.optimizers.frozen import without, zero_frozen, zero_missing
from ftrain.optimizers.parameter_group import frozen_names
from ftrain.schedules import Schedule, value_at
from ftrain.training.fingerprint import fingerprint
from ftrain.training.loss import (
    Batch,
    LossFunction,
    Metrics,
    Objective,
    differentiate,
    make_objective,
)
from ftrain.training.precision import Precision, as_precision
from ftrain.training.remat import Remat, check_remat, recompute
from ftrain.training.replica_reduction import make_reduction
from ftrain.training.state import TrainState
from ftrain.tree import Tree

Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
SETTINGS = ("clip_global_norm", "accumulate", "averages", "averages_ramp", "merge_rows", "remat")


def make_step(
    loss_fn: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    clip_global_norm: float | Schedule | None = None,
    accumulate: int = 1,
    averages: float | Schedule | None = None,
    averages_ramp: bool = False,
    merge_rows: bool = True,
    precision: Precision | str | None = None,
    remat: Remat = "none",
    learning_rate: LearningRate | None = None,
    replicas: Axis | None = None,
) -> "TrainStep":
    """Make the pure step `(state, batch) -> (state, metrics)` that minimises `loss_fn`.

    Metrics are those of the loss function and always `loss`, `learning_rate` and `gradient_norm`
    (before clipping); with an optimizer that skips updates, such as one in a `guard`, also
    `update_skipped` and `updates_skipped`, and with `loss_scaling` the `loss_scale`. A table that
    is read through `ftrain.gradients.lookup` gets a row-sparse gradient, if the optimizer accepts
    one. Parameters that the optimizer freezes, by `ftrain.optimizers.groups` or
    `optax.set_to_zero()`, do not count in the norm. Groups with their own learning rate show it as
    `learning_rate/NAME`.

    Args:
      loss_fn: `(params, batch, rng) -> loss` or `-> (loss, metrics)`; if the state has a model
        state, `(params, batch, rng, model_state) -> (loss, metrics, model_state)`. The loss and
        each metric is a scalar, which counts as a mean over examples, or a `ftrain.WeightedMean`:
        return that for any other mean, such as one over unmasked tokens, whose number differs
        between parts of a batch.
      clip_global_norm: the largest global norm of the gradients; longer ones are scaled down. It
        may be a schedule, of the step.
      accumulate: the number of microbatches that a batch is split into, to save memory. Each has
        its own random numbers.
      averages: the decay of moving averages of the parameters, a -= (1 - decay) * (a - p), or a
        schedule of it; create the state with `averages=True`, or with a pattern for some of them.
        Averages of a table cost time for all of its rows.
      averages_ramp: use the smaller of `averages` and (1 + n) / (10 + n) as the decay of step n, so
        that averages leave the initial parameters quickly: `num_updates` of TensorFlow 1's
        ExponentialMovingAverage.
      merge_rows: whether rows of a table that a batch reads twice are summed before the norm is
        computed, as in the gradient of the whole table. False uses the rows as they were read, as
        TensorFlow 1 does for IndexedSlices.
      precision: the dtypes of computation, parameters, outputs and slots: a `Precision`, or the
        dtype to compute in, such as "bfloat16". Create the state with the same precision.
      remat: what the backward pass computes again instead of keeping it, to save memory:
        "dots" keeps the results of matrix products and convolutions, "layers" what is alive
        between the layers, "names" what the model names with `jax.ad_checkpoint.checkpoint_name`.
        See `ftrain.training.remat`.
      replicas: the axis of replicas, each with its part of the batch, over which means are taken,
        for `shard_map` and `pmap`. The model state must consist of means over examples. Each
        replica has its own random numbers. A replica whose examples have weight 0 in the entry
        CONTRIBUTES of the batch is left out.
      learning_rate: shown in the metrics for an optimizer whose state has no learning rate, such as
        those of optax; without it they show NaN.
    """
    if isinstance(clip_global_norm, (int, float)) and not clip_global_norm > 0:  # may be infinite
        raise ValueError(f"clip_global_norm must be > 0, got {clip_global_norm}")
    check_fraction(averages=averages)
    check_count(accumulate=accumulate)
    check_transform(optimizer)
    check_remat(remat)
    policy = as_precision(precision)
    return TrainStep(
        loss_fn,
        optimizer if policy is None else policy.wrap(optimizer),
        clip_global_norm=clip_global_norm,
        accumulate=accumulate,
        averages=averages,
        averages_ramp=averages_ramp,
        merge_rows=merge_rows,
        precision=policy,
        remat=remat,
        learning_rate=learning_rate,
        replicas=replicas,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """A step made by `make_step`: call it with a state and a batch."""

    loss_fn: LossFunction
    optimizer: optax.GradientTransformation
    _: dataclasses.KW_ONLY
    clip_global_norm: float | Schedule | None
    accumulate: int
    averages: float | Schedule | None
    averages_ramp: bool
    merge_rows: bool
    precision: Precision | None
    remat: Remat
    learning_rate: LearningRate | None
    replicas: Axis | None

    @functools.cached_property
    def objective(self) -> Objective:
        """The loss function in the form that is differentiated."""
        loss_fn = self.loss_fn if self.precision is None else self.precision.loss(self.loss_fn)
        return recompute(make_objective(loss_fn), self.remat)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that change what the step computes, by the names of their arguments."""
        values = {name: getattr(self, name) for name in SETTINGS}
        shown = {
            name: _describe_schedule(value) if callable(value) else value
            for name, value in values.items()
        }
        return shown | {"precision": None if self.precision is None else str(self.precision)}

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take the step; return the new state and the metrics."""
        check_parameters(state.params)
        if self.precision is not None:
            self.precision.check(state.params, self.optimizer, self.learning_rate)
            self.precision.check_scale(loss_scale(state.opt_state))
        reduction = make_reduction(batch, self.replicas)
        rng = reduction.rng(_rng(state))
        found, model_state = differentiate(
            self.objective, state, reduction.batch, rng, self.accumulate, merge_rows=self.merge_rows
        )
        found, model_state = reduction.all(
            found, model_state, state.model_state, merge_rows=self.merge_rows
        )
        loss = value_of(found.value)
        metrics = {name: value_of(metric) for name, metric in found.auxiliary.items()}
        arguments = {"value": loss, **reduction.arguments}
        gradients = zero_frozen(
            found.gradients,
            self.optimizer,
            state.opt_state,
            state.params,
            value_fn=lambda params: loss,
            **arguments,
        )
        norm = global_norm(gradients)
        if self.clip_global_norm is not None:
            limit = value_at(self.clip_global_norm, state.step)
            gradients, _ = clip_by_global_norm(gradients, limit, use_norm=norm)

        def loss_at(params: Tree) -> jax.Array:  # for optimizers that search along a line
            loss, _ = self.objective(params, reduction.batch, rng, state.model_state)
            return value_of(reduction.loss(loss))

        updates, opt_state = update_with_rows(
            self.optimizer,
            zero_missing(gradients, state.opt_state, state.params),
            state.opt_state,
            state.params,
            value_fn=loss_at,
            **arguments,
        )
        params = apply_updates(state.params, without(updates, frozen_names(opt_state)))
        skips = _shown_skips(state.opt_state, opt_state)
        if "update_skipped" in skips:  # non-finite gradients come with non-finite statistics
            model_state = jax.lax.cond(
                skips["update_skipped"] > 0,
                lambda: state.model_state,
                lambda model_state=model_state: model_state,
            )
        new_state = state.replace(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            averages=_average(state, params, self.averages, self.averages_ramp),
            model_state=model_state,
        )
        rate = _shown_rate(opt_state, self.learning_rate, state.step)
        own = {"loss": loss, "learning_rate": rate, "gradient_norm": norm, **skips}
        for name, group_rate in group_learning_rates(opt_state).items():
            own[f"learning_rate/{name}"] = group_rate
        own |= reduction.metrics
        # Own metrics come first; they replace those of the loss function with the same names.
        return new_state, {**own, **metrics, **own}

    def differentiate(
        self, state: TrainState, batch: Batch
    ) -> tuple[jax.Array, Metrics, Tree, Tree]:
        """Return loss, metrics, model state and gradients of the step, before any clipping."""
        reduction = make_reduction(batch, self.replicas)
        rng = reduction.rng(_rng(state))
        found, model_state = differentiate(
            self.objective, state, reduction.batch, rng, self.accumulate
        )
        metrics = {name: value_of(metric) for name, metric in found.auxiliary.items()}
        return value_of(found.value), metrics, model_state, found.gradients


def _rng(state: TrainState) -> jax.Array:
    return jax.random.fold_in(state.rng, state.step)


def _describe_schedule(schedule: Callable[..., Any]) -> str:
    """A text for the record of a run: the same for the same schedule in any process."""
    return f"schedule {fingerprint(schedule, jax.ShapeDtypeStruct((), jnp.int32))}"


def _average(
    state: TrainState, params: Tree, decay: float | Schedule | None, ramp: bool
) -> Tree | None:
    if decay is None:
        return state.averages
    if state.averages is None:
        raise ValueError(
            "this step keeps averages: create its state with TrainState.create(..., averages=True)"
        )
    now = value_at(decay, state.step, jnp.float32)
    return update_averages(state.averages, params, now, state.step + 1 if ramp else None)


def _shown_skips(before: Tree, after: Tree) -> Metrics:
    """Return the metrics of transforms that skip updates."""
    scale = loss_scale(after)
    earlier = skipped_updates(before)
    now = skipped_updates(after)
    shown = {} if scale is None else {"loss_scale": scale}
    if earlier is not None and now is not None:
        shown |= {"update_skipped": now - earlier, "updates_skipped": now}
    return shown


def _shown_rate(opt_state: Tree, learning_rate: LearningRate | None, step: jax.Array) -> jax.Array:
    """Return the rate in the state of the optimizer, else the given one, else NaN for unknown."""
    current = current_learning_rate(opt_state)
    if current is not None:
        return current
    value = jnp.nan if learning_rate is None else value_at(learning_rate, step)
    return jnp.asarray(value, jnp.float32)
