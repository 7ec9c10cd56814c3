"""Consensus: decisions of all processes of a job, so that all take the same steps."""

import hashlib
import itertools
import os
import threading
from collections import deque
from typing import Any

import jax
from jax.sharding import Mesh

from ftrain.cluster import ClusterError, ProcessGroup, ProcessMismatchError, batch_shard, membership
from ftrain.data import Pipeline
from ftrain.launching.protocol import CLUSTER

LIMIT = 300.0  # seconds to wait for another process, which may have to compile its first step
MAX_PROGRAM = 1 << 20  # characters of a program that are compared, to find where it differs
DECISION = 60.0  # seconds for a decision, which needs no work of any process


class Consensus:
    """When to stop, and what time it is, as decided by all processes.

    Any process can request a stop at any time. All then hold before their next step, and the
    furthest step that one of them has started becomes the last one: the others continue up to it,
    and all end with the same state. Clocks differ, so all use the time of process 0; it advances at
    steps that are agreed on in the same way.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.interrupted = False
        self.reason: str | None = None  # for the stop that was agreed on
        self._run: int | None = None  # the number of this run in the group, once it has started
        self._early: dict | None = None  # a request made before that
        self._changed = threading.Condition()
        self._count = 0  # the newest step that this process has started
        self._holding = False
        self._asked = False
        self._ticking = False
        self._last: int | None = None
        self._time = 0.0
        self._ticks: deque[tuple[int, float]] = deque()  # steps and their new time

    def begin(self, count: int, now: float) -> float:
        """Start at the same step as all processes; return the time to use."""
        self._run = self.group.take_part(self)  # before the others can decide anything
        starts = self.group.gather("the first step", [count, now], LIMIT)
        different = [
            f"process {index} from step {step}"
            for index, (step, _) in enumerate(starts)
            if step != starts[0][0]
        ]
        if different:
            raise ClusterError(
                f"process 0 starts from step {starts[0][0]}, but {', '.join(different)}; "
                "do all processes share the directory?"
            )
        with self._changed:
            self._count = count
            self._time = starts[0][1]
            early = self._early
            self._early = None
        if early is not None:
            self._propose(early)
        return self._time

    def ask_to_stop(self, reason: str, *, interrupted: bool = False) -> None:
        """Have all processes stop at the same step; may be called in any thread."""
        with self._changed:
            if self._asked or self._last is not None:
                return
            self._asked = True
            proposal = {"stop": reason, "interrupted": interrupted, "by": self.group.index}
            if self._run is None:
                self._early = proposal
                return
        self._propose(proposal)

    def agree_to_continue(self, count: int) -> bool:
        """Return whether to take the step after `count`; waits for a pending decision."""
        with self._changed:
            self._wait()
            if self._last is not None and count >= self._last:
                return False
            self._count = count + 1
            return True

    def is_over(self, count: int, *, wait: bool = False) -> bool:
        """Return whether it was agreed that step `count` is the last one."""
        with self._changed:
            if wait:
                self._wait()
            return self._last is not None and count >= self._last

    def time(self, step: int) -> float:
        """Return the time that all processes use after `step`."""
        with self._changed:
            while self._ticks and self._ticks[0][0] <= step:
                _, self._time = self._ticks.popleft()
            return self._time

    def agree_on_time(self, step: int, now: float, due: float) -> float:
        """Return the time for hooks after `step`; process 0 advances it if `now` reaches `due`."""
        agreed = self.time(step)
        if agreed < due <= now and self.group.is_chief and not self._ticking:
            self._ticking = True
            self._propose({"time": now})
        return agreed

    def all_have(self, what: str, examples: int | None) -> bool:
        """Return whether every process has data; raise if their parts differ in length."""
        counts = self.group.gather(what, examples, LIMIT)
        if None in counts:
            return False
        if len({*counts}) > 1:
            found = ", ".join(f"process {index} has {count}" for index, count in enumerate(counts))
            raise ProcessMismatchError(
                f"{what}: {found} examples; all processes need parts of one length"
            )
        return True

    def hold(self) -> int:
        """Take no further step until there is a decision; return the newest step."""
        with self._changed:
            self._holding = True
            return self._count

    def decide(self, proposal: dict, step: int) -> None:
        """Apply a decision; `step` is the furthest one that a process has started."""
        with self._changed:
            if proposal["run"] != self._run:  # of an earlier run, which every process asked to stop
                pass
            elif "time" in proposal:
                # Some processes may have used the old time after `step` already.
                self._ticks.append((step + 1, proposal["time"]))
                self._ticking = False
            elif self._last is None:
                self._last = step
                self.interrupted = proposal["interrupted"]
                is_other = proposal["by"] != self.group.index and self.interrupted
                self.reason = proposal["stop"] + (
                    f" at process {proposal['by']}" if is_other else ""
                )
            self._holding = False
            self._changed.notify_all()

    def _propose(self, proposal: dict) -> None:
        self.group.propose(proposal | {"run": self._run})

    def _wait(self) -> None:
        while self._holding or (self._asked and self._last is None):
            if not self._changed.wait(DECISION):
                raise ClusterError(f"the processes did not agree on a step within {DECISION:g} s")


def check_program(group: ProcessGroup, step: int, text: str) -> None:
    """Raise ProcessMismatchError unless all processes compiled the same step: else they hang."""
    own = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    digests = group.gather(f"the program of step {step}", own, LIMIT)
    if len({*digests}) == 1:
        return
    index = next(index for index, digest in enumerate(digests) if digest != digests[0])
    shown = text[:MAX_PROGRAM] if group.index in (0, index) else ""
    lines = [each.splitlines() for each in group.gather("programs that differ", shown, LIMIT)]
    pairs = itertools.zip_longest(lines[index], lines[0], fillvalue="")
    here, there = next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))
    raise ProcessMismatchError(
        f"processes 0 and {index} compiled different programs for step {step}: process {index} has "
        f"{here[:200]!r}, process 0 has {there[:200]!r}; a step must not depend on the rank, "
        "a clock, or the order of a set"
    )


def check_group(group: ProcessGroup | None, mesh: Mesh | None) -> None:
    """Raise ValueError if this process is one of several but was not given their group."""
    if group is not None and group.count > 1:
        return
    way_out = "with ftrain.cluster.connect() as group: ...  and pass it to the loop, group=group"
    if mesh is not None and mesh.is_multi_process:
        raise ValueError(
            f"the mesh has devices of other processes, but the loop has no group: {way_out}"
        )
    if CLUSTER in os.environ and jax.process_count() == 1 and (member := membership()) is not None:
        raise ValueError(
            f"this process was started as one of {member.process_count} ({CLUSTER}), "
            f"but the loop has no group: {way_out}"
        )


def check_shards(data: Any, mesh: Mesh | None) -> None:
    """Raise ValueError unless the pipeline yields the part of the batch that this process needs."""
    if mesh is None or mesh.size < jax.process_count():
        raise ValueError(
            "several processes need a mesh of all their devices: mesh=ftrain.cluster.make_mesh()"
        )
    shard, shards = batch_shard(mesh)
    if isinstance(data, Pipeline) and (data.shard_index, data.shard_count) != (shard, shards):
        raise ValueError(
            f"the pipeline yields part {data.shard_index} of {data.shard_count} of a batch, "
            f"but this process needs part {shard} of {shards}: "
            "shard_index, shard_count = ftrain.cluster.batch_shard(mesh)"
        )
