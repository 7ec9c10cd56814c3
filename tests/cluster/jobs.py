"""Real jobs of several processes, started by the real command, for tests that disturb them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command import environment, write_config
from processes import start_process

from ftrain.checkpoints import open_reader
from ftrain.launching.child_environment import free_addresses

LIMIT = 150.0  # seconds; a test that needs them has failed


class Launched:
    """`ftrain launch` of a regression in a directory; `members` finds its processes."""

    def __init__(
        self, home: Path, count: int, *arguments: str, steps: int = 60, every: int = 20, options=()
    ):
        home.mkdir(parents=True, exist_ok=True)
        self.run = home / "run"
        config = write_config(home, steps=steps, every=every)
        command = [
            "launch",
            "-n",
            str(count),
            *options,
            str(config),
            f"run.directory={self.run}",
            *arguments,
        ]
        self.process = _start(*command)

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.members().values()]:  # after a failed test
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()

    def members(self) -> dict[int, int]:
        """Return the ids of the live processes by rank."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == self.process.pid:
                continue
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            cluster = [each for each in variables if each.startswith("FTRAIN_CLUSTER=")]
            if cluster and f"run.directory={self.run}" in words:
                found[json.loads(cluster[0].partition("=")[2])["task"]["index"]] = int(entry.name)
        return found

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + LIMIT
        while not (found := condition()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return found

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: [line for line in metrics_of(self.run) if line["step"] >= step])

    def end(self) -> tuple[int, str, str]:
        """Return the exit code and the output; all of its processes must have exited."""
        out, err = self.process.communicate(timeout=LIMIT)
        assert self.members() == {}
        return self.process.returncode, out, err


def launch(home: Path, count: int, *arguments: str, **options) -> tuple[int, str, str]:
    with Launched(home, count, *arguments, **options) as job:
        return job.end()


def run_group(
    config: Path, count: int, *arguments: str, own: dict[int, list[str]] | None = None, missing=()
):
    """Run `count` processes of `ftrain train` without a supervisor; return each code and output."""
    addresses = free_addresses(count)
    processes = []
    for index in range(count):
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        words = ["train", str(config), *arguments, *(own or {}).get(index, [])]
        if index not in missing:
            processes.append(_start(*words, FTRAIN_CLUSTER=json.dumps(cluster)))
    try:
        reported = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, out, err)
        for process, (out, err) in zip(processes, reported, strict=True)
    ]


def metrics_of(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def final_state(run: Path) -> dict[str, bytes]:
    reader = open_reader(run)
    return {name: reader.read(name).tobytes() for name in reader.variables}


def _start(*words: str, **variables: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "ftrain", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return start_process(command, env=environment() | variables, **pipes)
