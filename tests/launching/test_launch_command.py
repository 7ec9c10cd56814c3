"""The command itself: what it accepts, refuses and prints."""

import os
import pty
import re
import subprocess
import sys

import pytest
import typer
from command import run as run_command
from launched import LIMIT, ROOT, Launcher, run

from ftrain.cli.launch import CONTEXT_SETTINGS, launch


def refuse(arguments):
    """Return the error of the command for invalid arguments."""
    app = typer.Typer()
    app.command(context_settings=CONTEXT_SETTINGS)(launch)
    with pytest.raises(typer.TyperException) as caught:
        app(arguments, standalone_mode=False)
    return caught.value.format_message()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CONFIG"], r"the number of processes is missing: pass -n N before CONFIG"),
        (["-n", "0", "CONFIG"], r"-n: must be at least 1, got 0"),
        (["-n", "two", "CONFIG"], r"-n"),
        (
            ["-n", "2", "--processes-after-failure", "3", "CONFIG"],
            r"between 1 and the 2 of -n, got 3",
        ),
        (
            ["-n", "2", "--processes-after-failure", "0", "CONFIG"],
            r"between 1 and the 2 of -n, got 0",
        ),
        (["-n", "2", "nowhere.py"], r"CONFIG: nowhere\.py: there is no such file"),
        (["-n", "2"], r"Missing argument 'CONFIG'"),
        (
            ["-n", "2", "--hang-timeout", "-1", "CONFIG"],
            r"--hang-timeout: must be a finite number of seconds > 0, got -1",
        ),
        (
            ["-n", "2", "--hang-timeout", "0", "CONFIG"],
            r"must be a finite number of seconds > 0, got 0",
        ),
        (
            ["-n", "2", "--hang-timeout", "nan", "CONFIG"],
            r"must be a finite number of seconds > 0, got nan",
        ),
        (
            ["-n", "2", "--hang-timeout", "inf", "CONFIG"],
            r"must be a finite number of seconds > 0, got inf",
        ),
        (["-n", "2", "--max-restarts", "-1", "CONFIG"], r"--max-restarts.* 0"),
        (["-n", "2", "--gpus-each", "0", "CONFIG"], r"--gpus-each.* 1"),
        (["-n", "2", "--inject", "burn", "CONFIG"], r"--inject: fault 'burn': unknown kind"),
        (
            ["-n", "2", "--inject", "kill rank=2 step=1", "CONFIG"],
            r"rank=2 is not one of the processes, 0 to 1",
        ),
        (
            ["-n", "2", "--host", "192.0.2.1", "CONFIG"],
            r"'192.0.2.1' is not an address of this machine",
        ),
        (["-n", "2", "--host", "x" * 300, "CONFIG"], r"is not an address of this machine"),
        (["-n", "2", "--max-restart", "3", "CONFIG"], r"[Nn]o such option.*--max-restart"),
        (
            ["-n", "2", "CONFIG", "--max-restarts", "3"],
            r"--max-restarts is an option of launch and must come before",
        ),
        (["-n", "2", "CONFIG", "--hang-timeout=3"], r"--hang-timeout=3 is an option of launch"),
    ],
)
def test_bad_input_is_told(tmp_path, arguments, message):
    config = tmp_path / "job.toml"
    config.touch()
    reported = refuse([str(config) if word == "CONFIG" else word for word in arguments])
    assert re.search(message, reported)
    assert "\n" not in reported


def test_bad_input_takes_two_lines_and_no_traceback(tmp_path):
    result = run(tmp_path, n=0)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("ftrain: Invalid value for -n: must be at least 1, got 0\n")
    assert len(result.err.splitlines()) == 2


@pytest.mark.parametrize("config", ["configs/nowhere.toml", "configs"])
def test_a_config_that_is_not_there_is_told_as_by_train(config):
    reported = []
    for words in (["launch", "-n", "2"], ["train"]):
        result = run_command(*words, config, cwd=ROOT)
        assert (result.returncode, result.stdout) == (2, "")
        reported.append(result.stderr)
    assert reported[0] == reported[1]
    assert reported[0].startswith(f"ftrain: {config}: ")


def test_a_config_is_trained_and_its_mistake_ends_it(tmp_path):
    config = tmp_path / "job.toml"
    config.write_text('task = "digits"\nsteps = 1\n')
    result = run_command("launch", "-n", "1", config, "optimiser.name=adam", cwd=ROOT)
    assert result.returncode == 2
    assert "optimiser" in result.stderr
    assert "gave up: a restart would not help" in result.stdout


def test_lines_of_several_processes_are_whole(tmp_path):
    result = run(tmp_path, "steps=1", "action=flood", n=2)
    assert result.code == 0
    lines = [line for line in result.out.splitlines() if not line.startswith("launch: ")]
    for index, prefix in enumerate(("", "[1] ")):
        expected = [f"{prefix}{index}:{number} " + "x" * 60 for number in range(5_000)]
        assert [line for line in lines if line.startswith("[1] ") == bool(prefix)] == expected


def test_odd_output_is_passed_on(tmp_path):
    with Launcher(tmp_path, "steps=1", "action=print_oddly", n=2) as launcher:
        out, err = launcher.process.communicate(timeout=LIMIT)
    lines = out.split(b"\n")
    assert sorted(err.splitlines()) == [b"[1] to stderr", b"to stderr"]
    for prefix in (b"", b"[1] "):
        own = [
            line.removeprefix(prefix)
            for line in lines[:-2]
            if line.startswith(b"[1] ") == bool(prefix)
        ]
        assert own[:2] == [b"bad \xff\xfe bytes", b""]
        assert b"".join(own[2:]) == b"y" * 200_000 + b"no newline"
        assert all(len(line) <= 65536 for line in own)


def test_a_terminal_gets_a_line_that_moves_on(tmp_path):
    ours, theirs = pty.openpty()
    with Launcher(
        tmp_path, "steps=40", stdout=theirs, options=["--inject", "kill rank=1 step=20"]
    ) as launcher:
        os.close(theirs)
        shown = bytearray()
        while data := _read(ours):
            shown += data
        assert launcher.end().code == 0
    os.close(ours)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    assert re.search(r"\r\x1b\[2Kstep \d+/40  loss [\d.]+  2 processes\r", plain)
    assert re.search(r"  2 processes  1 restart\r", plain)
    assert re.search(r"\r\x1b\[2Klaunch: process 1 was killed by SIGKILL at step 19; ", plain)
    assert plain.endswith(" s\r\n")


def test_no_device_is_touched():
    code = "import sys, ftrain.launching, ftrain.cli.launch; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # on Linux: no process has the other side open
        return b""
