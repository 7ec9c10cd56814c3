"""Transient errors: a run retries, and else ends with a code after which it is restarted."""

import errno
import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import command
import pytest
from command import write_config

import ftrain
from ftrain.checkpoints import CheckpointManager
from ftrain.cli.exit_codes import exit_code
from ftrain.launching import TRANSIENT, USER_ERROR
from ftrain.paths import PathError

# Make the first listings of a directory fail, whichever function lists it; then run the command.
FAILING = """
import errno, os, sys
directory, failures, code = sys.argv[1], int(sys.argv[2]), getattr(errno, sys.argv[3])
left = [failures]

def failing(real):
    def listing(path="."):
        name = "/" if isinstance(path, int) else os.fsdecode(path)
        if os.path.abspath(name) == directory and left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code), str(path))
        return real(path)
    return listing

os.listdir, os.scandir = failing(os.listdir), failing(os.scandir)
sys.argv = ["ftrain", *sys.argv[4:]]
from ftrain.cli import main
main()
"""
FOR_EVER = 10**6
LONG = pytest.mark.campaign


@pytest.fixture
def trained(tmp_path) -> tuple[Path, Path]:
    """A config and its run directory, which has a checkpoint of step 6."""
    config = write_config(tmp_path, steps=6, every=3)
    run = tmp_path / "run"
    ended = command.run("train", config, f"run.directory={run}")
    assert ended.returncode == 0, ended.stderr
    return config, run


def train(config: Path, run: Path, failures: int, kind: str, *more: str, timeout: float = 30):
    arguments = [
        str(run / "checkpoints"),
        str(failures),
        kind,
        "train",
        str(config),
        f"run.directory={run}",
        *more,
    ]
    return command.run_program(FAILING, *arguments, FTRAIN_IO_TIMEOUT=f"{timeout}")


def test_a_listing_that_fails_for_a_while_is_retried(trained):
    config, run = trained
    ended = train(config, run, 3, "ESTALE", "steps=12", "--accept-changes")
    assert ended.returncode == 0, ended.stderr
    assert "resumed at step 6" in ended.stdout
    assert "done: 6 steps" in ended.stdout


@pytest.mark.parametrize(
    "kind",
    ["ESTALE", *(pytest.param(kind, marks=pytest.mark.campaign) for kind in ("EMFILE", "EIO"))],
)
def test_a_listing_that_keeps_failing_is_not_an_empty_directory(trained, kind):
    config, run = trained
    ended = train(config, run, FOR_EVER, kind, "steps=12", "--accept-changes", timeout=0.1)
    assert ended.returncode == TRANSIENT, (ended.stdout, ended.stderr)
    assert os.strerror(getattr(errno, kind)) in ended.stderr
    assert str(run / "checkpoints") in ended.stderr
    assert "Traceback" not in ended.stderr
    assert CheckpointManager(run).steps() == [3, 6]  # and nothing was begun again


def test_the_lock_of_another_host_is_no_mistake(trained):
    config, run = trained
    lock = run / "run.lock"
    lock.write_text(lock.read_text().replace(f"on host {socket.gethostname()}", "on host lost"))
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended = train(config, run, 0, "ESTALE", timeout=0.1)
    assert ended.returncode == TRANSIENT, ended.stderr
    assert "is in use by process" in ended.stderr
    assert "on host lost; wait for it" in ended.stderr
    assert len(ended.stderr.splitlines()) <= 2


def test_the_lock_of_a_process_at_work_is_a_mistake(trained):
    config, run = trained
    from ftrain.checkpoints import hold

    with hold(run / "run.lock", "it is held"):
        ended = train(config, run, 0, "ESTALE")
    assert ended.returncode == USER_ERROR, ended.stderr
    assert f"is in use by process {os.getpid()}; wait for it" in ended.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ESTALE, "Stale file handle", "runs/x"), TRANSIENT),
        (OSError(errno.EMFILE, "Too many open files"), TRANSIENT),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 1),
        (OSError(errno.ENOTTY, "Inappropriate ioctl for device", "runs/x"), 1),
        (FileNotFoundError(errno.ENOENT, "No such file", "runs/x"), USER_ERROR),
        (PermissionError(errno.EACCES, "Permission denied", "runs/x"), USER_ERROR),
        (PathError("gs://x is a URL"), USER_ERROR),
        (ftrain.checkpoints.SaveError("full"), 1),
        (ftrain.checkpoints.HeldElsewhereError("by another host"), TRANSIENT),
        (ftrain.checkpoints.InUseError("by a process"), USER_ERROR),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_mistakes_end_with_2(error, code):
    assert exit_code(error) == code


def test_an_error_is_what_it_was_raised_from():
    error = ftrain.checkpoints.SaveError("it was not saved")
    error.__cause__ = OSError(errno.EIO, "of the disk")
    assert exit_code(error) == TRANSIENT


