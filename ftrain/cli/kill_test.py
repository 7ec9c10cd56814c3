"""The kill test of `ftrain verify-resume`: training that is killed at random and resumed."""

import contextlib
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import typer

from ftrain.checkpoints import latest_checkpoint, open_reader
from ftrain.checkpoints.reader import compare_values
from ftrain.hooks.diagnostics import Line, first_difference, read_digest_log
from ftrain.launching import LaunchSpec, Screen
from ftrain.launching.child_environment import child_environments, open_lifeline
from ftrain.launching.child_processes import ChildGroup, ProcessStatus
from ftrain.launching.failures import find_cause
from ftrain.launching.signals import open_mailbox

PATIENCE = 15.0  # seconds for the others to exit by themselves after a kill; they need about two
_POLL = 0.001  # seconds
_LEDGER = "ledger.jsonl"
_OUTPUT = "output.txt"


class Kill(NamedTuple):
    """Which process was killed, and when."""

    rank: int
    inside: bool  # during a save


class Trial(NamedTuple):
    """One group of processes, from its start or resumption to its end."""

    start: int
    end: int
    saved: int  # the newest checkpoint that it left
    kill: Kill | None
    codes: list[int | None]  # the exit codes of its processes
    late: list[int]  # the processes that did not exit by themselves in time
    difference: str | None


