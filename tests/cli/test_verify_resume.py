"""ftrain verify-resume: it says yes to a run that can be resumed, and no to one that cannot."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from command import environment, run, start, wait_until, write_config
from processes import HANDLED

from ftrain.cli import kill_test
from ftrain.cli.kill_test import open_group
from ftrain.cli.verify_resume import verify_resume

# A program that imitates `ftrain train` in step with one other, without jax. FIRST and DEED are its
# other actions: at first, and when the other is gone.
PRETENDER = """
import json, os, signal, sys, time
from pathlib import Path

index = json.loads(os.environ["FTRAIN_CLUSTER"])["task"]["index"]
home = Path(sys.argv[1])
FIRST
(home / "checkpoints" / "7.saving").mkdir(parents=True, exist_ok=True)
(home / f"pid-{index}.tmp").write_text(str(os.getpid()))
(home / f"pid-{index}.tmp").rename(home / f"pid-{index}")
while not (home / f"pid-{1 - index}").exists():
    time.sleep(0.002)
other = (home / f"pid-{1 - index}").read_text()
for step in range(100):
    if index == 0:
        with open(home / "ledger.jsonl", "a") as ledger:
            print(json.dumps({"step": step, "state": {}}), file=ledger)
    if home.name == "killed":
        time.sleep(0.01)
        if not Path(f"/proc/{other}").exists():
            DEED
            os._exit(75)
