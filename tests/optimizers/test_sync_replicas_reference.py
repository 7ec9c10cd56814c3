"""Synchronous replicas, against the reference and a model of its accumulators and tokens."""

import heapq
from collections import deque

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replicas import GRADIENTS, PARAMS, compiled, counts

from ftrain import optimizers
from ftrain.optimizers import (
    apply_updates,
    averaged_params,
    sync_replicas,
)

# The reference's own numbers.

# By replicas to aggregate: local steps of the arrivals, and the means that a ConditionalAccumulator
# returned, and when.
TAKEN = {
    1: (
        [0, 0, 1, 1, 2, 2, 3, 4, 4, 5],
        {n: np.float32(GRADIENTS[n]) for n in (0, 2, 4, 6, 7, 9)},
    ),
    2: (
        [0, 0, 0, 1, 1, 1, 2, 0, 2, 3],
        {
            1: [0.4000000059604645, -0.7000000476837158],
            4: [0.9249999523162842, -0.44999998807907104],
            8: [0.40000003576278687, -0.800000011920929],
        },
    ),
    3: (  # the last one comes from the future, which is not stale
        [0, 0, 0, 1, 0, 1, 1, 2, 2, 9],
        {
            2: [0.20000000298023224, 0.5],
            6: [0.9999998211860657, 0.20333333313465118],
            9: [0.6433333158493042, -0.4333333671092987],
        },
    ),
    4: (
        [0, 0, 0, 0, 1, 0, 1, 1, 1, 2],
        {3: [0.4749999940395355, 0.375], 8: [0.42000001668930054, -0.4325000047683716]},
    ),
}


@pytest.mark.parametrize("needed", TAKEN)
def test_the_means_are_those_of_the_references_accumulator(needed):
    transform, update = compiled(needed)
    steps, taken = TAKEN[needed]
    state = transform.init(PARAMS)
    stale = 0
    applied = 0
    for n, (gradient, step) in enumerate(zip(GRADIENTS, steps, strict=True)):
        stale += step < applied
        updates, state = update({"w": jnp.array(gradient)}, state, PARAMS, local_step=step)
        np.testing.assert_allclose(
            updates["w"], taken.get(n, [0.0, 0.0]), rtol=2e-7
        )  # XLA multiplies by 1 / n
        applied += n in taken
        assert (counts(state)[2], counts(state)[3]) == (applied, stale)


