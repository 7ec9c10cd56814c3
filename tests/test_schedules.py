import jax
import numpy as np
import optax
import pytest

from ftrain import schedules

STEPS = np.array([0, 1, 7, 50, 99, 100, 101, 1000])


def test_cosine_decay_is_half_a_cosine_and_stays_at_its_end():
    values = schedules.cosine_decay(0.3, decay_steps=100, alpha=0.1)(STEPS)
    fractions = np.minimum(STEPS, 100) / 100
    np.testing.assert_allclose(values, 0.3 * (0.9 * 0.5 * (1 + np.cos(np.pi * fractions)) + 0.1), rtol=1e-6)


@pytest.mark.parametrize("staircase", [False, True])
def test_exponential_decay_equals_its_formula(staircase):
    values = schedules.exponential_decay(0.5, 7, 0.9, staircase)(STEPS)
    exponents = STEPS // 7 if staircase else STEPS / 7
    np.testing.assert_allclose(values, 0.5 * 0.9**exponents, rtol=1e-5)


def test_warmup_scales_a_number_or_a_schedule_of_any_kind():
    np.testing.assert_allclose(schedules.warmup(0.2, 50)(STEPS), 0.2 * np.minimum(STEPS / 50, 1), rtol=1e-6)
    after = optax.exponential_decay(1.0, 10, 0.5)
    np.testing.assert_allclose(schedules.warmup(after, 50)(99), after(99), rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedules.cosine_decay(0.1, 0),
        lambda: schedules.exponential_decay(0.1, -3, 0.9),
        lambda: schedules.warmup(0.1, 0),
    ],
)
def test_a_length_that_is_not_positive_is_refused(make):
    with pytest.raises(ValueError, match="steps must be > 0, got"):
        make()


def test_schedules_compile_with_a_traced_step():
    schedule = schedules.warmup(schedules.cosine_decay(0.1, 100), 10)
    np.testing.assert_allclose(jax.jit(schedule)(37), schedule(37), rtol=1e-6)