"""
STAY = (
    "signal.signal(signal.SIGABRT, signal.SIG_IGN); print('staying', flush=True); time.sleep(600)"
)


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.campaign)])
def test_a_run_that_resumes_bit_for_bit_is_proven_to(tmp_path, kills):
    config = write_config(tmp_path, steps=80 * kills, every=10)
    done = run("verify-resume", config, "--kills", f"{kills}", "--directory", tmp_path / "proof")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same, bit for bit" in done.stdout
    assert f"after {kills} kills" in done.stdout
    rows = re.findall(
        r"^ +(\d+) +(\d+) +([\d,]+) +(\d+)  (during|between|no)", done.stdout, re.MULTILINE
    )
    assert len(rows) == kills + 1
    assert rows[-1][4] == "no"
    assert any(int(row[1]) > 0 for row in rows), "some run was resumed from a checkpoint"


def test_a_run_that_does_not_is_found_out_with_step_and_leaf(tmp_path):
    """Its loss depends on the process it runs in."""
    config = write_config(tmp_path, steps=60, every=10)
    config.write_text(config.read_text().replace("regression:regression", "regression:forgetful"))
    done = run("verify-resume", config, "--kills", "2", "model.noise=0.0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"DIFFERENT: step \d+: state leaf (params|opt_state)/\S+", done.stdout)
    assert "both runs are kept in" in done.stdout


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    config = write_config(tmp_path, steps=100_000, every=100)
    process = start("verify-resume", config, env=environment() | {"TMPDIR": str(tmp_path)})
    wait_until(lambda: list(tmp_path.glob("verify-resume-*/straight/ledger.jsonl")))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("verify-resume-*"))
    assert not processes_of(tmp_path)


@pytest.mark.campaign
def test_too_few_steps_for_the_kills_is_said(tmp_path, monkeypatch, capsys):
    def be_too_late(self, group, *_):
        while group.is_complete:
            group.poll(0.01)
        return False

    for waiting in ("_wait_for_step", "_wait_for_save"):
        monkeypatch.setattr(kill_test.KillTest, waiting, be_too_late)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    with pytest.raises(typer.Exit) as ended:
        verify_resume(
            write_config(tmp_path, steps=2, every=1), kills=3, directory=tmp_path / "runs"
        )
    assert ended.value.exit_code == 1
    assert "the run ended after 0 of 3 kills, and 0 runs were resumed" in capsys.readouterr().out
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_config_that_cannot_be_trained_is_a_mistake(tmp_path):
    config = write_config(tmp_path, steps=60, every=10)
    done = run("verify-resume", config, "optimizer.name=adan")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) <= 2


@pytest.mark.campaign
def test_processes_that_train_together_are_killed_one_by_one(tmp_path):
    config = write_config(tmp_path, steps=200, every=10)
    done = run(
        "verify-resume",
        config,
        "--processes",
        "2",
        "--kills",
        "2",
        "--directory",
        tmp_path / "proof",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same, bit for bit" in done.stdout
    rows = re.findall(
        r"^ +\d+ +(\d+) +\d+ +\d+  (?:process (\d) (?:during|between)|no)",
        done.stdout,
        re.MULTILINE,
    )
    assert len(rows) == 3
    assert {rank for _, rank in rows[:-1]} == {"0", "1"}, "each of them was killed"
    assert int(rows[-1][0]) > 0, "the last one was resumed from a checkpoint"
    assert (
        "2 device(s) of 2 processes" in (tmp_path / "proof" / "straight" / "output.txt").read_text()
    )


@pytest.mark.campaign
def test_processes_that_train_together_end_when_the_command_is_killed(tmp_path):
    config = write_config(tmp_path, steps=100_000, every=100)
    process = start("verify-resume", config, "--processes", "2", "--directory", tmp_path / "proof")
    wait_until(lambda: (tmp_path / "proof" / "straight" / "ledger.jsonl").exists())
    trained = len(processes_of(tmp_path)) - 1
    process.kill()
    process.communicate()
    assert trained == 2
    wait_until(lambda: not processes_of(tmp_path))


@pytest.mark.campaign
def test_a_process_that_outlives_the_others_is_ended_and_named(tmp_path, pretend):
    out, _ = pretend(deed=STAY, patience=0.3)
    rank = int(re.findall(r"process (\d) during a save$", out, re.MULTILINE)[0])
    assert (
        f"HANGING: process {1 - rank} did not exit by itself within 0.3 s "
        f"after process {rank} was killed" in out
    )
    assert f"both runs are kept in {tmp_path / 'proof'}" in out
    assert "staying" in (tmp_path / "proof" / "killed" / "output.txt").read_text()


def test_a_process_that_ends_for_a_reason_of_its_own_is_named(pretend):
    out, _ = pretend(
        first="if (home / 'ledger.jsonl').exists(): sys.exit('once is enough')", deed="os._exit(9)"
    )
    assert re.search(
        r"process (0|1) during a save; process (?!\1)\d ended with exit code 9$",
        out,
        re.MULTILINE,
    )


def test_of_several_processes_the_one_that_failed_is_named(pretend):
    out, err = pretend(first="if index == 1: sys.exit('no data')", patience=0.3)
    assert "uninterrupted: " not in out
    assert (
        "training failed on several processes; "
        "process 1 failed before its first step with exit code 1; " in err
    )
    assert "; process 0 did not exit by itself:" in err
    assert "[1] no data" in err


def test_a_process_that_never_ends_after_the_others_is_named(pretend):
    _, err = pretend(first="if index == 1: (home / 'pid-1').touch(); time.sleep(600)", patience=0.3)
    assert "training failed on several processes; process 1 did not exit by itself:" in err


def test_of_a_group_that_is_left_by_an_exception_nobody_stays(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(600)", str(tmp_path)]

    def be_interrupted():
        with open_group(command, 3, tmp_path / "output.txt") as group:
            assert group.is_complete
            assert len(processes_of(tmp_path)) == 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert not processes_of(tmp_path)


def test_who_has_ended_before_was_not_killed(tmp_path):
    program = (
        "import json, os, sys; sys.exit(json.loads(os.environ['FTRAIN_CLUSTER'])['task']['index'])"
    )
    with open_group([sys.executable, "-c", program], 3, tmp_path / "output.txt") as group:
        assert group.wait(60) == []
        assert [group.kill_one(rank) for rank in range(3)] == [False] * 3
        assert [status.returncode for status in group.statuses] == [0, 1, 2]


@pytest.fixture
def pretend(tmp_path, monkeypatch, capsys):
    """Run the command on two pretenders: it fails and leaves none; return what it printed."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}

    def verify(
        *, first: str = "pass", deed: str = "pass", patience: float = 60.0
    ) -> tuple[str, str]:
        program = tmp_path / "pretender.py"
        program.write_text(PRETENDER.replace("FIRST", first).replace("DEED", deed))
        monkeypatch.setattr(
            kill_test,
            "train_command",
            lambda *given: [sys.executable, str(program), str(given[-1])],
        )
        monkeypatch.setattr(kill_test, "PATIENCE", patience)
        config = write_config(tmp_path, steps=100, every=10)
        with pytest.raises(typer.Exit) as ended:
            verify_resume(config, kills=2, processes=2, seed=0, directory=tmp_path / "proof")
        assert ended.value.exit_code == 1
        assert not processes_of(tmp_path)
        return capsys.readouterr()

    yield verify
    for number, handler in handlers.items():
        signal.signal(number, handler)


def processes_of(home: Path) -> list[str]:
    """The command lines of those that have a directory in it, but for this process."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.split(maxsplit=1) for line in listed.splitlines()]
    return [line[-1] for line in lines if str(home) in line[-1] and int(line[0]) != os.getpid()]
