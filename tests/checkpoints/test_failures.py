"""Processes killed during saves, full disks, and directories that are missing or read-only."""

import logging
import random
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from command import ROOT, run, run_program

from ftrain.checkpoints import CheckpointManager, SaveError, verify

SHAPE = (40, 1000)  # of each of 10 leaves
SAVING = """
import sys
import numpy as np
from ftrain.checkpoints import CheckpointManager

with CheckpointManager(sys.argv[1], keep=2) as manager:
    step = (manager.latest() or 0) + 1
    while True:
        values = {f"leaf{n}": float(step * 100 + n) for n in range(10)}
        leaves = {name: np.full((40, 1000), value, np.float32) for name, value in values.items()}
        manager.save(step, leaves)
        print("saving", step, flush=True)
        manager.wait()
        print("saved", step, flush=True)
        step += 1
"""


def like():
    return {f"leaf{n}": np.zeros(SHAPE, np.float32) for n in range(10)}


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [0, 1])  # two halves, which can run in parallel
def test_25_kills_inside_of_saves_lose_nothing_that_was_saved(tmp_path, seed):
    chance = random.Random(seed)
    inside = 0
    for _ in range(25):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVING, tmp_path], stdout=subprocess.PIPE, text=True
        )
        for _ in range(chance.randint(1, 4)):
            process.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.06))
        process.kill()
        said = process.communicate()[0].split()
        saved = [
            int(number)
            for word, number in zip(said[::2], said[1::2], strict=False)
            if word == "saved"
        ]
        inside += any(tmp_path.glob("*.saving*"))
        manager = CheckpointManager(tmp_path)
        for step in manager.steps():
            assert verify(tmp_path / f"{step}") == []
        latest = manager.latest()
        assert latest is not None or not saved
        if latest is not None:
            assert latest >= max(saved, default=0)
            restored = manager.restore(like=like(), step=latest)
            assert all((restored[f"leaf{n}"] == latest * 100 + n).all() for n in range(10))
    assert inside >= 5, "too few of the kills were during a save"


def in_process(code: str, *arguments: str | Path) -> subprocess.CompletedProcess:
    return run_program(textwrap.dedent(code), *arguments)


LIMITED = """
import resource, signal, sys
import numpy as np
from ftrain.checkpoints import CheckpointManager, SaveError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
small, large = {"x": np.ones(10, np.float32)}, {"x": np.random.default_rng(0).random(1_000_000)}
manager = CheckpointManager(sys.argv[1])
manager.save(1, small)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    manager.save(2, large)
except SaveError as error:
    print(error)
manager.save(3, small)
print(manager.steps())
"""


def test_a_file_that_may_not_grow_is_a_clear_error_and_what_was_saved_stays(tmp_path):
    done = in_process(LIMITED, tmp_path)
    message, steps = done.stdout.splitlines()
    assert message.startswith(f"{tmp_path}/2 was not saved: ")
    assert "File too large" in message
    assert message.endswith("remaining checkpoints: 1")
    assert steps == "[1, 3]"
    assert "Traceback" not in done.stderr
    assert verify(tmp_path / "1") == verify(tmp_path / "3") == []
    assert not list(tmp_path.glob("*.saving*")), "what was half written takes no space"


TASKS = """
import asyncio, gc, sys
from ftrain.checkpoints import CheckpointManager
from orbax.checkpoint import v1 as ocp

async def own():
    raise ValueError("mine")

async def orbaxes():
    ocp.load("/nowhere/at/all")

async def forget_both():
    tasks = [asyncio.create_task(own()), asyncio.create_task(orbaxes())]
    await asyncio.sleep(0.5)
    del tasks
    gc.collect()

with CheckpointManager(sys.argv[1]) as manager:
    manager.save(1, {"w": 1.0})
asyncio.run(forget_both())
"""


def test_the_log_keeps_what_is_not_of_orbax(tmp_path):
    done = in_process(TASKS, tmp_path)
    assert done.stderr.count("never retrieved") == 1, done.stderr
    assert "ValueError: mine" in done.stderr


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True, check=False
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_a_clear_error_and_what_was_saved_stays(small_disk):
    manager = CheckpointManager(small_disk)
    manager.save(1, {"x": np.ones(10)})
    with pytest.raises(SaveError, match=r"2 was not saved: No space left on device"):
        manager.save(2, {"x": np.random.default_rng(0).random(1_000_000)})
    assert manager.steps() == [1]
    manager.save(3, {"x": np.ones(10)})
    assert manager.steps() == [1, 3]


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_run_on_a_full_disk_ends_or_goes_on_as_its_config_says(small_disk, on_error):
    settings = [
        "steps=160",
        "checkpoint.every_steps=20",
        "checkpoint.keep=20",
        f"checkpoint.on_error={on_error}",
    ]
    done = run(
        "train", ROOT / "configs" / "digits.toml", f"run.directory={small_disk / 'run'}", *settings
    )
    said = done.stderr if on_error == "stop" else done.stdout
    assert done.returncode == (1 if on_error == "stop" else 0), done.stderr
    assert "was not saved: No space left on device; remaining checkpoints: 20, 40" in said
    assert len(done.stderr.splitlines()) <= 2, done.stderr
    steps = CheckpointManager(small_disk / "run" / "checkpoints").steps()
    assert steps[:2] == [20, 40]
    assert all(verify(small_disk / "run" / "checkpoints" / str(step)) == [] for step in steps)


def test_a_failed_write_that_nobody_waits_for_is_not_logged_a_second_time(caplog):
    """As asyncio does when it deletes a future of TensorStore whose error was never read."""
    text = 'RESOURCE_EXHAUSTED: Error writing "x/c/0" in OCDBT database at local file "1/"'
    for error in (ValueError(text), ValueError("of another library")):
        logging.getLogger("asyncio").error(
            "Future exception was never retrieved", exc_info=(ValueError, error, None)
        )
    assert [str(record.exc_info[1]) for record in caplog.records] == ["of another library"]


def test_a_disk_that_can_only_be_read_is_a_clear_error(small_disk):
    manager = CheckpointManager(small_disk)
    manager.save(1, {"x": np.ones(10)})
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(
        SaveError, match=r"2 was not saved: .*Read-only file system.*remaining checkpoints: 1"
    ):
        manager.save(2, {"x": np.ones(10)})
    assert verify(small_disk / "1") == []


def save_and_wait(manager: CheckpointManager, step: int) -> None:
    manager.save(step, {"x": jnp.ones(2)})
    manager.wait()


def test_a_directory_that_is_gone_is_a_clear_error(tmp_path):
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        save_and_wait(manager, 1)
        (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
        with pytest.raises(SaveError, match=r"2 was not saved: .*checkpoints no longer exists"):
            save_and_wait(manager, 2)
        assert not (tmp_path / "checkpoints").exists()
        (tmp_path / "elsewhere").rename(tmp_path / "checkpoints")
        save_and_wait(manager, 3)
    assert CheckpointManager(tmp_path / "checkpoints").steps() == [1, 3]


def test_a_step_that_was_being_replaced_is_there_again(tmp_path):
    """Killed between the two renames: the old one is moved, the new one is missing."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"x": jnp.ones(2)})
    (tmp_path / "1").rename(tmp_path / "1.replaced")
    manager = CheckpointManager(tmp_path)
    manager.save(2, {"x": jnp.ones(2)})
    assert manager.steps() == [1, 2]
