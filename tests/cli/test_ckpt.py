"""ftrain ckpt: what it shows, what it does, and what it says to mistakes."""

import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from command import run
from references import FOLDER
from safetensors.numpy import load_file, save_file

from ftrain.checkpoints import CheckpointManager


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("run")
    manager = CheckpointManager(home / "checkpoints", on_warning=lambda text: None)
    for step in (100, 200, 300):
        params = {
            "dense": {"kernel": jnp.full((3, 4), step / 100), "bias": jnp.zeros(4, jnp.bfloat16)}
        }
        manager.save(step, {"params": params, "step": step}, metrics={"loss": 1 / step})
    manager.save(400, {"params": jnp.array(jnp.nan)})
    return home


def ckpt(*arguments, code: int = 0) -> str:
    done = run("ckpt", *arguments)
    assert done.returncode == code, done.stderr
    return done.stdout if code in (0, 1) else done.stderr


def test_list_shows_what_is_there_and_why(home):
    lines = ckpt("list", home).splitlines()
    assert [line.split()[0] for line in lines] == ["step", "100", "200", "300", "400.suspect"]
    assert "0.01" in lines[1]
    assert "latest, newest" in lines[3]
    assert "set aside: non-finite" in lines[4]


def test_show_gives_every_leaf_with_its_figures(home):
    text = ckpt("show", home / "checkpoints" / "200")
    kernel = next(line.split() for line in text.splitlines() if "kernel" in line)
    assert kernel == ["kernel", "[3,", "4]", "float32", "48", "B", "2", "0", "2", "2", "0.0%"]
    bias = next(line.split() for line in text.splitlines() if "bias" in line)
    assert bias[-1] == "100.0%"
    assert "3 leaves" in text
    assert ckpt("show", home).startswith(str(home / "checkpoints" / "300"))  # of a run, the latest
    assert "non-finite" in ckpt("show", home / "checkpoints" / "400.suspect")
    assert len(ckpt("show", home, "--include", "params/dense/k.*").splitlines()) == 6


def test_diff_tells_which_leaves_differ_and_how_far(home):
    text = ckpt("diff", home / "100", home / "300", code=1)
    assert re.search(r"params/dense/kernel\s+differs\s+2\s+0.6667\s+12", text)
    assert "params/dense/bias" not in text
    assert "1 of 3 leaves are the same" in text
    assert "3 of 3 leaves are the same" in ckpt("diff", home / "100", home / "100")
    other = ckpt("diff", home / "100", home / "checkpoints" / "400.suspect", code=1)
    assert "only in" in other


