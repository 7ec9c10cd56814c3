"""Record files: write shards, read by index, batch by length, train, and detect damage.

Command: python examples/records.py
Time: 4 seconds on 2 CPU cores.
Result: a loss below 0.01, and the same final parameters for a run that was interrupted.
"""

import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import ftrain
from ftrain.data import Buckets, Pad, Pipeline, RecordSource, example_lengths
from ftrain.formats import DamagedRecordError, Fixed, Ragged, RecordWriter, encode_example

home = Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)

# Each example is a list of numbers of any length, and their mean.
with RecordWriter(home / "train.tfrecord", shard_records=1000) as writer:
    for _ in range(3000):
        values = rng.normal(size=rng.integers(1, 40)).astype(np.float32)
        writer.write(encode_example({"values": values, "mean": values.mean()}))
print("wrote", ", ".join(path.name for path in writer.paths))

# The spec lists the features of a record. Records can be read in any order, and are verified when
# they are read.
spec = {"values": Ragged("float32"), "mean": Fixed()}
source = RecordSource(str(home / "train-*.tfrecord"), spec)
print(
    f"{len(source)} examples; lengths of two of them:",
    [len(row) for row in source.read(np.array([2999, 7]))["values"]],
)

# A batch has examples of similar length, padded to one of four lengths: four compiled programs.
buckets = Buckets(example_lengths(source, "values"), boundaries=[10, 20, 30, 40])
data = Pipeline(
    source, batch_size=64, buckets=buckets, pad={"values": Pad(lengths="count")}, seed=1
)
print("shapes of the first batches:", [data.batch(step)["values"].shape for step in range(5)])


def loss_fn(params, batch, rng):
    guess = jnp.sum(batch["values"] * params["weight"], axis=1) / (batch["count"] + params["more"])
    return jnp.mean((guess - batch["mean"]) ** 2)


def train(directory, steps):
    optimizer = ftrain.optimizers.adam(0.05)
    params = {"weight": jnp.zeros(()), "more": jnp.ones(())}
    return ftrain.train(
        loss_fn, params, data, optimizer=optimizer, steps=steps, directory=directory
    )


whole = train(home / "whole", 300)
train(home / "parts", 137)  # interrupted here; the resumed run gets the same batches
parts = train(home / "parts", 300)
same = all(np.array_equal(whole.params[name], parts.params[name]) for name in whole.params)
print("the interrupted run ended", "with the same parameters" if same else "with other parameters")

# A flipped bit is reported with file, record and byte, or such records are skipped and counted.
shard = writer.paths[1]
damaged = bytearray(shard.read_bytes())
damaged[5000] ^= 1
shard.write_bytes(damaged)
try:
    RecordSource(shard, spec).read(np.arange(1000))
except DamagedRecordError as error:
    print("damage:", str(error).removeprefix(f"{home}/"))
print("left out:", len(RecordSource(shard, spec, on_damage="skip").damages), "record of 1000")
