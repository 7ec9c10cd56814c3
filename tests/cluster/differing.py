"""A program of a user's own that is not the same in all processes; run by test_programs.py."""

import jax.numpy as jnp
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

        def loss_fn(params, batch, rng):
            loss, metrics = regression.loss_fn(params, batch, rng)
            return loss * jnp.float32(1 + company.index), metrics

        optimizer = ftrain.optimizers.gradient_descent(0.1)
        ftrain.train(loss_fn, regression.init_params(), data, optimizer=optimizer, steps=5, mesh=mesh, company=company)


if __name__ == "__main__":
    main()
