"""A program whose early stopping keeps its count across an interrupt; run by test_programs.py."""

import sys
from pathlib import Path

import regression

import ftrain
from ftrain.hooks import CheckpointSaver, Logging, StopWhen


class Publishing(ftrain.Hook):
    """Publishes the same score every ten steps."""

    when = ftrain.every(steps=10)

    def after_step(self, report):
        report.publish({"score": 1.0})


class Interrupting(ftrain.Hook):
    when = ftrain.training.at(25)
    loop = None

    def after_step(self, report):
        self.loop.interrupt("SIGTERM")


def main() -> None:
    directory = Path(sys.argv[1])
    with ftrain.cluster.connect(limit=30) as group:
        mesh = ftrain.cluster.make_mesh()
        data = regression.sharded(mesh)
        optimizer = ftrain.optimizers.gradient_descent(0.1)
        step = ftrain.make_step(regression.loss_fn, optimizer)
        state = ftrain.TrainState.create(regression.init_params(), optimizer)
        for number, last in enumerate((25, 40, 40)):
            stop = StopWhen("score", patience=3)
            interrupting = Interrupting()
            hooks = [
                CheckpointSaver(directory),
                Publishing(),
                stop,
                Logging(write=lambda line: None),
            ]
            hooks += [interrupting] if number == 0 else []
            with ftrain.training.Loop(
                step, state, data, mesh=mesh, group=group, hooks=hooks
            ) as loop:
                interrupting.loop = loop
                while not loop.should_stop():
                    loop.advance()
            assert loop.steps_taken == last, (number, loop.steps_taken, loop.stop_reason)
            assert stop.state()["looks"] == last // 10 - 1, (number, stop.state())
            assert loop.start_step == (0, 25, 40)[number]
    print("all", flush=True)


if __name__ == "__main__":
    main()
