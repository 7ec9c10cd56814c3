import numpy as np
import pytest

from ftrain.data import ArraySource, FilterSource, MapSource, Pipeline


def numbers(count: int = 100) -> ArraySource:
    return ArraySource({"n": np.arange(count), "x": np.arange(count) / 2})


def test_whole_batches_are_mapped():
    source = MapSource(numbers(), lambda batch: {"square": batch["n"] ** 2})
    np.testing.assert_array_equal(source.read(np.array([3, 1]))["square"], [9, 1])
    assert len(source) == 100


def test_examples_are_mapped_one_by_one_also_to_unequal_lengths():
    source = MapSource(numbers(), lambda example: {"row": np.arange(example["n"])}, each=True)
    rows = source.read(np.array([3, 1]))["row"]
    assert [row.tolist() for row in rows] == [[0, 1, 2], [0]]
    assert source.read(np.array([2, 2]))["row"].shape == (2, 2)


def test_numbers_of_several_dtypes_would_depend_on_the_company():
    source = MapSource(
        numbers(), lambda example: {"v": int(example["n"]) if example["n"] < 8 else 0.5}, each=True
    )
    assert source.read(np.arange(8))["v"].dtype == np.int64
    with pytest.raises(ValueError, match="returned v as float64 and as int64; use one dtype"):
        source.read(np.arange(16))


def test_a_source_of_ones_own_is_checked():
    class Careless:
        def __init__(self, answer):
            self.answer = answer

        def __len__(self):
            return 10

        def read(self, indices):
            return self.answer

    assert Pipeline(Careless({"x": [1, 2]}), batch_size=2).batch(0)["x"].tolist() == [1, 2]
    with pytest.raises(
        ValueError, match=r"Careless returned x with shape \(3,\), expected 2 along the first axis"
    ):
        Pipeline(Careless({"x": np.ones(3)}), batch_size=2).batch(0)
    with pytest.raises(TypeError, match="Careless must return a dict of arrays, got ndarray"):
        Pipeline(Careless(np.ones(2)), batch_size=2).batch(0)
    with pytest.raises(
        TypeError, match=r"a source needs a length and read\(indices\), got dict; use ArraySource"
    ):
        Pipeline({"x": np.ones(3)}, batch_size=1)


def test_what_a_function_answers_is_checked():
    with pytest.raises(TypeError, match="must return a dict of arrays, got list"):
        MapSource(numbers(), lambda batch: [1]).read(np.array([0]))
    with pytest.raises(
        ValueError, match=r"returned n with shape \(1,\), expected 2 along the first axis"
    ):
        MapSource(numbers(), lambda batch: {"n": batch["n"][:1]}).read(np.array([0, 1]))


def fail_at_seven(example):
    if example["n"] == 7:
        raise KeyError("seven")
    return example


def test_an_error_tells_the_function_the_source_and_the_example():
    pipeline = Pipeline(
        MapSource(numbers(), fail_at_seven, each=True), batch_size=10, shuffle=False
    )
    with pytest.raises(KeyError) as caught:
        pipeline.batch(0)
    assert caught.value.__notes__ == [
        "raised by fail_at_seven, given ArraySource(n, x): example 7",
        "while reading the input of step 1 from MapSource(ArraySource(n, x), fail_at_seven)",
    ]


def test_only_what_is_kept_is_there_and_it_is_looked_at_once():
    looked = []

    def is_even(batch):
        looked.append(len(batch["n"]))
        return batch["n"] % 2 == 0

    source = FilterSource(numbers(3001), is_even)
    assert not looked  # not before it is used
    assert len(source) == 1501
    np.testing.assert_array_equal(source.read(np.array([0, 5, 1500]))["n"], [0, 10, 3000])
    assert sum(looked) == 3001
    assert source.where(5) == "ArraySource(n, x): example 10"


def test_filtered_pipelines_are_functions_of_seed_and_step():
    source = FilterSource(numbers(), lambda batch: batch["n"] > 50)
    pipeline = Pipeline(source, batch_size=7, seed=3)
    seen = np.concatenate([pipeline.batch(step)["n"] for step in range(7)])
    assert sorted(seen) == list(range(51, 100))


def test_what_is_no_answer_to_keep_or_not_is_refused():
    with pytest.raises(ValueError, match=r"must return 100 booleans, got int64\[100\]"):
        len(FilterSource(numbers(), lambda batch: batch["n"]))
    with pytest.raises(ValueError, match="has no examples"):
        Pipeline(FilterSource(numbers(), lambda batch: batch["n"] < 0), batch_size=1)
