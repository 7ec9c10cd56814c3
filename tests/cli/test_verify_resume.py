"""ftrain verify-resume: it says yes to a run that can be resumed, and no to one that cannot."""

import re
import signal
import subprocess
import time

from command import environment, run, start, write_config


def test_a_run_that_resumes_bit_for_bit_is_proven_to(tmp_path):
    config = write_config(tmp_path, steps=300, every=10)
    done = run("verify-resume", config, "--kills", "4", "--directory", tmp_path / "proof")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same, bit for bit" in done.stdout
    assert "after 4 kills" in done.stdout
    rows = re.findall(r"^ +(\d+) +(\d+) +([\d,]+) +(\d+)  (inside|between|no)", done.stdout, re.MULTILINE)
    assert len(rows) == 5
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
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("verify-resume-*/straight/ledger.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("verify-resume-*"))
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"{tmp_path}/verify-resume" not in listed


def test_too_few_steps_for_the_kills_is_said(tmp_path):
    config = write_config(tmp_path, steps=2, every=1)
    done = run("verify-resume", config, "--kills", "50")
    assert done.returncode == 1
    assert "give it more steps, as steps=8" in done.stdout


def test_a_config_that_cannot_be_trained_is_a_mistake(tmp_path):
    config = write_config(tmp_path, steps=60, every=10)
    done = run("verify-resume", config, "optimizer.name=adan")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) <= 2
