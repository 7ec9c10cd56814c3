"""One process of a job that saves or restores.

multihost_program.py PORT INDEX COUNT DIRECTORY ACTION
"""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftrain.checkpoints import CheckpointManager, DamagedError


def spread(value, *axes):
    value = np.asarray(value)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return jax.make_array_from_callback(
        value.shape, NamedSharding(mesh, PartitionSpec(*axes)), lambda at: value[at]
    )


def tree(step: int):
    rows = np.arange(48, dtype=np.float32).reshape(8, 6) + 100 * step
    whole = spread(rows)
    rng = jax.jit(jax.random.key, out_shardings=whole.sharding)(step)
    return {"rows": spread(rows, "data"), "whole": whole, "rng": rng, "number": step}


def numbers(tree) -> dict:
    """Return the parts of a tree that this process holds."""
    plain = {**tree, "rng": jax.random.key_data(tree["rng"])}
    own = {
        name: [np.asarray(s.data) for s in plain[name].addressable_shards]
        for name in ("rows", "whole", "rng")
    }
    return jax.tree.map(lambda leaf: leaf.tolist(), own)


def act(manager: CheckpointManager, action: str) -> None:
    if action == "save":
        for step in (1, 2, 3):
            manager.save(step, tree(step))
        manager.wait()
        assert manager.steps() == [2, 3] or jax.process_index() > 0, (
            manager.steps()
        )  # the first process deletes
    elif action == "save nan":
        manager.on_warning = print
        manager.save(
            9, tree(9) | {"rows": spread(np.where(np.arange(8) == 7, np.nan, 1.0), "data")}
        )
        manager.wait()
        assert 9 not in manager.steps()
    elif action == "restore":
        restored = manager.restore(like=tree(0))
        assert numbers(restored) == numbers(tree(3)), restored
        assert restored["rows"].sharding == tree(0)["rows"].sharding
    elif action == "restore damaged":
        try:
            manager.restore(like=tree(0), step=3)
        except DamagedError as error:
            print(error)
        else:
            raise SystemExit("the damage was not found")


def main(port: str, index: str, count: str, directory: str, action: str) -> None:
    if int(count) > 1:
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(
            address, int(count), int(index), coordinator_bind_address=address
        )
    with CheckpointManager(directory, keep=2) as manager:
        act(manager, action)


if __name__ == "__main__":
    main(*sys.argv[1:])
