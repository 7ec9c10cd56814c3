"""The control client: the connection of one process to the control server."""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from ftrain.cluster import control_protocol as protocol
from ftrain.cluster.addresses import Address
from ftrain.cluster.control_protocol import (
    ClusterError,
    ControlMessage,
    LimitError,
    PeerLostError,
    ProcessMismatchError,
)
from ftrain.cluster.job_token import JobToken, make_challenge
from ftrain.launching.protocol import TOKEN

_RETRY_SECONDS = 0.05  # between two attempts to connect
_ATTEMPT_SECONDS = 5.0  # that one attempt may take
_REFUSED_SECONDS = 0.5  # until a refused process tries again
_STRANGER = "the listener there is not an ftrain process"


class ControlClient:
    """Connects within `limit` seconds. A thread passes messages of the server to `on_message`.

    Both sides prove that they know the job token before anything else is sent;
    ProcessMismatchError if one does not.
    """

    def __init__(
        self,
        address: Address,
        index: int,
        count: int,
        limit: float,
        on_message: Callable[[ControlMessage], None],
        token: JobToken,
    ):
        self._index = index
        self._on_message = on_message
        self._token = token
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[str, ControlMessage] = {}
        self._disconnected = False
        self._lost = False
        deadline = time.monotonic() + limit
        reason = _STRANGER
        while (refusal := self._try_to_join(address, count, limit, deadline)) is not None:
            reason = refusal.reason or reason
            if not refusal.may_try_again or time.monotonic() + _REFUSED_SECONDS >= deadline:
                raise ClusterError(f"process {index} was refused at {address}: {reason}")
            time.sleep(_REFUSED_SECONDS)
        self._reader = self._socket.makefile("rb")
        threading.Thread(target=self._read, name="ftrain-control-client", daemon=True).start()

    def send(self, message: ControlMessage) -> None:
        """Send a message; if the connection is lost, `on_message` gets `{"lost": 0}`."""
        line = protocol.encode(message, protocol.MAX_LINE)
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError:
            self._lose()

    def gather(self, name: str, value: Any, limit: float) -> list[Any]:
        """Return the values of all processes; ClusterError names those that are missing in time."""
        try:
            self.send({"gather": name, "value": value, "limit": limit})
        except LimitError as error:
            raise ValueError(
                f"the value of process {self._index} for {name!r} cannot be sent: {error}"
            ) from None
        deadline = time.monotonic() + limit + 5  # the server enforces the limit
        with self._changed:
            while name not in self._answers:
                if self._lost:
                    raise PeerLostError(
                        f"process 0 was lost while process {self._index} waited at: {name}"
                    )
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise ClusterError(
                        f"process 0 did not answer process {self._index} "
                        f"within {limit + 5:g} s at: {name}; is its host overloaded?"
                    )
            answer = self._answers.pop(name)
        if "missing" in answer:
            refused = f"; refused: {', '.join(answer['refused'])}" if answer.get("refused") else ""
            raise ClusterError(
                f"waited {answer['limit']:.3g} s at: {name}; "
                f"missing: {_listed(answer['processes'])}; are they running?{refused}"
            )
        return answer["values"]

    def disconnect(self, *, agreed: bool = True) -> None:
        """Leave the job; if that is not agreed by all, the server notifies the others."""
        if self._disconnected:
            return
        self._disconnected = True
        if agreed:
            self.send({"bye": self._index})
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _try_to_join(
        self, address: Address, count: int, limit: float, deadline: float
    ) -> "_Refusal | None":
        """Connect and authenticate; return None once this process is connected."""
        self._socket = _connect(address, self._index, limit, deadline)
        handshake_ends = min(deadline, time.monotonic() + protocol.HANDSHAKE_SECONDS)
        try:
            answer = self._authenticate(address, count, handshake_ends)
        except (EOFError, OSError):
            # Closed without a reason, as by a job that has just ended: the next one will listen.
            refusal = _Refusal("", may_try_again=True)
        except ProcessMismatchError:
            self._socket.close()
            raise
        except (ValueError, RecursionError):
            refusal = _Refusal(_STRANGER, may_try_again=False)
        else:
            if "welcome" in answer:
                self._socket.settimeout(None)
                return None
            reason = f"{answer.get('refused', _STRANGER)}"
            refusal = _Refusal(reason, answer.get("may_try_again") is True)
        self._socket.close()
        return refusal

    def _authenticate(self, address: Address, count: int, deadline: float) -> ControlMessage:
        """Return the last answer of the handshake, in which each side proves to know the token."""
        nonce = make_challenge()
        hello = {
            "hello": self._index,
            "count": count,
            "nonce": nonce,
            "host": socket.gethostname()[:64],
        }
        self._socket.sendall(protocol.encode(hello))
        challenge = _receive_line(self._socket, deadline).get("challenge")
        if not isinstance(challenge, str):
            raise ValueError("the answer has no challenge")
        facts = (self._index, count, nonce, challenge)
        self._socket.sendall(protocol.encode({"proof": self._token.prove("client", *facts)}))
        answer = _receive_line(self._socket, deadline)
        if answer.get("refused") == "token":
            raise ProcessMismatchError(
                f"process {self._index} on {socket.gethostname()} was refused at {address}: "
                f"process 0 has another job token than {self._token.source} here; "
                f"{_what_to_check(self._token)}"
            )
        if "welcome" in answer and not self._token.is_proof(answer.get("proof"), "server", *facts):
            raise ProcessMismatchError(
                f"the listener at {address} is not process 0 of this job: "
                f"it does not know the job token {self._token.source} of process {self._index}; "
                f"{_what_to_check(self._token)}"
            )
        return answer

    def _read(self) -> None:
        try:
            with suppress(OSError, ValueError), self._reader:
                for line in self._reader:
                    self._receive(json.loads(line))
        finally:
            self._lose()

    def _receive(self, message: ControlMessage) -> None:
        name = message.get("gathered") or message.get("missing")
        if name is None:
            self._on_message(message)
            return
        with self._changed:
            self._answers[name] = message
            self._changed.notify_all()

    def _lose(self) -> None:
        with self._changed:
            is_new = not self._lost and not self._disconnected
            self._lost = True
            self._changed.notify_all()
        if is_new:
            self._on_message({"lost": 0})


class _Refusal(NamedTuple):
    reason: str
    may_try_again: bool


def _connect(address: Address, index: int, limit: float, deadline: float) -> socket.socket:
    while True:
        try:
            left = max(_RETRY_SECONDS, deadline - time.monotonic())
            connection = socket.create_connection(address, timeout=min(left, _ATTEMPT_SECONDS))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            protocol.detect_lost_peer(connection)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ClusterError(
                    f"process {index} found no process 0 at {address} within {limit:g} s "
                    f"({error}); is it running?"
                ) from None
            time.sleep(_RETRY_SECONDS)
        else:
            connection.settimeout(None)
            return connection


def _receive_line(connection: socket.socket, deadline: float) -> ControlMessage:
    """Read a message of the handshake, byte by byte: what follows it belongs to another reader."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) > protocol.MAX_HANDSHAKE_LINE:
            raise LimitError(f"the line has more than {protocol.MAX_HANDSHAKE_LINE:,} bytes")
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        byte = connection.recv(1)
        if not byte:
            raise EOFError
        line += byte
    return protocol.decode(bytes(line))


def _what_to_check(token: JobToken) -> str:
    if token.source == TOKEN:
        return f"set the same {TOKEN} for all processes"
    return (
        f"do all hosts see the same {token.source}? "
        f"if not, use a shared directory, or set {TOKEN} for all processes"
    )


def _listed(indices: list[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
