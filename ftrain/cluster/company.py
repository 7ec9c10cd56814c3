"""The company: the processes of a job, as one of them sees it."""

import atexit
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from ftrain.cluster.control_messages import Message
from ftrain.cluster.line import Line, MismatchError, PeerLostError
from ftrain.cluster.shared_directory import (
    VISIBLE_SECONDS,
    Probe,
    describe_blind,
    look_for_probe,
    remove_probe,
    write_probe,
)
from ftrain.cluster.spec import ClusterSpec
from ftrain.cluster.switchboard import Switchboard
from ftrain.launching.contract import PEER_FAILED, USER_ERROR

GRACE = (
    2.0  # seconds in which a process that lost another may end by itself, with an error of its own
)
LAST_WORDS = 10.0  # seconds that a process which failed may take to close what it has open


class Decider(Protocol):
    """Who takes part in decisions: told to hold, it answers with the step that it has come to, and waits."""

    def hold(self) -> int: ...
    def decide(self, proposal: Message, step: int) -> None: ...


class Company:
    """This process among those of its job. `connect` makes one, `create_local` one of a single process.

    As a context manager it tells the others when an exception ends this process, so that they end too.
    """

    def __init__(self, spec: ClusterSpec, index: int, count: int):
        self.spec, self.index, self.count = spec, index, count
        self._decider: Decider | None = None
        self._deciders = 0  # that have taken part
        self._missed: list[Callable[[Decider], object]] = []  # what came before there was one
        self._deciding = threading.Lock()
        self.tell_end: Callable[[str, int], None] = lambda why, process: (
            None
        )  # of another, which ends this one
        self.has_failed = False
        self.exit_code = 1  # of this process, once it has failed
        self.is_bound = False  # to the others: the runtime of the devices has been started, and none can go on alone
        self._line: Line | None = None
        self._switchboard: Switchboard | None = None
        self._shared: set[Path] = set()  # directories that all processes were found to share
        self._ending = threading.Lock()
        self._loss = threading.Event()
        self._why = ""  # this process cannot go on
        self._peer_code = PEER_FAILED  # to exit with then: a mistake is one of all processes, as a restart repeats it

    @property
    def is_chief(self) -> bool:
        """Whether this is the process that writes for all."""
        return self.index == 0

    def gather(self, name: str, value: Any, limit: float = 60.0) -> list[Any]:
        """What each process brings under `name`, as JSON can say it, in their order.

        Every process has to come within `limit` seconds of the first; ClusterError names those who do not.
        """
        return [value] if self._line is None else self._line.gather(name, value, limit)

    def barrier(self, name: str, limit: float = 60.0) -> None:
        """Wait until all processes have come here."""
        self.gather(name, None, limit)

    def check_directory(self, directory: str | Path, limit: float = VISIBLE_SECONDS) -> None:
        """Check that all processes see one directory and may write there; MismatchError names the hosts that do not.

        Process 0 writes a file there, which the others have to find within `limit` seconds. Each directory is checked
        once; all processes must call this.
        """
        path = Path(directory).absolute()
        if self._line is None or path in self._shared:
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
        error = describe_blind(probe, [(host, problem) for host, problem in seen])
        if error is not None:
            raise MismatchError(error)
        self._shared.add(path)

    def propose(self, proposal: Message) -> None:
        """Have all processes decide together on the step of `proposal`: the furthest that one of them has come to."""
        if self._line is not None:
            self._line.send({"propose": proposal})

    def take_part(self, decider: Decider) -> int:
        """Have `decider` take part in decisions from now on; it hears of those that were taken before the first came.

        The answer is how many have come before: processes that run the same program count alike.
        """
        with self._deciding:
            self._decider, number, self._deciders = decider, self._deciders, self._deciders + 1
            for tell in self._missed:
                tell(decider)
            self._missed.clear()
            return number

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process ends with an error, which ends them too."""
        if self._line is None or self.has_failed:
            return
        self.has_failed = True
        if not self.is_bound:
            self._close(agreed=False)
            return
        atexit.register(self._exit)  # jax's own farewell would wait for those that are gone
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        limit = LAST_WORDS
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            self.exit_code = error.code
        if isinstance(error, MismatchError):
            self.exit_code = USER_ERROR
        if isinstance(error, PeerLostError):  # what is open may wait for the one that is gone
            self.exit_code, limit = PEER_FAILED, GRACE / 2
        self._line.send({"failed": message[:2000], "code": self.exit_code})
        _after(limit, lambda: _end_now(message, self.exit_code))

    def explain(self, error: Exception) -> Exception:
        """What an error of the runtime comes from: if another process is gone, that is the news, and not its wires."""
        import jax

        is_of_runtime = self._line is not None and isinstance(error, jax.errors.JaxRuntimeError)
        return PeerLostError(self._why) if is_of_runtime and self._loss.wait(GRACE / 2) else error

    def leave(self, limit: float = 600.0) -> None:
        """Take leave of the others, when all have come to their end."""
        if self._line is None:
            return
        import jax

        self.barrier("the end of the job", limit)
        self._line.hang_up()
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

    def join(self, line: Line, switchboard: Switchboard | None) -> None:
        """Go on with a connection; `connect` does this."""
        self._line, self._switchboard = line, switchboard

    def bind(self) -> None:
        """From here on this process cannot go on alone."""
        self.is_bound = True
        if self._loss.is_set():
            raise PeerLostError(self._why)

    def listen(self, message: Message) -> None:
        """In a thread: what the others say."""
        if "hold" in message:
            held = self._tell(lambda decider: decider.hold())
            if self._line is not None:
                self._line.send({"held": held or 0})
        elif "decided" in message:
            self._tell(lambda decider: decider.decide(message["decided"], message["step"]))
        elif "failed" in message:
            # it still closes what it has open, and may need this process for it: a checkpoint that is being written
            self._peer_code = USER_ERROR if message["code"] == USER_ERROR else PEER_FAILED
            self._end_with(message["process"], f"failed: {message['failed']}", LAST_WORDS + GRACE)
        elif "lost" in message:
            self._end_with(
                message["lost"], "is gone", 0.0 if message["lost"] == 0 or self._why else GRACE
            )

    def _tell(self, what: Callable[[Decider], Any]) -> Any:
        with self._deciding:
            if self._decider is not None:
                return what(self._decider)
            self._missed.append(what)
            return None

    def _close(self, *, agreed: bool = True) -> None:
        if self._line is not None:
            self._line.hang_up(agreed=agreed)
            self._line = None
        if self._switchboard is not None:
            self._switchboard.close()
            self._switchboard = None

    def _exit(self) -> None:
        """End this process, which has failed. The others hear of it first: without the first process, the runtime of
        their devices would abort them, in many words."""
        if self._line is not None:
            self._line.send({"gone": True})
        if self._switchboard is not None:
            self._switchboard.wait_for_others_to_leave(GRACE / 2)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(self.exit_code)

    def _end_with(self, process: int, what: str, patience: float) -> None:
        """Another process ends: this one cannot go on. It may find out by itself, and say more, if it is quick."""
        self._why = self._why or f"process {process} {what}; process {self.index} ends too"
        self._loss.set()
        if not self.is_bound or self.has_failed:
            return

        def end() -> None:
            if not self.has_failed and self._ending.acquire(blocking=False):
                self.tell_end(self._why, process)
                _end_now(self._why, self._peer_code)

        if patience:
            _after(patience, end)
        else:  # the runtime of the devices is about to abort this process, in many words
            end()


def create_local() -> Company:
    """A company of one: the same program, without any other process."""
    return Company(ClusterSpec({"worker": ["localhost:0"]}), 0, 1)


def check_facts(facts: list[Mapping[str, Any]]) -> None:
    """See to it that all processes have come with the same facts: versions, and what they are to do."""
    differences = []
    for index, own in enumerate(facts):
        for key in [*facts[0], *(key for key in own if key not in facts[0])]:
            here, there = own.get(key), facts[0].get(key)
            if here != there:
                differences.append(f"{key} is {here!r} at process {index}, {there!r} at process 0")
    if differences:
        raise MismatchError("the processes differ:\n  " + "\n  ".join(differences))


def _after(seconds: float, work: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()


def _end_now(why: str, code: int) -> None:
    with contextlib.suppress(Exception):
        sys.stderr.write(f"ftrain: {why}\n")  # at once, as the runtime may be writing there too
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code)
