"""The process group: the processes of a job, as one of them sees it."""

import atexit
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from ftrain.cluster.control_client import ControlClient
from ftrain.cluster.control_protocol import ControlMessage, PeerLostError, ProcessMismatchError
from ftrain.cluster.control_server import ControlServer
from ftrain.cluster.spec import ClusterSpec
from ftrain.launching.protocol import PEER_FAILED, USER_ERROR

GRACE = 2.0  # seconds for a process that lost another to exit by itself, with its own error
CLOSE_SECONDS = 10.0  # for a process that failed to close its files
VISIBLE_SECONDS = 30.0  # until a file of one host appears on another: network file systems cache
_POLL = 0.1  # seconds
_PROBE_PREFIX = ".shared_check."


class Decider(Protocol):
    """Takes part in decisions of the group: on `hold` it stops and returns its step."""

    def hold(self) -> int:
        """Take no further step, and return the step that was reached."""
        ...

    def decide(self, proposal: ControlMessage, step: int) -> None:
        """Apply a proposal once `step` is reached, and continue until then."""
        ...


class ProcessGroup:
    """This process and the others of its job. `connect` makes one; `create_local` one of size 1.

    As a context manager it notifies the others when an exception ends this process, so that they
    end too.
    """

    def __init__(self, spec: ClusterSpec, index: int, count: int):
        self.spec = spec
        self.index = index
        self.count = count
        # Called with the reason and the other process, before its failure ends this one.
        self.on_peer_failure: Callable[[str, int], None] = lambda why, process: None
        self.has_failed = False
        self.exit_code = 1  # of this process, once it has failed
        # True once the runtime of the devices has started: then no process can continue alone.
        self.is_bound = False
        self._decider: Decider | None = None
        self._deciders = 0  # registered so far
        self._missed: list[Callable[[Decider], object]] = []  # calls before the first decider
        self._deciding = threading.Lock()
        self._client: ControlClient | None = None
        self._server: ControlServer | None = None
        self._shared: set[Path] = set()  # directories that all processes share
        self._ending = threading.Lock()
        self._loss = threading.Event()
        self._why = ""  # the reason of the loss
        # The exit code after a loss: that of a user's mistake if the peer failed by one.
        self._peer_code = PEER_FAILED

    @property
    def is_chief(self) -> bool:
        """True for process 0, which writes for all."""
        return self.index == 0

    def gather(self, name: str, value: Any, limit: float = 60.0) -> list[Any]:
        """Return the values of all processes under `name`, in their order; JSON must encode them.

        Every process must call this within `limit` seconds of the first; ClusterError names those
        that do not.
        """
        return [value] if self._client is None else self._client.gather(name, value, limit)

    def barrier(self, name: str, limit: float = 60.0) -> None:
        """Wait until all processes have called this."""
        self.gather(name, None, limit)

    def check_directory(self, directory: str | Path, limit: float = VISIBLE_SECONDS) -> None:
        """Check that all processes see one directory and may write to it.

        ProcessMismatchError names the hosts that do not. Process 0 writes a file there, which the
        others must find within `limit` seconds. Each directory is checked once; all processes must
        call this.
        """
        path = Path(directory).absolute()
        if self._client is None or path in self._shared:
            return
        own = write_probe(path) if self.is_chief else None
        try:
            probe = Probe(*self.gather("the check of the run directory", own)[0])
            problem = look_for_probe(path, probe, limit)
            seen = self.gather(
                "the run directory, seen by all", [socket.gethostname(), problem], limit + 60
            )
        finally:
            if own is not None:
                remove_probe(own)
        error = describe_unusable(probe, [(host, problem) for host, problem in seen])
        if error is not None:
            raise ProcessMismatchError(error)
        self._shared.add(path)

    def propose(self, proposal: ControlMessage) -> None:
        """Have all processes apply `proposal` at one step: the highest that any has reached."""
        if self._client is not None:
            self._client.send({"propose": proposal})

    def take_part(self, decider: Decider) -> int:
        """Register `decider` for all decisions from now on, and those before the first decider.

        Returns the number of deciders before it, which is the same in all processes that run the
        same program.
        """
        with self._deciding:
            number = self._deciders
            self._decider = decider
            self._deciders += 1
            for call in self._missed:
                call(decider)
            self._missed.clear()
            return number

    def fail(self, error: BaseException) -> None:
        """Notify the others that this process ends with an error, which ends them too."""
        if self._client is None or self.has_failed:
            return
        self.has_failed = True
        if not self.is_bound:
            self._close(agreed=False)
            return
        atexit.register(self._exit)  # jax's own shutdown would wait for lost processes
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        limit = CLOSE_SECONDS
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            self.exit_code = error.code
        if isinstance(error, ProcessMismatchError):
            self.exit_code = USER_ERROR
        if isinstance(error, PeerLostError):  # closing files may wait for the lost process
            self.exit_code = PEER_FAILED
            limit = GRACE / 2
        self._client.send({"failed": message[:2000], "code": self.exit_code})
        _call_later(limit, lambda: _end_now(message, self.exit_code))

    def explain(self, error: Exception) -> Exception:
        """Return PeerLostError for a runtime error that a lost process has caused, else `error`."""
        import jax

        is_of_runtime = self._client is not None and isinstance(error, jax.errors.JaxRuntimeError)
        return PeerLostError(self._why) if is_of_runtime and self._loss.wait(GRACE / 2) else error

    def leave(self, limit: float = 600.0) -> None:
        """Wait for all processes to finish, then disconnect."""
        if self._client is None:
            return
        import jax

        self.barrier("the end of the job", limit)
        self._client.disconnect()
        jax.distributed.shutdown()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, SystemExit) and not error.code:
            error = None
        try:
            if error is None:
                self.leave()
        except BaseException as failure:
            self.fail(failure)
            raise
        if error is not None:
            self.fail(error)

    def attach(self, client: ControlClient, server: ControlServer | None) -> None:
        """Use this connection; `connect` calls this."""
        self._client = client
        self._server = server

    def bind(self) -> None:
        """Mark that the runtime is about to start: from now on a lost process ends this one."""
        self.is_bound = True
        if self._loss.is_set():
            raise PeerLostError(self._why)

    def handle(self, message: ControlMessage) -> None:
        """Handle a message of the control server, in the thread of the client."""
        if "hold" in message:
            held = self._call_decider(lambda decider: decider.hold())
            if self._client is not None:
                self._client.send({"held": held or 0})
        elif "decided" in message:
            self._call_decider(lambda decider: decider.decide(message["decided"], message["step"]))
        elif "failed" in message:
            # It still closes its files and may need this process, as to write a checkpoint.
            self._peer_code = USER_ERROR if message["code"] == USER_ERROR else PEER_FAILED
            reason = f"failed: {message['failed']}"
            self._end_with(message["process"], reason, CLOSE_SECONDS + GRACE)
        elif "lost" in message:
            # Without process 0 the runtime is about to abort this process, with a long message.
            at_once = message["lost"] == 0 or bool(self._why)
            self._end_with(message["lost"], "was lost", 0.0 if at_once else GRACE)

    def _call_decider(self, call: Callable[[Decider], Any]) -> Any:
        with self._deciding:
            if self._decider is not None:
                return call(self._decider)
            self._missed.append(call)
            return None

    def _close(self, *, agreed: bool = True) -> None:
        if self._client is not None:
            self._client.disconnect(agreed=agreed)
            self._client = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def _exit(self) -> None:
        """End this process, which has failed, after the others were notified.

        Without process 0, the runtime of their devices would abort them with a long message.
        """
        if self._client is not None:
            self._client.send({"gone": True})
        if self._server is not None:
            self._server.wait_for_others_to_leave(GRACE / 2)
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(self.exit_code)

    def _end_with(self, process: int, what: str, patience: float) -> None:
        """End this process because another one ends.

        Within `patience` seconds it may detect that by itself, and raise an error that says more.
        """
        self._why = self._why or f"process {process} {what}; process {self.index} ends too"
        self._loss.set()
        if not self.is_bound or self.has_failed:
            return

        def end() -> None:
            if not self.has_failed and self._ending.acquire(blocking=False):
                self.on_peer_failure(self._why, process)
                _end_now(self._why, self._peer_code)

        if patience:
            _call_later(patience, end)
        else:
            end()


