"""The control client: the connection of one process to the control server."""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from ftrain.cluster.addresses import Address
from ftrain.cluster.control_messages import (
    HANDSHAKE_SECONDS,
    MAX_HANDSHAKE_LINE,
    MAX_LINE,
    LimitError,
    Message,
    decode,
    encode,
)
from ftrain.cluster.job_token import JobToken, make_challenge
from ftrain.cluster.switchboard import watch_connection
from ftrain.launching.contract import TOKEN

_RETRY = 0.05  # seconds between two tries to connect
_TRY = 5.0  # seconds that one try may take
_AGAIN = 0.5  # seconds until one that was not let in tries it again
_STRANGER = "the listener there is not an ftrain process"


class ClusterError(RuntimeError):
    """Something that the processes of a job have to do together, and cannot."""


class MismatchError(ClusterError):
    """The processes of a job do not fit together."""

    comes_again = True  # each time that the job is started


class PeerLostError(ClusterError):
    """Another process is gone, and this one cannot go on without it."""


class Line:
    """Connects within `limit` seconds. A thread hands each message that is not an answer to `listen`.

    Both sides prove that they know the job token before anything else is sent; MismatchError if one does not.
    """

    def __init__(
        self,
        address: Address,
        index: int,
        count: int,
        limit: float,
        listen: Callable[[Message], None],
        token: JobToken,
    ):
        self._index, self._listen, self._token = index, listen, token
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[str, Message] = {}
        self._hung_up = self._lost = False
        deadline, reason = time.monotonic() + limit, _STRANGER
        while (refusal := self._come_in(address, count, limit, deadline)) is not None:
            reason = refusal.reason or reason
            if not refusal.may_try_again or time.monotonic() + _AGAIN >= deadline:
                raise ClusterError(f"process {index} was refused at {address}: {reason}")
            time.sleep(_AGAIN)
        self._reader = self._socket.makefile("rb")
        threading.Thread(target=self._read, name="ftrain-line", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message; if the control server is gone, `listen` hears of that."""
        line = encode(message, MAX_LINE)
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError:
            self._lose()

    def gather(self, name: str, value: Any, limit: float) -> list[Any]:
        """The values that all processes bring under this name; ClusterError names those who do not come in time."""
        try:
            self.send({"gather": name, "value": value, "limit": limit})
        except LimitError as error:
            raise ValueError(
                f"the value that process {self._index} brings to {name!r} is {error}"
            ) from None
        deadline = time.monotonic() + limit + 5  # the control server watches over the limit
        with self._changed:
            while name not in self._answers:
                if self._lost:
                    raise PeerLostError(f"process 0 is gone, while it was waited for at: {name}")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise ClusterError(f"no answer from process 0 for {limit:g} s at: {name}")
            answer = self._answers.pop(name)
        if "missing" in answer:
            refused = f"; refused: {', '.join(answer['refused'])}" if answer.get("refused") else ""
            raise ClusterError(
                f"waited {answer['limit']:.3g} s at: {name}; missing: {_listed(answer['processes'])}; are they running?"
                f"{refused}"
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

    def _come_in(
        self, address: Address, count: int, limit: float, deadline: float
    ) -> "_Refusal | None":
        """Connect and authenticate; None once this process is connected."""
        self._socket = _connect(address, self._index, limit, deadline)
        try:
            answer = self._authenticate(
                address, count, min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
            )
        except (
            EOFError,
            OSError,
        ):  # closed without a word, as by a job that has just ended: the next one will listen
            refusal = _Refusal("", may_try_again=True)
        except MismatchError:
            self._socket.close()
            raise
        except (ValueError, RecursionError):
            refusal = _Refusal(_STRANGER, may_try_again=False)
        else:
            if "welcome" in answer:
                self._socket.settimeout(None)
                return None
            refusal = _Refusal(
                f"{answer.get('refused', _STRANGER)}", answer.get("may_try_again") is True
            )
        self._socket.close()
        return refusal

    def _authenticate(self, address: Address, count: int, deadline: float) -> Message:
        """What the control server answers in the end, once each side has proved that it knows the job token."""
        nonce = make_challenge()
        hello = {
            "hello": self._index,
            "count": count,
            "nonce": nonce,
            "host": socket.gethostname()[:64],
        }
        self._socket.sendall(encode(hello))
        challenge = _receive_line(self._socket, deadline).get("challenge")
        if not isinstance(challenge, str):
            raise ValueError("no challenge")
        facts = (self._index, count, nonce, challenge)
        self._socket.sendall(encode({"proof": self._token.prove("client", *facts)}))
        answer = _receive_line(self._socket, deadline)
        if answer.get("refused") == "token":
            raise MismatchError(
                f"process {self._index} on {socket.gethostname()} was refused at {address}: process 0 has another job "
                f"token than {self._token.source} here; {_what_to_check(self._token)}"
            )
        if "welcome" in answer and not self._token.is_proof(answer.get("proof"), "server", *facts):
            raise MismatchError(
                f"the listener at {address} is not process 0 of this job: it does not know the job token "
                f"{self._token.source} of process {self._index}; {_what_to_check(self._token)}"
            )
        return answer

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
            watch_connection(connection)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ClusterError(
                    f"process {index} found no process 0 at {address} within {limit:g} s ({error}); is it running?"
                ) from None
            time.sleep(_RETRY)
        else:
            connection.settimeout(None)
            return connection


def _receive_line(connection: socket.socket, deadline: float) -> Message:
    """A message of the handshake; byte by byte, because what follows it is not to be read here."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) > MAX_HANDSHAKE_LINE:
            raise LimitError(f"a line of more than {MAX_HANDSHAKE_LINE} bytes")
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        byte = connection.recv(1)
        if not byte:
            raise EOFError
        line += byte
    return decode(bytes(line))


def _what_to_check(token: JobToken) -> str:
    if token.source == TOKEN:
        return f"set the same {TOKEN} for all processes"
    return f"do all hosts see the same {token.source}? if not, use a shared directory, or set {TOKEN} for all processes"


def _listed(indices: list[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
