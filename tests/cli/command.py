"""Starting the real command in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

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
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    return subprocess.Popen(command, **(pipes | options))


def run(*arguments: str | Path, **options) -> subprocess.CompletedProcess:
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def write_config(directory: Path, steps: int, every: int) -> Path:
    path = directory / "job.toml"
    path.write_text(CONFIG.format(steps=steps, every=every))
    return path
