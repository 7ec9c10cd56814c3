"""Groups of real processes that fail in real ways, and restart or give up."""

import json
import re
import signal

import pytest
from launched import Launcher, run

HANGS_SOON = ("--hang-timeout", "1.5")  # seconds, in which a process must also have started


def test_all_goes_well(tmp_path):
    result = run(tmp_path, "steps=12", n=3)
    assert (result.code, result.err) == (0, "")
    assert re.fullmatch(r"launch: done: 12 steps on 3 processes in \d+\.\d s\n", result.out)


def test_what_a_process_is_given(tmp_path):
    result = run(
        tmp_path,
        "steps=2",
        "action=show_environment",
        options=["--gpus-each", "2", "--hang-timeout", "77.5"],
    )
    assert result.code == 0
    facts = [json.loads((tmp_path / f"attempt-0/facts-{index}").read_text()) for index in range(2)]
    clusters = [json.loads(each["given"].pop("FTRAIN_CLUSTER")) for each in facts]
    assert [cluster["task"] for cluster in clusters] == [
        {"type": "worker", "index": index} for index in range(2)
    ]
    assert clusters[0]["cluster"] == clusters[1]["cluster"]
    assert all(
        re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in clusters[0]["cluster"]["worker"]
    )
    (token,) = {each["given"].pop("FTRAIN_JOB_TOKEN") for each in facts}
    assert re.fullmatch("[0-9a-f]{64}", token)
    for each, gpus in zip(facts, ("0,1", "2,3"), strict=True):
        own = {int(each["given"].pop(name)) for name in ("FTRAIN_PROGRESS", "FTRAIN_LIFELINE")}
        assert len(own) == 2
        assert set(each["descriptors"]) == {0, 1, 2} | own
        assert each["session"] == each["pid"]
        assert each["input"] == "/dev/null"
        assert int(each["given"].pop("FTRAIN_LAUNCHER")) > 1
        rest = {
            "FTRAIN_ATTEMPT": "0",
            "FTRAIN_HANG_TIMEOUT": "77.5",
            "JAX_CUDA_VISIBLE_DEVICES": gpus,
        }
        assert each["given"] == rest


def test_one_is_killed_and_all_go_on_from_the_last_save(tmp_path):
    result = run(
        tmp_path, "action=show_environment", n=3, options=["--inject", "kill rank=1 step=8"]
    )
    assert result.code == 0
    reported, summary, outcome = result.own
    assert reported == "process 1 was killed by SIGKILL at step 7; restart 1 of 10"
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    what = "process 1 was killed by SIGKILL at step 7"
    assert re.fullmatch(rf"{when}: {what}; resumed from step 5, restarted in \d+\.\d s", summary)
    assert outcome.startswith("done: 20 steps on 3 processes")
    assert not (tmp_path / "attempt-1/4-0").exists()
    given = [
        json.loads((tmp_path / f"attempt-{attempt}/facts-0").read_text())["given"]
        for attempt in range(2)
    ]
    assert [each["FTRAIN_ATTEMPT"] for each in given] == ["0", "1"]
    assert given[0]["FTRAIN_INJECT"] == given[1]["FTRAIN_INJECT"] == "kill rank=1 step=8"
    assert given[0]["FTRAIN_CLUSTER"] != given[1]["FTRAIN_CLUSTER"]


def test_somebody_kills_them_again_and_again(tmp_path):
    with Launcher(tmp_path, "steps=60") as launcher:
        for attempt, (step, index) in enumerate([(8, 0), (21, 1), (34, 0)]):
            launcher.wait_for_step(step, attempt)
            launcher.signal_one(index, signal.SIGKILL, attempt)
        result = launcher.end()
    assert result.code == 0
    reported = [re.sub(r"step \d+; .*", "step", line) for line in result.own[:3]]
    assert reported == [f"process {index} was killed by SIGKILL at step" for index in (0, 1, 0)]
    assert all("restarted in" in line for line in result.own[3:6])
    assert result.own[6].startswith("done: 60 steps")


def test_fewer_after_a_failure(tmp_path):
    options = ["--inject", "exit rank=0 step=8 code=3", "--processes-after-failure", "1"]
    result = run(tmp_path, n=3, options=options)
    assert result.code == 0
    assert result.own[0] == "process 0 failed at step 7 with exit code 3; restart 1 of 10 with 1"
    assert result.own[-1].startswith("done: 20 steps on 1 process in")