def test_a_run_of_the_references_own_optimizer():
    """The reference is

    SyncReplicasOptimizer(
        MomentumOptimizer(0.1, 0.9), 2, 1, ExponentialMovingAverage(0.3, global_step), [w]
    )
    """
    given = [[1.76, 0.4], [0.98, 2.24], [1.87, -0.98], [0.95, -0.15], [-0.1, 0.41]]
    given += [[0.14, 1.45], [0.76, 0.12], [0.44, 0.33], [1.49, -0.21], [0.31, -0.85]]
    expected = [
        ([0.8629999756813049, -2.131999969482422], [0.8879090547561646, -2.1080000400543213]),
        ([0.5986999869346619, -2.1942999362945557], [0.6710022687911987, -2.172724962234497]),
        ([0.3588300049304962, -2.343369960784912], [0.4524816870689392, -2.2921764850616455]),
        ([0.08294704556465149, -2.500032901763916], [0.193807452917099, -2.437675952911377]),
        ([-0.2553476095199585, -2.588029623031616], [-0.12060108780860901, -2.5429234504699707]),
    ]
    transform = sync_replicas(optimizers.momentum(0.1, 0.9), 2, 1, averages=0.3, averages_ramp=True)
    params = PARAMS
    state = transform.init(PARAMS)
    update = jax.jit(transform.update)
    for n, gradient in enumerate(given):
        updates, state = update({"w": jnp.array(gradient)}, state, params)
        params = apply_updates(params, updates)
        values, means = expected[(n - 1) // 2] if n else ([1.0, -2.0], [1.0, -2.0])
        np.testing.assert_allclose(params["w"], values, rtol=1e-6)
        np.testing.assert_allclose(averaged_params(state)["w"], means, rtol=1e-6)


# A model of the reference: an accumulator on one side, workers and their tokens on the other.


class Accumulator:
    """Accepts up-to-date gradients of replicas, and returns their mean once there are enough."""

    def __init__(self, needed):
        self.needed = needed
        self.step = 0
        self.dropped = 0
        self.held = []

    def push(self, gradient, count, step):
        """The mean, if this arrival completed it."""
        if step is not None and step < self.step:
            self.dropped += count
            return None
        self.held += [np.float64(gradient)] * count
        if len(self.held) < self.needed:
            return None
        mean = np.mean(self.held, axis=0)
        self.held = []
        self.step += 1
        return mean


def simulate(needed, total, seed, spare=0, length=40):
    """Arrivals in order, (gradient, local step, mean or None), of workers of random speed.

    `spare` tokens beyond the first round let workers begin a second batch before it ends.
    """
    rng = np.random.default_rng(seed)
    accumulator = Accumulator(needed)
    tokens = deque([0] * (max(0, needed - total) + spare))
    paused = deque()
    busy = [
        (rng.exponential(), worker, 0) for worker in range(total)
    ]  # when each is done, and its local step
    heapq.heapify(busy)
    for _ in range(length):
        now, worker, step = heapq.heappop(busy)
        gradient = rng.normal(size=2).astype(np.float32)
        mean = accumulator.push(gradient, 1, step)
        yield gradient, step, mean
        paused.append(worker)
        if mean is not None:
            tokens.extend([accumulator.step] * max(needed, total))
        while tokens and paused:
            heapq.heappush(busy, (now + rng.exponential(), paused.popleft(), tokens.popleft()))


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 10**6), st.integers(0, 4))
def test_workers_that_come_in_any_order_get_the_updates_of_the_model(needed, total, seed, spare):
    transform, update = compiled(needed, total, 0.5)
    params = PARAMS
    state = transform.init(PARAMS)
    expected = np.float64(PARAMS["w"])
    stale = applied = 0
    for gradient, step, mean in simulate(needed, total, seed, spare):
        stale += step < applied
        updates, state = update({"w": jnp.array(gradient)}, state, params, local_step=step)
        params = apply_updates(params, updates)
        if mean is not None:
            expected = expected - 0.5 * mean
            applied += 1
        np.testing.assert_allclose(params["w"], expected, rtol=1e-4, atol=1e-5)
        assert counts(state)[2:] == (applied, stale)
    assert applied >= 40 // (2 * max(needed, total))


def test_backup_replicas_are_dropped_and_lone_ones_contribute_several_batches():
    slow = [step for _, step, _ in simulate(3, 5, seed=1)]
    assert slow != sorted(
        slow
    )  # the simulation has stale gradients, or nothing above would be tested
    means = [mean is not None for _, _, mean in simulate(4, 1, seed=1)]
    assert means == [n % 4 == 3 for n in range(40)]


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.one_of(st.none(), st.integers(-2, 2)),
        st.sampled_from([np.nan, np.inf, 1e38]),
    ),
    max_size=25,
)


@hypothesis.settings(max_examples=60)
@hypothesis.given(needed=st.integers(1, 5), sequence=ARRIVALS)
def test_any_arrivals_give_what_the_model_gives(needed, sequence):
    transform, update = compiled(needed, 5)
    accumulator = Accumulator(needed)
    state = transform.init(PARAMS)
    aggregated = 0
    for n, (count, lag, poison) in enumerate(sequence):
        step = None if lag is None else max(0, accumulator.step + lag)
        is_stale = step is not None and step < accumulator.step
        gradient = (
            np.float32([n + 0.1, -n]) if count and not is_stale else np.full(2, poison, np.float32)
        )
        held = len(accumulator.held)
        mean = accumulator.push(gradient, count, step)
        aggregated = held + count if mean is not None else aggregated
        extra = {} if step is None else {"local_step": step}
        updates, state = update(
            {"w": jnp.array(gradient)}, state, PARAMS, contributions=count, **extra
        )
        np.testing.assert_allclose(
            updates["w"], np.zeros(2) if mean is None else mean, rtol=1e-6, atol=1e-6
        )
        assert counts(state) == (
            len(accumulator.held),
            aggregated,
            accumulator.step,
            accumulator.dropped,
        )
