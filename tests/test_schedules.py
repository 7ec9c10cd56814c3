import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from references import array, cases

from ftrain import schedules

STEPS = np.array([0, 1, 7, 49, 50, 51, 99, 100, 101, 1000])


@pytest.mark.reference
@pytest.mark.parametrize(
    "case", cases("schedules"), ids=lambda case: case["function"].rpartition(".")[2]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_are_those_of_the_reference(case, dtype):
    recorded = case[dtype] if dtype == "float32" else case[dtype].get("value")
    if recorded is None:  # TensorFlow 1 has no float64 here: compare with its float32
        recorded = case["float32"]
    exact = dtype == "float64" and "value" in case["float64"]
    with jax.enable_x64(dtype == "float64"):
        schedule = getattr(schedules, case["function"].rpartition(".")[2])(**case["arguments"])
        values = np.array([schedule(step) for step in case["global_step"]])
        assert values.dtype == dtype
        at_once = np.asarray(schedule(jnp.array(case["global_step"])))
    rate = case["arguments"].get("learning_rate", 0.0)
    tolerance = {"rtol": 1e-12, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6 * rate}
    for ours in (values, at_once):
        np.testing.assert_allclose(ours, array(recorded, dtype), **tolerance)


def test_noise_is_a_function_of_seed_and_step_with_the_variance_asked_for():
    def noise(seed):
        options = {"initial_variance": 4.0, "variance_decay": 0.0, "num_periods": 0.0, "beta": 0.0}
        noisy = schedules.noisy_linear_cosine_decay(1.0, 100_000, seed=seed, **options)
        plain = schedules.linear_cosine_decay(1.0, 100_000, num_periods=0.0, beta=0.0)
        steps = jnp.arange(5000)
        return np.asarray(noisy(steps) - plain(steps)), float(noisy(17) - plain(17))

    first, at_17 = noise(1)
    assert first[17] == pytest.approx(at_17, rel=1e-5)
    np.testing.assert_array_equal(first, noise(1)[0])
    assert not np.array_equal(first, noise(2)[0])
    assert first.std() == pytest.approx(2.0, rel=0.05)
    assert abs(first.mean()) < 0.15


def test_warmup_scales_a_number_or_a_schedule_of_any_kind():
    np.testing.assert_allclose(
        schedules.warmup(0.2, 50)(STEPS), 0.2 * np.minimum(STEPS / 50, 1), rtol=1e-6
    )
    after = optax.exponential_decay(1.0, 10, 0.5)
    np.testing.assert_allclose(schedules.warmup(after, 50)(99), after(99), rtol=1e-6)


def test_joined_schedules_count_their_own_steps():
    joined = schedules.join([0.5, schedules.cosine_decay(1.0, 50), 0.25], [50, 100])
    expected = (
        [0.5] * 4
        + [1.0]
        + [float(schedules.cosine_decay(1.0, 50)(s)) for s in (1, 49)]
        + [0.25] * 3
    )
    np.testing.assert_allclose([joined(step) for step in STEPS], expected, rtol=1e-6)


def test_warmup_stable_decay_is_a_trapezium():
    values = schedules.warmup_stable_decay(0.4, 50, 49, 2, end_learning_rate=0.1)(STEPS)
    np.testing.assert_allclose(
        values, [0, 0.008, 0.056, 0.392, 0.4, 0.4, 0.4, 0.25, 0.1, 0.1], rtol=1e-5
    )


def test_inverse_sqrt_peaks_at_the_end_of_its_warmup():
    values = schedules.inverse_sqrt(0.3, 100)(STEPS)
    expected = np.where(STEPS <= 100, 0.3 * STEPS / 100, 0.3 * np.sqrt(100 / np.maximum(STEPS, 1)))
    np.testing.assert_allclose(values, expected, rtol=1e-5)


NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.cosine_decay(0.1, 0), "decay_steps must be > 0, got 0"),
        (lambda: schedules.exponential_decay(0.1, -3, 0.9), "decay_steps must be > 0, got -3"),
        (lambda: schedules.warmup(0.1, 0), "warmup_steps must be > 0, got 0"),
        (lambda: schedules.cosine_decay_restarts(0.1, 10, t_mul=0.0), "t_mul must be > 0, got 0.0"),
        (
            lambda: schedules.piecewise_constant([1, 2], [0.1]),
            "values must have one more entry than boundaries, got 1 and 2",
        ),
        (
            lambda: schedules.piecewise_constant([3, 2], [1, 2, 3]),
            r"boundaries must be in ascending order, got \[3, 2\]",
        ),
        (
            lambda: schedules.join([0.1, 0.2], [2, 1]),
            "schedules must have one more entry than boundaries, got 2 and 2",
        ),
        (
            lambda: schedules.join([0.1, 0.2, 0.3], [2, 1]),
            r"boundaries must be in ascending order, got \[2, 1\]",
        ),
        (lambda: schedules.warmup_stable_decay(0.1, 1, -1, 1), "stable_steps must be >= 0, got -1"),
        (lambda: schedules.cosine_decay(NAN, 9), "learning_rate must be a finite number, got nan"),
        (
            lambda: schedules.exponential_decay(0.1, 9, NAN),
            "decay_rate must be a finite number, got nan",
        ),
        (
            lambda: schedules.polynomial_decay(0.1, 9, NAN),
            "end_learning_rate must be a finite number, got nan",
        ),
        (
            lambda: schedules.piecewise_constant([3], [0.1, NAN]),
            "values must be a finite number, got nan",
        ),
        (lambda: schedules.warmup(NAN, 9), "schedule must be a finite number, got nan"),
        (lambda: schedules.join([0.1, NAN], [3]), "schedules must be a finite number, got nan"),
        (lambda: schedules.inverse_sqrt(NAN, 9), "learning_rate must be a finite number, got nan"),
        (
            lambda: schedules.warmup_stable_decay(NAN, 1, 1, 1),
            "learning_rate must be a finite number, got nan",
        ),
        (
            lambda: schedules.cosine_decay_restarts(NAN, 9),
            "learning_rate must be a finite number, got nan",
        ),
        (
            lambda: schedules.linear_cosine_decay(NAN, 9),
            "learning_rate must be a finite number, got nan",
        ),
        (
            lambda: schedules.noisy_linear_cosine_decay(0.1, 9, -1.0),
            "initial_variance must be >= 0, got -1.0",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_schedules_compile_with_a_traced_step():
    schedule = schedules.warmup(schedules.cosine_decay_restarts(0.1, 100), 10)
    np.testing.assert_allclose(jax.jit(schedule)(37), schedule(37), rtol=1e-6)
