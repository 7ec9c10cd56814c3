"""A run directory belongs to its launcher until that is gone."""

import subprocess
import sys

import pytest

from ftrain.config.load import ConfigError
from ftrain.config.run_directory import claim
from ftrain.launching.protocol import LAUNCHER


@pytest.fixture
def launcher(monkeypatch):
    """A process that lives until its input ends, and passes for the one that started this one."""
    program = [sys.executable, "-c", "input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        monkeypatch.setenv(LAUNCHER, f"{process.pid}")
        yield process
        process.kill()


def test_it_is_its_launchers_between_two_attempts(tmp_path, launcher, monkeypatch):
    claim(tmp_path, {"steps": 1}).close()
    claim(tmp_path, {"steps": 1}).close()  # the next attempt
    monkeypatch.delenv(LAUNCHER)
    for _ in range(2):  # nor does a try that failed change that
        with pytest.raises(
            ConfigError, match=f"is in use by ftrain launch, process {launcher.pid}"
        ):
            claim(tmp_path, {"steps": 1})
    launcher.kill()
    launcher.wait()
    claim(tmp_path, {"steps": 1}).close()


def test_a_launcher_of_the_same_number_is_another_one(tmp_path, launcher, monkeypatch):
    claim(tmp_path, {"steps": 1}).close()
    lock = tmp_path / "run.lock"
    words = lock.read_text().split()
    lock.write_text(lock.read_text().replace(words[-2], "12345"))  # when it was started
    monkeypatch.delenv(LAUNCHER)
    claim(tmp_path, {"steps": 1}).close()


@pytest.mark.parametrize(
    "text", ["launcher\n", "launcher ../self 1 x\n", "\xff\n", "launcher 0 0 0\n"]
)
def test_any_other_text_in_the_lock_means_nothing(tmp_path, text):
    (tmp_path / "run.lock").write_text(text)
    claim(tmp_path, {"steps": 1}).close()
