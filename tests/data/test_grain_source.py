import numpy as np
import pytest

from ftrain.data import GrainSource, Pipeline, Stream

grain = pytest.importorskip("grain")


def dataset():
    return grain.MapDataset.range(100).map(lambda n: {"n": n, "square": np.float32(n * n)})


def test_a_map_dataset_is_read_by_index():
    batch = GrainSource(dataset()).read(np.array([7, 3]))
    assert batch["n"].tolist() == [7, 3]
    assert batch["square"].dtype == np.float32
    numbers = GrainSource(grain.MapDataset.range(5)).read(np.array([4]))
    assert numbers["value"].tolist() == [4]


def test_its_batches_are_functions_of_seed_and_step():
    pipeline = Pipeline(GrainSource(dataset().seed(3).shuffle()), batch_size=10, seed=1)
    seen = np.concatenate([pipeline.batch(step)["n"] for step in range(10)])
    assert sorted(seen) == list(range(100))


def test_what_was_filtered_out_is_named():
    source = GrainSource(dataset().filter(lambda element: element["n"] != 3))
    with pytest.raises(
        ValueError, match="element 3 was filtered out: filter with a FilterSource instead"
    ):
        source.read(np.arange(5))


def test_an_iter_dataset_is_a_stream():
    with pytest.raises(TypeError, match="wrap an iterable in a Stream"):
        GrainSource(dataset().to_iter_dataset())
    batches = list(Stream(dataset().to_iter_dataset(), batch_size=25))
    assert batches[-1]["n"].tolist() == list(range(75, 100))
