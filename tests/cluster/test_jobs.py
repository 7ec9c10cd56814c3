"""Jobs of several real processes, killed, stopped, disturbed and resumed."""

import os
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest
from command import run, write_config
from jobs import Launched, final_state, launch, metrics_of, run_group

from ftrain.checkpoints import CheckpointManager, verify

LOGGED = ["log.every_steps=5", "summary.every_steps=5"]


def losses(run) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics_of(run) if "loss" in line}


MOMENTS = ("after a step", "during a save", "at any time")


def kill_one(job: Launched, rank: int, moment: str, seed: int) -> bool:
    """Kill a process at a random moment; return whether a save was pending."""
    checkpoints = job.run / "checkpoints"
    before = max(losses(job.run), default=0)

    def saves() -> set[str]:
        return {path.name for path in checkpoints.glob("*.saving*")}

    left = saves()
    if moment == "after a step":
        job.wait_for(lambda: max(losses(job.run), default=0) > before)
    elif moment == "during a save":
        job.wait_for(lambda: saves() - left)
    else:
        time.sleep(random.Random(seed).uniform(0, 8))
    members = job.wait_for(lambda: len(found := job.members()) == 3 and found)
    is_inside = bool(saves() - left)
    os.kill(members[rank], signal.SIGKILL)
    job.wait_for(lambda: members[rank] not in job.members().values())
    return is_inside


