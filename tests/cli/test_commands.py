import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT, environment, run, start, write_config

import ftrain


def test_help_and_version_do_not_import_jax():
    code = (
        "import sys\n"
        "from ftrain.cli import main\n"
        "sys.argv = ['ftrain', sys.argv[1]]\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "names = {'jax', 'numpy', 'optax', 'orbax', 'pydantic', 'rich', 'tensorboard'}\n"
        "heavy = names & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for option, expected in (("--help", "train"), ("--version", f"ftrain {ftrain.__version__}")):
        done = subprocess.run(
            [sys.executable, "-c", code, option], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_train_resume_eval_and_a_changed_config(tmp_path):
    config = write_config(tmp_path, steps=60, every=20)
    home = tmp_path / "run"
    done = run("train", config, f"run.directory={home}", "log.every_steps=20")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (
        lines[0] == "regression:regression: 4 parameters, 64 examples, 60 steps of 8, 1 device(s); "
        f"in {home}"
    )
    assert re.fullmatch(r"first step after \d+\.\d s", lines[1])
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(":")[0] for line in steps] == ["step 20", "step 40", "step 60"]
    assert "eval/distance" in steps[1]
    assert re.search(f"tensorboard --logdir {home}", done.stdout)
    assert sorted(path.name.split(".")[0] for path in home.iterdir()) == [
        "checkpoints",
        "config",
        "data",
        "events",
        "metrics",
        "run",
    ]

    again = run("train", config, f"run.directory={home}", "log.every_steps=20")
    assert again.returncode == 0
    assert "all 60 steps were taken before" in again.stdout

    evaluated = run("eval", home)
    assert evaluated.returncode == 0, evaluated.stderr
    assert evaluated.stdout.startswith("step 60: eval/distance ")
    assert run("eval", home, "--step", "40").stdout.startswith("step 40: ")

    changed = run("train", config, f"run.directory={home}", "log.every_steps=20", "steps=80")
    assert changed.returncode == 2
    assert "steps was 60, now 80" in changed.stderr
    assert len(changed.stderr.splitlines()) == 2

    longer = run(
        "train",
        config,
        f"run.directory={home}",
        "log.every_steps=20",
        "steps=80",
        "--accept-changes",
    )
    assert longer.returncode == 0
    assert "resumed at step 60" in longer.stdout
    assert "done: 20 steps" in longer.stdout


@pytest.mark.campaign
def test_compiled_programs_are_cached_unless_jax_is_told_otherwise(tmp_path):
    config = write_config(tmp_path, steps=5, every=5)
    elsewhere = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert (
        run(
            "train", config, f"run.directory={tmp_path / 'a'}", env=environment() | elsewhere
        ).returncode
        == 0
    )
    assert any((tmp_path / "cache" / "ftrain" / "jax").iterdir())
    told = {
        "XDG_CACHE_HOME": str(tmp_path / "no"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "told"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    assert (
        run("train", config, f"run.directory={tmp_path / 'b'}", env=environment() | told).returncode
        == 0
    )
    assert any((tmp_path / "told").iterdir())
    assert not (tmp_path / "no").exists()


def test_check_says_what_a_config_would_do_and_writes_nothing(tmp_path):
    done = run("check", write_config(tmp_path, steps=60, every=20), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for fact in (
        "4 in 2 leaves",
        "x float32[8, 3], y float32[8]",
        "7.5 epochs",
        "good; train it with: ftrain train",
    ):
        assert fact in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_schema_is_json():
    done = run("schema")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["title"] == "ftrain config"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "nowhere.toml"], "nowhere.toml: there is no such file"),
        (["train", "job.toml", "data.batchsize=3"], "did you mean batch_size?"),
        (["train", "job.toml", "run.directory=job.toml/run"], "job.toml/run cannot be written"),
        (["train", "job.toml", "task=digit"], "did you mean digits?"),
        (
            ["check", "job.toml", "data.batch_size=65"],
            "larger than the data, which has 64 examples",
        ),
        (["eval", "nothing"], "nothing/config.toml: there is no such file; RUN is a directory"),
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument 'CONFIG'"),
        (["train", "job.toml", "--fast"], "No such option"),
    ],
)
def test_a_users_mistake_is_two_lines_at_most_and_exit_code_two(tmp_path, arguments, expected):
    write_config(tmp_path, steps=60, every=20)
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stderr.startswith("ftrain: ")
    assert len(done.stderr.splitlines()) <= 2
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_a_damaged_config_in_the_run_directory_loses_nothing(tmp_path):
    config = write_config(tmp_path, steps=20, every=10)
    home = tmp_path / "run"
    assert run("train", config, f"run.directory={home}").returncode == 0
    (home / "config.toml").write_text("task = = 1")
    before = sorted(str(path) for path in home.rglob("*"))
    done = run("train", config, f"run.directory={home}")
    assert done.returncode == 2
    assert "run/config.toml: is not valid TOML" in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert sorted(str(path) for path in home.rglob("*")) == before


