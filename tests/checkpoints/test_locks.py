"""Locks: one process at a time; a lock of a dead process is taken over."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ftrain
from ftrain.checkpoints import HeldElsewhereError, InUseError, hold, is_held
from ftrain.checkpoints.lock import is_still_held
from ftrain.storage import TIMEOUT

LEAVES_A_CHILD = """
import os, sys, time
from pathlib import Path
from ftrain.checkpoints import hold
lock = hold(Path(sys.argv[1]), "it is held")
child = os.fork()  # it inherits the file, and with it the lock
if not child:
    time.sleep(600)
print(os.getpid(), child, flush=True)
time.sleep(600)
"""

TAKES_IT = """
import sys, time
from pathlib import Path
from ftrain.checkpoints import hold
sys.stdin.readline()
lock = hold(Path(sys.argv[1]), "it is held")
print("has it", flush=True)
time.sleep(600)
"""


@pytest.fixture
def orphan(tmp_path):
    """A lock of a killed process that its child still holds, and both processes."""
    environ = os.environ | {
        "PYTHONPATH": str(Path(ftrain.__file__).parents[1]),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-W", "ignore", "-c", LEAVES_A_CHILD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        parent, child = map(int, process.stdout.readline().split())
        try:
            yield tmp_path / "lock", process, parent
        finally:
            os.kill(child, signal.SIGKILL)
            process.kill()


def test_a_lock_of_a_live_process_names_it(orphan):
    path, _, parent = orphan
    with pytest.raises(InUseError, match=f"it is held by process {parent}; wait for it"):
        hold(path, "it is held")
    assert is_held(path)


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs /proc, to know which processes there are"
)
def test_a_lock_of_a_process_that_ended_is_taken_over(orphan):
    path, process, _ = orphan
    process.kill()
    process.wait()
    assert not is_held(path)
    with hold(path, "it is held"):
        assert f"process {os.getpid()} " in path.read_text()
        assert is_held(path)
        with pytest.raises(InUseError, match=f"by process {os.getpid()}"):
            hold(path, "it is held")
    assert not is_held(path)


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs /proc, to know which processes there are"
)
def test_a_process_that_has_not_been_waited_for_has_ended_too(orphan):
    path, process, _ = orphan
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    hold(path, "it is held").close()


def test_a_number_that_was_given_to_another_process_is_not_taken_for_the_old_one(orphan):
    path, _, _ = orphan
    text = path.read_text()
    started = text.split(" started ")[1].split()[0]
    path.write_text(
        text.replace(f"started {started}", f"started {int(started) - 1}")
    )  # an earlier process had this id
    hold(path, "it is held").close()


CHANGES = {
    "another host": ("on host ", "on host far-away-"),
    "another boot": ("boot ", "boot 0-"),
    "another container": ("namespace ", "namespace other-"),
}


@pytest.mark.parametrize(("old", "new"), CHANGES.values(), ids=CHANGES)
def test_a_lock_of_another_machine_is_never_taken_over(orphan, monkeypatch, old, new):
    path, process, parent = orphan
    monkeypatch.setenv(TIMEOUT, "0.1")
    process.kill()
    process.wait()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(
        HeldElsewhereError,
        match=rf"by process {parent} on host .*; if that host is lost, .* delete {path}",
    ):
        hold(path, "it is held")
    path.unlink()  # as the message says
    hold(path, "it is held").close()


@pytest.mark.parametrize("text", ["", "1234\n", "process x on host y\n"])
def test_a_lock_that_does_not_say_whose_it_is_is_not_taken_over(orphan, text):
    path, process, _ = orphan
    process.kill()
    process.wait()
    path.write_text(text)
    with pytest.raises(InUseError, match="it is held by another process"):
        hold(path, "it is held")


@pytest.mark.campaign
def test_of_two_that_take_a_lock_over_one_has_it(orphan):
    path, process, _ = orphan
    process.kill()
    process.wait()
    program = "import sys, time\nfrom pathlib import Path\nfrom ftrain.checkpoints import hold\n"
    program += "sys.stdin.readline()\nlock = hold(Path(sys.argv[1]), 'held')\n"
    program += "print('has it', flush=True)\ntime.sleep(600)"
    environ = os.environ | {"PYTHONPATH": str(Path(ftrain.__file__).parents[1])}
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    contenders = [
        subprocess.Popen([sys.executable, "-c", TAKES_IT, path], env=environ, **pipes)
        for _ in range(3)
    ]
    try:
        for contender in contenders:
            contender.stdin.write("\n")
            contender.stdin.flush()
        has_it = [contender for contender in contenders if "has it" in contender.stdout.readline()]
        assert len(has_it) == 1
        assert f"process {has_it[0].pid} " in path.read_text()
    finally:
        for contender in contenders:
            contender.kill()
            contender.communicate()


def test_a_lock_that_was_deleted_and_taken_is_known_to_be_lost(tmp_path):
    path = tmp_path / "lock"
    with hold(path, "it is held") as first:
        assert is_still_held(first, path)
        path.unlink()
        assert is_still_held(first, path)  # no other process has it
        with hold(path, "it is held") as second:
            assert not is_still_held(first, path)
            assert is_still_held(second, path)
