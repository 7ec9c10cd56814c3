"""Steps whose metrics have other names: StopOnNaN and the progress bar use those they find."""

import io

import jax.numpy as jnp
import optax
import pytest
from regression import init_params, loss_fn
from rich.console import Console

import ftrain
from ftrain import TrainState, every, make_step
from ftrain.hooks import NonFiniteError, ProgressBar, StopAtStep, StopOnNaN
from ftrain.training import Loop

pytestmark = pytest.mark.usefixtures("no_thread_left")


def adversarial(state, batch):
    """A step of two losses, one of which is NaN at step 7; its learning rate is always unknown."""
    error = jnp.mean(batch["y"] ** 2)
    metrics = {
        "generator_loss": error,
        "critic_loss": jnp.where(state.step == 6, jnp.nan, error),
        "learning_rate": jnp.float32(jnp.nan),
    }
    return state.replace(step=state.step + 1), metrics


def without_metrics(state, batch):
    return state.replace(step=state.step + 1), {}


def drive(hooks, data, step=adversarial, **options):
    state = TrainState.create(init_params(), optax.sgd(0.1))
    with Loop(step, state, data, hooks=hooks, **options) as loop:
        while not loop.should_stop():
            loop.advance()
    return loop


@pytest.mark.parametrize("fuse", [1, 5])
def test_without_a_loss_every_metric_is_watched(pipeline, fuse):
    with pytest.raises(NonFiniteError, match="critic_loss is nan at step 7;"):
        drive([StopOnNaN(), StopAtStep(20)], pipeline, fuse=fuse)


def test_the_guard_of_a_run_is_the_same(pipeline):
    def train():
        with ftrain.Run(
            adversarial, TrainState.create(init_params(), optax.sgd(0.1)), pipeline, steps=20
        ) as run:
            while not run.should_stop():
                run.advance()

    with pytest.raises(NonFiniteError, match="critic_loss is nan at step 7;"):
        train()


def test_an_unknown_learning_rate_is_no_failure(pipeline):
    assert drive([StopOnNaN(), StopAtStep(5)], pipeline).steps_taken == 5


def test_a_metric_that_may_be_nan_is_not_watched_beside_a_loss(pipeline):
    def loss(params, batch, rng):
        return loss_fn(params, batch, rng)[0], {"undefined": jnp.float32(jnp.nan)}

    step = make_step(loss, optax.sgd(0.1))
    assert drive([StopOnNaN(), StopAtStep(5)], pipeline, step).steps_taken == 5


def test_a_step_without_metrics_has_nothing_to_watch(pipeline):
    assert drive([StopOnNaN(), StopAtStep(5)], pipeline, without_metrics).steps_taken == 5


@pytest.mark.parametrize("fuse", [1, 5])
def test_a_metric_that_the_step_does_not_have_is_an_error_at_the_first_step(pipeline, fuse):
    seen = []

    class Watching(ftrain.Hook):
        order = StopOnNaN.order - 1

        def begin(self, report):
            report.listen(metrics=self.watch)

        def watch(self, metrics):
            seen.append(metrics.last)

    message = (
        "cannot watch los: the step has no such metric; "
        "it has generator_loss, critic_loss, learning_rate"
    )
    with pytest.raises(KeyError, match=message) as caught:
        drive([Watching(), StopOnNaN(["critic_loss", "los"]), StopAtStep(20)], pipeline, fuse=fuse)
    assert seen == [1]
    assert str(caught.value).startswith("StopOnNaN")


@pytest.mark.parametrize(
    ("step", "shown"),
    [(adversarial, ["generator_loss", "critic_loss", "steps/s"]), (without_metrics, ["steps/s"])],
)
def test_the_progress_bar_shows_what_there_is(pipeline, step, shown):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=160)
    drive([ProgressBar(6, console, when=every(steps=2)), StopAtStep(6)], pipeline, step)
    assert all(word in text.getvalue() for word in [*shown, "6/6"])
    assert "nan" not in text.getvalue()
