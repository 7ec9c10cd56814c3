"""A program of a user's own that trains again and again in the same processes; run by test_programs.py."""

import regression

import ftrain
from ftrain.cluster import batch_shard, connect, make_mesh, membership


def main() -> None:
    member = membership()
    assert member is not None
    with connect(member.spec, member.job, member.index, limit=30) as company:
        mesh = make_mesh()
        shard, shards = batch_shard(mesh)
        source = ftrain.data.ArraySource(regression.make_arrays())
        data = ftrain.data.Pipeline(source, batch_size=8, shard_index=shard, shard_count=shards)
        optimizer = ftrain.optimizers.gradient_descent(0.1)
        step = ftrain.make_step(regression.loss_fn, optimizer)
        state = ftrain.TrainState.create(regression.init_params(), optimizer)
        for number in range(6):
            hooks = [ftrain.hooks.StopAtStep(2 + number % 3)]
            with ftrain.training.Loop(step, state, data, mesh=mesh, company=company, hooks=hooks) as loop:
                while not loop.should_stop():
                    loop.advance()
            assert loop.steps_taken == 2 + number % 3, (number, loop.steps_taken, loop.stop_reason)
    print("all", flush=True)


if __name__ == "__main__":
    main()
