"""Signals to the supervisor and to its processes; no process is left afterwards."""

import os
import re
import signal
import time

import pytest
from launched import Launcher, living, run, wait_until

FOREVER = ("steps=1000000", "pace=0.005")
ASKING = "asking 2 processes to save and stop; send it again to stop at once"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_has_them_save_and_stop(tmp_path, number):
    with Launcher(tmp_path, *FOREVER) as launcher:
        launcher.wait_for_step(7)
        launcher.signal(number)
        result = launcher.end()
    assert result.code == 0
    assert result.own[0] == f"{number.name}: {ASKING}"
    stopped = re.fullmatch(
        rf"stopped by {number.name} at step (\d+) of 1,000,000 in \d+\.\d s", result.own[1]
    )
    assert stopped
    assert int((tmp_path / "saved").read_text()) == int(stopped[1])


def test_the_second_signal_ends_them_at_once(tmp_path):
    with Launcher(tmp_path, *FOREVER, "action=ignore_sigterm") as launcher:
        launcher.wait_for_step(3)
        launcher.signal(signal.SIGINT)
        launcher.wait_for_step(launcher.step() + 20)  # they continue
        launcher.signal(signal.SIGINT)
        result = launcher.end()
    assert result.code == 128 + signal.SIGINT
    assert result.own[0] == f"SIGINT: {ASKING}"
    assert result.own[1] == "SIGINT: ending 2 processes at once"
    assert "stopped by SIGINT at step" in result.own[2]


@pytest.mark.campaign
def test_one_that_hangs_while_it_stops(tmp_path):
    with Launcher(
        tmp_path, *FOREVER, "action=hang_on_sigterm", options=["--hang-timeout", "1.5"]
    ) as launcher:
        launcher.wait_for_step(7)
        launcher.signal(signal.SIGTERM)
        result = launcher.end()
    assert result.code == 1
    assert re.search(r"process 0 hung at step", result.own[1])
    assert "but with a failure" in result.own[2]
    assert not (tmp_path / "attempt-1").exists()


def test_processes_that_are_not_ready_for_it(tmp_path):
    with Launcher(tmp_path, *FOREVER, "action=die_of_sigterm") as launcher:
        launcher.wait_for_step(2)
        launcher.signal(signal.SIGTERM)
        result = launcher.end()
    assert result.code == 128 + signal.SIGTERM
    assert re.search(
        r"stopped by SIGTERM at step \d+ of 1,000,000: 2 processes ended without saving",
        result.own[1],
    )


def test_a_signal_while_it_waits_to_restart(tmp_path):
    with Launcher(tmp_path, "action=always_die") as launcher:
        wait_until(lambda: (tmp_path / "attempt-1").exists())
        while b"in 1 s" not in launcher.process.stdout.readline():
            pass
        launcher.signal(signal.SIGTERM)
        result = launcher.end()
    assert result.code == 0
    assert not (tmp_path / "attempt-2").exists()
    assert result.own[-1].startswith("stopped by SIGTERM ")


def test_somebody_asks_one_process_to_stop(tmp_path):
    with Launcher(tmp_path, *FOREVER, n=3) as launcher:
        launcher.wait_for_step(7)
        launcher.signal_one(1, signal.SIGTERM)
        result = launcher.end()
    assert result.code == 0
    assert len(result.own) == 1
    assert re.match(r"stopped by SIGTERM at step \d+ of 1,000,000 in", result.own[0])


def test_somebody_kills_one_with_sigterm_that_does_not_handle_it(tmp_path):
    with Launcher(tmp_path, "steps=40", "action=die_of_sigterm") as launcher:
        launcher.wait_for_step(7)
        launcher.signal_one(1, signal.SIGTERM)
        result = launcher.end()
    assert result.code == 0
    assert result.own[0].startswith("process 1 was killed by SIGTERM at step")
    assert result.own[-1].startswith("done: 40 steps")


def test_children_of_the_processes_go_with_them(tmp_path):
    result = run(tmp_path, "action=raise_grandchildren", options=["--inject", "kill rank=1 step=3"])
    assert result.code == 0
    assert len(result.own) == 3
    assert len(list(tmp_path.glob("attempt-*/grandchild-*"))) == 8  # and none of them is alive


def test_children_go_when_all_are_ended_at_once(tmp_path):
    with Launcher(
        tmp_path, *FOREVER, "action=raise_grandchildren", "action=ignore_sigterm"
    ) as launcher:
        launcher.wait_for_step(2)
        assert len(living(tmp_path)) >= 7
        launcher.signal(signal.SIGTERM)
        launcher.signal(signal.SIGINT)
        assert launcher.end().code in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def test_the_supervisor_itself_is_killed(tmp_path):
    with Launcher(tmp_path, *FOREVER, n=3) as launcher:
        launcher.wait_for_step(3)
        launcher.process.kill()
        launcher.process.wait()
        wait_until(lambda: not living(tmp_path))


@pytest.mark.campaign
def test_the_supervisor_is_held_for_longer_than_a_process_may_be_silent(tmp_path):
    with Launcher(tmp_path, *FOREVER, options=["--hang-timeout", "1.5"]) as launcher:
        launcher.wait_for_step(3)
        launcher.signal(signal.SIGSTOP)
        launcher.signal_one(0, signal.SIGSTOP)  # so that it is silent, too
        time.sleep(2)  # the test is about the passing of time
        launcher.signal_one(0, signal.SIGCONT)
        launcher.signal(signal.SIGCONT)
        launcher.wait_for_step(launcher.step() + 20)
        launcher.signal(signal.SIGTERM)
        result = launcher.end()
    assert (result.code, len(result.own)) == (0, 2)


def test_a_terminal_that_is_gone_ends_nothing(tmp_path):
    reading, writing = os.pipe()
    with Launcher(tmp_path, "steps=30", "action=flood", stdout=writing) as launcher:
        os.close(writing)
        os.close(reading)
        assert launcher.end().code == 0


def test_one_that_is_stopped_does_not_outlive_the_launcher(tmp_path):
    with Launcher(tmp_path, *FOREVER, "action=report") as launcher:
        launcher.wait_for_step(3)
        launcher.signal_one(1, signal.SIGSTOP)
        launcher.signal(signal.SIGKILL)
        wait_until(lambda: not living(tmp_path))
