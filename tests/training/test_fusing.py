"""Fused or not: the same bits, the same steps, the same that hooks see."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from regression import init_params, loss_fn, make_arrays

from ftrain import TrainState, make_step, optimizers
from ftrain.cluster import make_mesh
from ftrain.data import ArraySource, Pipeline
from ftrain.hooks import CheckpointSaver, FeedBatch, NonFiniteError, StopAtStep, StopOnNaN
from ftrain.tasks.digits import classify, init_classifier
from ftrain.training import Hook, Loop, at, every, first, fusion, never, timer
from ftrain.training.compiled_step import CompiledStep
from ftrain.training.fusion import Taken, best_length, first_difference, gaps
from ftrain.training.pieces import Piece

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("no_thread_left")]
ADAM = optimizers.adam(0.05)
STEP = make_step(loss_fn, ADAM, clip_global_norm=1.0, averages=0.9)
PIPELINE = Pipeline(ArraySource(make_arrays()), batch_size=8, seed=3)
STEPS = 40

TRIGGERS = st.one_of(
    st.integers(1, 50).map(lambda n: every(steps=n)),
    st.integers(1, 20).map(lambda n: timer(steps=n)),
    st.integers(1, 20).map(lambda n: timer(steps=n, at_once=False)),
    st.lists(st.integers(1, STEPS), min_size=1, max_size=4).map(lambda steps: at(*steps)),
    st.integers(1, 12).map(first),
    st.just(never()),
)


def make_state(step=0):
    return TrainState.create(init_params(), ADAM, averages=True).replace(step=jnp.int32(step))


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.replace(rng=None))]


class Spy(Hook):
    """Writes down all that it is told, the state included if it asks for it."""

    def __init__(self, when, needs_state, watches):
        self.when = when
        self.needs_state = needs_state
        self.watches = watches
        self.seen = []

    def begin(self, report):
        if self.watches:
            report.listen(metrics=self.watch)

    def watch(self, metrics):
        if self.watches:
            self.seen.extend(
                ("watch", step, metrics.row(step))
                for step in range(metrics.first, metrics.last + 1)
            )

    def after_step(self, report):
        state = bits(report.state) if self.needs_state else None
        self.seen.append(("after", report.step, report.values(), state))

    def end(self, report):
        self.seen.append(("end", report.step, report.values()))


class Publisher(Hook):
    def __init__(self, when):
        self.when = when

    def after_step(self, report):
        report.publish({"published": float(report.step)})


def run(hooks, fuse, start=0, data=PIPELINE, **options):
    with Loop(STEP, make_state(start), data, hooks=hooks, fuse=fuse, **options) as loop:
        while not loop.should_stop():
            loop.advance()
    return loop


RUNS = given(
    spies=st.lists(st.tuples(TRIGGERS, st.booleans(), st.booleans()), max_size=4),
    publishing=TRIGGERS,
    fuse=st.sampled_from([2, 3, 7, 20, 50]),
    start=st.integers(0, 20),
)


@settings(max_examples=10)
@example(spies=[], publishing=every(steps=3), fuse=3, start=4)  # gradients are clipped later
@RUNS
def test_hooks_see_the_same_and_the_state_is_the_same(spies, publishing, fuse, start):
    check_that_hooks_see_the_same(spies, publishing, fuse, start)


@pytest.mark.campaign
@settings(max_examples=100)
@RUNS
def test_hooks_see_the_same_in_many_runs(spies, publishing, fuse, start):
    check_that_hooks_see_the_same(spies, publishing, fuse, start)


def check_that_hooks_see_the_same(spies, publishing, fuse, start):
    def observe(fuse):
        hooks = [
            Publisher(publishing),
            *(Spy(*options) for options in spies),
            StopOnNaN(),
            StopAtStep(STEPS),
        ]
        loop = run(hooks, fuse, start)
        return bits(loop.state), loop.steps_taken, [hook.seen for hook in hooks[1:-2]]

    single, fused = observe(1), observe(fuse)
    assert fused[0] == single[0]
    assert fused[1] == single[1] == STEPS
    for one, other in zip(single[2], fused[2], strict=True):
        # Calls of one kind keep their order; the order between the two kinds may differ for hooks
        # that need no state.
        for kind in ("watch", "after", "end"):
            assert [each for each in other if each[0] == kind] == [
                each for each in one if each[0] == kind
            ]


@pytest.mark.parametrize("fuse", [7, "auto"])
def test_a_mesh_gives_the_same_bits_too(fuse):
    hooks = [StopOnNaN(), StopAtStep(150)]
    single, fused = (run(hooks, each, mesh=make_mesh(4)) for each in (1, fuse))
    assert bits(single.state) == bits(fused.state)


def test_plain_iterables_are_fused_to_their_end():
    batches = [PIPELINE.batch(step) for step in range(23)]
    fused = run([], 5, data=iter(batches))
    assert fused.steps_taken == 23
    assert bits(fused.state) == bits(run([StopAtStep(23)], 1).state)


def test_a_stop_between_two_triggers_is_a_step_that_a_hook_asked_for():
    class Stopper(Hook):
        when = at(13)

        def after_step(self, report):
            report.stop("unlucky")

    assert run([Stopper()], 10).steps_taken == 13


def test_a_nan_inside_of_a_fused_call_is_named_with_its_own_step():
    def loss(params, batch, rng):
        value, metrics = loss_fn(params, batch, rng)
        return jnp.where(batch["number"][0] == 33, jnp.nan, value), metrics

    batches = [PIPELINE.batch(n) | {"number": np.full(8, n + 1)} for n in range(60)]
    state = TrainState.create(init_params(), ADAM)

    def train():
        with Loop(make_step(loss, ADAM), state, batches, hooks=[StopOnNaN()], fuse=20) as loop:
            while not loop.should_stop():
                loop.advance()

    with pytest.raises(NonFiniteError, match="loss is nan at step 33;") as caught:
        train()
    assert caught.value.step == 33


def compiled_lengths(loop):
    return sorted({count for count, _ in loop._compiled._compiled})


@pytest.mark.parametrize("steps", [37, 50, 64, 101])
def test_two_lengths_are_compiled_at_most(steps):
    hooks = [Spy(every(steps=11), False, False), Spy(at(3, 17), False, False), StopAtStep(steps)]
    assert len(compiled_lengths(run(hooks, 8))) <= 2


def test_step_takes_exactly_one_step_whatever_is_fused():
    with Loop(STEP, make_state(), PIPELINE, hooks=[StopAtStep(STEPS)], fuse=8) as loop:
        for expected in range(1, 6):
            loop.step()
            assert loop.steps_taken == expected
        while not loop.should_stop():
            loop.advance()
    assert bits(loop.state) == bits(run([StopAtStep(STEPS)], 1).state)


def test_a_hook_may_change_its_trigger_in_the_middle():
    class Restless(Hook):
        when = at(5)

        def __init__(self):
            self.seen = []

        def after_step(self, report):
            self.seen.append(report.step)
            self.when = at(report.step + 3)

    restless = Restless()
    run([restless, StopAtStep(20)], 10)
    assert restless.seen == [5, 8, 11, 14, 17, 20]


class Notices(Hook):
    def __init__(self):
        self.texts = []

    def begin(self, report):
        report.listen(notice=self.texts.append)


@pytest.mark.parametrize("fuse", ["auto", 10])
def test_a_hook_that_changes_batches_turns_fusing_off_and_that_is_said(fuse):
    notices = Notices()
    loop = run([FeedBatch(lambda step: {}), notices, StopAtStep(30)], fuse)
    assert compiled_lengths(loop) == [1]
    assert notices.texts == [
        "steps are not fused: before each of them a hook changes the batch (FeedBatch)"
    ]


class StopAtNotice(Notices):
    """Stops at the first notice; the clock decides how many steps there are before it."""

    when = every(steps=100)
    needs_state = False

    def after_step(self, report):
        if self.texts:
            report.stop("noticed")


@pytest.fixture
def any_speed_will_do(monkeypatch):
    """What is measured does not decide: the machine may be busy with other tests."""
    monkeypatch.setattr(fusion, "LONG_STEP", math.inf)
    monkeypatch.setattr(fusion, "MAX_SHARE", math.inf)


@pytest.mark.usefixtures("any_speed_will_do")
def test_auto_fuses_quick_steps_and_says_so():
    notices = StopAtNotice()
    loop = run([notices, StopAtStep(5_000_000)], "auto")
    assert compiled_lengths(loop) == [1, 50]
    assert "50 steps are fused into one call" in notices.texts[0]
    assert bits(loop.state) == bits(run([StopAtStep(loop.steps_taken)], 1).state)


def test_auto_leaves_steps_alone_whose_time_is_not_spent_on_dispatching(monkeypatch):
    monkeypatch.setattr(fusion, "LONG_STEP", 0.0)
    monkeypatch.setattr(fusion, "DISPATCH_SHARE", 2.0)
    loop = run([StopAtStep(60)], "auto")
    assert compiled_lengths(loop) == [1]
    assert loop._fuser.is_decided


def test_auto_leaves_steps_alone_that_gain_nothing(monkeypatch):
    monkeypatch.setattr(fusion, "LONG_STEP", math.inf)
    monkeypatch.setattr(fusion, "MAX_SHARE", 0.0)
    compared = []
    compare = fusion.compare
    monkeypatch.setattr(fusion, "compare", lambda *given: compared.append(1) or compare(*given))

    class StopWhenCompared(Hook):
        when = every(steps=100)

        def after_step(self, report):
            if compared:
                report.stop("compared")

    loop = run([StopWhenCompared(), StopAtStep(5_000_000)], "auto")
    assert loop._fuser.length == 1


@pytest.mark.usefixtures("any_speed_will_do")
def test_auto_does_not_fuse_what_would_give_other_bits(monkeypatch):
    monkeypatch.setattr(fusion, "first_difference", lambda one, other: "leaf params/w")
    notices = StopAtNotice()
    loop = run([notices, StopAtStep(5_000_000)], "auto")
    assert notices.texts == [
        "steps are not fused: fused ones return other bits, first in leaf params/w"
    ]
    assert loop._fuser.length == 1


def test_convolutions_keep_their_bits_whatever_is_asked_for():
    rng = np.random.default_rng(0)
    arrays = {
        "image": rng.random((64, 8, 8, 1), np.float32),
        "label": rng.integers(0, 10, 64).astype(np.int32),
    }
    data = Pipeline(ArraySource(arrays), batch_size=16)

    def loss(params, batch, rng):
        logits = classify(params, batch["image"], dropout=0.25, rng=rng)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(16), batch["label"]])

    def train(fuse):
        state = TrainState.create(init_classifier(jax.random.key(0), channels=8, hidden=32), ADAM)
        with Loop(make_step(loss, ADAM), state, data, hooks=[StopAtStep(60)], fuse=fuse) as loop:
            while not loop.should_stop():
                loop.advance()
        return bits(loop.state)

    assert train(10) == train(1)


def test_the_first_leaf_that_differs_is_named():
    one = Taken({"params/b": b"1", "params/w": b"2"}, b"3", 1.0)
    assert first_difference(one, one) is None
    other = one._replace(state=one.state | {"params/w": b"4"})
    assert first_difference(one, other) == "leaf params/w"
    assert first_difference(one, one._replace(metrics=b"4")) == "the metrics"


class OtherRounding(CompiledStep):
    """Rounds a few elements another way if steps are fused, as a compiler may do."""

    def __call__(self, state, piece, first):
        state, metrics = super().__call__(state, piece, first)
        if piece.count > 1:
            slots = state.opt_state.slots
            m = np.array(slots["m"]["w"])
            bits = m.view(np.uint32)
            bits[bits % 16 == 3] ^= 1
            slots = slots | {"m": slots["m"] | {"w": jnp.asarray(m)}}
            state = state.replace(opt_state=state.opt_state._replace(slots=slots))
        return state, metrics


@pytest.mark.parametrize("length", [2, 7])
def test_a_difference_in_the_last_bit_of_a_few_elements_is_found(length):
    piece = Piece(1, PIPELINE.batch(0))
    exact = fusion.compare(CompiledStep(STEP), make_state(), piece, length)
    assert exact.difference is None
    assert 0 < exact.fused_seconds < math.inf
    other = fusion.compare(OtherRounding(STEP), make_state(), piece, length)
    assert other.difference == "leaf opt_state/slots/m/w"


def test_a_checkpoint_in_the_middle_resumes_to_the_same_bits(tmp_path):
    whole = run([StopAtStep(90)], 1)
    run([CheckpointSaver(tmp_path, when=every(steps=17)), StopAtStep(40)], 6)
    resumed = run([CheckpointSaver(tmp_path, when=every(steps=17)), StopAtStep(90)], 25)
    assert resumed.start_step == 40
    assert bits(resumed.state) == bits(whole.state)


@given(st.lists(TRIGGERS, max_size=4), st.integers(0, 30))
def test_gaps_lead_from_one_due_step_to_the_next(triggers, start):
    fired = [trigger.counts_from(start) for trigger in triggers]
    due = []
    for step in range(start + 1, start + 60):
        firing = [i for i, trigger in enumerate(triggers) if trigger.due(step, 0.0, fired[i])]
        for i in firing:
            fired[i] = step
        due += [step] if firing else []
    found = []
    step = start
    for gap in gaps(triggers, start):
        step += gap
        if step >= start + 60:
            break
        found.append(step)
    assert found == due


@given(st.integers(1, 400), st.integers(1, 60))
def test_the_best_length_needs_the_fewest_calls(gap, most):
    best = best_length([every(steps=gap)], 0, most)

    def calls(length):
        return gap // length + gap % length

    assert 1 <= best <= most
    assert calls(best) == min(map(calls, range(1, most + 1)))


@pytest.mark.parametrize("fuse", [0, -1, 2.5, True, "always"])
def test_fuse_must_make_sense(fuse):
    with pytest.raises(ValueError, match='fuse must be "auto" or a whole number >= 1'):
        Loop(STEP, make_state(), PIPELINE, fuse=fuse)
