import gc
import itertools
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import slow_transforms

from ftrain.data import ArraySource, Pipeline, feed, prefetch, read_ahead

pytestmark = pytest.mark.usefixtures("no_thread_left")

FOLDER = Path(__file__).parent


def make(pipeline: Pipeline, **options) -> Pipeline:
    return Pipeline(pipeline.source, batch_size=8, seed=3, **options)


def take(pipeline: Pipeline, count: int, start: int = 0):
    batches = feed(pipeline, start)
    try:
        return [next(batches) for _ in range(count)]
    finally:
        batches.close()


@pytest.mark.parametrize(
    "options", [{"threads": 4}, {"workers": 2}, {"threads": 3, "epochs": 9, "last": "keep"}]
)
def test_who_reads_makes_no_difference(pipeline, options):
    plain = make(pipeline, transform=slow_transforms.jitter)
    for step, batch in enumerate(
        take(make(pipeline, transform=slow_transforms.jitter, **options), 40, start=5), 5
    ):
        expected = plain.batch(step)
        np.testing.assert_array_equal(batch["x"], expected["x"])
        np.testing.assert_array_equal(batch["y"], expected["y"])


def test_random_transforms_differ_by_epoch_and_not_by_process():
    source = ArraySource({"x": np.zeros((6, 3), np.float32), "y": np.arange(6)})
    whole = Pipeline(source, batch_size=6, seed=1, transform=slow_transforms.jitter)
    first = whole.batch(0)["x"]
    second = whole.batch(1)["x"]
    assert len(np.unique(np.concatenate([first, second]))) == 36
    parts = [
        Pipeline(
            source,
            batch_size=6,
            seed=1,
            transform=slow_transforms.jitter,
            shard_index=at,
            shard_count=3,
        ).batch(1)
        for at in range(3)
    ]
    np.testing.assert_array_equal(np.concatenate([part["x"] for part in parts]), second)


def test_workers_are_other_processes_and_end_with_the_feed(pipeline):
    batches = take(make(pipeline, transform=slow_transforms.tell_process, workers=2), 60)
    seen = {int(number) for batch in batches for number in batch["process"]}
    assert 1 <= len(seen) <= 2
    assert os.getpid() not in seen
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("options", [{}, {"threads": 2}, {"workers": 1}])
def test_an_error_arrives_with_the_source_and_the_example(options):
    source = ArraySource({"n": np.arange(64)})
    pipeline = Pipeline(
        source, batch_size=8, shuffle=False, transform=slow_transforms.fail, **options
    )
    batches = feed(pipeline)
    for _ in range(2):
        next(batches)  # although it may have been read together with the one that fails
    with pytest.raises(ValueError, match="cannot work on 17") as caught:
        list(batches)
    assert caught.value.__notes__ == [
        "raised by fail, given ArraySource(n): example 17",
        "while reading the input of step 3 from ArraySource(n)",
    ]
    batches.close()


def test_a_feed_that_is_forgotten_ends(pipeline):
    for _ in feed(make(pipeline, threads=2)):
        break
    gc.collect()
    for _ in range(100):
        if not any(thread.name.startswith("ftrain") for thread in threading.enumerate()):
            return
        time.sleep(0.05)
    pytest.fail("its threads are still there")


def test_a_feed_gives_what_iterating_gives(pipeline):
    rows = [np.arange(length) for length in (3, 3, 2, 5)]
    ragged = Pipeline(
        ArraySource({"r": np.array([*rows, None], object)[:4]}),
        batch_size=2,
        shuffle=False,
        epochs=1,
    )
    assert (
        [batch["r"].shape for batch in feed(ragged)]
        == [batch["r"].shape for batch in ragged]
        == [(2, 3), (2,)]
    )


def test_an_error_that_cannot_be_sent_is_told_all_the_same():
    source = ArraySource({"n": np.arange(64)})
    pipeline = Pipeline(
        source, batch_size=8, shuffle=False, transform=slow_transforms.raise_peculiar, workers=1
    )
    batches = feed(pipeline)
    with pytest.raises(RuntimeError, match="Peculiar: peculiar") as caught:
        list(batches)
    assert "raised by raise_peculiar, given ArraySource(n): example 40" in caught.value.__notes__
    assert "in raise_peculiar" in str(caught.value.__cause__)
    batches.close()


def test_a_source_that_stops_ends_the_data():
    class Ending(ArraySource):
        def read(self, indices):
            if indices.max() >= 20:
                raise StopIteration
            return super().read(indices)

    source = Ending({"n": np.arange(64)})
    assert len(list(feed(Pipeline(source, batch_size=5, shuffle=False)))) == 4


def test_a_worker_that_dies_is_told(pipeline):
    batches = feed(make(pipeline, transform=slow_transforms.die, workers=1))
    with pytest.raises(
        RuntimeError, match=r"that read from ArraySource\(x, y\) died \(exit code 1\)"
    ):
        next(batches)
    batches.close()


def test_what_cannot_be_sent_to_a_worker_is_told(pipeline):
    batches = feed(make(pipeline, transform=lambda example, rng: example, workers=1))
    with pytest.raises(
        TypeError, match=r"ArraySource\(x, y\) cannot be sent to a worker process: .*no lambdas"
    ):
        next(batches)
    batches.close()


@pytest.mark.parametrize("options", ["threads=1", "threads=2", "workers=1"])
def test_a_read_that_hangs_does_not_keep_the_process(tmp_path, options):
    program = tmp_path / "hanging.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import numpy as np
            import slow_transforms
            from ftrain.data import ArraySource, Pipeline, feed, prefetch

            if __name__ == "__main__":
                source = ArraySource({{"x": np.zeros((64, 3))}})
                prefetch.GRACE = 0.5
                hang = slow_transforms.hang
                batches = feed(Pipeline(source, batch_size=8, {options}, transform=hang))
                batches.close()
                print("closed", flush=True)
            """
        )
    )
    ran = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(FOLDER)},
    )
    assert ran.stdout == "closed\n", ran.stderr


def test_threads_read_no_further_than_they_may(monkeypatch):
    monkeypatch.setattr(read_ahead, "CHUNK_STEPS", 1)
    too_far = threading.Event()
    reads = itertools.count(1)

    class Watched(ArraySource):
        def read(self, indices):
            # Those that wait to be taken, one per thread and one more, and the one that is taken.
            if next(reads) > prefetch.DEPTH + 3 + 1 + 1:
                too_far.set()
            return super().read(indices)

    batches = feed(Pipeline(Watched({"x": np.zeros((64, 2))}), batch_size=32, threads=3))
    next(batches)
    assert not too_far.wait(0.3)
    batches.close()


def test_workers_end_when_their_parent_is_killed(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(
        textwrap.dedent(
            """
            import multiprocessing, os, signal, sys
            import numpy as np
            import slow_transforms
            from ftrain.data import ArraySource, Pipeline, feed, prefetch, read_ahead

            if __name__ == "__main__":
                source = ArraySource({"x": np.zeros((64, 3))})
                transform = slow_transforms.tell_process
                data = Pipeline(source, batch_size=8, workers=1, transform=transform)
                print(int(next(feed(data))["process"][0]), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    ran = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(FOLDER)},
    )
    worker = Path(f"/proc/{int(ran.stdout)}")
    for _ in range(300):
        if not worker.exists() or "(zombie)" in (worker / "status").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the worker is still there")