def test_verify_finds_damage(home, tmp_path):
    assert ckpt("verify", home).count(": good") == 4
    copy = Path(shutil.copytree(home, tmp_path / "copy"))
    largest = max((copy / "checkpoints" / "200").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[10] ^= 1
    largest.write_bytes(data)
    text = ckpt("verify", copy, code=1)
    assert f"{copy}/checkpoints/200: DAMAGED" in text
    assert f"file {largest.relative_to(copy / 'checkpoints' / '200')} has crc32c" in text
    assert text.count(": good") == 3


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_export_is_read_by_others(home, tmp_path, kind):
    path = tmp_path / f"out.{kind}"
    text = ckpt("export", home, "--out", path, "--include", "params/.*", "--include", "step")
    assert f"{path}: 3 leaves" in text
    assert path.stat().st_mode & 0o044 == 0o044
    arrays = load_file(path) if kind == "safetensors" else dict(np.load(path))
    assert sorted(arrays) == ["params/dense/bias", "params/dense/kernel", "step"]
    assert arrays["step"].shape == ()
    np.testing.assert_array_equal(arrays["params/dense/kernel"], np.full((3, 4), 3.0, np.float32))
    assert arrays["params/dense/bias"].dtype == (
        "bfloat16" if kind == "safetensors" else np.float32
    )
    assert "exists already" in ckpt("export", home, "--to", kind, "--out", path, code=2)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_exports_are_shown_compared_and_verified(home, tmp_path, kind):
    path = tmp_path / f"out.{kind}"
    ckpt("export", home / "200", "--out", path, "--exclude", ".*bias")
    text = ckpt("show", path)
    kernel = next(line.split() for line in text.splitlines() if "kernel" in line)
    assert kernel[:8] == ["kernel", "[3,", "4]", "float32", "48", "B", "2", "0"]
    assert "2 of 2 leaves are the same" in ckpt("diff", path, home / "200", "--exclude", ".*bias")
    assert "differs" in ckpt("diff", path, home / "300", code=1)
    assert f"{path}: good" in ckpt("verify", path)


def test_best_and_latest_are_steps(tmp_path):
    manager = CheckpointManager(tmp_path / "checkpoints", keep_best=1)
    for step, loss in ((100, 0.2), (200, 0.1), (300, 0.3)):
        manager.save(step, {"w": np.float32([step])}, metrics={"loss": loss})
    assert re.search(r" w +\[1\] +float32 +4 B +200 ", ckpt("show", tmp_path / "best"))
    assert "0 of 1 leaves" in ckpt("diff", tmp_path / "best", tmp_path / "latest", code=1)
    assert ckpt("verify", tmp_path / "best") == f"{tmp_path}/checkpoints/200: good\n"
    assert "pinned" in ckpt("pin", tmp_path, "best")
    ckpt("rm", tmp_path / "latest")
    assert manager.steps() == [100, 200]
    assert manager.checkpoints()[1].pinned


def test_rm_pin_and_unpin(home, tmp_path):
    copy = shutil.copytree(home, tmp_path / "copy")
    ckpt("pin", copy, "100")
    assert "100 is pinned; unpin it first" in ckpt("rm", copy, "100", code=2)
    assert "pinned" in ckpt("list", copy)
    ckpt("unpin", copy, "100")
    ckpt("rm", copy, "100", "200", "400.suspect")
    assert [line.split()[0] for line in ckpt("list", copy).splitlines()] == ["step", "300"]
    assert "300 is the last checkpoint" in ckpt("rm", copy, "0300", code=2)
    assert "300 is the last checkpoint" in ckpt("rm", f"{copy}/300", code=2)
    ckpt("rm", copy, "300", "--force")
    assert "holds no checkpoint" in ckpt("list", copy, code=2)


@pytest.mark.reference
@pytest.mark.parametrize(
    "directory", [path.name for path in sorted((FOLDER / "tf_checkpoint").glob("*/"))]
)
def test_tensorflows_files_are_shown_and_compared(directory):
    text = ckpt("show", FOLDER / "tf_checkpoint" / directory)
    assert " leaves, " in text
    prefix = next((FOLDER / "tf_checkpoint" / directory).glob("*.index")).with_suffix("")
    assert "leaves are the same" in ckpt("diff", prefix, prefix)
    assert f"{prefix}: good" in ckpt("verify", prefix)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "nowhere"), "nowhere does not exist; expected a checkpoint"),
        (("list", "nowhere"), "nowhere does not exist"),
        (("show", "gs://bucket/run"), "gs://bucket/run is a URL; expected a local path"),
        (("list", "gs://bucket/run"), "gs://bucket/run is a URL; expected a local path"),
        (("rm", "HOME", "7"), "there is no checkpoint of step 7; there are [100, 200, 300]"),
        (("rm", "HOME", "../300"), "a step must be a whole number, best or latest, got '../300'"),
        (("show", "HOME", "--include", "("), "'(' is not a regular expression"),
        (("export", "HOME", "--to", "pickles"), "pickles"),
        (("export", "HOME", "--include", "nothing"), "the patterns select none of its 3 leaves"),
        (("export", "HOME", "--include", "["), "'[' is not a regular expression"),
        (("export", "HOME", "--out", "nowhere/x.npz"), "there is no directory nowhere"),
        (("export", "HOME", "--out", "x.bin"), "pass --to safetensors or --to npz"),
        (
            ("export", "HOME", "--out", "x.npz", "--to", "safetensors"),
            "the suffix of x.npz does not match --to safetensors",
        ),
        (("rm", "HOME"), "the steps are missing"),
        (
            ("show", "HOME/best"),
            "set keep_best, best_metric and best_mode in [checkpoint], or name",
        ),
        (
            ("show", "CUT"),
            "cut.safetensors: array 'w' ends at data byte 8, but there are 4: the file is cut",
        ),
        (("verify", "CUT"), "cut.safetensors: array 'w' ends at data byte 8"),
    ],
)
def test_mistakes_are_told_in_two_lines(home, tmp_path, arguments, said):
    save_file({"w": np.float32([1, 2])}, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-4])
    paths = {"HOME": home, "HOME/best": home / "best", "CUT": tmp_path / "cut.safetensors"}
    text = ckpt(*(paths.get(each, each) for each in arguments), code=2)
    assert said in text
    assert len(text.strip().splitlines()) <= 2
