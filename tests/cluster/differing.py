"""A user's program that differs between processes; run by test_programs.py."""

import jax.numpy as jnp
import regression

import ftrain


def main() -> None:
    with ftrain.cluster.connect(limit=30) as group:
        mesh = ftrain.cluster.make_mesh()
        data = regression.sharded(mesh)

        def loss_fn(params, batch, rng):
            loss, metrics = regression.loss_fn(params, batch, rng)
            return loss * jnp.float32(1 + group.index), metrics

        optimizer = ftrain.optimizers.gradient_descent(0.1)
        ftrain.train(
            loss_fn,
            regression.init_params(),
            data,
            optimizer=optimizer,
            steps=5,
            mesh=mesh,
            group=group,
        )


if __name__ == "__main__":
    main()
