"""Log lines and the progress bar show means over the steps since the last line."""

import io

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from regression import init_params, loss_fn, make_arrays
from rich.console import Console
from test_hooks import drive

import ftrain
from ftrain import every
from ftrain.hooks import Logging, ProgressBar, StopAtStep
from ftrain.hooks.console import MAX_CALLS, IntervalMeans, format_values
from ftrain.training import StepMetrics, at


def count_loss(params, batch, rng):
    """The loss of step n is n."""
    return batch["number"][0] + 0 * jnp.sum(params["w"]), {"square": batch["number"][0] ** 2}


def numbers(count: int):
    return [{"number": np.full(2, n + 1, np.float32)} for n in range(count)]


def lines_of(count=7, when=None, **options) -> list[str]:
    lines = []
    logging = Logging(
        options.pop("metrics", ["loss", "square", "learning_rate"]),
        when=when or every(steps=3),
        write=lines.append,
        **options,
    )
    drive([logging, StopAtStep(count)], numbers(count), loss=count_loss)
    return [line for line in lines if "fused into one call" not in line]  # depends on the time


def test_a_line_has_the_means_since_the_last_line_and_the_last_loss():
    assert lines_of() == [
        "step 3: loss 2 (last 3), square 4.667, learning_rate 0.1",
        "step 6: loss 5 (last 6), square 25.67, learning_rate 0.1",
        "step 7: loss 7, square 49, learning_rate 0.1",
    ]


def test_the_values_of_the_last_step_if_asked_for():
    assert lines_of(mean=False)[0] == "step 3: loss 3, square 9, learning_rate 0.1"
    assert lines_of(when=every(steps=1))[2] == "step 3: loss 3, square 9, learning_rate 0.1"


def test_a_format_gets_the_means():
    found = []
    lines_of(metrics=None, format=lambda values: found.append(dict(values)) or "x")
    assert [values["loss"] for values in found] == [2, 5, 7]


def test_more_calls_than_are_kept():
    means = IntervalMeans()
    count = 2 * MAX_CALLS + 50
    for step in range(1, count + 1):
        means.add(StepMetrics(step, step, ("loss",), jnp.full(1, step, jnp.float32)))
    assert means.take() == {"loss": (count + 1) / 2}


def test_nothing_is_read_before_a_line():
    class Device:
        is_read = False

        def __array__(self, dtype=None, copy=None):
            self.is_read = True
            return np.array([3.0], np.float32)

    means = IntervalMeans()
    device = Device()
    means.add(StepMetrics(1, 1, ("loss",), device))  # pyright: ignore[reportArgumentType]
    assert not device.is_read
    assert means.take() == {"loss": 3.0}
    assert means.take() == {"loss": 3.0}
    means.clear()
    assert means.take() == {}


def test_rates_and_counts_are_not_averaged():
    means = IntervalMeans()
    names = ("loss", "learning_rate", "learning_rate/head", "loss_scale", "updates_skipped")
    means.add(StepMetrics(1, 1, names, jnp.ones(5)))
    assert means.take() == {"loss": 1.0}


def test_steps_with_other_metrics_and_nan():
    means = IntervalMeans()
    means.add(StepMetrics(1, 2, ("a", "b"), jnp.array([[1.0, 2.0], [3.0, 4.0]])))
    means.add(StepMetrics(3, 3, ("a",), jnp.array([8.0])))
    assert means.take() == {"a": 4.0, "b": 3.0}
    means.add(StepMetrics(4, 4, ("a",), jnp.array([jnp.nan])))
    assert np.isnan(means.take()["a"])


@pytest.mark.parametrize(("mean", "shown"), [(True, "loss 2.5"), (False, "loss 4")])
def test_the_bar_shows_the_mean_too(mean, shown):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    bar = ProgressBar(4, console, when=at(4), mean=mean)
    drive([bar, StopAtStep(4)], numbers(4), loss=count_loss)
    assert shown in text.getvalue()


def test_a_last_value_that_looks_the_same_is_not_repeated():
    assert format_values({"loss": 1.0}, last={"loss": 1.000001}) == "loss 1"
    assert format_values({"loss": 1.0, "x": 2.0}, last={"loss": 3.0}) == "loss 1 (last 3), x 2"


def test_an_unknown_learning_rate_is_not_shown():
    lines = []
    ftrain.train(
        loss_fn,
        init_params(),
        ftrain.data.Pipeline(ftrain.data.ArraySource(make_arrays()), batch_size=8),
        optimizer=optax.sgd(0.1),
        steps=2,
        hooks=[Logging(when=every(steps=1), write=lines.append)],
    )
    assert lines
    assert not any("nan" in line or "learning_rate" in line for line in lines)
