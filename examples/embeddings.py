"""A recommender with two embedding tables of 200,000 rows, of which a step reads 512 each.

Command: python examples/embeddings.py
Time: 4 seconds on 2 CPU cores.
Result: the loss falls below 1e-6, and only the rows that were read have changed.

A table that is read through `lookup` gets a row-sparse gradient, so a step costs the same for a
table of any size. Users and films have hidden tastes of two dimensions, and the model learns them
from ratings.
"""

import jax
import jax.numpy as jnp
import numpy as np

import ftrain
from ftrain.gradients import lookup

USERS = 200_000
FILMS = 200_000
TASTES = 2
RATINGS = 100_000


def make_ratings() -> dict[str, np.ndarray]:
    """Return ratings of 100 of the films by 100 of the users."""
    rng = np.random.default_rng(0)
    users, films = (
        rng.choice(count, 100, replace=False).astype(np.int32) for count in (USERS, FILMS)
    )
    tastes = rng.normal(size=(2, 100, TASTES)).astype(np.float32)
    who, what = rng.integers(0, 100, size=(2, RATINGS))
    return {
        "user": users[who],
        "film": films[what],
        "rating": np.sum(tastes[0, who] * tastes[1, what], axis=1),
    }


def init_params() -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(0))
    return {
        "users": 0.3 * jax.random.normal(first, (USERS, TASTES)),
        "films": 0.3 * jax.random.normal(second, (FILMS, TASTES)),
    }


def loss_fn(params, batch, rng):
    users = lookup(params["users"], batch["user"])
    films = lookup(params["films"], batch["film"])
    error = jnp.sum(users * films, axis=1) - batch["rating"]
    return jnp.mean(error**2), {"largest_error": jnp.max(jnp.abs(error))}


def main() -> None:
    start = init_params()
    state = ftrain.train(
        loss_fn,
        start,
        ftrain.data.Pipeline(ftrain.data.ArraySource(make_ratings()), batch_size=512),
        optimizer=ftrain.optimizers.adagrad(0.5),
        steps=1000,
    )
    moved = int(jnp.sum(jnp.any(state.params["users"] != init_params()["users"], axis=1)))
    print(f"{moved} of {USERS:,} rows were trained; the others are unchanged")


if __name__ == "__main__":
    main()