def create_local() -> ProcessGroup:
    """Return a group of size 1: the same program, without any other process."""
    return ProcessGroup(ClusterSpec({"worker": ["localhost:0"]}), 0, 1)


def check_facts(facts: list[Mapping[str, Any]]) -> None:
    """Raise ProcessMismatchError unless the facts of all processes, such as versions, are equal."""
    differences = []
    for index, own in enumerate(facts):
        for key in [*facts[0], *(key for key in own if key not in facts[0])]:
            here = own.get(key)
            there = facts[0].get(key)
            if here != there:
                differences.append(f"{key} is {here!r} at process {index}, {there!r} at process 0")
    if differences:
        raise ProcessMismatchError(
            "all processes must have the same config and versions:\n  " + "\n  ".join(differences)
        )


class Probe(NamedTuple):
    """A file that process 0 has written to a directory for the others to find."""

    directory: str
    name: str
    error: str | None  # why it could not be written


def write_probe(directory: Path) -> Probe:
    """Write a file with a random name to `directory`; the probe has the error if that fails."""
    name = _PROBE_PREFIX + secrets.token_hex(8)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    except OSError as error:
        return Probe(f"{directory}", name, error.strerror or str(error))
    return Probe(f"{directory}", name, None)


def remove_probe(probe: Probe) -> None:
    """Remove the file of `write_probe`."""
    with suppress(OSError):
        (Path(probe.directory) / probe.name).unlink(missing_ok=True)


