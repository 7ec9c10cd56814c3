"""Runs that are killed: processes that train, end at moments of chance, and are compared with one that did not."""

import contextlib
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import typer

from ftrain.checkpoints import latest_checkpoint, open_reader
from ftrain.checkpoints.inspecting import compare_values
from ftrain.hooks.ledger import Line, first_difference, read_ledger

_LEDGER = "ledger.jsonl"
_POLL = 0.001  # seconds


class Attempt(NamedTuple):
    """One process: from its start or resumption to its end."""

    start: int
    end: int
    saved: int  # the newest checkpoint that it left
    inside: bool | None  # whether it was killed inside of a save; None: it was not killed
    difference: str | None


class Killer:
    """A straight run, and one that is killed, side by side in a directory."""

    def __init__(self, config: Path, overrides: list[str], home: Path, seed: int):
        self._config, self._overrides, self._random = config, overrides, random.Random(seed)
        self._straight, self._killed = home / "straight", home / "killed"
        self._wanted: dict[int, Line] = {}
        self._steps, self._read = 0, 0
        self._process: subprocess.Popen[bytes] | None = None
        self.count, self.kills, self.inside, self.resumed, self.compared = 0, 0, 0, 0, 0

    def __enter__(self) -> "Killer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def run_straight(self) -> int:
        """The run that nobody disturbs, and how many steps it took."""
        self._start(self._straight)
        self._end(self._straight)
        lines, _ = read_ledger(self._straight / _LEDGER)
        for line in lines:
            self._wanted[line["step"]] = self._wanted.get(line["step"], {}) | line
        self._steps = max(self._wanted)
        return self._steps

    def run_once(self, killing: bool) -> Attempt:
        """One more process of the other run; it is killed at a moment of chance, or not at all."""
        self.count += 1
        left = self._saves()  # by a process that was killed before
        process, in_a_save = self._start(self._killed), self._random.random() < 0.5
        inside = None
        if killing and (self._wait_for_save(process, left) if in_a_save else self._wait_for_step(process)):
            process.kill()
            inside = bool(self._saves() - left) if process.wait() != 0 else None
        if inside is None:
            self._end(self._killed)
        self.kills += inside is not None
        self.inside += inside is True
        lines, self._read = read_ledger(self._killed / _LEDGER, self._read)
        latest = latest_checkpoint(self._killed / "checkpoints")
        start, end = (lines[0]["step"], lines[-1]["step"]) if lines else (0, 0)
        self.resumed += start > 0
        return Attempt(start, end, int(latest.name) if latest else 0, inside, self._first_difference(lines))

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

    def _start(self, home: Path) -> subprocess.Popen[bytes]:
        home.mkdir(parents=True, exist_ok=True)
        command: list[Any] = [sys.executable, "-m", "ftrain", "train", self._config, *self._overrides]
        command += [f"run.directory={home}", "--ledger", home / _LEDGER]
        with open(home / "output.txt", "ab") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        return self._process

    def _end(self, home: Path) -> None:
        """See to it that a process ended well."""
        if self._process is not None and self._process.wait() != 0:
            said = (home / "output.txt").read_text(errors="replace").strip().splitlines()[-5:]
            typer.echo("\n".join([f"training failed with exit code {self._process.returncode}:", *said]), err=True)
            raise typer.Exit(self._process.returncode if self._process.returncode > 0 else 1)

    def _wait_for_step(self, process: subprocess.Popen[bytes]) -> bool:
        """Until some step, not far from where it starts; False if it ends before that."""
        position, target = self._read, None
        while process.poll() is None:
            lines, position = read_ledger(self._killed / _LEDGER, position)
            if lines and target is None:
                start = lines[0]["step"]
                target = self._random.randint(start, start + max(1, (self._steps - start) // 4))
            if lines and target is not None and lines[-1]["step"] >= target:
                return True
            time.sleep(_POLL)
        return False

    def _saves(self) -> set[tuple[str, int]]:
        """The saves that are under way, or never ended."""
        found = set()
        for path in self._killed.glob("checkpoints/*.saving*"):
            with contextlib.suppress(FileNotFoundError):
                found.add((path.name, path.stat().st_ino))
        return found

    def _wait_for_save(self, process: subprocess.Popen[bytes], left: set[tuple[str, int]]) -> bool:
        """Until some moment of a save; False if it ends before that."""
        while process.poll() is None:
            if self._saves() - left:
                time.sleep(self._random.uniform(0, 0.03))
                return process.poll() is None
            time.sleep(_POLL)
        return False
