import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.data import ArraySource, ConcatSource, FilterSource, MapSource, MixSource, Pad, Pipeline


def part(start: int, count: int) -> ArraySource:
    return ArraySource({"n": np.arange(start, start + count)})


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
def test_sources_one_behind_the_other(lengths, data):
    starts = np.cumsum([0, *lengths])
    source = ConcatSource(
        [part(start, count) for start, count in zip(starts, lengths, strict=False)]
    )
    assert len(source) == sum(lengths)
    if len(source):
        indices = np.array(data.draw(st.lists(st.integers(0, len(source) - 1), min_size=1)))
        np.testing.assert_array_equal(source.read(indices)["n"], indices)


def test_parts_that_are_not_alike_are_named():
    other = ArraySource({"n": np.zeros((3, 2))})
    with pytest.raises(
        ValueError,
        match=r"ArraySource\(n\) has n as float64\[2\], but ArraySource\(n\) has it as int64",
    ):
        ConcatSource([part(0, 3), other])  # before anything is read
    texts = ArraySource({"text": np.array([b"a", b"bc"], object)})
    with pytest.raises(
        ValueError, match=r"has (n|text) as (int64|nothing|objects).*but .* has it as"
    ):
        ConcatSource([part(0, 3), texts])


def drawn(pipeline: Pipeline, steps: int) -> np.ndarray:
    return np.concatenate([pipeline.batch(step)["n"] for step in range(steps)])


def test_a_mixture_has_its_weights_and_each_part_its_own_epochs():
    source = MixSource([part(0, 70), part(100, 1000), part(2000, 5)], [0.3, 0.6, 0.1])
    numbers = drawn(Pipeline(source, batch_size=100, seed=4), 100)
    parts = np.searchsorted([100, 2000], numbers, "right")
    assert np.bincount(parts).tolist() == [3000, 6000, 1000]
    counts = np.bincount(numbers[parts == 0])
    assert set(counts.tolist()) == {
        42,
        43,
    }  # 3,000 draws of 70 examples: 42 whole epochs, and a part of another
    within = np.bincount(parts[:1000])
    assert 250 < within[0] < 350  # and not only at the end


def test_a_mixture_is_a_function_of_seed_and_step_on_any_number_of_processes():
    def make(**options):
        return Pipeline(
            MixSource([part(0, 70), part(100, 33)], [1, 2]), batch_size=12, seed=1, **options
        )

    for step in (0, 1, 900, 12345):
        whole = make().batch(step)["n"]
        parts = [make(shard_index=index, shard_count=4).batch(step)["n"] for index in range(4)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_mixture_that_is_not_shuffled_takes_each_part_in_order():
    source = MixSource([part(0, 50), part(100, 50)], [1, 3])
    numbers = drawn(Pipeline(source, batch_size=50, shuffle=False), 200)
    first = numbers[numbers < 100]
    np.testing.assert_array_equal(first, np.tile(np.arange(50), 50))


def test_a_mixture_may_be_mapped_and_mixed_again_but_not_chosen_from():
    inner = MixSource([part(0, 1000), part(1000, 1000)], [1, 1])
    outer = Pipeline(MapSource(inner, lambda batch: {"n": batch["n"] + 1}), batch_size=10)
    np.testing.assert_array_equal(drawn(outer, 3), drawn(Pipeline(inner, batch_size=10), 3) + 1)
    nested = drawn(Pipeline(MixSource([inner, part(2000, 1000)], [4, 1]), batch_size=500), 100)
    assert np.bincount(nested // 1000).tolist() == [20_000, 20_000, 10_000]
    with pytest.raises(
        TypeError,
        match=r"would ignore the weights of .*; apply it to each source, then mix the results",
    ):
        FilterSource(inner, lambda batch: batch["n"] > 3)
    with pytest.raises(
        TypeError,
        match=r"would ignore the weights of .*; apply it to each source, then mix the results",
    ):
        ConcatSource([inner, part(0, 3)])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1], "weights must have an entry for each of the 2 sources, got 1"),
        ([1, 0], "finite and > 0"),
        ([1, float("nan")], "finite and > 0"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        MixSource([part(0, 3), part(0, 3)], weights)


def test_each_part_of_a_mixture_comes_whole_before_it_comes_again():
    numbers = drawn(
        Pipeline(MixSource([part(0, 1000), part(5000, 50)], [0.9, 0.1]), batch_size=100, seed=2), 40
    )
    for first, count in ((0, 1000), (5000, 50)):
        own = numbers[(numbers >= first) & (numbers < first + count)]
        for epoch in range(len(own) // count):
            assert sorted(own[epoch * count : (epoch + 1) * count]) == list(
                range(first, first + count)
            )


def ragged(start):
    return MapSource(
        part(start, 9),
        lambda example: {"w": np.full(example["n"] % 3 + 1, example["n"])},
        each=True,
    )


def test_parts_may_have_unequal_lengths():
    data = Pipeline(MixSource([ragged(0), ragged(9)], [1, 1]), batch_size=4, pad={"w": Pad(3)})
    for step in range(20):
        assert data.batch(step)["w"].shape == (4, 3)
    assert len(ConcatSource([ragged(0), ragged(9)]).read(np.array([], int))) == 0


def test_a_tiny_weight_still_counts():
    assert MixSource([part(0, 3), part(0, 3)], [1e-9, 1]).quotas.tolist() == [1, 9999]
    assert MixSource([part(0, 3)] * 3, [1, 1, 1]).quotas.tolist() == [3334, 3333, 3333]


def test_nothing_to_mix_is_refused():
    with pytest.raises(ValueError, match=r"ArraySource\(n\) has no examples to mix"):
        MixSource([part(0, 0), part(0, 3)], [1, 1])
    with pytest.raises(ValueError, match="at least one source"):
        ConcatSource([])
