"""docs/architecture.md is true: its paths exist, and a step enters no file that it omits."""

import re
import sys
import threading
from pathlib import Path

import pytest
from regression import init_params, loss_fn, make_arrays

import ftrain
from ftrain import TrainState, make_step, optimizers
from ftrain.data import ArraySource, Pipeline
from ftrain.training import Loop

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = Path(ftrain.__file__).parent


def files_of(title: str) -> list[str]:
    """Return the files in the table of a section."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(ftrain/[\w/]+\.py)` \|", section, re.MULTILINE)


def test_every_path_exists():
    paths = set(re.findall(r"`((?:ftrain|tests|configs|docs)/[\w./]+)`", PAGE))
    assert len(paths) > 40
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("title", "most"), [("One training step", 20), ("From a config to the first checkpoint", 35)]
)
def test_the_ways_are_short(title, most):
    files = files_of(title)
    assert len(set(files)) == len(files)
    assert 10 < len(files) <= most


def test_a_step_enters_no_other_file():
    entered: set[str] = set()
    recording = threading.Event()

    def record(frame, event, argument):
        path = frame.f_code.co_filename
        if recording.is_set() and path.startswith(str(PACKAGE)):
            entered.add(f"ftrain/{Path(path).relative_to(PACKAGE).as_posix()}")

    optimizer = optimizers.momentum(0.1, 0.9)
    state = TrainState.create(init_params(), optimizer)
    data = Pipeline(ArraySource(make_arrays()), batch_size=8)
    before = sys.getprofile()
    threading.setprofile(record)
    try:
        with Loop(make_step(loss_fn, optimizer), state, data, fuse=1) as loop:
            for _ in range(100):
                loop.step()
            recording.set()
            sys.setprofile(record)
            for _ in range(500):  # enough steps for the read-ahead thread
                loop.step()
            sys.setprofile(before)
            recording.clear()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    assert "ftrain/data/pipeline.py" in entered  # so the thread was recorded too
    assert entered - set(files_of("One training step")) == set()