class KillTest:
    """An uninterrupted run, and one that is killed and resumed, side by side in a directory."""

    def __init__(
        self, config: Path, overrides: list[str], home: Path, seed: int, processes: int = 1
    ):
        self._config = config
        self._overrides = overrides
        self._processes = processes
        self._random = random.Random(seed)
        self._ranks = random.Random(seed)
        self._straight = home / "straight"
        self._killed = home / "killed"
        self._expected: dict[int, Line] = {}
        self._victims: list[int] = []  # the next ones, last first
        self._steps = 0
        self._read = 0  # bytes of the digest log
        self.count = 0
        self.kills = 0
        self.inside = 0
        self.resumed = 0
        self.compared = 0

    def run_straight(self) -> int:
        """Run without interruption, and return the number of steps."""
        with self._open_group(self._straight) as group:
            late = group.wait(PATIENCE)
        self._check_exits(group, late, self._straight)
        lines, _ = read_digest_log(self._straight / _LEDGER)
        for line in lines:
            self._expected[line["step"]] = self._expected.get(line["step"], {}) | line
        self._steps = max(self._expected)
        return self._steps

    def run_once(self, killing: bool) -> Trial:
        """Start the other run again; if `killing`, kill one of its processes at a random moment."""
        self.count += 1
        left = self._saves()  # by processes that were killed before
        with self._open_group(self._killed) as group:
            in_a_save = self._random.random() < 0.5
            due = killing and (
                self._wait_for_save(group, left) if in_a_save else self._wait_for_step(group)
            )
            kill = self._kill_one(group, left) if due else None
            late = group.wait(PATIENCE)
        if kill is None:
            self._check_exits(group, late, self._killed)
        self.kills += kill is not None
        self.inside += kill is not None and kill.inside
        lines, self._read = read_digest_log(self._killed / _LEDGER, self._read)
        latest = latest_checkpoint(self._killed / "checkpoints")
        start, end = (lines[0]["step"], lines[-1]["step"]) if lines else (0, 0)
        self.resumed += start > 0
        codes = [status.returncode for status in group.statuses]
        saved = int(latest.name) if latest else 0
        return Trial(start, end, saved, kill, codes, late, self._first_difference(lines))

    def compare_final_states(self) -> str | None:
        """Return the first difference between the final states, or None."""
        straight = open_reader(self._straight)
        killed = open_reader(self._killed)
        for name in straight.variables:
            if straight.variables[name] != killed.variables.get(name):
                return f"the final state: leaf {name} has another shape or dtype"
            if compare_values(straight.read(name), killed.read(name)).elements:
                return f"the final state: leaf {name}"
        return None

    def _first_difference(self, lines: list[Line]) -> str | None:
        self.compared += sum("begun" not in line for line in lines)
        for line in lines:
            difference = first_difference(line, self._expected.get(line["step"], {"state": {}}))
            if difference is not None:
                restored = " as it was restored" if "begun" in line else ""
                return f"step {line['step']}{restored}: {difference}"
        return None

    def _open_group(self, home: Path) -> AbstractContextManager["KillableGroup"]:
        home.mkdir(parents=True, exist_ok=True)
        command = [
            *train_command(self._config, self._overrides, home),
            "--ledger",
            str(home / _LEDGER),
        ]
        return open_group(command, self._processes, home / _OUTPUT)

    def _check_exits(self, group: "KillableGroup", late: list[int], home: Path) -> None:
        """Exit with an error if a process failed that was not killed."""
        if not any(status.has_failed for status in group.statuses):
            return
        output = (home / _OUTPUT).read_text(errors="replace").strip().splitlines()[-5:]
        typer.echo(
            "\n".join([f"training failed {_describe_failure(group.statuses, late)}:", *output]),
            err=True,
        )
        raise typer.Exit(group.statuses[find_cause(group.statuses).process].exit_code)

    def _kill_one(self, group: "KillableGroup", left: set[tuple[str, int]]) -> Kill | None:
        """Kill a process, each as often as the others; return None if it exited before that."""
        if not self._victims:
            self._victims = self._ranks.sample(range(self._processes), self._processes)
        rank = self._victims.pop()
        return Kill(rank, bool(self._saves() - left)) if group.kill_one(rank) else None

    def _wait_for_step(self, group: "KillableGroup") -> bool:
        """Wait for a random step, not far from the start; False if a process exits before that."""
        position = self._read
        target = None
        while group.is_complete:
            lines, position = read_digest_log(self._killed / _LEDGER, position)
            if lines and target is None:
                start = lines[0]["step"]
                target = self._random.randint(start, start + max(1, (self._steps - start) // 4))
            if lines and target is not None and lines[-1]["step"] >= target:
                return True
            group.poll(_POLL)
        return False

    def _saves(self) -> set[tuple[str, int]]:
        """Return the saves in progress, or interrupted."""
        found = set()
        for path in self._killed.glob("checkpoints/*.saving*"):
            with contextlib.suppress(FileNotFoundError):
                found.add((path.name, path.stat().st_ino))
        return found

    def _wait_for_save(self, group: "KillableGroup", left: set[tuple[str, int]]) -> bool:
        """Wait for a random moment of a save; False if a process exits before that."""
        while group.is_complete:
            if self._saves() - left:
                time.sleep(self._random.uniform(0, 0.03))
                group.poll(0.0)
                return group.is_complete
            group.poll(_POLL)
        return False


class KillableGroup(ChildGroup):
    """A group of which one process can be killed while the others are left alone."""

    @property
    def is_complete(self) -> bool:
        """True while no process has exited."""
        return self.running == len(self.statuses)

    def kill_one(self, rank: int) -> bool:
        """Kill a process and wait until it has exited; False if it exited in another way before."""
        process = self.processes[rank]
        process.kill()
        while process.status.running:
            self.poll(_POLL)
        return process.status.returncode == -signal.SIGKILL

    def wait(self, patience: float) -> list[int]:
        """Wait until all processes have exited, and return those that did not exit by themselves.

        After the first exit, the others have `patience` seconds. A process that needs more writes
        its stacks and is killed.
        """
        deadline = None
        while self.running and (deadline is None or time.monotonic() < deadline):
            self.poll(_POLL)
            if deadline is None and not self.is_complete:
                deadline = time.monotonic() + patience
        late = [status.index for status in self.statuses if status.running]
        self.end(hanging=late)
        while self.running:
            self.poll(_POLL)
        return late


@contextmanager
def open_group(command: Sequence[str], processes: int, output: Path) -> Iterator[KillableGroup]:
    """Start `processes` processes of a command, on free ports, and append their output to a file.

    On exit none of them is left. They also end if this process itself is killed.
    """
    with ExitStack() as stack:
        lifeline = stack.enter_context(open_lifeline())
        file = stack.enter_context(open(output, "ab"))
        screen = Screen(file.fileno(), file.fileno())
        stack.callback(screen.close)
        mailbox = stack.enter_context(open_mailbox(()))  # the caller handles the signals
        # A single process uses the timeout of its config.
        hang_timeout = LaunchSpec.hang_timeout if processes > 1 else 0.0
        environments = child_environments(processes, hang_timeout=hang_timeout)
        group = KillableGroup(
            command, environments, lifeline=lifeline, screen=screen, mailbox=mailbox
        )
        stack.callback(group.close)
        yield group


def train_command(config: Path, overrides: list[str], home: Path) -> list[str]:
    """Return the command of each process of a run."""
    from ftrain.config.load import escape_braces

    return [
        sys.executable,
        "-m",
        "ftrain",
        "train",
        str(config),
        *overrides,
        f"run.directory={escape_braces(str(home))}",
    ]


def _describe_failure(statuses: list[ProcessStatus], late: list[int]) -> str:
    if len(statuses) == 1:
        return f"with exit code {statuses[0].returncode}"
    failed = any(status.has_failed and status.index not in late for status in statuses)
    stories = [find_cause(statuses).description] if failed else []
    hanging = [f"process {rank} did not exit by itself" for rank in late]
    return "; ".join(["on several processes", *stories, *hanging])
