import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.data import Pipeline, RangeSource
from ftrain.data.order import permute

SEEDS = st.integers(0, 2**32 - 1)


@given(st.integers(1, 3000), SEEDS, st.integers(0, 100))
def test_it_is_a_permutation(length, seed, epoch):
    assert sorted(permute(np.arange(length), length, (seed, epoch))) == list(range(length))


@given(st.integers(2**31, 2**62), SEEDS, st.data())
def test_large_ranges_keep_numbers_apart_and_inside(length, seed, data):
    near = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=50, unique=True))
    placed = permute(np.array(near), length, (seed, 0))
    assert len(set(placed.tolist())) == len(near)
    assert placed.min() >= 0
    assert placed.max() < length


def test_keys_choose_other_permutations():
    made = {
        tuple(permute(np.arange(100), 100, (seed, epoch)))
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(made) == 400


def chi_square(counts: np.ndarray) -> float:
    """The deviation from equal counts, in standard deviations of what chance gives."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def places(permutations: np.ndarray) -> np.ndarray:
    """How often each number stands at each place."""
    length = permutations.shape[1]
    counts = np.zeros((length, length))
    for permutation in permutations:
        counts[np.arange(length), permutation] += 1
    return counts


def differences(permutations: np.ndarray) -> np.ndarray:
    """How often neighbours differ by each number."""
    length = permutations.shape[1]
    return np.bincount((np.diff(permutations, axis=1) % length).ravel(), minlength=length)[1:]


def overlap(permutations: np.ndarray) -> np.ndarray:
    """Count where the first quarter ends up, by quarters: a batch is no block of the file."""
    length = permutations.shape[1] // 4 * 4
    quarters = permutations[:, : length // 4] * 4 // permutations.shape[1]
    return np.bincount(quarters.ravel(), minlength=4)


@pytest.mark.parametrize("length", [7, 16, 37, 64, 100, 128])
def test_it_is_as_good_as_a_true_shuffle(length):
    computed = np.stack([permute(np.arange(length), length, (seed, 1)) for seed in range(2000)])
    true = np.stack([np.random.default_rng(seed).permutation(length) for seed in range(2000)])
    # Random counts are not quite equal, because the differences of one permutation depend on each
    # other. So the true shuffle defines what is usual.
    for statistic in (places, differences, overlap):
        usual = abs(chi_square(statistic(true)))
        assert abs(chi_square(statistic(computed))) < max(4.0, 2 * usual), statistic.__name__


def test_the_statistics_find_out_a_poor_shuffle():
    """A random rotation keeps neighbours together; a fixed one puts each number at one place."""
    rotations = np.stack([(np.arange(64) + seed) % 64 for seed in range(3000)])
    assert chi_square(differences(rotations)) > 100
    assert chi_square(places(rotations[:1].repeat(3000, axis=0))) > 100
    assert chi_square(overlap(np.arange(64)[None].repeat(3000, axis=0))) > 100


def test_ten_billion_examples_cost_nothing():
    pipeline = Pipeline(RangeSource(10**10), batch_size=64, seed=5)
    first = pipeline.batch(0)["index"]
    far = pipeline.batch(3 * 10**8)["index"]  # in the second epoch
    assert len(np.unique(np.concatenate([first, far]))) == 128
    assert first.max() > 10**9
