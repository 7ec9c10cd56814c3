"""Mutated inputs of every format: each is read, or refused with a documented error, within limits.

The default suite reads some hundred inputs of each format. With --campaign, more than 100,000 are
read, and the totals are printed.
To repeat an input that fails: `python tests/fuzzing/campaign.py NUMBER 1 FORMAT`.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from campaign import MEMORY, PROGRESS, SECONDS
from readers import FORMATS

CAMPAIGN = Path(__file__).with_name("campaign.py")
ROOT = CAMPAIGN.parents[2]
SHORT = 250  # inputs of each format
UNIT = 800  # inputs of the campaign for each unit of a format's weight

Totals = dict[str, dict[str, Any]]


def fuzz(names: list[str], first: int, count: int, progress: Path) -> Totals:
    """Read inputs in a separate process, which a limit on time or memory may end."""
    command = [sys.executable, CAMPAIGN, str(first), str(count), *names]
    paths = {"PYTHONPATH": f"{ROOT}", PROGRESS: f"{progress}"}
    environ = os.environ | paths | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, cwd=progress.parent, env=environ, capture_output=True, text=True)
    if done.returncode:
        number = progress.read_text().strip() if progress.exists() else "none"
        limits = f"limits: {SECONDS} s and {MEMORY >> 20} MB"
        pytest.fail(
            f"the process ended with {done.returncode}, "
            f"last input: {number} ({limits})\n{done.stderr}"
        )
    totals: Totals = json.loads(done.stdout)
    failures = [
        f"{name}, input {failure['number']}: {failure['input']}\n{failure['error']}"
        for name, each in totals.items()
        for failure in each.pop("failures")
    ]
    assert not failures, f"{len(failures)} failures\n" + "\n".join(failures[:5])
    return totals


def test_some_inputs_of_each_format(tmp_path):
    totals = fuzz(list(FORMATS), 0, SHORT, tmp_path / "progress")
    for name, each in totals.items():
        assert each["inputs"] == SHORT
        assert each["accepted"] > 0, f"{name}: nothing gets beyond the first check"


@pytest.mark.campaign
def test_the_campaign(tmp_path, capsys):
    """All formats, two processes at a time; the inputs that follow those of the short version."""

    def run(name: str) -> Totals:
        return fuzz([name], SHORT, UNIT * FORMATS[name].weight, tmp_path / name.replace(" ", "_"))

    longest_first = sorted(FORMATS, key=lambda name: -FORMATS[name].weight)
    with ThreadPoolExecutor(2) as pool:
        totals = {
            name: each for found in pool.map(run, longest_first) for name, each in found.items()
        }
    with capsys.disabled():
        print("\n" + show(totals))
    assert sum(each["inputs"] for each in totals.values()) >= 100_000


def show(totals: Totals) -> str:
    """The totals as lines, and their sums."""
    columns = ("inputs", "accepted", "refused")
    lines = [f"{'format':24}{'inputs':>10}{'accepted':>10}{'refused':>10}{'slowest':>12}"]
    for name, each in totals.items():
        figures = "".join(f"{each[column]:10,}" for column in columns)
        lines.append(f"{name:24}{figures}{1000 * each['slowest']:9.1f} ms")
    sums = "".join(f"{sum(each[column] for each in totals.values()):10,}" for column in columns)
    return "\n".join([*lines, f"{'all':24}{sums}"])
