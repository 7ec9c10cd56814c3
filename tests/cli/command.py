"""Running the real command in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from forking import ForkServer
from processes import start_process

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent

CONFIG = """
task = "regression:regression"
steps = {steps}

[model]
noise = 0.1

[data]
batch_size = 8

[optimizer]
name = "adam"
learning_rate = 0.01

[checkpoint]
every_steps = {every}

[evaluation]
every_steps = {every}
"""


def environment() -> dict[str, str]:
    one_device = {"XLA_FLAGS": "", "PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}", "COLUMNS": "200"}
    return os.environ | one_device


def start(*arguments: str | Path, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "ftrain", *map(str, arguments)]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": environment(),
    }
    return start_process(command, **(pipes | options))


def run(*arguments: str | Path, **options) -> subprocess.CompletedProcess:
    """Run a command to its end, if possible in a fork of a process that has imported ftrain."""
    environ = options.get("env", environment())
    if options.keys() <= {"cwd", "env"} and _fork_server().serves(environ):
        return _fork_server().run(
            [str(argument) for argument in arguments], **({"env": environ} | options)
        )
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_program(source: str, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess:
    """Run the source of a Python program, in a fork of a process that has imported ftrain."""
    words = [str(argument) for argument in arguments]
    return _fork_server().run(words, env=environment() | environ, program=source)


@cache
def _fork_server() -> ForkServer:
    return ForkServer(environment())


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for an event; the limit is far beyond what a busy machine needs."""
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.01)


def write_config(directory: Path, steps: int, every: int) -> Path:
    path = directory / "job.toml"
    path.write_text(CONFIG.format(steps=steps, every=every))
    return path
