"""What the tests of commands share."""

from pathlib import Path

import pytest
from data_command import example, write


@pytest.fixture
def records(tmp_path) -> Path:
    return write(tmp_path / "train.tfrecord", [example(number) for number in range(20)])
