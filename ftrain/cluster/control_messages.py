"""Messages between control clients and the control server: lines of JSON, with limits on all that a peer can send."""

import json
import re
from typing import Any

Message = dict[str, Any]
MAX_LINE = 1 << 24  # bytes of a line from a process of the job
MAX_HANDSHAKE_LINE = 1024  # bytes of a line from a peer that has not authenticated yet
MAX_DEPTH = 32  # arrays and objects inside each other
HANDSHAKE_SECONDS = 10.0  # from the connection to the end of the handshake
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


class LimitError(ValueError):
    """A message is longer or deeper than a peer may send."""


def encode(message: Message, limit: int | None = None) -> bytes:
    """A message as a line; with a limit, LimitError if the peer would refuse it."""
    line = json.dumps(message).encode()
    if limit is not None:
        _check_depth(line)
        if len(line) > limit:
            raise LimitError(f"a message of {len(line):,} bytes; at most {limit:,} can be sent")
    return line + b"\n"


def decode(line: bytes) -> Message:
    """The message of a line; ValueError for anything else, LimitError for one that is nested too deeply."""
    _check_depth(line)
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


def _check_depth(line: bytes) -> None:
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", line)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise LimitError(f"a message nested more than {MAX_DEPTH} deep")
