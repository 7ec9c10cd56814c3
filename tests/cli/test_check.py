import os
import pty
import re
from pathlib import Path

import pytest
from command import ROOT, environment, run, start, write_config

from ftrain.cli.check import check
from ftrain.config import ConfigError

SPLIT = ["mesh.fsdp=3", "sharding.min_size=2", "data.batch_size=12"]


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_config(tmp_path, steps=60, every=20)


def rows(shown: str) -> dict[str, list[str]]:
    """The lines of the layout by the name that they begin with, each cut at wide gaps."""
    table = shown.partition("split over")[2].partition("\nstate ")[0]
    return {line.split()[0]: re.split(r" {2,}", line.strip()) for line in table.splitlines()[1:]}


def test_the_short_form_has_the_totals_and_no_leaves(config, capsys):
    check(config)
    shown = capsys.readouterr().out
    assert re.search(r"state +68 B, 68 B per device \(parameters 16 B\)", shown)
    assert re.search(r"mesh +data 4, fsdp 1, model 1 *\n", shown)
    assert re.search(r"examples per device +2 *\n", shown)
    assert "opt_state" not in shown
    assert "note:" not in shown


def test_leaves_are_shown_for_the_devices_there_are(config, capsys):
    check(config, ["mesh.data=1", *SPLIT], leaves=True)
    shown = capsys.readouterr().out
    assert re.search(r"mesh +data 1, fsdp 3, model 1; 1 of 4 devices unused *\n", shown)
    found = rows(shown)
    assert found["params/w"] == ["params/w", "[3]", "float32", "fsdp", "4 B"]
    assert found["params/b"] == ["params/b", "[]", "float32", "4 B"]
    assert found["opt_state/slots/m/w"][-2:] == ["fsdp", "4 B"]
    assert found["rng"] == ["rng", "[]", "key<fry>", "8 B"]
    assert len(found) == 10
    assert "\nstate 68 B, 44 B per device; 3 of 10 leaves are split\n" in shown


def test_devices_can_be_imagined(config, capsys):
    check(config, SPLIT, devices=6)
    shown = capsys.readouterr().out
    assert re.search(r"mesh +data 2, fsdp 3, model 1 *\n", shown)
    assert re.search(r"examples per device +2 *\n", shown)
    assert rows(shown)["opt_state/slots/v/w"] == [
        "opt_state/slots/v/w",
        "[3]",
        "float32",
        "fsdp",
        "4 B",
    ]
    assert "good; train it with: ftrain train" in shown


def test_rules_of_the_config_are_followed(config, capsys):
    config.write_text(
        config.read_text() + '\n[[sharding.rules]]\nleaf = "w"\naxes = ["data+model"]\n'
    )
    check(config, ["mesh.data=1", "mesh.model=3"], devices=3)
    assert rows(capsys.readouterr().out)["params/w"] == [
        "params/w",
        "[3]",
        "float32",
        "model",
        "4 B",
    ]
    check(
        config,
        ["mesh.data=1", "mesh.model=3", 'sharding.rules=[{leaf="^params/w", axes=["model"]}]'],
        devices=3,
    )
    shown = capsys.readouterr().out
    assert rows(shown)["opt_state/slots/m/w"][-1] == "12 B"
    assert "68 B, 60 B per device; 1 of 10 leaves are split" in shown


def test_leaves_that_no_axis_divides_are_noted_a_few_or_all(config, capsys):
    overrides = ["mesh.fsdp=2", "sharding.min_size=2", "step.averages=0.9"]
    named = (
        "note: {} of shape [3] is replicated on every device, "
        "as fsdp=2 divides none of its dimensions; pad 3 to 4, or give"
    )
    check(config, overrides, devices=2)
    few = capsys.readouterr().out
    assert few.count("note: ") == 4
    assert named.format("params/w") in few
    assert "note: and 1 more such leaves; --leaves names them" in few
    check(config, overrides, devices=2, leaves=True)
    every = capsys.readouterr().out
    assert every.count("note: ") == 4
    assert named.format("averages/w") in every


@pytest.mark.parametrize(
    ("overrides", "devices", "message"),
    [
        (
            ["mesh.fsdp=3"],
            64,
            "command line: mesh: fsdp must be 1, 2, 4, 8, 16, 32 or 64, got 3; with data=-1",
        ),
        (
            [],
            64,
            "job.toml: data.batch_size: batch_size 8 does not divide over the 64 devices "
            "of the mesh; use 64",
        ),
        (
            ['sharding.rules=[{leaf="x", axes=[]}]'],
            8,
            "command line: sharding.rules: the rule for 'x' matches no leaf",
        ),
        (
            ['sharding.rules=[{leaf="w", axes=["data"]}]'],
            8,
            "command line: sharding.rules: the rule for 'w' does not fit "
            "leaf params/w of shape [3]: dimension 0",
        ),
        (
            ['sharding.rules=[{leaf="(", axes=[]}]'],
            None,
            "command line: [sharding] leaf of rule 1 in rules must be a re",
        ),
        (["sharding.rules=3"], None, "command line: sharding.rules: must be a valid list, got 3"),
        (
            ["sharding.min_sise=3"],
            None,
            "command line: sharding.min_sise: unknown key; did you mean min_size?",
        ),
    ],
)
def test_mistakes_name_the_key(config, overrides, devices, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(config, overrides, devices=devices)


def test_a_mistake_is_two_lines_and_exit_code_two(config):
    wrong = 'sharding.rules=[{leaf="w", axes=["modle"]}]'
    for arguments, expected in (
        ((wrong, "--devices", "4"), "there is no axis 'modle'; did you mean model?"),
        (("--devices", "0"), "Invalid value for '--devices'"),
        (("mesh.model=3", "--devices", "16"), "model must be 1, 2, 4, 8 or 16, got 3"),
    ):
        done = run("check", config, *arguments)
        assert done.returncode == 2
        assert expected in done.stderr
        assert len(done.stderr.splitlines()) <= 2
        assert done.stdout == ""
    assert [path.name for path in config.parent.iterdir()] == ["job.toml"]


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.campaign)])
def test_the_table_fits_a_terminal(columns):
    screen, terminal = pty.openpty()
    wide = environment() | {"COLUMNS": str(columns), "TERM": "dumb"}
    arguments = ("check", ROOT / "configs" / "digits.toml", "--devices", "64", "mesh.fsdp=8")
    process = start(*arguments, stdout=terminal, stderr=terminal, env=wide)
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(screen, 4096):
            shown += part
    except OSError:  # the terminal is gone when the process ends
        pass
    os.close(screen)
    assert process.wait(60) == 0
    table = shown.decode().partition("metrics")[2].partition("good;")[0].splitlines()
    assert max(map(len, table)) <= columns
    kernel = next(line for line in table if line.startswith(" params/dense/kernel"))
    assert kernel.split() == [
        "params/dense/kernel",
        "[512,",
        "128]",
        "float32",
        "fsdp,",
        "-",
        "32.8",
        "KB",
    ]
    assert any(line.startswith("state 574 KB, 115 KB per device") for line in table)
