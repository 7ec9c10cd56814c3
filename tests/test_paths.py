"""Directories as users write them: a path that the system accepts works for a run."""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from regression import init_params, loss_fn

import ftrain
from ftrain.checkpoints import (
    CheckpointManager,
    checkpoint_exists,
    checkpoint_state,
    checkpoints_iterator,
    init_from_checkpoint,
    latest_checkpoint,
    open_reader,
    verify,
    wait_for_checkpoint,
    warm_start,
)
from ftrain.data import ArraySource, TextSource
from ftrain.formats import RecordWriter, match_files, read_records
from ftrain.hooks import CheckpointSaver, CrashBundle, Logging, Profiler, SummarySaver, WaitForStep
from ftrain.paths import PathError, local_path
from ftrain.summaries import MetricsFile, SummaryWriter, read_metrics

OPTIMIZER = ftrain.optimizers.gradient_descent(0.05)
QUIET = Logging(write=lambda line: None)
URLS = ["gs://bucket/run", "s3://bucket/run", "file:///tmp/run", "hdfs://host:9000/run"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory, with a link beside it to a directory elsewhere."""
    (tmp_path / "work").mkdir()
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


DIRECTORIES = {  # path as written: the directory it means
    "../x": "x",
    "a/../../x": "x",
    "../link/x": "far/away/x",
    "../link/../x": "far/x",  # the parent of a link is that of its target
    "~/x": "home/x",
    "x/": "work/x",
    "./x//y/.": "work/x/y",
    "with a space": "work/with a space",
    "zażółć/数据": "work/zażółć/数据",
    "run[1]*?": "work/run[1]*?",
}


@pytest.mark.parametrize(("given", "where"), DIRECTORIES.items(), ids=DIRECTORIES)
def test_a_run_in_a_directory_of_any_spelling_is_saved_read_and_resumed(
    here, pipeline, given, where
):
    if given.startswith("a/"):
        (here / "work" / "a").mkdir()

    def train(steps):
        options = {"optimizer": OPTIMIZER, "steps": steps, "directory": given, "hooks": [QUIET]}
        return ftrain.train(loss_fn, init_params(), pipeline, **options)

    train(3)
    state = train(5)
    assert (here / where / "checkpoints" / "5" / "manifest.json").is_file()
    assert (here / where / "metrics.jsonl").is_file()
    latest = latest_checkpoint(given)
    assert latest is not None
    assert os.path.samefile(latest, here / where / "checkpoints" / "5")
    assert verify(os.path.join(given, "checkpoints", "5")) == []
    assert checkpoint_exists(os.path.join(given, "5"))
    assert checkpoint_state(given) is not None
    np.testing.assert_array_equal(open_reader(given).read("params/w"), state.params["w"])
    blank = init_params()
    for read in (
        warm_start(blank, given, var_name_to_prev_var_name={"(.*)": r"params/\1"}),
        init_from_checkpoint(blank, given, {"params/": "/"}),
        CheckpointManager(given).restore(like=state).params,
    ):
        np.testing.assert_array_equal(read["w"], state.params["w"])


def test_the_working_directory_may_change(here, monkeypatch):
    with CheckpointManager("checkpoints") as manager, SummaryWriter("events") as writer:
        monkeypatch.chdir(here)
        manager.save(1, {"w": jnp.ones(3)})
        writer.write(1, {"loss": 1.0})
    assert latest_checkpoint(here / "work" / "checkpoints") == here / "work" / "checkpoints" / "1"


ENTRIES = {
    "CheckpointManager": CheckpointManager,
    "latest_checkpoint": latest_checkpoint,
    "checkpoint_exists": checkpoint_exists,
    "checkpoint_state": checkpoint_state,
    "wait_for_checkpoint": lambda path: wait_for_checkpoint(path, timeout=0),
    "checkpoints_iterator": lambda path: next(checkpoints_iterator(path, timeout=0), None),
    "open_reader": open_reader,
    "verify": verify,
    "warm_start": lambda path: warm_start(init_params(), path),
    "init_from_checkpoint": lambda path: init_from_checkpoint(init_params(), path, {"/": "/"}),
    "SummaryWriter": SummaryWriter,
    "MetricsFile": MetricsFile,
    "read_metrics": read_metrics,
    "CheckpointSaver": CheckpointSaver,
    "WaitForStep": lambda path: WaitForStep(3, path),
    "evaluate_checkpoints": lambda path: next(
        ftrain.evaluate_checkpoints(path, dict, None, timeout=0)
    ),
    "SummarySaver": SummarySaver,
    "CrashBundle": CrashBundle,
    "Profiler": Profiler,
    "RecordWriter": RecordWriter,
    "read_records": lambda path: next(iter(read_records(path))),
    "match_files": match_files,
    "TextSource": TextSource,
    "ArraySource.open": ArraySource.open,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("url", URLS)
def test_a_url_is_refused_in_one_line_and_nothing_is_made(here, entry, url):
    with pytest.raises(PathError, match=r"is a URL; expected a local path: [^\n]*$") as caught:
        ENTRIES[entry](url)
    assert url in str(caught.value)
    assert not list((here / "work").iterdir())


@pytest.mark.parametrize("url", URLS)
def test_a_run_at_a_url_is_refused_before_anything_is_made(here, pipeline, url):
    with pytest.raises(PathError, match="is a URL"):
        ftrain.train(loss_fn, init_params(), pipeline, optimizer=OPTIMIZER, steps=3, directory=url)
    assert not list((here / "work").iterdir())


@pytest.mark.parametrize(
    "path", ["", "a\0b", "a\\b", "~nobody-of-that-name/x", os.fsdecode(b"a\xff")]
)
def test_what_cannot_be_a_directory_is_refused(here, path):
    with pytest.raises(PathError):
        local_path(path)


def test_a_local_name_that_looks_like_a_url_can_be_written(here):
    assert local_path("./gs:/bucket") == here / "work" / "gs:" / "bucket"
    assert local_path("./~") == here / "work" / "~"
