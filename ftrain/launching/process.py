"""One process of a group: started, listened to, signalled and reaped."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ftrain.launching.account import Account
from ftrain.launching.contract import LIFELINE, LINE_LIMIT, PROGRESS, decode
from ftrain.launching.lines import LineCutter

_CHUNK = 65536
_CHUNKS = 16  # at a time: more than a pipe holds, but one that never stops talking cannot keep the others waiting
_TO_CLOSE = 7.0  # seconds more for a process that has told its failure, and closes what it has open
_LAST_OF_A_GROUP = 2.0  # seconds in which a killed process is gone, unless the system is in trouble


class Process:
    """A program in a session of its own, so that no signal of the terminal reaches it, with a pipe for its messages."""

    def __init__(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], lifeline: int
    ):
        self.progress, theirs = os.pipe()
        descriptors = {PROGRESS: str(theirs), LIFELINE: str(lifeline)}
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment, **descriptors},
                pass_fds=(theirs, lifeline),
                start_new_session=True,
            )
        except BaseException:
            os.close(self.progress)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(self.progress, False)
        self.account = Account(index, sign_at=time.monotonic())
        self._kill_at: float | None = None
        self._lines = LineCutter(LINE_LIMIT)

    @property
    def outputs(self) -> tuple[int, int]:
        """The file descriptors of its stdout and stderr, to read from."""
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        return self._popen.stdout.fileno(), self._popen.stderr.fileno()

    def hear(self) -> bool:
        """Take in the messages that have come; False if there will be no more."""
        for _ in range(_CHUNKS):
            try:
                data = os.read(self.progress, _CHUNK)
            except BlockingIOError:
                return True
            for line in self._lines.feed(data):
                message = decode(line)
                if message is not None:
                    self.account.hear(message, time.monotonic())
            if not data:
                return False
        return True

    def reap(self) -> None:
        """If it has ended, take in its last messages and how it ended, and kill its own children."""
        if self.account.running and os.waitid(
            os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            self.hear()
            self._signal_group(
                signal.SIGKILL
            )  # before it is reaped: until then nobody else can get its number
            self.account.end(self._popen.wait(), time.monotonic())

    def is_halted(self) -> bool:
        """Whether a signal has stopped it, to be continued."""
        with suppress(ChildProcessError):  # it has ended in the meantime, or was reaped
            return (
                os.waitid(os.P_PID, self._popen.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
                is not None
            )
        return False

    def ask_to_stop(self) -> None:
        self._signal(signal.SIGTERM)

    def abort(self, patience: float) -> None:
        """Have it write where it is and end; after `patience` seconds it is killed."""
        if self.account.running:
            self.account.forced = True
            self._signal(signal.SIGABRT)
            self._signal(signal.SIGCONT)  # a halted process could not
            self.kill_in(patience)

    def kill_in(self, patience: float) -> None:
        """Kill it after so many seconds, if it has not ended by then."""
        self._kill_at = time.monotonic() + patience

    def kill_when_due(self, now: float) -> None:
        if self._kill_at is not None and now >= self._kill_at + (
            _TO_CLOSE if self.account.told_own_failure else 0.0
        ):
            self.kill()

    def kill(self) -> None:
        if self.account.running:
            self.account.forced = True
            self._signal_group(signal.SIGKILL)

    def finish(self) -> None:
        """See to it that neither the process nor any of its children is left."""
        if self.account.running:
            self.kill()
            self.account.end(self._popen.wait(), time.monotonic())
        self._await_children()

    def close(self) -> None:
        """Give its file descriptors back."""
        os.close(self.progress)
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            stream.close()

    def _signal(self, number: signal.Signals) -> None:
        if (
            self.account.running
        ):  # not reaped, so that the number is still its own; Popen's method might reap it
            os.kill(self._popen.pid, number)

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(
            ProcessLookupError, PermissionError
        ):  # the latter is what some systems say of a zombie
            os.killpg(self._popen.pid, number)

    def _await_children(self) -> None:
        """Wait until the last of its group, which was killed, is gone: it might still hold files."""
        deadline = time.monotonic() + _LAST_OF_A_GROUP
        while _lives(self._popen.pid) and time.monotonic() < deadline:
            time.sleep(0.002)


def _lives(group: int) -> bool:
    """Whether there is a process in a group that is more than a zombie, which nobody might reap."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False
