"""Several real processes save together; as many, more or fewer processes restore."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ftrain.checkpoints import load_variable, verify

PROGRAM = Path(__file__).parent / "multihost_program.py"


def run_together(count: int, directory: Path, action: str) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, PROGRAM, str(port)]
    processes = [
        subprocess.Popen(
            [*command, str(index), str(count), directory, action],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"XLA_FLAGS": ""},
        )
        for index in range(count)
    ]
    try:
        told = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, told, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [out for out, _ in told]


def damage(directory: Path) -> None:
    largest = max(directory.glob("state/**/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 4
    largest.write_bytes(data)


@pytest.mark.campaign
def test_two_save_and_two_or_one_restore(tmp_path):
    run_together(2, tmp_path, "save")
    assert verify(tmp_path / "3") == []
    np.testing.assert_array_equal(
        load_variable(tmp_path, "rows"), np.arange(48.0).reshape(8, 6) + 300
    )
    run_together(2, tmp_path, "restore")
    run_together(1, tmp_path, "restore")
    for told in run_together(2, tmp_path, "save nan")[:1]:
        assert "9.suspect has non-finite leaves: rows" in told  # which only the second process has
    damage(tmp_path / "3")
    for told in run_together(2, tmp_path, "restore damaged"):
        assert "3 is damaged" in told


def test_one_saves_and_two_restore(tmp_path):
    run_together(1, tmp_path, "save")
    run_together(2, tmp_path, "restore")
