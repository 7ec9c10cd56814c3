"""A user's program: one process of a job, fed by an iterator; run by test_programs.py."""

import sys

import jax
import numpy as np
import regression

import ftrain
from ftrain.cluster import connect, make_mesh, membership


def batches(rank: int, count: int):
    arrays = regression.make_arrays(8 * count)
    for number in range(count):
        rows = slice(number * 8 + 4 * rank, number * 8 + 4 * rank + 4)
        yield {name: array[rows] for name, array in arrays.items()}


def main(directory: str, *counts: str) -> None:
    member = membership()
    assert member is not None
    with connect(member.spec, member.job, member.index, limit=30) as group:
        optimizer = ftrain.optimizers.gradient_descent(0.1)
        state = ftrain.TrainState.create(regression.init_params(), optimizer)
        step = ftrain.make_step(regression.loss_fn, optimizer)
        data = batches(group.index, int(counts[group.index]))
        if len(counts) > group.count:
            data = ftrain.data.Pipeline(
                ftrain.data.ArraySource(regression.make_arrays()), batch_size=8
            )
        with ftrain.Run(
            step, state, data, directory=directory, mesh=make_mesh(), group=group
        ) as run:
            while not run.should_stop():
                run.advance()
        print(
            run.steps_taken,
            run.stop_reason,
            np.asarray(jax.device_get(run.state.params["w"])).tolist(),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
