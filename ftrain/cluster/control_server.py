"""The control server of process 0: all processes of a job connect to it, gather values and vote.

It is separate from the collectives of the devices, which have neither timeouts nor names: a process
that waits there for a missing peer waits forever, or is aborted without a reason. Every process,
process 0 included, has one connection to it, and both sides send lines of JSON. A peer must prove
that it knows the job token before anything else, and what it can cost until then is limited.
"""

import asyncio
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

from ftrain.cluster import control_protocol as protocol
from ftrain.cluster.addresses import Address
from ftrain.cluster.control_protocol import ControlMessage, LimitError
from ftrain.cluster.job_token import JobToken, make_challenge

MIN_PENDING = 64  # handshakes at once; in a large job, two for each process
MAX_LOGGED = 20  # refused connections that are logged in LOG_SECONDS; more are only counted
LOG_SECONDS = 600.0
_CHUNK = 1 << 16  # bytes read at once
_MAX_NAMED = 3  # refused processes that an error names
# What a message of a broken or foreign peer raises.
_INVALID = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class ControlServer:
    """Listens at an address until it is closed; raises OSError if it cannot."""

    def __init__(self, address: Address, count: int, token: JobToken):
        self._count = count
        self._token = token
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._left: set[int] = set()
        self._is_complete = False  # True once all have gathered: then none can be replaced
        self._gathering: dict[str, _Gathering] = {}
        self._proposals: list[ControlMessage] = []
        self._ballot: _Ballot | None = None
        # Connections in their handshake, the oldest first, with their addresses.
        self._pending: dict[asyncio.StreamWriter, str] = {}
        # By process: why a peer that claimed to be it was refused.
        self._refused: dict[int, str] = {}
        self._log = _RefusalLog()
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, address.host, address.port, limit=_CHUNK)
            )
        except BaseException:
            self._loop.close()
            raise
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ftrain-control-server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            self._server.close()
            for writer in (*self._members.values(), *self._pending):
                writer.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)  # lets the tasks handle their cancellation
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()

    def wait_for_others_to_leave(self, limit: float) -> None:
        """Wait until only process 0 is connected, at most `limit` seconds."""
        deadline = time.monotonic() + limit
        while self._members.keys() - {0} and time.monotonic() < deadline:
            time.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = _LineReader(reader)
        peer = _name(writer)
        index = None
        try:
            protocol.detect_lost_peer(writer.get_extra_info("socket"))
            self._admit(writer, peer)
            async with asyncio.timeout(protocol.HANDSHAKE_SECONDS):
                index = await self._welcome(lines, writer, peer)
            while index is not None and (line := await lines.next(protocol.MAX_LINE)) is not None:
                self._handle(index, protocol.decode(line))
        except TimeoutError:
            if index is None:
                self._log.refuse(peer, f"no handshake within {protocol.HANDSHAKE_SECONDS:g} s")
        except LimitError as error:
            self._log.refuse(peer, f"{error}")
        except OSError:
            pass  # the peer has disconnected
        except _INVALID as error:
            self._log.refuse(
                peer, f"it is not an ftrain process: invalid message ({type(error).__name__})"
            )
        except asyncio.CancelledError:  # the server closes
            pass
        finally:
            self._pending.pop(writer, None)
            if index is not None and index not in self._left:
                self._lose(index)
            with suppress(OSError, RuntimeError):
                writer.close()

    def _admit(self, writer: asyncio.StreamWriter, peer: str) -> None:
        """Begin a handshake; if too many are open, abort the oldest. One takes milliseconds."""
        if len(self._pending) >= max(MIN_PENDING, 2 * self._count):
            oldest = next(iter(self._pending))
            self._log.refuse(
                self._pending.pop(oldest), "more connections than can authenticate at once"
            )
            oldest.transport.abort()
        self._pending[writer] = peer

    async def _welcome(
        self, lines: "_LineReader", writer: asyncio.StreamWriter, peer: str
    ) -> int | None:
        """Authenticate a peer; return its process index, or None if it was refused."""
        line = await lines.next(protocol.MAX_HANDSHAKE_LINE)
        if line is None:
            return None
        hello = protocol.decode(line)
        index = hello["hello"]
        count = hello["count"]
        nonce = hello["nonce"]
        challenge = make_challenge()
        _send(writer, {"challenge": challenge})
        line = await lines.next(protocol.MAX_HANDSHAKE_LINE)
        if line is None:
            return None
        if not self._token.is_proof(
            protocol.decode(line).get("proof"), "client", index, count, nonce, challenge
        ):
            self._refuse_stranger(hello, writer, peer)
            return None
        refusal = None
        may_try_again = False
        if count != self._count:
            refusal = (
                f"it was started as one of {count} processes, process 0 as one of {self._count}"
            )
        elif type(index) is not int or not 0 <= index < self._count:
            refusal = f"a job of {self._count} has no process {index}"
        elif index in self._members or index in self._left:
            refusal = f"process {index} is or was connected already; a job is restarted as a whole"
            # If that was its predecessor, this job is about to end, and the next one to start.
            may_try_again = True
        if refusal is not None:
            _send(writer, {"refused": refusal, "may_try_again": may_try_again})
            return None
        self._pending.pop(writer, None)
        self._members[index] = writer
        _send(
            writer,
            {
                "welcome": index,
                "proof": self._token.prove("server", index, count, nonce, challenge),
            },
        )
        return index

    def _refuse_stranger(
        self, hello: ControlMessage, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        index = hello["hello"]
        host = hello.get("host")
        known = type(index) is int and 0 <= index < self._count
        claim = f"process {index} on {_shown(host)}" if known else "an unknown process"
        self._log.refuse(
            peer, f"it claims to be {claim}, but does not know the job token of process 0"
        )
        if known:
            self._refused[index] = (
                f"process {index} on {_shown(host)} at {peer}, which has another job token"
            )
        _send(writer, {"refused": "token"})

    def _lose(self, index: int) -> None:
        """Remove a lost process; until all have connected, a new one may take its place."""
        self._members.pop(index, None)
        if self._is_complete:
            self._left.add(index)
            self._send_all({"lost": index})
        for name, gathering in list(self._gathering.items()):
            gathering.values.pop(index, None)
            if not gathering.values and gathering.timeout_message is None:
                gathering.stop_clock()  # the next process is the first, with a limit of its own
                del self._gathering[name]

    def _handle(self, index: int, message: ControlMessage) -> None:
        if "gather" in message:
            self._gather(index, message["gather"], message["value"], message["limit"])
        elif "propose" in message:
            self._proposals.append(message["propose"])
            self._vote()
        elif "held" in message and self._ballot is not None:
            self._ballot.steps[index] = message["held"]
            self._vote()
        elif "failed" in message:
            self._send_all({**message, "process": index}, except_for=index)
        elif "gone" in message:
            self._lose(index)
        elif "bye" in message:
            self._left.add(index)
            self._members.pop(index, None)

    def _gather(self, index: int, name: str, value: Any, limit: float) -> None:
        gathering = self._gathering.get(name)
        if gathering is None:
            gathering = self._gathering[name] = _Gathering(self._count)
            gathering.timer = self._loop.call_later(limit, self._give_up, name, limit)
        gathering.values[index] = value
        if gathering.timeout_message is not None:  # too late: the others have given up
            _send(self._members[index], gathering.timeout_message)
        elif not gathering.missing():
            gathering.stop_clock()
            del self._gathering[name]
            self._is_complete = True
            self._send_all(
                {
                    "gathered": name,
                    "values": [gathering.values[each] for each in range(self._count)],
                }
            )

    def _give_up(self, name: str, limit: float) -> None:
        gathering = self._gathering[name]
        missing = gathering.missing()
        refused = [self._refused[index] for index in missing if index in self._refused]
        gathering.timeout_message = {
            "missing": name,
            "processes": missing,
            "limit": limit,
            "refused": refused[:_MAX_NAMED],
        }
        for index in gathering.values:
            if index in self._members:
                _send(self._members[index], gathering.timeout_message)

    def _vote(self) -> None:
        """Start the next vote, for which all processes send their steps, or announce its result."""
        if self._ballot is None and self._proposals:
            self._ballot = _Ballot(self._proposals.pop(0))
            self._send_all({"hold": True})
        elif self._ballot is not None and len(self._ballot.steps) == self._count:
            ballot = self._ballot
            self._ballot = None
            self._send_all({"decided": ballot.proposal, "step": max(ballot.steps.values())})
            self._vote()

    def _send_all(self, message: ControlMessage, except_for: int | None = None) -> None:
        for index, writer in self._members.items():
            if index != except_for:
                _send(writer, message)


class _Gathering:
    """The values that the processes have sent under one name so far."""

    def __init__(self, count: int):
        self.values: dict[int, Any] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.timeout_message: ControlMessage | None = None
        self._count = count

    def stop_clock(self) -> None:
        """Cancel its time limit."""
        if self.timer is not None:
            self.timer.cancel()

    def missing(self) -> list[int]:
        """Return the processes that have not sent a value."""
        return [index for index in range(self._count) if index not in self.values]


class _Ballot:
    """A vote: the proposal, and the step of each process that holds."""

    def __init__(self, proposal: ControlMessage):
        self.proposal = proposal
        self.steps: dict[int, int] = {}


class _LineReader:
    """The lines of a connection. The limit is an argument, as it changes with the handshake."""

    def __init__(self, reader: asyncio.StreamReader):
        self._reader = reader
        self._rest = bytearray()

    async def next(self, limit: int) -> bytes | None:
        """Return the next line without its newline, or None at the end of the stream.

        LimitError if it is longer than `limit` bytes.
        """
        searched = 0
        while (end := self._rest.find(b"\n", searched)) < 0:
            if len(self._rest) > limit:
                break
            searched = len(self._rest)
            data = await self._reader.read(_CHUNK)
            if not data:
                return None
            self._rest += data
        if not 0 <= end <= limit:
            raise LimitError(f"the line has more than {limit:,} bytes")
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line


class _RefusalLog:
    """Logs refused connections, at a limited rate: strangers must not fill a disk."""

    def __init__(self) -> None:
        self._logged: deque[float] = deque()
        self._unlogged = 0

    def refuse(self, peer: str, why: str) -> None:
        """Log that a connection was refused, or only count it if there are too many."""
        now = time.monotonic()
        while self._logged and now - self._logged[0] > LOG_SECONDS:
            self._logged.popleft()
        if len(self._logged) >= MAX_LOGGED:
            self._unlogged += 1
            return
        self._logged.append(now)
        more = f" ({self._unlogged} more before it)" if self._unlogged else ""
        last = "; more of them are counted, not logged" if len(self._logged) == MAX_LOGGED else ""
        self._unlogged = 0
        with suppress(OSError, ValueError):
            print(
                f"ftrain: refused a connection from {peer}: {why}{more}{last}",
                file=sys.stderr,
                flush=True,
            )


def _name(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return f"{Address(*peer[:2])}" if peer else "a peer that has disconnected"


def _shown(text: object) -> str:
    """Return a name from an unauthenticated peer, safe for a log line."""
    return (
        "".join(letter for letter in f"{text}"[:64] if letter.isalnum() or letter in ".-_")
        or "a host without name"
    )


def _send(writer: asyncio.StreamWriter, message: ControlMessage) -> None:
    with suppress(OSError, RuntimeError):  # it has disconnected, which its reader detects
        writer.write(protocol.encode(message))
