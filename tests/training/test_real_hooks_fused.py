"""The hooks of ftrain, in combinations drawn by hypothesis: fused or not, they write the same."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from regression import init_params, loss_fn, make_arrays

from ftrain import TrainState, make_step, optimizers
from ftrain.checkpoints import CheckpointManager
from ftrain.data import ArraySource, Pipeline
from ftrain.hooks import (
    Callback,
    CheckpointSaver,
    Evaluator,
    FinalOps,
    Logging,
    StepCounter,
    StopAtStep,
    StopOnNaN,
    StopWhen,
    SummarySaver,
)
from ftrain.summaries import read_metrics
from ftrain.training import Loop, at, every, first, timer

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("no_thread_left")]
MOMENTUM = optimizers.momentum(0.02, 0.9)
STEP = make_step(loss_fn, MOMENTUM)
PIPELINE = Pipeline(ArraySource(make_arrays()), batch_size=8, seed=3)
WHEN = st.one_of(
    st.sampled_from([5, 10, 15, 40]).map(lambda n: every(steps=n)),
    st.sampled_from([4, 9]).map(lambda n: timer(steps=n)),
    st.just(at(7, 21)),
    st.just(first(3)),
)
# Each makes its hook anew, in a directory, with a list to write lines to.
HOOKS = {
    "logging": lambda when, home, lines: Logging(
        ["loss", "gradient_norm"], when=when, write=lines.append
    ),
    "counting": lambda when, home, lines: StepCounter(when=when),
    "guard": lambda when, home, lines: StopOnNaN(),
    "summaries": lambda when, home, lines: SummarySaver(home, when=when),
    "saver": lambda when, home, lines: CheckpointSaver(home / "checkpoints", when=when, keep=99),
    "evaluator": lambda when, home, lines: Evaluator(
        lambda params: {"w": float(jnp.sum(params["w"]))}, when=when
    ),
    "threshold": lambda when, home, lines: StopWhen("loss", threshold=0.02, when=when),
    "patience": lambda when, home, lines: StopWhen("eval/w", patience=2, mode="max"),
    "callback": lambda when, home, lines: Callback(
        lambda report: lines.append(f"called at {report.step}"), when=when
    ),
    "final": lambda when, home, lines: FinalOps(
        lambda state: {"final": float(jnp.sum(state.params["w"]))}
    ),
}


def all_that_is_left(chosen, fuse):
    """Everything that a run with these hooks leaves behind, but for what a clock says."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        hooks = [HOOKS[name](when, home, lines) for name, when in chosen]
        state = TrainState.create(init_params(), MOMENTUM)
        with Loop(STEP, state, PIPELINE, hooks=[*hooks, StopAtStep(45)], fuse=fuse) as loop:
            while not loop.should_stop():
                loop.advance()
        manager = CheckpointManager(home / "checkpoints")
        saved = {step: bits(manager.restore(like=state, step=step)) for step in manager.steps()}
        written = read_metrics(home / "metrics.jsonl") if (home / "metrics.jsonl").exists() else []
    kept = [
        {k: v for k, v in line.items() if k != "time" and not k.endswith("_per_second")}
        for line in written
    ]
    # A hook that needs no state is called later, so its lines may mix with others in another order.
    return (
        bits(loop.state),
        loop.steps_taken,
        loop.stop_reason,
        sorted(lines),
        saved,
        [x for x in kept if len(x) > 1],
    )


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.replace(rng=None))]


RUNS = given(
    st.dictionaries(st.sampled_from(sorted(HOOKS)), WHEN, min_size=2), st.sampled_from([3, 10, 50])
)


@settings(max_examples=5)
@RUNS
def test_what_a_run_leaves_behind_does_not_depend_on_fusing(chosen, fuse):
    check_that_fusing_changes_nothing(chosen, fuse)


@pytest.mark.campaign
@settings(max_examples=50)
@RUNS
def test_what_many_runs_leave_behind_does_not_depend_on_fusing(chosen, fuse):
    check_that_fusing_changes_nothing(chosen, fuse)


def check_that_fusing_changes_nothing(chosen, fuse):
    single, fused = (all_that_is_left(list(chosen.items()), each) for each in (1, fuse))
    assert fused == single