def test_a_change_that_does_not_fit_the_checkpoint_changes_nothing(tmp_path):
    config = write_config(tmp_path, steps=20, every=10)
    home = tmp_path / "run"
    assert run("train", config, f"run.directory={home}").returncode == 0
    before = (home / "config.toml").read_text()
    other = "optimizer={name='gradient_descent', learning_rate=0.1}"
    done = run("train", config, f"run.directory={home}", other, "--accept-changes")
    assert done.returncode == 2
    assert "checkpoints/20 does not fit: leaf opt_state/slots/m/b is not expected" in done.stderr
    assert (home / "config.toml").read_text() == before
    assert run("eval", home).returncode == 0


def test_a_step_that_cannot_be_traced_is_told_before_anything_is_written(tmp_path):
    config = write_config(tmp_path, steps=20, every=10)
    for command in ("check", "train"):
        done = run(command, config, "task=regression:vector_loss", "model={}", cwd=tmp_path)
        assert done.returncode == 2
        assert (
            "a step of regression:vector_loss fails: ValueError: loss_fn must return a scalar loss"
            in done.stderr
        )
        assert done.stderr.splitlines()[1] == "ftrain --traceback ... shows where it was raised"
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]
    assert (
        "Traceback"
        in run("--traceback", "check", config, "task=regression:vector_loss", "model={}").stderr
    )


def test_a_run_directory_in_part_unwritable_is_a_line(tmp_path):
    config = write_config(tmp_path, steps=20, every=10)
    home = tmp_path / "run"
    (home / "metrics.jsonl").mkdir(parents=True)
    done = run("train", config, f"run.directory={home}")
    assert done.returncode == 2
    assert "Is a directory" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_on_a_terminal_there_is_a_progress_bar(tmp_path):
    config = write_config(tmp_path, steps=3000, every=1000)
    screen, terminal = pty.openpty()
    process = start(
        "train", config, f"run.directory={tmp_path / 'run'}", stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the process ends
        while part := os.read(screen, 4096):
            shown += part
    os.close(screen)
    assert process.wait(60) == 0
    text = shown.decode()
    for word in ("3000/3000", "loss ", "lr ", "steps/s ", "left", "step 1000: eval/distance"):
        assert word in text


def test_nan_is_told_in_a_line_and_exit_code_one(tmp_path):
    config = write_config(tmp_path, steps=5000, every=10)
    home = tmp_path / "run"
    done = run(
        "train",
        config,
        f"run.directory={home}",
        "optimizer={name='gradient_descent', learning_rate=1e6}",
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ftrain: loss is ")
    assert "Traceback" not in done.stderr


def test_the_package_runs_as_a_module_and_as_a_command():
    installed = Path(sys.executable).with_name("ftrain")
    command = subprocess.run(
        [installed, "--version"], capture_output=True, text=True, check=True, env=environment()
    )
    assert command.stdout == run("--version", cwd=ROOT).stdout


@pytest.mark.parametrize("words", [(), ("data",), ("ckpt",)])
def test_without_a_command_the_commands_are_shown(words):
    done = run(*words)
    assert done.returncode == 2
    assert done.stderr == ""
    assert done.stdout.startswith(
        f"Usage: {' '.join(('python -m ftrain', *words))} [OPTIONS] COMMAND"
    ) or (done.stdout.startswith(f"Usage: {' '.join(('ftrain', *words))} [OPTIONS] COMMAND"))
    assert len(done.stdout.splitlines()) > 10