HOGGING = """
import os, resource, sys
from ftrain.checkpoints import CheckpointManager, latest_checkpoint
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
hogged = []
while True:
    try:
        hogged.append(os.open("/", os.O_RDONLY))
    except OSError:
        break
home = sys.argv[1]
for ask in (lambda: CheckpointManager(home).latest(), lambda: latest_checkpoint(home)):
    try:
        print("found", ask())
    except OSError as error:
        print("raised", error.errno)
"""


def test_a_process_out_of_file_descriptors_does_not_take_a_directory_for_empty(tmp_path):
    import jax.numpy as jnp

    CheckpointManager(tmp_path).save(600, {"w": jnp.ones(3)})
    ended = command.run_program(HOGGING, tmp_path, FTRAIN_IO_TIMEOUT="0")
    assert ended.stdout.split() == ["raised", f"{errno.EMFILE}"] * 2, ended.stderr
    assert (
        resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64
    )  # of this process, nothing was changed


EXITS = """
import os, sys
sys.exit(74 if os.environ["FTRAIN_ATTEMPT"] == "0" else 0)
"""


def test_a_launcher_starts_again_what_ended_so_before_its_first_step(tmp_path):
    (tmp_path / "program.py").write_text(EXITS)
    ended = command.run("launch", "-n", "1", tmp_path / "program.py")
    assert ended.returncode == 0, ended.stderr
    assert "failed before its first step with exit code 74; restart 1 of 10" in ended.stdout


def _can_trace() -> str | None:
    """Why strace cannot be used here, if it cannot."""
    if shutil.which("strace") is None:
        return "needs strace, which is not installed"
    try:
        tried = subprocess.run(
            ["strace", "-o", os.devnull, "true"], capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "strace cannot be started here"
    return None if tried.returncode == 0 else "strace may not trace processes here"


@pytest.mark.campaign
@pytest.mark.skipif(_can_trace() is not None, reason=_can_trace() or "")
@pytest.mark.parametrize(("when", "code"), [("1..2", 0), ("1+", TRANSIENT)])
def test_errors_of_the_system_itself(trained, when, code):
    config, run = trained
    directory = str(run / "checkpoints")
    inject = ["-e", "trace=openat", "-e", f"inject=openat:error=ESTALE:when={when}"]
    trace = [
        "strace",
        "-o",
        os.devnull,
        "-P",
        directory,
        *inject,
    ]  # of the main thread: it counts for each thread
    arguments = [
        sys.executable,
        "-m",
        "ftrain",
        "train",
        str(config),
        f"run.directory={run}",
        "steps=12",
    ]
    environ = command.environment() | {"FTRAIN_IO_TIMEOUT": "30" if code == 0 else "0.1"}
    ended = subprocess.run(
        [*trace, *arguments, "--accept-changes"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == code, (ended.stdout, ended.stderr)
    if code == 0:
        assert "resumed at step 6" in ended.stdout
    else:
        assert "Stale file handle" in ended.stderr
        assert CheckpointManager(run).steps() == [3, 6]


def test_a_run_at_a_url_is_refused_and_nothing_is_made(tmp_path):
    config = write_config(tmp_path, steps=6, every=3)
    ended = command.run("train", config, "run.directory=gs://bucket/run", cwd=tmp_path)
    assert ended.returncode == USER_ERROR
    assert "run.directory: gs://bucket/run is a URL; expected a local path" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


@pytest.mark.campaign
def test_a_run_in_the_directory_beside_is_saved_resumed_and_evaluated(tmp_path):
    (tmp_path / "work").mkdir()
    config = write_config(tmp_path / "work", steps=6, every=3)
    for said in ("done: 6 steps", "all 6 steps were taken before"):
        ended = command.run("train", config, "run.directory=../beside", cwd=tmp_path / "work")
        assert ended.returncode == 0, ended.stderr
        assert said in ended.stdout
    assert CheckpointManager(tmp_path / "beside").steps() == [3, 6]
    for arguments in (
        ("eval", "../beside"),
        ("ckpt", "verify", "../beside"),
        ("ckpt", "show", "../beside/6"),
    ):
        ended = command.run(*arguments, cwd=tmp_path / "work")
        assert ended.returncode == 0, ended.stderr


@pytest.mark.campaign
def test_ctrl_c_is_still_ended_by_saving(trained):
    """The shield of a run's state and the handler of the command do not get in each other's way."""
    config, run = trained
    changes = ("steps=1000000", "log.every_steps=50", "--accept-changes")
    process = command.start("train", config, f"run.directory={run}", *changes)
    assert process.stdout is not None
    while "step 50:" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "SIGINT: saving and stopping" in err
    assert "the same command resumes there" in out
