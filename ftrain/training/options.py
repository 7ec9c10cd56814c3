"""The options of a loop, the same for `Loop`, `Run` and `train`."""

from collections.abc import Callable
from typing import Any, TypedDict

from jax.sharding import Mesh

from ftrain.cluster import ProcessGroup, Sharding
from ftrain.suggestions import suggest
from ftrain.training.compiled_step import Parallel
from ftrain.training.fusion import Fuse
from ftrain.training.loss import Batch
from ftrain.training.recovery import Scaffold


class LoopOptions(TypedDict, total=False):
    """Keyword arguments of `Loop`, `Run` and `train`.

    mesh: the devices to train on; by default one.
    fuse: how many steps, up to the next one at which a hook is due, `advance` takes in one compiled
      call; "auto", the default, measures it. Hooks see the same, and the numbers are the same bit
      for bit: a trial checks that, and steps whose bits would change are not fused.
    scaffold: how the state is prepared before the run starts.
    sharding: how the state is sharded over the mesh; by default every device has all of it.
    parallel: how the step is spread over the mesh; "jit" by default. For "shard_map" and "pmap"
      make the step with `make_step(replicas=axis_of(parallel))`; every device then has the whole
      state.
    recoveries: how often, without getting further, a run restarts from the newest checkpoint, or
      its initial state, after a transient runtime error ("ABORTED", "UNAVAILABLE"); 3 by default.
    group: the other processes of the job. All of them make and enter the same loop, and stop after
      the same step. Steps are not fused then, and errors are not recovered from: the job is
      restarted as a whole.
    straggler_timeout: seconds that a step waits for the data of this process. Then the step runs
      without them: the replicas of this process do not contribute, and the data are used at the
      next step. Needs a step of replicas, see `parallel`, and an optimizer made by
      `sync_replicas`. Such a run cannot be repeated exactly.
    prepare: a function of a step and this process's part of its batch, called on the host by the
      read-ahead thread; returns the batch to use. Steps are not fused.
    clock: returns the time in seconds for triggers and reports.
    """

    mesh: Mesh | None
    fuse: Fuse
    scaffold: Scaffold | None
    sharding: Sharding | None
    parallel: Parallel
    recoveries: int
    group: ProcessGroup | None
    straggler_timeout: float | None
    prepare: Callable[[int, Batch], Batch] | None
    clock: Callable[[], float]


def check_options(options: LoopOptions, *others: str) -> None:
    """Raise TypeError for an unknown option, and suggest a known one; `others` are known too."""
    known = [*LoopOptions.__annotations__, *others]
    given: dict[str, Any] = {**options}
    for name in given:
        if name not in known:
            raise TypeError(f"there is no option {name!r}{suggest(name, known)}")