def look_for_probe(directory: Path, probe: Probe, limit: float = VISIBLE_SECONDS) -> str | None:
    """Return why this process cannot use the directory of process 0, or None if it can."""
    if probe.error is not None:
        return None  # process 0 reports it
    deadline = time.monotonic() + limit
    while not _is_visible(directory / probe.name):
        if time.monotonic() >= deadline:
            return f"does not see the file that process 0 has written (waited {limit:g} s)"
        time.sleep(_POLL)
    return None if os.access(directory, os.W_OK) else "cannot write there"


def describe_unusable(probe: Probe, found: Sequence[tuple[str, str | None]]) -> str | None:
    """Return one line that names the processes that cannot use the directory; None if all can."""
    if probe.error is not None:
        return (
            f"run directory {probe.directory}: "
            f"process 0 on {found[0][0]} cannot write there: {probe.error}"
        )
    unusable = [
        (index, host, problem) for index, (host, problem) in enumerate(found) if problem is not None
    ]
    if not unusable:
        return None
    _, _, problem = unusable[0]
    names = [f"process {index} on {host}" for index, host, _ in unusable[:4]]
    more = f" and {len(unusable) - len(names)} more" if len(unusable) > len(names) else ""
    return (
        f"run directory {probe.directory}: {', '.join(names)}{more} {problem}; "
        f"process 0 is on {found[0][0]}. "
        "Choose a directory on a file system that all hosts share and may write to"
    )


def _is_visible(path: Path) -> bool:
    with suppress(OSError):  # makes a network file system refresh its cache of the directories
        for directory in (path.parent.parent, path.parent):
            with os.scandir(directory) as entries:
                next(entries, None)
    try:
        return path.read_text() == path.name
    except (OSError, UnicodeError):
        return False


def _call_later(seconds: float, work: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()


def _end_now(why: str, code: int) -> None:
    with suppress(Exception):
        sys.stderr.write(f"ftrain: {why}\n")  # in one write, as the runtime may write there too
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code)
