"""Child processes: the status of one, the process itself, and a group that ends together."""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftrain.launching.output import LineSplitter, OutputReader, Screen
from ftrain.launching.protocol import (
    HANG,
    HUNG,
    LIFELINE,
    MAX_LINE,
    PEER_FAILED,
    PROGRESS,
    Done,
    Failed,
    Message,
    Progress,
    Stopped,
    decode,
)
from ftrain.launching.signals import Mailbox

GRACE = 3.0  # seconds for the other processes to exit by themselves after one failed
ABORT_SECONDS = 2.0  # for a hanging process to write its stacks
_CHUNK = 65536
_CHUNKS = 16  # per read: more than a pipe holds, but one busy process cannot block the others
_CLOSE_SECONDS = 7.0  # more for a process that reported its failure and closes its files
_KILL_SECONDS = 2.0  # in which a killed process vanishes, unless the system is in trouble
_SHELL_SIGNAL = 128  # a shell turns the signal of its child into an exit code above this
_LONG_PAUSE = 1.0  # seconds between two polls that show that the supervisor itself was stopped


@dataclass
class ProcessStatus:
    """What is known of one process. All times are seconds of one monotonic clock."""

    index: int
    alive_at: float  # the last sign of life; the first one is the start of the process
    first_step: int | None = None  # the first step that it reported
    step: int | None = None
    max_step: int = 0
    busy: str | None = None  # its current work according to its newest message, if not a step
    steps: int | None = None
    loss: float | None = None
    failure: Failed | None = None  # the first one that it reported
    stop_signal: str | None = None  # that it reported as the reason to stop
    done: bool = False
    returncode: int | None = None  # negative for a signal
    ended_at: float | None = None  # when it reported a failure, or exited
    terminated: bool = False  # True once the supervisor has aborted or killed it

    def update(self, message: Message, now: float) -> None:
        """Apply a message from the process."""
        match message:
            case Progress():
                self._advance(message, now)
            case Failed():
                self.failure = self.failure or message
                self.ended_at = now if self.ended_at is None else self.ended_at
            case Stopped(name):
                self.stop_signal = name
            case Done(step):
                self.done = True
                self.alive_at = now
                self.step = max(step, self.step or 0)
                self.max_step = max(step, self.max_step)

    def set_exited(self, returncode: int, now: float) -> None:
        """Record how the process exited."""
        self.returncode = returncode
        self.ended_at = now if self.ended_at is None else self.ended_at

    @property
    def running(self) -> bool:
        """True until it has exited."""
        return self.returncode is None

    @property
    def has_failed(self) -> bool:
        """True if it has exited with an error or by a signal."""
        return self.returncode is not None and self.returncode != 0

    @property
    def has_own_failure(self) -> bool:
        """True if it failed by itself: not by the supervisor, nor because of another process.

        A failure that it reported itself counts even if it was terminated afterwards.
        """
        if not self.has_failed or self.returncode == PEER_FAILED:
            return False
        return not self.terminated if self.failure is None else self.failure.because is None

    @property
    def hung(self) -> bool:
        """True if its own watchdog ended it."""
        return self.returncode == HUNG or (self.failure is not None and self.failure.kind == HANG)

    @property
    def reported_own_failure(self) -> bool:
        """True if it reported an error of its own, which is not a hang."""
        return self.failure is not None and self.failure.because is None and not self.hung

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it."""
        if self.returncode is None:
            return None
        by_signal = self.returncode < 0
        number = -self.returncode if by_signal else self.returncode - _SHELL_SIGNAL
        try:
            return signal.Signals(number).name
        except ValueError:  # of the real-time signals only the first and the last have names
            return f"signal {number}" if by_signal else None

    @property
    def exit_code(self) -> int:
        """The exit code that reports its failure: its own, or 1 for a signal."""
        return self.returncode if self.returncode is not None and self.returncode > 0 else 1

    def _advance(self, progress: Progress, now: float) -> None:
        self.first_step = progress.step if self.first_step is None else self.first_step
        self.busy = progress.busy
        # Backward too: the process recovers from an earlier step, or starts a second run.
        moved = progress.step is not None and progress.step != self.step
        if moved or progress.busy is not None:
            self.alive_at = now
        if moved:
            self.step = progress.step
            self.done = False
        self.max_step = max(self.max_step, self.step or 0)
        self.steps = progress.steps if progress.steps is not None else self.steps
        self.loss = progress.loss if progress.loss is not None else self.loss


class ChildProcess:
    """A program with a pipe for its messages.

    It runs in a session of its own, so that no signal of the terminal reaches it.
    """

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
        self.status = ProcessStatus(index, alive_at=time.monotonic())
        self._kill_at: float | None = None
        self._lines = LineSplitter(MAX_LINE)

    @property
    def outputs(self) -> tuple[int, int]:
        """The file descriptors of its stdout and stderr, to read from."""
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        return self._popen.stdout.fileno(), self._popen.stderr.fileno()

    def read_messages(self) -> bool:
        """Apply the messages that have arrived to the status; False if there will be no more."""
        for _ in range(_CHUNKS):
            try:
                data = os.read(self.progress, _CHUNK)
            except BlockingIOError:
                return True
            for line in self._lines.feed(data):
                message = decode(line)
                if message is not None:
                    self.status.update(message, time.monotonic())
            if not data:
                return False
        return True

    def reap(self) -> None:
        """If it has exited, read its last messages and its exit code, and kill its children."""
        if not self.status.running:
            return
        if os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.read_messages()
            # Before it is reaped: until then the system cannot reuse the number of its group.
            self._signal_group(signal.SIGKILL)
            self.status.set_exited(self._popen.wait(), time.monotonic())

    def is_halted(self) -> bool:
        """True if a signal such as SIGSTOP has stopped it."""
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):  # it has exited in the meantime, or was reaped
            return os.waitid(os.P_PID, self._popen.pid, options) is not None
        return False

    def request_stop(self) -> None:
        """Send SIGTERM: save and stop."""
        self._signal(signal.SIGTERM)

    def abort(self, patience: float) -> None:
        """Have it write its stacks and exit; kill it after `patience` seconds."""
        if self.status.running:
            self.status.terminated = True
            self._signal(signal.SIGABRT)
            self._signal(signal.SIGCONT)  # a halted process cannot handle the abort
            self.kill_after(patience)

    def kill_after(self, patience: float) -> None:
        """Kill it after `patience` seconds, unless it has exited by then."""
        self._kill_at = time.monotonic() + patience

    def kill_when_due(self, now: float) -> None:
        """Kill it if the patience of `abort` or `kill_after` is over."""
        extra = _CLOSE_SECONDS if self.status.reported_own_failure else 0.0
        if self._kill_at is not None and now >= self._kill_at + extra:
            self.kill()

    def kill(self) -> None:
        """Kill it and its children at once."""
        if self.status.running:
            self.status.terminated = True
            self._signal_group(signal.SIGKILL)

    def finish(self) -> None:
        """Kill it if it still runs, and wait until it and its children have vanished."""
        if self.status.running:
            self.kill()
            self.status.set_exited(self._popen.wait(), time.monotonic())
        deadline = time.monotonic() + _KILL_SECONDS  # its children may hold files until then
        while _is_alive(self._popen.pid) and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        """Close its file descriptors."""
        os.close(self.progress)
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            stream.close()

    def _signal(self, number: signal.Signals) -> None:
        # Not by Popen's method, which might reap it. Until then the number is its own.
        if self.status.running:
            os.kill(self._popen.pid, number)

    def _signal_group(self, number: signal.Signals) -> None:
        # PermissionError: what some systems raise for a zombie
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)


class ChildGroup:
    """Starts one process for each environment; after `close` none of their descendants is left."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        lifeline: int,
        screen: Screen,
        mailbox: Mailbox,
    ):
        self.processes: list[ChildProcess] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(mailbox, selectors.EVENT_READ)
        self._polled_at = time.monotonic()
        self._output: OutputReader | None = None
        try:
            for index, environment in enumerate(environments):
                process = ChildProcess(index, command, environment, lifeline)
                self.processes.append(process)
                self._selector.register(process.progress, selectors.EVENT_READ, process)
            self._output = OutputReader([process.outputs for process in self.processes], screen)
        except BaseException:
            self.close()
            raise

    @property
    def statuses(self) -> list[ProcessStatus]:
        """The status of each process, in order."""
        return [process.status for process in self.processes]

    @property
    def running(self) -> int:
        """The number of processes that have not exited."""
        return sum(status.running for status in self.statuses)

    def poll(self, timeout: float) -> None:
        """Read messages, reap processes that have exited, and kill those whose time is over.

        Waits at most `timeout` seconds for a message; a signal in the mailbox ends the wait.
        """
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, ChildProcess) and not key.data.read_messages():
                self._selector.unregister(key.fd)
        self._discount_pause()
        for process in self.processes:
            process.reap()
            process.kill_when_due(self._polled_at)

    def halted(self) -> set[int]:
        """Return the processes that a signal has stopped (SIGSTOP), which may be continued."""
        return {process.status.index for process in self.processes if process.is_halted()}

    def request_stop(self) -> None:
        """Send SIGTERM to all: save and stop."""
        for process in self.processes:
            process.request_stop()

    def end(self, hanging: Collection[int] = ()) -> None:
        """End all: the hanging ones write their stacks first, the others may exit by themselves."""
        for process in self.processes:
            if process.status.index in hanging:
                process.abort(ABORT_SECONDS)
            else:
                process.kill_after(GRACE)

    def kill(self) -> None:
        """Kill all at once."""
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Kill what is left, and print the rest of the output."""
        for process in self.processes:
            process.finish()
        if self._output is not None:
            self._output.close()
        for process in self.processes:
            process.close()
        self._selector.close()

    def _discount_pause(self) -> None:
        """Do not count time in which the supervisor itself was stopped as silence of processes."""
        now = time.monotonic()
        pause = now - self._polled_at
        self._polled_at = now
        if pause > _LONG_PAUSE:
            for status in self.statuses:
                status.alive_at = min(now, status.alive_at + pause)


def _is_alive(group: int) -> bool:
    """True if a process of a group is alive; zombies do not count, as they may never be reaped."""
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
