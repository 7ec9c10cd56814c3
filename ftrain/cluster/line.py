"""A line: the connection of one process to the switchboard."""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from ftrain.cluster.addresses import Address
from ftrain.cluster.switchboard import Message, keep_alive

_RETRY = 0.05  # seconds between two tries to connect
_TRY = 5.0  # seconds that one try may take
_AGAIN = 0.5  # seconds until one that was not let in tries it again
_ENDED = b'{"may_try_again": true}'  # without a word, as a job that has just ended: the next one will listen there
_STRANGER = "who listens there does not answer as a process of ftrain does"


class ClusterError(RuntimeError):
    """Something that the processes of a job have to do together, and cannot."""


class MismatchError(ClusterError):
    """The processes of a job do not fit together."""

    comes_again = True  # each time that the job is started


class PeerLostError(ClusterError):
    """Another process is gone, and this one cannot go on without it."""


class Line:
    """Connects within `limit` seconds. A thread hands each message that is not an answer to `listen`."""

    def __init__(self, address: Address, index: int, count: int, limit: float, listen: Callable[[Message], None]):
        self._index, self._listen = index, listen
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[str, Message] = {}
        self._hung_up = self._lost = False
        deadline = time.monotonic() + limit
        while (refusal := self._come_in(address, count, limit, deadline)) is not None:
            if not refusal.may_try_again or time.monotonic() >= deadline:
                raise ClusterError(f"process {index} was not let in at {address}: {refusal.reason}")
            time.sleep(_AGAIN)
        threading.Thread(target=self._read, name="ftrain-line", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message; if the switchboard is gone, `listen` hears of that."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._lose()

    def gather(self, name: str, value: Any, limit: float) -> list[Any]:
        """The values that all processes bring under this name; ClusterError names those who do not come in time."""
        self.send({"gather": name, "value": value, "limit": limit})
        deadline = time.monotonic() + limit + 5  # the switchboard watches over the limit
        with self._changed:
            while name not in self._answers:
                if self._lost:
                    raise PeerLostError(f"process 0 is gone, while it was waited for at: {name}")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise ClusterError(f"no answer from process 0 for {limit:g} s at: {name}")
            answer = self._answers.pop(name)
        if "missing" in answer:
            raise ClusterError(
                f"waited {answer['limit']:.3g} s at: {name}; missing: {_listed(answer['processes'])}; are they running?"
            )
        return answer["values"]

    def hang_up(self, *, agreed: bool = True) -> None:
        """Leave, as agreed with all others, or else such that they take notice."""
        if self._hung_up:
            return
        self._hung_up = True
        if agreed:
            self.send({"bye": self._index})
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _come_in(self, address: Address, count: int, limit: float, deadline: float) -> "_Refusal | None":
        """Connect, and say who this is."""
        self._socket = _connect(address, self._index, limit, deadline)
        self._reader = self._socket.makefile("rb")
        self._socket.settimeout(max(_RETRY, deadline - time.monotonic()))
        try:
            self._socket.sendall(json.dumps({"hello": self._index, "count": count}).encode() + b"\n")
            answer = json.loads(self._reader.readline() or _ENDED)
        except OSError:
            answer = json.loads(_ENDED)
        except ValueError:
            answer = None
        answer = answer if isinstance(answer, dict) else {}
        self._socket.settimeout(None)
        if "welcome" in answer:
            return None
        self._reader.close()
        self._socket.close()
        return _Refusal(answer.get("refused", _STRANGER), answer.get("may_try_again", False))

    def _read(self) -> None:
        try:
            with suppress(OSError, ValueError), self._reader:
                for line in self._reader:
                    self._receive(json.loads(line))
        finally:
            self._lose()

    def _receive(self, message: Message) -> None:
        name = message.get("gathered") or message.get("missing")
        if name is None:
            self._listen(message)
            return
        with self._changed:
            self._answers[name] = message
            self._changed.notify_all()

    def _lose(self) -> None:
        with self._changed:
            is_news, self._lost = not self._lost and not self._hung_up, True
            self._changed.notify_all()
        if is_news:
            self._listen({"lost": 0})


class _Refusal(NamedTuple):
    reason: str
    may_try_again: bool


def _connect(address: Address, index: int, limit: float, deadline: float) -> socket.socket:
    while True:
        try:
            left = max(_RETRY, deadline - time.monotonic())
            connection = socket.create_connection(address, timeout=min(left, _TRY))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ClusterError(
                    f"process {index} found no process 0 at {address} within {limit:g} s ({error}); is it running?"
                ) from None
            time.sleep(_RETRY)
        else:
            connection.settimeout(None)
            return connection


def _listed(indices: list[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
