"""Manifests, metadata and directories with hostile names, times and kinds of files."""

import json
import os
import textwrap
from pathlib import Path

import jax.numpy as jnp
import pytest
from command import run_program
from typer.testing import CliRunner

from ftrain.checkpoints import (
    CheckpointError,
    CheckpointManager,
    DamagedError,
    open_reader,
    read_catalog,
    verify,
)
from ftrain.checkpoints.manifest import crc32c_of_text
from ftrain.cli import app

LONG = "x" * 300


@pytest.fixture
def home(tmp_path) -> Path:
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(7, {"w": jnp.ones(3)})
    return tmp_path


def change(home: Path, **changes) -> Path:
    """Change a manifest, with a valid checksum, and delete the other record of the save time."""
    path = home / "checkpoints" / "7" / "manifest.json"
    body = json.dumps(json.loads(path.read_text())["manifest"] | changes, sort_keys=True)
    path.write_text(f'{{"crc32c": "{crc32c_of_text(body)}",\n"manifest": {body}}}\n')
    (home / "checkpoints" / "checkpoints.json").unlink(missing_ok=True)
    return path.parent


def listed(home: Path) -> str:
    done = CliRunner().invoke(app, ["ckpt", "list", str(home)])
    assert done.exception is None, done.exception
    return done.stdout


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), 1e300, -1e18])
def test_a_manifest_with_an_impossible_time_is_damaged_and_still_listed(home, seconds):
    step = change(home, time=seconds)
    with pytest.raises(DamagedError, match="is not a time in seconds since 1970"):
        open_reader(step)
    assert "7" in listed(home)


def test_a_manifest_with_a_name_that_no_file_can_have_is_damaged_and_still_listed(home):
    step = change(home, files={f"a/{LONG}": {"size": 1, "crc32c": "00000000"}})
    with pytest.raises(DamagedError, match="has a name of more than 255 bytes"):
        open_reader(step)
    assert verify(step)
    assert "7" in listed(home)
    step = change(home, files={"a/\ud800": {"size": 1, "crc32c": "00000000"}})
    assert verify(step)
    assert "7" in listed(home)


def test_a_directory_with_a_number_of_250_digits_is_no_checkpoint(home):
    odd = home / "checkpoints" / ("9" * 250)
    odd.mkdir()
    (odd / "commit_success.txt").touch()
    assert [record.step for record in read_catalog(home / "checkpoints").records] == [7]
    assert "7" in listed(home)


def test_a_directory_from_beyond_the_calendar_is_listed(home):
    odd = home / "checkpoints" / "9.damaged"
    odd.mkdir()
    os.utime(odd, (1 << 40, 1 << 40))
    assert "9.damaged" in listed(home)


@pytest.mark.parametrize(
    "retention", [{"best": 1.5}, {"metric": ["loss"]}, {"best": "1"}, {"best": 1, "metric": {}}]
)
def test_a_catalog_with_values_of_other_types_is_built_again(home, retention):
    path = home / "checkpoints" / "checkpoints.json"
    contents = json.loads(path.read_text())
    contents["retention"] |= retention
    path.write_text(json.dumps(contents))
    assert "7" in listed(home)


PROGRAM = """
    import resource, signal, sys
    from ftrain.checkpoints import CheckpointError, open_reader, verify
    signal.alarm(300)  # instead of waiting for a pipe for ever
    before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (before + (1 << 30), -1))
    for action in (open_reader, verify):
        try:
            print(action(sys.argv[1]))
        except CheckpointError as error:
            print(error)
"""


@pytest.mark.parametrize("name", ["_METADATA", "_CHECKPOINT_METADATA"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_metadata_that_never_end_are_not_read(home, name, kind):
    step = home / "checkpoints" / "7"
    (path,) = step.rglob(name)
    path.unlink()
    (step / "manifest.json").unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    done = run_program(textwrap.dedent(PROGRAM), step)
    assert done.returncode == 0, done.stderr
    if name == "_METADATA":
        assert (
            done.stdout.count("is not a regular file") == 2 or done.stdout.count("is missing") == 2
        )


def test_a_manifest_above_the_limit_is_not_read(home, monkeypatch):
    step = home / "checkpoints" / "7"
    monkeypatch.setattr(
        "ftrain.checkpoints.manifest.read_manifest.__kwdefaults__", {"max_bytes": 10}
    )
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: it has \d+ bytes, expected at most 10"
    ):
        open_reader(step)
