"""A user's program whose loop hangs after its third step; run by test_programs.py."""

import time

import regression

import ftrain


class Hanging(ftrain.Hook):
    when = ftrain.at(3)

    def after_step(self, report: ftrain.training.Report) -> None:
        time.sleep(1000)


def main() -> None:
    optimizer = ftrain.optimizers.gradient_descent(0.1)
    state = ftrain.TrainState.create(regression.init_params(), optimizer)
    data = ftrain.data.Pipeline(ftrain.data.ArraySource(regression.make_arrays()), batch_size=8)
    with ftrain.training.Loop(
        ftrain.make_step(regression.loss_fn, optimizer), state, data, hooks=[Hanging()]
    ) as loop:
        while not loop.should_stop():
            loop.step()


if __name__ == "__main__":
    main()
