"""Input speed in examples per second.

    python benchmarks/data.py [PART ...] [--rounds 7] [--tensorflow PYTHON]

- records: 100,000 Examples (64 floats, an int, a string) in one file, batches of 128, with verified
  checksums, parsed; in order and shuffled, compared with tf.data (parse_example, prefetch) on the
  same file. TensorFlow runs in the separate interpreter PYTHON, in turns with ftrain. The default
  is this interpreter (pip install '.[bench-data]').
- arrays: 50,000 examples of 16 floats in memory, shuffled, compared with a bare numpy permutation
  and fancy index.
- memory: the memory of a process that reads a file larger than all of its buffers.
- digits: steps per second of the training loop on the digits, from record files compared with from
  memory.

All variants alternate in rounds, because the machine's speed drifts. Figures are medians over the
rounds, and ratios are medians of the ratios of the rounds.
"""

import argparse
import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ftrain.data import ArraySource, Pipeline, RecordSource, feed
from ftrain.formats import Fixed, RecordWriter, encode_example

EXAMPLES = 100_000
BATCH = 128
SPEC = {"floats": Fixed((64,)), "label": Fixed(dtype="int64"), "name": Fixed(dtype="bytes")}

THEIRS = """
import sys, time
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(2)
spec = {
    "floats": tf.io.FixedLenFeature([64], tf.float32),
    "label": tf.io.FixedLenFeature([], tf.int64),
    "name": tf.io.FixedLenFeature([], tf.string),
}
def make(shuffle):
    data = tf.data.TFRecordDataset(sys.argv[1])
    if shuffle:
        data = data.shuffle(10_000, seed=0)
    data = data.batch(128, drop_remainder=True)
    data = data.map(lambda r: tf.io.parse_example(r, spec), tf.data.AUTOTUNE)
    return data.prefetch(tf.data.AUTOTUNE)
ways = {"order": make(False), "shuffled": make(True)}
print("ready", flush=True)
for line in sys.stdin:
    start, count = time.perf_counter(), 0
    for batch in ways[line.strip()].as_numpy_iterator():
        count += len(batch["label"])
    print(count / (time.perf_counter() - start), flush=True)
"""


