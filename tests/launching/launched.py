"""Start the real command on programs, mostly pretenders, and look for what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from processes import start_process

ROOT = Path(__file__).parents[2]
PRETENDER = Path(__file__).with_name("pretender.py")
LIMIT = 240.0  # seconds; a test that needs them has failed, also on a busy machine


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def own(self) -> list[str]:
        """The supervisor's own lines."""
        return [
            line.removeprefix("launch: ")
            for line in self.out.splitlines()
            if line.startswith("launch: ")
        ]


class Launcher:
    """`ftrain launch` of `n` processes of a program; their command line names a home directory."""

    def __init__(
        self,
        home: Path,
        *arguments: str,
        n: int = 2,
        options: Sequence[str] = (),
        program: Path = PRETENDER,
        **popen,
    ):
        self.home, self.n = home, n
        command = [
            sys.executable,
            "-m",
            "ftrain",
            "launch",
            "-n",
            str(n),
            *options,
            str(program),
            f"home={home}",
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = start_process([*command, *arguments], cwd=ROOT, **(pipes | popen))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in living(self.home):  # after a failed test
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def end(self) -> Result:
        """Return the result once it has exited; none of its processes may be alive then."""
        out, err = self.process.communicate(timeout=LIMIT)
        assert living(self.home) == {}
        return Result(
            self.process.returncode, (out or b"").decode(errors="replace"), (err or b"").decode()
        )

    def wait_for_step(self, step: int, attempt: int = 0) -> None:
        """Wait until all pretenders have reached a step."""
        meeting = self.home / f"attempt-{attempt}"
        wait_until(lambda: all((meeting / f"{step}-{index}").exists() for index in range(self.n)))

    def step(self) -> int:
        """Return the highest step of the first attempt."""
        return max(
            int(path.name.partition("-")[0]) for path in (self.home / "attempt-0").glob("[0-9]*-*")
        )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def signal_one(self, index: int, number: int, attempt: int = 0) -> None:
        os.kill(int((self.home / f"attempt-{attempt}" / f"pid-{index}").read_text()), number)


def run(
    home: Path, *arguments: str, n: int = 2, options: Sequence[str] = (), program: Path = PRETENDER
) -> Result:
    with Launcher(home, *arguments, n=n, options=options, program=program) as launcher:
        return launcher.end()


def living(home: Path) -> dict[int, str]:
    """Return the other processes that have a directory in their command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            # The command line of a zombie is empty.
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(home) in command and int(path.parent.name) != os.getpid():
            found[int(path.parent.name)] = command
    return found


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)
