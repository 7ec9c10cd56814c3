"""A user's program that trains repeatedly in the same processes; run by test_programs.py."""

import regression

import ftrain


def main() -> None:
    with ftrain.cluster.connect(limit=30) as group:
        mesh = ftrain.cluster.make_mesh()
        data = regression.sharded(mesh)
        optimizer = ftrain.optimizers.gradient_descent(0.1)
        step = ftrain.make_step(regression.loss_fn, optimizer)
        state = ftrain.TrainState.create(regression.init_params(), optimizer)
        for number in range(6):
            hooks = [ftrain.hooks.StopAtStep(2 + number % 3)]
            with ftrain.training.Loop(
                step, state, data, mesh=mesh, group=group, hooks=hooks
            ) as loop:
                while not loop.should_stop():
                    loop.advance()
            assert loop.steps_taken == 2 + number % 3, (number, loop.steps_taken, loop.stop_reason)
    print("all", flush=True)


if __name__ == "__main__":
    main()
