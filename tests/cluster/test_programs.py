"""Users' programs under the launcher: the same Python in every process."""

import json
from pathlib import Path

import evaluating
import pytest
from command import run

PROGRAM = Path(__file__).with_name("iterating.py")
LONG = pytest.mark.campaign


@pytest.mark.parametrize(
    "counts",
    [pytest.param(("9", "9"), marks=LONG), ("9", "5"), pytest.param(("4", "9"), marks=LONG)],
)
def test_iterators_of_unequal_lengths_end_all_processes_at_the_same_step(tmp_path, counts):
    done = run("launch", "-n", "2", PROGRAM, tmp_path, *counts)
    assert done.returncode == 0, done.stdout + done.stderr
    reported = [
        line.removeprefix("[1] ") for line in done.stdout.splitlines() if "the data ended" in line
    ]
    reported = [line for line in reported if line[0].isdigit()]
    assert len(reported) == 2
    assert reported[0] == reported[1]
    assert reported[0].startswith(f"{min(map(int, counts))} the data ended [")


def test_a_pipeline_that_is_not_for_this_process_is_refused(tmp_path):
    done = run("launch", "-n", "2", PROGRAM, tmp_path, "9", "9", "pipeline")
    assert done.returncode == 1
    assert "yields part 0 of 1 of a batch, but this process needs part" in done.stderr


def test_an_evaluation_is_the_same_in_all_processes_and_in_one():
    done = run("launch", "-n", "2", "--max-restarts", "0", PROGRAM.with_name("evaluating.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("measured ")[2] for line in done.stdout.splitlines()]
    lines = [line for line in lines if line]
    assert len(lines) == 4
    assert all(lines.count(line) % 2 == 0 for line in lines)
    expected = evaluating.measure(evaluating.make_state())
    for line in lines:
        assert json.loads(line) == pytest.approx(expected, rel=1e-6)


@pytest.mark.campaign
def test_a_loop_that_hangs_is_found(tmp_path):
    program = PROGRAM.with_name("hanging.py")
    done = run("launch", "-n", "1", "--hang-timeout", "8", "--max-restarts", "0", program)
    assert done.returncode == 1
    assert "process 0 hung at step 3 (no sign of life for " in done.stdout
    assert "in Hanging" in done.stdout
    assert "hanging.py" in done.stderr, "its stack"


def test_processes_that_run_different_programs_are_told_apart():
    done = run("launch", "-n", "2", "--hang-timeout", "30", PROGRAM.with_name("differing.py"))
    assert done.returncode != 0
    assert "processes 0 and 1 compiled different programs for step 1: " in done.stderr
    assert "dense<2.0" in done.stderr
    assert "hung" not in done.stdout
    assert "restart 1" not in done.stdout


@pytest.mark.campaign
def test_one_loop_after_the_other_in_the_same_processes():
    done = run("launch", "-n", "2", "--max-restarts", "0", PROGRAM.with_name("repeating.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(line.endswith("all") for line in done.stdout.splitlines()) == 2


@pytest.mark.campaign
def test_what_hooks_remember_is_the_same_in_all_processes(tmp_path):
    done = run(
        "launch",
        "-n",
        "2",
        "--max-restarts",
        "0",
        PROGRAM.with_name("remembering.py"),
        tmp_path / "run",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(line.endswith("all") for line in done.stdout.splitlines()) == 2


def test_the_example_is_one_program_for_many_processes(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "processes.py"
    done = run("launch", "-n", "2", example, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("'w': Array(") == 1
    assert "launch: done: 500 steps on 2 processes" in done.stdout


@pytest.mark.campaign
def test_a_program_that_does_not_join_the_others_is_told_so(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "quickstart.py"
    done = run("launch", "-n", "2", example, cwd=tmp_path)
    assert done.returncode == 1
    assert (
        "this process was started as one of 2 (FTRAIN_CLUSTER), but the loop has no group"
        in done.stderr
    )
    assert "restart 1" not in done.stdout


@pytest.mark.campaign
def test_all_processes_refuse_a_run_that_was_trained_otherwise(tmp_path):
    def launch(*arguments):
        program = PROGRAM.with_name("resuming.py")
        return run(
            "launch", "-n", "2", "--max-restarts", "0", program, tmp_path / "run", *arguments
        )

    for steps in ("4", "6"):
        done = launch(steps, "0.01")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(f"ended at {steps}") == 2
    refused = launch("8", "0.02")
    assert refused.returncode != 0
    assert refused.stderr.count("RunMismatchError: ") >= 1
    assert "the optimizer differs" in refused.stderr
    assert "hung" not in refused.stdout
    again = launch("4", "0.02", "overwrite")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("ended at 4") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1"]