@pytest.mark.campaign
def test_a_job_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(tmp_path):
    arguments = [
        "steps=500",
        "data.batch_size=12",
        "checkpoint.every_steps=10",
        "evaluation.every_steps=1000",
        *LOGGED,
    ]
    code, out, err = launch(tmp_path / "straight", 3, *arguments)
    assert code == 0, out + err
    with Launched(tmp_path / "killed", 3, *arguments, options=["--max-restarts", "20"]) as job:
        inside = sum(
            kill_one(job, rank=kill % 3, moment=MOMENTS[(kill + kill // 3) % 3], seed=kill)
            for kill in range(10)
        )
        code, out, err = job.end()
    assert code == 0, out + err
    assert inside > 0
    assert "restart 10 of 20" in out
    assert final_state(tmp_path / "killed" / "run") == final_state(tmp_path / "straight" / "run")


@pytest.mark.campaign
def test_a_process_that_is_stopped_and_one_that_hangs_are_found(tmp_path):
    options = ["--hang-timeout", "6", "--inject", "freeze rank=1 step=25; hang rank=0 step=45"]
    code, out, err = launch(tmp_path, 2, options=options)
    assert code == 0, out + err
    frozen, hanging = re.findall(
        r"^launch: process (\d) hung (.*); restart \d of 10", out, re.MULTILINE
    )
    assert frozen[0] == "1"
    assert "it is stopped by a signal" in frozen[1]
    assert hanging[0] == "0"
    assert ", in Faults" in hanging[1]
    assert "in _hang" in out + err, "the stack of the process that hangs"
    assert "done: 60 steps on 2 processes" in out


def test_a_signal_to_one_process_stops_all_at_the_same_step(tmp_path):
    with Launched(tmp_path, 3, "steps=100000", "data.batch_size=12", *LOGGED, every=1000) as job:
        job.wait_for_step(20)
        os.kill(job.members()[1], signal.SIGTERM)
        code, out, err = job.end()
    assert code == 0, out + err
    assert "SIGTERM at process 1" in out
    steps = CheckpointManager(job.run / "checkpoints").steps()
    assert f"stopped at step {steps[-1]} of 100000" in out
    assert verify(job.run / "checkpoints" / str(steps[-1])) == []
    assert "restart" not in out


@pytest.mark.campaign
def test_ctrl_c_at_the_launcher_saves_and_stops(tmp_path):
    with Launched(tmp_path, 2, "steps=100000", *LOGGED, every=1000) as job:
        job.wait_for_step(20)
        job.process.send_signal(signal.SIGINT)
        code, out, err = job.end()
    assert code == 0, out + err
    assert CheckpointManager(job.run / "checkpoints").steps()


@pytest.mark.campaign
def test_a_job_goes_on_with_fewer_processes_and_the_same_batches(tmp_path):
    arguments = ["model.noise=0", "steps=30", *LOGGED]
    code, out, err = launch(tmp_path / "four", 4, *arguments, every=30)
    assert code == 0, out + err
    on = ["model.noise=0", "steps=60", *LOGGED]
    shutil.copytree(tmp_path / "four", tmp_path / "one")
    for name, count in (("four", 2), ("one", 1)):
        # the same run with more steps: the number of steps is all that has changed
        arguments = [*on, "--accept-changes"]
        code, out, err = launch(tmp_path / name, count, *arguments, every=30)
        assert code == 0, out + err
        assert "resumed at step 30" in out
    code, out, err = launch(tmp_path / "alone", 1, *on, every=30)
    assert code == 0, out + err
    expected = losses(tmp_path / "alone" / "run")
    for name in ("four", "one"):
        found = losses(tmp_path / name / "run")
        assert list(found) == list(expected)
        np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


@pytest.mark.campaign
def test_going_on_with_fewer_after_a_failure(tmp_path):
    options = ["--processes-after-failure", "1", "--inject", "kill rank=1 step=30"]
    code, out, err = launch(tmp_path, 2, options=options)
    assert code == 0, out + err
    assert "done: 60 steps on 1 process" in out


@pytest.mark.campaign
def test_a_nan_on_one_process_ends_the_job_and_is_not_tried_again(tmp_path):
    code, out, err = launch(tmp_path, 2, options=["--inject", "nan rank=1 step=30"])
    assert code == 1
    assert "is nan at step 30" in out + err
    assert "restart 1" not in out
    assert CheckpointManager(tmp_path / "run" / "checkpoints").steps() == [20]


@pytest.mark.campaign
def test_an_exception_on_one_process_ends_all_and_is_tried_once_more(tmp_path):
    code, out, err = launch(tmp_path, 2, options=["--inject", "exit rank=1 step=30 code=3"])
    assert code == 0, out + err
    assert "process 1 failed at step" in out
    assert "exit code 3" in out


@pytest.mark.campaign
def test_a_disk_that_is_full_ends_the_job_and_what_was_saved_stays(tmp_path):
    code, out, err = launch(
        tmp_path, 2, options=["--max-restarts", "0", "--inject", "full_disk step=55"]
    )
    assert code == 1, out + err
    assert "File too large" in out + err
    assert 20 in CheckpointManager(tmp_path / "run" / "checkpoints").steps()
    assert verify(tmp_path / "run" / "checkpoints" / "20") == []


@pytest.mark.campaign
def test_saving_by_the_clock_is_agreed_on(tmp_path):
    config = write_config(tmp_path, steps=3000, every=1000)
    config.write_text(
        config.read_text().replace(
            "[checkpoint]\nevery_steps = 1000", "[checkpoint]\nevery_secs = 0.5"
        )
    )
    reported = run_group(config, 2, f"run.directory={tmp_path / 'run'}", "checkpoint.keep=100")
    assert [code for code, _, _ in reported] == [0, 0], reported
    steps = CheckpointManager(tmp_path / "run" / "checkpoints").steps()
    assert len(steps) > 2
    assert all(verify(tmp_path / "run" / "checkpoints" / str(step)) == [] for step in steps)
    assert (tmp_path / "run" / "logs" / "process_1.log").read_text()


@pytest.mark.parametrize(
    "parallel", ["shard_map", pytest.param("pmap", marks=pytest.mark.campaign)]
)
def test_every_way_to_spread_a_step_gives_the_same_numbers(tmp_path, parallel):
    config = write_config(tmp_path, steps=30, every=30)
    found = {}
    for way in ("jit", parallel):
        run = tmp_path / way
        reported = run_group(
            config, 2, "model.noise=0", f"step.parallel={way}", f"run.directory={run}", *LOGGED
        )
        assert [code for code, _, _ in reported] == [0, 0], reported
        found[way] = losses(run)
    assert list(found["jit"]) == list(found[parallel])
    np.testing.assert_allclose(
        list(found["jit"].values()), list(found[parallel].values()), rtol=1e-6
    )


@pytest.mark.campaign
def test_a_late_process_is_left_out(tmp_path):
    arguments = ["step.parallel=shard_map", "sync_replicas.replicas_to_aggregate=1", *LOGGED]
    arguments += [
        "sync_replicas.straggler_timeout=0.3",
        "sync_replicas.total_num_replicas=2",
        "summary.every_steps=1",
    ]
    late = ["--inject", "slow_data rank=1 step=350 secs=6"]  # far ahead, because much is read ahead
    code, out, err = launch(tmp_path, 2, *arguments, "steps=600", every=600, options=late)
    assert code == 0, out + err
    counts = [line["replicas"] for line in metrics_of(tmp_path / "run") if "replicas" in line]
    assert set(counts) == {1.0, 2.0}
    assert counts.count(1.0) < 25


@pytest.mark.campaign
def test_a_state_in_parts_is_resumed_whole_and_evaluated_anywhere(tmp_path):
    arguments = [
        "mesh.fsdp=2",
        "sharding.min_size=1",
        "sharding.rules=[{leaf='w', axes=['']}]",
        "model.noise=0",
    ]
    code, out, err = launch(tmp_path / "parts", 2, *arguments)
    assert code == 0, out + err
    done = run("eval", tmp_path / "parts" / "run")
    assert done.returncode == 0, done.stderr
    code, out, err = launch(tmp_path / "parts", 1, "model.noise=0", "steps=80", "--accept-changes")
    assert code == 0, out + err
    assert "resumed at step 60" in out
    code, out, err = launch(tmp_path / "whole", 1, "model.noise=0", "steps=80")
    assert code == 0, out + err
    found, expected = (metrics_of(tmp_path / name / "run")[-1] for name in ("parts", "whole"))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_signal_while_the_processes_meet_is_not_lost(tmp_path):
    with Launched(tmp_path, 2, "steps=100000", *LOGGED, every=1000) as job:
        job.wait_for(lambda: len(job.members()) == 2)
        job.wait_for(lambda: (job.run / "run.lock").exists())
        job.process.send_signal(signal.SIGTERM)
        code, out, err = job.end()
    assert code == 0, out + err
    assert "of 100000 (SIGTERM" in out


def test_fewer_processes_after_a_failure_are_checked_before_the_first_step(tmp_path):
    code, out, err = launch(tmp_path, 4, options=["--processes-after-failure", "3"])
    assert code == 2, out + err
    problem = "a restart with 3 processes of 1 device(s) would fail: batch_size 8"
    assert f"--processes-after-failure 3: {problem}" in err
    assert "restart 1" not in out
    assert not metrics_of(tmp_path / "run")
