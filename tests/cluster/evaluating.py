"""A program of a user's own: each process has a part of the examples; run by test_programs.py."""

import json

import numpy as np
import regression

import ftrain
from ftrain.cluster import batch_shard, connect, make_mesh, membership
from ftrain.data import ArraySource, Pipeline
from ftrain.training.state import place

EXAMPLES = 21


def arrays() -> dict[str, np.ndarray]:
    made = regression.make_arrays(EXAMPLES)
    return made | {"label": (made["y"] > 0).astype(np.int32)}


def measure(state, mesh=None, batch_size=8) -> dict[str, float]:
    """With a last batch in which one process has padding only."""
    shard_index, shard_count = (0, 1) if mesh is None else batch_shard(mesh)
    data = Pipeline(
        ArraySource(arrays()),
        batch_size=batch_size,
        shuffle=False,
        epochs=1,
        last="pad",
        shard_index=shard_index,
        shard_count=shard_count,
    )
    measured = {
        "auc": ftrain.metrics.auc(logits="prediction"),
        "error": ftrain.metrics.mean("error"),
        "f1": ftrain.metrics.f1(logits="prediction"),
        "r2": ftrain.metrics.r2(labels="y"),
    }
    return {**ftrain.evaluate(regression.predict, state, data, measured)}


def make_state() -> ftrain.TrainState:
    params = {"w": np.array([0.5, -1.0, 2.0], np.float32), "b": np.float32(0.1)}
    return ftrain.TrainState.create(params, ftrain.optimizers.gradient_descent(0.1))


def main() -> None:
    member = membership()
    assert member is not None
    with connect(member.spec, member.job, member.index, limit=30):
        mesh = make_mesh()
        state = place(make_state(), mesh)
        for size in (8, 10):
            print("measured", json.dumps(measure(state, mesh, size)), flush=True)


if __name__ == "__main__":
    main()
