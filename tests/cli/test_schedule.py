import re

import numpy as np
from command import environment, run, write_config
from PIL import Image

from ftrain.cli.schedule import draw_in_terminal

DECAY = (
    'optimizer.learning_rate={name="polynomial_decay", learning_rate=0.5, decay_steps=40, '
    "end_learning_rate=0.1}"
)


def test_the_learning_rate_is_drawn_in_the_terminal_and_as_a_png(tmp_path):
    config = write_config(tmp_path, steps=40, every=10)
    picture = tmp_path / "rate.png"
    done = run("schedule", config, DECAY, "--output", picture)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].strip() == "learning rate of job over 40 steps"
    assert re.match(r" 0\.5 [⠁-⣿]", lines[1])
    assert re.match(r"0\.11 .*[⠁-⣿]$", lines[12])  # at the last update, number 39
    assert lines[13].split() == ["0", "39"]
    assert lines[14] == f"written: {picture}"
    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert (
            len(set(np.asarray(image.convert("RGB")).reshape(-1, 3)[:, 0].tolist())) > 10
        )  # something is drawn


def test_a_terminal_that_knows_only_ascii(tmp_path):
    config = write_config(tmp_path, steps=40, every=10)
    done = run(
        "schedule",
        config,
        "-o",
        tmp_path / "x.png",
        env=environment() | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert "*" * 60 in done.stdout


def test_mistakes_are_told_in_two_lines(tmp_path):
    config = write_config(tmp_path, steps=40, every=10)
    for arguments, expected in (
        (["-o", "x.pdf"], "x.pdf must end in .png"),
        (["-o", tmp_path / "nowhere" / "x.png"], "No such file or directory"),
        (
            ['optimizer={name="regression:without_rate"}'],
            "without_rate: expected exactly one learning_rate",
        ),
    ):
        done = run("schedule", config, *arguments)
        assert done.returncode == 2
        assert expected in done.stderr
        assert done.stderr.count("\n") <= 2


def test_values_that_are_not_finite_leave_a_gap(capsys):
    y = np.linspace(0, 1, 100)
    y[40:60] = np.nan
    draw_in_terminal(np.arange(100), y, "gap")
    gap = [line[30:36] for line in capsys.readouterr().out.splitlines()[1:13]]
    assert {character for part in gap for character in part} == {"⠀"}
    draw_in_terminal(np.arange(3), np.full(3, np.nan), "nothing")
    assert "nothing" in capsys.readouterr().out
