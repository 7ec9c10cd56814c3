"""Consensus: what the processes of a job decide together, so that each of them takes the same steps."""

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

LIMIT = 300.0  # seconds that one process waits for another; a first step may have to be compiled
MOST_SHOWN = 1 << 20  # characters of a program, to find out where it differs
DECISION = 60.0  # seconds for a decision, which no process has to do anything for


class Consensus:
    """When to stop, and what time it is, as decided by all processes.

    Any of them can ask for a stop, at any moment. All then hold before their next step, and the furthest step that one
    has begun becomes the last one: so the others go on to it, and all end with the same state. Time, which differs from
    process to process, is the first one's; it moves on at steps that are decided on in the same way.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.interrupted = False
        self.reason: str | None = None  # for the stop that was decided on
        self._run: int | None = None  # which one of this group it is, once it has begun
        self._early: dict | None = None  # what was asked for before that
        self._changed = threading.Condition()
        self._count = 0  # the newest step that this process has begun
        self._holding = self._asked = self._ticking = False
        self._last: int | None = None
        self._time = 0.0
        self._ticks: deque[tuple[int, float]] = deque()  # steps from which on another time holds

    def begin(self, count: int, now: float) -> float:
        """All start, from the same step; the answer is the time that it is for all."""
        self._run = self.group.take_part(self)  # before the others can decide anything
        told = self.group.gather("the first step", [count, now], LIMIT)
        different = [
            f"process {index} from step {step}"
            for index, (step, _) in enumerate(told)
            if step != told[0][0]
        ]
        if different:
            raise ClusterError(
                f"process 0 starts from step {told[0][0]}, but {', '.join(different)}; do all see the same directory?"
            )
        with self._changed:
            self._count, self._time = count, told[0][1]
            early, self._early = self._early, None
        if early is not None:
            self._propose(early)
        return self._time

    def ask_to_stop(self, reason: str, *, interrupted: bool = False) -> None:
        """Have all processes stop at the same step; any thread may ask."""
        with self._changed:
            if self._asked or self._last is not None:
                return
            self._asked = True
            proposal = {"stop": reason, "interrupted": interrupted, "by": self.group.index}
            if self._run is None:
                self._early = proposal
                return
        self._propose(proposal)

    def go_on(self, count: int) -> bool:
        """Before the step after `count`: whether it is to be taken. Waits for a decision that is under way."""
        with self._changed:
            self._wait()
            if self._last is not None and count >= self._last:
                return False
            self._count = count + 1
            return True

    def is_over(self, count: int, *, wait: bool = False) -> bool:
        """Whether step `count` was decided to be the last one."""
        with self._changed:
            if wait:
                self._wait()
            return self._last is not None and count >= self._last

    def time(self, step: int) -> float:
        """What time it is for all processes after `step`."""
        with self._changed:
            while self._ticks and self._ticks[0][0] <= step:
                _, self._time = self._ticks.popleft()
            return self._time

    def agree_on_time(self, step: int, now: float, wanted: float) -> float:
        """What time it is for hooks that are due after `step`; where it is `wanted` that it moves on, it will."""
        agreed = self.time(step)
        if (
            agreed < wanted <= now and self.group.is_chief and not self._ticking
        ):  # the others wait for the first
            self._ticking = True
            self._propose({"time": now})
        return agreed

    def all_have(self, what: str, examples: int | None) -> bool:
        """Whether every process has data, in parts that are equally long."""
        told = self.group.gather(what, examples, LIMIT)
        if None in told:
            return False
        if len({*told}) > 1:
            found = ", ".join(f"process {index} has {count}" for index, count in enumerate(told))
            raise ProcessMismatchError(
                f"{what}: {found} examples; all processes need parts of one length"
            )
        return True

    def hold(self) -> int:
        """In a thread: take no further step until something is decided; the answer is how far this process is."""
        with self._changed:
            self._holding = True
            return self._count

    def decide(self, proposal: dict, step: int) -> None:
        """In a thread: what was decided, and the furthest step that any process has begun."""
        with self._changed:
            if (
                proposal["run"] != self._run
            ):  # an earlier one, of which each process has asked for the end
                pass
            elif "time" in proposal:
                self._ticks.append(
                    (step + 1, proposal["time"])
                )  # some may have looked at the clock at `step`
                self._ticking = False
            elif self._last is None:
                self._last, self.interrupted = step, proposal["interrupted"]
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
                raise ClusterError(
                    f"waited {DECISION:g} s for all processes to decide on the last step"
                )


def check_program(group: ProcessGroup, step: int, text: str) -> None:
    """All processes have to run the same program: with different ones they would wait for each other for ever."""
    own = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    told = group.gather(f"the program of step {step}", own, LIMIT)
    if len({*told}) == 1:
        return
    index = next(index for index, digest in enumerate(told) if digest != told[0])
    shown = text[:MOST_SHOWN] if group.index in (0, index) else ""
    lines = [each.splitlines() for each in group.gather("programs that differ", shown, LIMIT)]
    pairs = itertools.zip_longest(lines[index], lines[0], fillvalue="")
    here, there = next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))
    raise ProcessMismatchError(
        f"step {step} is another program at process {index} than at process 0: {here[:200]!r} instead of "
        f"{there[:200]!r}; what is compiled must not depend on the process: its number, a clock, the order of a set"
    )


def check_group(group: ProcessGroup | None, mesh: Mesh | None) -> None:
    """A process that was started as one of several must not train on its own by mistake."""
    if group is not None and group.count > 1:
        return
    way_out = "with ftrain.cluster.connect() as group: ...  and give it to the loop, group=group"
    if mesh is not None and mesh.is_multi_process:
        raise ValueError(
            f"the mesh has devices of other processes, but the loop has no group: {way_out}"
        )
    if CLUSTER in os.environ and jax.process_count() == 1 and (member := membership()) is not None:
        raise ValueError(
            f"this process was started as one of {member.process_count} ({CLUSTER}), but trains on its own: {way_out}"
        )


def check_shards(data: Any, mesh: Mesh | None) -> None:
    """Of several processes each needs its part of a batch, and no other."""
    if mesh is None or mesh.size < jax.process_count():
        raise ValueError(
            "several processes need a mesh of all their devices: mesh=ftrain.cluster.make_mesh()"
        )
    shard, shards = batch_shard(mesh)
    if isinstance(data, Pipeline) and (data.shard_index, data.shard_count) != (shard, shards):
        raise ValueError(
            f"the pipeline gives part {data.shard_index} of {data.shard_count} of a batch, but this process has part "
            f"{shard} of {shards}; shard_index, shard_count = ftrain.cluster.batch_shard(mesh) are what it needs"
        )