@pytest.mark.parametrize(
    ("fault", "story"),
    [
        pytest.param(
            "freeze rank=2 step=8",
            r"process 2 hung at step 7 "
            r"\(it is stopped by a signal, no sign of life for [12]\.\d s\)",
            marks=pytest.mark.campaign,
        ),
        ("hang rank=1 step=8", r"process 1 hung at step 7 \(no sign of life for [12]\.\d s, .*\)"),
    ],
)
def test_one_hangs_while_the_others_wait_for_it(tmp_path, fault, story):
    result = run(tmp_path, "action=dump_on_abort", n=3, options=[*HANGS_SOON, "--inject", fault])
    assert result.code == 0
    shown = re.search(r"^\[1\] .*File .*pretender\.py.* in run$", result.err, re.MULTILINE)
    # The stacks show where it hung; a stopped process cannot write its stacks.
    assert bool(shown) == fault.startswith("hang")
    assert re.match(story, result.own[0])
    assert result.own[-1].startswith("done: 20 steps")


def test_the_watchdogs_of_the_others_are_quicker(tmp_path):
    result = run(tmp_path, "action=find_itself_hanging", n=3, options=["--hang-timeout", "20"])
    assert result.code == 0
    assert result.own[0].startswith("process 1 hung at step 2 (no sign of life for ")


@pytest.mark.campaign
def test_repeating_a_step_is_no_sign_of_life(tmp_path):
    result = run(tmp_path, "action=keep_talking", options=HANGS_SOON)
    assert result.code == 0
    assert re.match(r"process [01] hung at step 3 ", result.own[0])  # both have reached it


def test_being_busy_is_a_sign_of_life(tmp_path):
    result = run(tmp_path, "steps=2", "action=be_busy", options=HANGS_SOON)
    assert (result.code, len(result.own)) == (0, 1)


@pytest.mark.campaign
def test_one_that_is_done_and_does_not_end(tmp_path):
    result = run(tmp_path, "steps=10", "action=stay", options=HANGS_SOON)
    assert result.code == 0
    assert result.own[0].startswith("process 0 hung at step 10 (no sign of life for ")


def test_what_is_no_message_is_not_heard(tmp_path):
    result = run(tmp_path, "steps=5", "action=lie")
    assert (result.code, len(result.own)) == (0, 1)


def test_a_program_that_says_nothing_at_all(tmp_path):
    program = tmp_path / "quiet.py"
    program.write_text("import sys; print('ran with', *sys.argv[2:])")
    result = run(tmp_path, "--lr", "-n", "3", n=1, program=program)
    assert result.code == 0
    assert result.out.splitlines()[0] == "ran with --lr -n 3"
    assert result.own[0].startswith("done: 1 process in")


def test_a_mistake_is_not_repeated(tmp_path):
    result = run(tmp_path, "action=make_a_mistake")
    assert result.code == 2
    assert result.err.removeprefix("[1] ") == "ftrain: the config is wrong\n", (
        "once, whoever says it"
    )
    assert re.search(r": process \d failed before its first step with exit code 2$", result.own[0])
    assert re.fullmatch(r"gave up: a restart would not help; in \d+\.\d s", result.own[1])


def test_a_failure_for_which_a_restart_would_not_help(tmp_path):
    result = run(tmp_path, n=3, options=["--inject", "nan rank=1 step=8"])
    assert result.code == 1
    assert result.own[0].endswith("process 1 failed at step 7: NonFiniteError: loss is nan")
    assert result.own[1].startswith("gave up: a restart would not help")


def test_the_same_exception_twice(tmp_path):
    result = run(tmp_path, "action=always_raise")
    assert result.code == 3
    assert len(list(tmp_path.glob("attempt-*"))) == 2
    assert re.match(
        r"gave up: it did not get beyond step [67], so a restart would repeat it",
        result.own[-1],
    )


@pytest.mark.campaign
def test_deaths_that_lead_nowhere(tmp_path):
    result = run(tmp_path, "action=always_die")
    assert result.code == 1
    assert len(list(tmp_path.glob("attempt-*"))) == 5
    assert result.own[0] == "process 0 was killed by SIGKILL before its first step; restart 1 of 10"
    assert result.own[1].endswith("; restart 2 of 10 in 1 s")
    assert re.search(
        r"; (restarted|resumed from the start), but reached no new step$", result.own[4]
    )
    assert result.own[-1].startswith("gave up: 5 attempts in a row made no progress")


def test_no_restart_is_allowed(tmp_path):
    result = run(tmp_path, options=["--max-restarts", "0", "--inject", "exit rank=1 step=8 code=9"])
    assert result.code == 9
    assert result.own[-1].startswith("gave up: restarts are disabled")


@pytest.mark.campaign
def test_those_that_do_not_notice_are_ended(tmp_path):
    """Process 1 does not need process 0, and is not notified that it was lost."""
    program = tmp_path / "alone.py"
    program.write_text(
        "import json, os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if json.loads(os.environ['FTRAIN_CLUSTER'])['task']['index'] == 0: sys.exit(4)\n"
        "time.sleep(600)\n"
    )
    result = run(tmp_path, program=program)
    assert result.code == 4
    assert "process 0 failed before its first step with exit code 4" in result.own[0]
