"""Runs that are killed: processes that train, end at moments of chance, and are compared with one that did not."""

import contextlib
import random
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import typer

from ftrain.checkpoints import latest_checkpoint, open_reader
from ftrain.checkpoints.array_values import compare_values
from ftrain.cli.killed_group import POLL, KilledGroup, open_group
from ftrain.hooks.ledger import Line, first_difference, read_ledger
from ftrain.launching.account import Account
from ftrain.launching.diagnosis import find_cause

PATIENCE = 15.0  # seconds that the others have to end by themselves after one was killed; they need about two
_LEDGER, _OUTPUT = "ledger.jsonl", "output.txt"


class Kill(NamedTuple):
    """Which process was killed, and when."""

    rank: int
    inside: bool  # of a save


class Attempt(NamedTuple):
    """One group of processes, mostly of a single one: from its start or resumption to its end."""

    start: int
    end: int
    saved: int  # the newest checkpoint that it left
    kill: Kill | None
    codes: list[int | None]  # what its processes ended with
    late: list[int]  # the processes that did not end by themselves when they should have
    difference: str | None


class Killer:
    """A straight run, and one that is killed, side by side in a directory."""

    def __init__(
        self, config: Path, overrides: list[str], home: Path, seed: int, processes: int = 1
    ):
        self._config, self._overrides, self._processes = config, overrides, processes
        self._random, self._ranks = random.Random(seed), random.Random(seed)
        self._straight, self._killed = home / "straight", home / "killed"
        self._wanted: dict[int, Line] = {}
        self._victims: list[int] = []  # the next ones, last first
        self._steps, self._read = 0, 0
        self.count, self.kills, self.inside, self.resumed, self.compared = 0, 0, 0, 0, 0

    def run_straight(self) -> int:
        """The run that nobody disturbs, and how many steps it took."""
        with self._open_group(self._straight) as group:
            late = group.wait(PATIENCE)
        self._check_end(group, late, self._straight)
        lines, _ = read_ledger(self._straight / _LEDGER)
        for line in lines:
            self._wanted[line["step"]] = self._wanted.get(line["step"], {}) | line
        self._steps = max(self._wanted)
        return self._steps

    def run_once(self, killing: bool) -> Attempt:
        """Start the other run once more; one of its processes is killed at a moment of chance, or none at all."""
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
            self._check_end(group, late, self._killed)
        self.kills += kill is not None
        self.inside += kill is not None and kill.inside
        lines, self._read = read_ledger(self._killed / _LEDGER, self._read)
        latest = latest_checkpoint(self._killed / "checkpoints")
        start, end = (lines[0]["step"], lines[-1]["step"]) if lines else (0, 0)
        self.resumed += start > 0
        codes = [account.code for account in group.accounts]
        saved = int(latest.name) if latest else 0
        return Attempt(start, end, saved, kill, codes, late, self._first_difference(lines))

    def compare_final_states(self) -> str | None:
        straight, killed = open_reader(self._straight), open_reader(self._killed)
        for name in straight.variables:
            if straight.variables[name] != killed.variables.get(name):
                return f"the final state: leaf {name} has another shape or dtype"
            if compare_values(straight.read(name), killed.read(name)).elements:
                return f"the final state: leaf {name}"
        return None

    def _first_difference(self, lines: list[Line]) -> str | None:
        self.compared += sum("begun" not in line for line in lines)
        for line in lines:
            difference = first_difference(line, self._wanted.get(line["step"], {"state": {}}))
            if difference is not None:
                return f"step {line['step']}{' as it was restored' if 'begun' in line else ''}: {difference}"
        return None

    def _open_group(self, home: Path) -> AbstractContextManager[KilledGroup]:
        home.mkdir(parents=True, exist_ok=True)
        command = [
            *train_command(self._config, self._overrides, home),
            "--ledger",
            str(home / _LEDGER),
        ]
        return open_group(command, self._processes, home / _OUTPUT)

    def _check_end(self, group: KilledGroup, late: list[int], home: Path) -> None:
        """See to it that processes which nobody killed have ended well."""
        if not any(account.fell for account in group.accounts):
            return
        said = (home / _OUTPUT).read_text(errors="replace").strip().splitlines()[-5:]
        typer.echo(
            "\n".join([f"training failed {_describe_failure(group.accounts, late)}:", *said]),
            err=True,
        )
        raise typer.Exit(group.accounts[find_cause(group.accounts).process].exit_code)

    def _kill_one(self, group: KilledGroup, left: set[tuple[str, int]]) -> Kill | None:
        """Kill some process, each as often as the others; None if it had ended by then."""
        if not self._victims:
            self._victims = self._ranks.sample(range(self._processes), self._processes)
        rank = self._victims.pop()
        return Kill(rank, bool(self._saves() - left)) if group.kill_one(rank) else None

    def _wait_for_step(self, group: KilledGroup) -> bool:
        """Until some step, not far from where it starts; False if a process ends before that."""
        position, target = self._read, None
        while group.is_whole:
            lines, position = read_ledger(self._killed / _LEDGER, position)
            if lines and target is None:
                start = lines[0]["step"]
                target = self._random.randint(start, start + max(1, (self._steps - start) // 4))
            if lines and target is not None and lines[-1]["step"] >= target:
                return True
            group.look(POLL)
        return False

    def _saves(self) -> set[tuple[str, int]]:
        """The saves that are under way, or never ended."""
        found = set()
        for path in self._killed.glob("checkpoints/*.saving*"):
            with contextlib.suppress(FileNotFoundError):
                found.add((path.name, path.stat().st_ino))
        return found

    def _wait_for_save(self, group: KilledGroup, left: set[tuple[str, int]]) -> bool:
        """Until some moment of a save; False if a process ends before that."""
        while group.is_whole:
            if self._saves() - left:
                time.sleep(self._random.uniform(0, 0.03))
                group.look(0.0)
                return group.is_whole
            group.look(POLL)
        return False


def train_command(config: Path, overrides: list[str], home: Path) -> list[str]:
    """What each process of a run is started with."""
    return [
        sys.executable,
        "-m",
        "ftrain",
        "train",
        str(config),
        *overrides,
        f"run.directory={home}",
    ]


def _describe_failure(accounts: list[Account], late: list[int]) -> str:
    if len(accounts) == 1:
        return f"with exit code {accounts[0].code}"
    by_themselves = any(account.fell and account.index not in late for account in accounts)
    stories = [find_cause(accounts).story] if by_themselves else []
    return "; ".join(
        [
            "on several processes",
            *stories,
            *(f"process {rank} did not end by itself" for rank in late),
        ]
    )
