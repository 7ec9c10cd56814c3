"""The control protocol of client and server: messages as lines of JSON, limits, and errors."""

import json
import re
import socket
from typing import Any

ControlMessage = dict[str, Any]
MAX_LINE = 1 << 24  # bytes of a line from a process of the job
MAX_HANDSHAKE_LINE = 1024  # bytes of a line from a peer that has not authenticated yet
MAX_DEPTH = 32  # arrays and objects inside each other
HANDSHAKE_SECONDS = 10.0  # from the connection to the end of the handshake
LOST_AFTER = 18.0  # seconds without an answer from its host after which a peer is lost
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


class ClusterError(RuntimeError):
    """The processes of a job cannot connect, or one does not take part in time."""


class ProcessMismatchError(ClusterError):
    """The processes of a job differ where they must be equal."""

    retryable = False  # a restart would repeat it


class PeerLostError(ClusterError):
    """The connection to another process was lost, and this one cannot continue without it."""


class LimitError(ValueError):
    """A message is longer or deeper than a peer may send."""


def encode(message: ControlMessage, limit: int | None = None) -> bytes:
    """Return a message as a line; with a limit, LimitError if the peer would refuse it."""
    line = json.dumps(message).encode()
    if limit is not None:
        _check_depth(line)
        if len(line) > limit:
            raise LimitError(f"the message has {len(line):,} bytes, expected at most {limit:,}")
    return line + b"\n"


def decode(line: bytes) -> ControlMessage:
    """Return the message of a line; ValueError if it is not one, LimitError if it is too deep."""
    _check_depth(line)
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("the message is not a JSON object")
    return message


def detect_lost_peer(connection: socket.socket) -> None:
    """Have the system close a connection soon after the host of the peer has vanished.

    Keepalives detect it on an idle connection. While data is unacknowledged there are none, and the
    system would retransmit for a quarter of an hour, so that time is limited as well. A process
    that is only stopped is not lost: its host answers.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": 5,
        "TCP_KEEPINTVL": 4,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": round(1000 * LOST_AFTER),  # milliseconds
    }
    for option, value in options.items():
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _check_depth(line: bytes) -> None:
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", line)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise LimitError(f"the message has more than {MAX_DEPTH} levels of nesting")
