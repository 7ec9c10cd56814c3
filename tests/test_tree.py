import jax
import jax.numpy as jnp

from ftrain import TrainState, optimizers
from ftrain.tree import count_bytes, count_elements, named_leaves


def test_leaves_are_named_by_their_keys_joined_by_slashes():
    state = TrainState.create(
        {"dense": {"kernel": jnp.zeros((2, 3))}}, optimizers.momentum(0.1, 0.9)
    )
    names = list(named_leaves(state))
    assert "params/dense/kernel" in names
    assert "opt_state/slots/momentum/dense/kernel" in names


def test_sizes_count_all_leaves_of_any_kind():
    tree = {"a": jnp.zeros((2, 3), jnp.bfloat16), "b": [jax.ShapeDtypeStruct((4,), jnp.float32)]}
    assert count_elements(tree) == 10
    assert count_bytes(tree) == 6 * 2 + 4 * 4
    assert count_elements({}) == 0
