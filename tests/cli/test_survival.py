"""Real processes that are killed: a resumed run ends where an uninterrupted one would have."""

import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from command import environment, run, start, wait_until, write_config
from processes import start_process

from ftrain.checkpoints import CheckpointManager
from ftrain.config import build, load, plan
from ftrain.summaries import read_metrics

KILLS = 10


def final_state(config, home, steps):
    job = build(plan(load(config)), directory=home)
    state = CheckpointManager(home / "checkpoints").restore(like=job.initial_state(), step=steps)
    return [
        np.asarray(leaf)
        for leaf in jax.tree.leaves(state.replace(rng=jax.random.key_data(state.rng)))
    ]


def wait_for_training(process) -> None:
    for line in process.stdout:
        if " parameters, " in line:  # said just before the first step
            return
    raise AssertionError(f"the run ended before it trained: {process.stderr.read()}")


def has_metrics(home) -> bool:
    """Whether the run has taken steps, and written so."""
    path = home / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


@pytest.mark.campaign
def test_killed_at_random_moments_it_ends_bit_for_bit_the_same(tmp_path):
    steps = 12_000
    every = 150
    config = write_config(tmp_path, steps=steps, every=every)
    assert run("train", config, f"run.directory={tmp_path / 'whole'}").returncode == 0
    killed = tmp_path / "killed"
    seed = random.Random(0)
    manager = CheckpointManager(killed / "checkpoints")
    latest = [0]
    for _ in range(KILLS):
        process = start("train", config, f"run.directory={killed}")
        wait_for_training(process)
        further = latest[-1] + seed.choice((0, 1, 2, 4)) * every
        wait_until(lambda further=further: (manager.latest() or 0) >= further)
        time.sleep(seed.uniform(0.0, 0.05))  # so that it is sometimes in the middle of a save
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, (
            f"done after kills at {latest}: give it more steps"
        )
        latest.append(manager.latest() or 0)
    assert latest == sorted(latest)
    assert latest[-1] > 0

    last = run("train", config, f"run.directory={killed}")
    assert last.returncode == 0, last.stderr
    whole, resumed = (
        final_state(config, tmp_path / "whole", steps),
        final_state(config, killed, steps),
    )
    for a, b in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(a, b)

    def losses(home):
        return {
            line["step"]: line["loss"]
            for line in read_metrics(home / "metrics.jsonl")
            if "loss" in line
        }

    assert losses(tmp_path / "whole") == losses(killed)


def interrupt(tmp_path, number):
    config = write_config(tmp_path, steps=10_000_000, every=10_000_000)
    home = tmp_path / "run"
    process = start("train", config, f"run.directory={home}")
    wait_for_training(process)
    wait_until(lambda: has_metrics(home))
    process.send_signal(number)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert f"{signal.Signals(number).name}: saving and stopping" in err
    assert "Traceback" not in err
    step = CheckpointManager(home / "checkpoints").latest()
    assert step
    assert f"stopped at step {step} of 10000000 ({signal.Signals(number).name})" in out
    assert "the same command resumes there" in out


def test_ctrl_c_saves_and_stops(tmp_path):
    interrupt(tmp_path, signal.SIGINT)


def test_sigterm_saves_and_stops(tmp_path):
    interrupt(tmp_path, signal.SIGTERM)


def test_a_second_signal_stops_at_once(tmp_path):
    config = write_config(tmp_path, steps=10_000_000, every=10_000_000)
    home = tmp_path / "run"
    process = start("train", config, f"run.directory={home}")
    wait_for_training(process)
    wait_until(lambda: has_metrics(home))
    process.send_signal(
        signal.SIGSTOP
    )  # both signals are waiting when it wakes, so none can come too late
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=240)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert "send it again to stop at once" in err


@pytest.mark.campaign
def test_a_second_signal_does_not_wait_for_the_device(tmp_path):
    config = write_config(tmp_path, steps=1000, every=1000)
    process = start(
        "train", config, "task=regression:slow", "model={}", f"run.directory={tmp_path / 'run'}"
    )
    wait_for_training(process)
    time.sleep(3)  # it is compiling or in its first step, which takes many minutes
    process.send_signal(signal.SIGINT)
    said = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=240)
    assert "SIGINT: saving and stopping" in said
    assert process.returncode == 128 + signal.SIGINT


def test_a_listener_that_went_away_does_not_cost_the_checkpoint(tmp_path):
    config = write_config(tmp_path, steps=10_000_000, every=10_000_000)
    home = tmp_path / "run"
    process = start("train", config, f"run.directory={home}", "log.every_steps=100")
    wait_for_training(process)
    process.stdout.close()
    process.stderr.close()
    wait_until(lambda: has_metrics(home))
    process.send_signal(signal.SIGINT)
    process.wait(240)
    assert CheckpointManager(home / "checkpoints").latest()


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path):
    """As SIGINT is in the background of a script."""
    config = write_config(tmp_path, steps=10_000_000, every=10_000_000)
    home = tmp_path / "run"
    ignoring = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    ignoring += "os.execv(sys.argv[1], sys.argv[1:])"
    command = [
        sys.executable,
        "-c",
        ignoring,
        sys.executable,
        "-m",
        "ftrain",
        "train",
        config,
        f"run.directory={home}",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = start_process(command, env=environment(), **pipes)
    wait_for_training(process)
    wait_until(lambda: has_metrics(home))
    for _ in range(3):
        process.send_signal(signal.SIGINT)
    size = (home / "metrics.jsonl").stat().st_size
    wait_until(lambda: (home / "metrics.jsonl").stat().st_size > size)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0
    assert "SIGINT: ignored, as the process was started that way; SIGTERM stops the run" in err
    assert "SIGTERM: saving and stopping" in err
