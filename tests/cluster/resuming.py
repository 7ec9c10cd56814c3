"""A program that trains in a directory with a given learning rate; run by test_programs.py."""

import sys

import regression

import ftrain


def main(directory: str, steps: str, rate: str, overwrite: str = "") -> None:
    with ftrain.cluster.connect(limit=30) as group:
        mesh = ftrain.cluster.make_mesh()
        state = ftrain.train(
            regression.loss_fn,
            regression.init_params(),
            regression.sharded(mesh),
            optimizer=ftrain.optimizers.adam(float(rate)),
            steps=int(steps),
            directory=directory,
            mesh=mesh,
            group=group,
            overwrite=bool(overwrite),
        )
        print("ended at", int(state.step), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
