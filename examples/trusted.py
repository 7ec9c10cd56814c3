"""Checkpoints of any pytree: keep the best, detect damage, restore an older one, warm start.

Command: python examples/trusted.py
Time: 3 seconds on 2 CPU cores.
Result: the damaged file and leaf are named, the checkpoint before it is restored, and a new model
starts with the encoder of the old one.
"""

import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp

from ftrain.checkpoints import CheckpointManager, init_from_checkpoint, list_variables, verify


def make_model(seed: int, classes: int):
    encoder, head = jax.random.split(jax.random.key(seed))
    return {
        "encoder": {"kernel": jax.random.normal(encoder, (64, 32))},
        "head": {"kernel": jax.random.normal(head, (32, classes))},
    }


home = Path(tempfile.mkdtemp(prefix="trusted-"))
with CheckpointManager(home, keep=2, keep_best=1, best_metric="loss") as manager:
    for step, loss in ((1, 0.9), (2, 0.3), (3, 0.5), (4, 0.4)):
        model = make_model(step, classes=10)
        manager.save(step, model, metrics={"loss": loss})  # writes in the background
    manager.wait()
    print(f"kept: {manager.steps()}, the latest is {manager.latest()}, the best {manager.best()}")
print(f"leaves: {list_variables(home)}")

# Change one bit of the latest checkpoint on the disk.
data = max((home / "4").rglob("d/*"), key=lambda path: path.stat().st_size)
contents = bytearray(data.read_bytes())
contents[len(contents) // 2] ^= 1
data.write_bytes(contents)
print("damage:", *verify(home / "4"), sep="\n  ")

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = CheckpointManager(home).restore(like=make_model(0, classes=10))
print(f"restored: {str(caught[0].message).splitlines()[-1]}")
assert jnp.array_equal(model["encoder"]["kernel"], make_model(3, classes=10)["encoder"]["kernel"])

# Another model, with more classes, starts with the encoder of step 2.
new = init_from_checkpoint(make_model(7, classes=100), home / "2", {"encoder/": "encoder/"})
assert jnp.array_equal(new["encoder"]["kernel"], make_model(2, classes=10)["encoder"]["kernel"])
print(f"carried over: encoder/kernel; head/kernel is new, {new['head']['kernel'].shape}")