def write_records(path: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    with RecordWriter(path) as writer:
        for number in range(count):
            features = {
                "floats": rng.standard_normal(64, np.float32),
                "label": number % 1000,
                "name": b"n%d" % number,
            }
            writer.write(encode_example(features))


def examples_a_second(batches: Iterator[dict[str, np.ndarray]], name: str) -> float:
    """Read all batches; return the examples per second."""
    start = time.perf_counter()
    count = 0
    for batch in batches:
        count += len(batch[name])
    return count / (time.perf_counter() - start)


class TensorFlow:
    """tf.data in a separate process, which reads only during `run`."""

    def __init__(self, python: str, path: Path):
        self._process = subprocess.Popen(
            [python, "-c", THEIRS, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.is_there = self._read() == "ready\n"

    def run(self, way: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{way}\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.communicate()


def take_turns(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, way in ways.items() if number % 2 else reversed(ways.items()):
            figure = way()
            if number:  # the first round warms up
                figures[name].append(figure)
    return figures


def show(title: str, figures: dict[str, list[float]], base: str, unit: str = "examples/s") -> None:
    print(f"\n{title}")
    for name, values in figures.items():
        ratio = statistics.median(
            ours / theirs for ours, theirs in zip(values, figures[base], strict=True)
        )
        print(f"  {name:34} {statistics.median(values):14,.0f} {unit}   {ratio:6.2f} of {base}")


def records(home: Path, rounds: int, tensorflow: str) -> None:
    path = home / "examples.tfrecord"
    write_records(path, EXAMPLES)
    source = RecordSource(path, SPEC)

    def read(shuffle: bool, **options) -> Callable[[], float]:
        pipeline = Pipeline(source, batch_size=BATCH, epochs=1, shuffle=shuffle, **options)
        return lambda: examples_a_second(feed(pipeline), "label")

    ways = {"ftrain, in order": read(False), "ftrain, shuffled": read(True)}
    ways["ftrain, batch by batch"] = lambda: by_step(
        Pipeline(source, batch_size=BATCH), EXAMPLES // BATCH
    )
    theirs = TensorFlow(tensorflow, path)
    if theirs.is_there:
        ways["tf.data, in order"] = lambda: theirs.run("order")
        ways["tf.data, shuffle(10,000)"] = lambda: theirs.run("shuffled")
    else:
        print(
            f"{tensorflow} cannot import tensorflow: "
            "pip install '.[bench-data]', or pass --tensorflow PYTHON"
        )
    figures = take_turns(ways, rounds)
    theirs.close()
    base = "tf.data, in order" if theirs.is_there else "ftrain, in order"
    show("records: parsed and verified, batches of 128", figures, base)
    ours = {name: values for name, values in figures.items() if name.startswith("ftrain")}
    show("random access", ours, "ftrain, in order")
    start = time.perf_counter()
    RecordSource(path, SPEC, sidecar=False)
    print(f"  index of {EXAMPLES:,} records made in {(time.perf_counter() - start) * 1e3:.0f} ms")


def by_step(pipeline: Pipeline, steps: int) -> float:
    start = time.perf_counter()
    for step in range(steps):
        pipeline.batch(step)
    return steps * pipeline.batch_size / (time.perf_counter() - start)


def by_50(pipeline: Pipeline, steps: int) -> float:
    """Read as a loop does that fuses 50 steps into one call."""
    start = time.perf_counter()
    for step in range(0, steps, 50):
        pipeline.batches(step, 50)
    return -(-steps // 50) * 50 * pipeline.batch_size / (time.perf_counter() - start)


def bare(array: np.ndarray, batch_size: int, epochs: int) -> float:
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    count = 0
    for _ in range(epochs):
        order = rng.permutation(len(array))
        for at in range(0, len(array) - batch_size + 1, batch_size):
            count += len(array[order[at : at + batch_size]])
    return count / (time.perf_counter() - start)


def arrays(rounds: int) -> None:
    array = np.random.default_rng(0).standard_normal((50_000, 16), np.float32)
    epochs = 10
    for size in (32, 128, 1024):
        endless = Pipeline(ArraySource({"x": array}), batch_size=size)
        finite = Pipeline(ArraySource({"x": array}), batch_size=size, epochs=epochs)
        steps = epochs * len(array) // size
        ways = {
            "numpy, permutation and index": lambda size=size: bare(array, size, epochs),
            "ftrain, pipeline.batch(step)": lambda endless=endless, steps=steps: by_step(
                endless, steps
            ),
            "ftrain, batches(step, 50), stacked": lambda endless=endless, steps=steps: by_50(
                endless, steps
            ),
            "ftrain, feed (read-ahead thread)": lambda finite=finite: examples_a_second(
                feed(finite), "x"
            ),
        }
        show(
            f"arrays in memory, batches of {size}",
            take_turns(ways, rounds),
            "numpy, permutation and index",
        )


def memory(home: Path) -> None:
    """Read a large file through small buffers, in a separate process."""
    path = home / "large.tfrecord"
    payload = np.zeros(1 << 20, np.uint8).tobytes()
    with RecordWriter(path) as writer:
        for _ in range(1500):
            writer.write(payload)
    program = f"""
        import resource
        from ftrain.data import Pipeline, RecordSource, feed
        def anonymous():
            lines = open("/proc/self/status").read().splitlines()
            return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1e3
        batches = feed(Pipeline(RecordSource({str(path)!r}), batch_size=8, epochs=1))
        most = 0.0
        first = None
        for step, batch in enumerate(batches):
            first = anonymous() if step == 20 else first
            most = max(most, anonymous())
        print(first, most)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    first, most = map(float, ran.stdout.split())
    print(f"\nmemory: {path.stat().st_size / 1e6:,.0f} MB of records in batches of 8 MB")
    print(
        f"  the process's own memory: {first:,.0f} MB after 20 batches, "
        f"at most {most:,.0f} MB until the end"
    )
    path.unlink()


def digits(home: Path, rounds: int) -> None:
    """Run the training loop on the digits, from memory and from records."""
    import jax

    from ftrain import Run, TrainState, make_step
    from ftrain.optimizers import momentum
    from ftrain.tasks import digits as make_task

    tasks = {
        "from memory": make_task(channels=16),
        "from records": make_task(channels=16, records=str(home / "digits")),
    }
    steps = 300

    def train(name: str) -> float:
        task = tasks[name]
        optimizer = momentum(0.05, momentum=0.9)
        state = TrainState.create(task.init(jax.random.key(0)), optimizer, seed=0)
        step = make_step(task.loss_fn, optimizer)
        with Run(
            step, state, Pipeline(task.source, batch_size=128), steps=2 * steps, directory=None
        ) as run:
            while run.state.step < steps:
                run.advance()
            start = time.perf_counter()
            while not run.should_stop():
                run.advance()
            jax.block_until_ready(run.state.params)
            return steps / (time.perf_counter() - start)

    def quietly(name: str) -> float:
        with contextlib.redirect_stdout(io.StringIO()):
            return train(name)

    ways = {name: lambda name=name: quietly(name) for name in tasks}
    show("digits, the whole loop", take_turns(ways, rounds), "from memory", "steps/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["records", "arrays", "memory", "digits"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--tensorflow",
        default=sys.executable,
        help="a Python interpreter that can import tensorflow",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        parts = {
            "records": lambda: records(Path(home), options.rounds, options.tensorflow),
            "arrays": lambda: arrays(options.rounds),
            "memory": lambda: memory(Path(home)),
            "digits": lambda: digits(Path(home), options.rounds),
        }
        for part in options.parts:
            parts[part]()


if __name__ == "__main__":
    main()
