"""The control server, at process 0 of a job: all processes meet there, exchange values and decide together.

It is separate from the collectives of the devices, which have no limits and no names: a process that waits there for a
missing peer waits for ever, or is aborted without a reason. Every process, process 0 included, has one connection to
it, and both sides send lines of JSON. A peer has to prove that it knows the job token before anything else; what it can
cost until then is limited.
"""

import asyncio
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

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

MIN_PENDING = (
    64  # connections that may be in their handshake at once; in a large job, two for each process
)
LOGGED = 20  # refused connections that are logged in LOG_SECONDS; more are counted
LOG_SECONDS = 600.0
LOST_AFTER = 18.0  # seconds without an answer from its host after which a peer is lost
_CHUNK = 1 << 16  # bytes read at once
_SHOWN = 3  # refused processes that an error names
_DAMAGE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)  # a broken or foreign peer


class Switchboard:
    """Listens at an address until it is closed; raises OSError if it cannot."""

    def __init__(self, address: Address, count: int, token: JobToken):
        self._count, self._token = count, token
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._left: set[int] = set()
        self._have_met = False  # all of them: from then on none can be replaced
        self._gathering: dict[str, _Gathering] = {}
        self._proposals: list[Message] = []
        self._ballot: _Ballot | None = None
        self._pending: dict[
            asyncio.StreamWriter, str
        ] = {}  # in their handshake, the oldest first, with their address
        self._refused: dict[int, str] = {}  # why one that called itself this process was refused
        self._log = _Log()
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, address.host, address.port, limit=_CHUNK)
            )
        except BaseException:
            self._loop.close()
            raise
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ftrain-switchboard", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening; who is still connected will find it gone."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            self._server.close()
            for writer in (*self._members.values(), *self._pending):
                writer.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)  # lets them be cancelled
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()

    def wait_for_others_to_leave(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        while self._members.keys() - {0} and time.monotonic() < deadline:
            time.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines, peer, index = _Lines(reader), _name(writer), None
        try:
            watch_connection(writer.get_extra_info("socket"))
            self._admit(writer, peer)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                index = await self._welcome(lines, writer, peer)
            while index is not None and (line := await lines.next(MAX_LINE)) is not None:
                self._take(index, decode(line))
        except TimeoutError:
            if index is None:
                self._log.refuse(peer, f"no handshake within {HANDSHAKE_SECONDS:g} s")
        except LimitError as error:
            self._log.refuse(peer, f"it sent {error}")
        except OSError:
            pass  # it is gone
        except _DAMAGE as error:
            self._log.refuse(
                peer, f"it sent what no process of ftrain does ({type(error).__name__})"
            )
        except asyncio.CancelledError:  # this server is closed
            pass
        finally:
            self._pending.pop(writer, None)
            if index is not None and index not in self._left:
                self._lose(index)
            with suppress(OSError, RuntimeError):
                writer.close()

    def _admit(self, writer: asyncio.StreamWriter, peer: str) -> None:
        """Begin a handshake. Where too many are open the oldest ends: a process of the job takes milliseconds."""
        if len(self._pending) >= max(MIN_PENDING, 2 * self._count):
            oldest = next(iter(self._pending))
            self._log.refuse(
                self._pending.pop(oldest), "more connections than can authenticate at once"
            )
            oldest.transport.abort()
        self._pending[writer] = peer

    async def _welcome(
        self, lines: "_Lines", writer: asyncio.StreamWriter, peer: str
    ) -> int | None:
        """The number of a process that has proved to know the token and has a place in the job; else None."""
        line = await lines.next(MAX_HANDSHAKE_LINE)
        if line is None:
            return None
        hello = decode(line)
        index, count, nonce = hello["hello"], hello["count"], hello["nonce"]
        challenge = make_challenge()
        _send(writer, {"challenge": challenge})
        line = await lines.next(MAX_HANDSHAKE_LINE)
        if line is None:
            return None
        if not self._token.is_proof(
            decode(line).get("proof"), "client", index, count, nonce, challenge
        ):
            self._refuse_stranger(hello, writer, peer)
            return None
        refusal, may_try_again = None, False
        if count != self._count:
            refusal = (
                f"it was started as one of {count} processes, process 0 as one of {self._count}"
            )
        elif type(index) is not int or not 0 <= index < self._count:
            refusal = f"a job of {self._count} has no process {index}"
        elif index in self._members or index in self._left:
            refusal = f"process {index} is or was connected already; a job is restarted as a whole"
            may_try_again = True  # if that was its forerunner, this whole job is about to end, and the next to begin
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

    def _refuse_stranger(self, hello: Message, writer: asyncio.StreamWriter, peer: str) -> None:
        index, host = hello["hello"], hello.get("host")
        known = type(index) is int and 0 <= index < self._count
        who = f"process {index} on {_shown(host)}" if known else "something else"
        self._log.refuse(
            peer, f"it says that it is {who}, but does not know the job token of process 0"
        )
        if known:
            self._refused[index] = (
                f"process {index} on {_shown(host)} at {peer}, which has another job token"
            )
        _send(writer, {"refused": "token"})

    def _lose(self, index: int) -> None:
        """A process is gone; as long as they have not met, another may come in its place."""
        self._members.pop(index, None)
        if self._have_met:
            self._left.add(index)
            self._tell_all({"lost": index})
        for name, gathering in list(self._gathering.items()):
            gathering.values.pop(index, None)
            if (
                not gathering.values and gathering.given_up is None
            ):  # whoever comes next is the first, with its own limit
                gathering.stop_clock()
                del self._gathering[name]

    def _take(self, index: int, message: Message) -> None:
        if "gather" in message:
            self._gather(index, message["gather"], message["value"], message["limit"])
        elif "propose" in message:
            self._proposals.append(message["propose"])
            self._vote()
        elif "held" in message and self._ballot is not None:
            self._ballot.counts[index] = message["held"]
            self._vote()
        elif "failed" in message:
            self._tell_all({**message, "process": index}, but=index)
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
        if gathering.given_up is not None:  # it is late: the others have gone
            _send(self._members[index], gathering.given_up)
        elif not gathering.missing():
            gathering.stop_clock()
            del self._gathering[name]
            self._have_met = True
            self._tell_all(
                {
                    "gathered": name,
                    "values": [gathering.values[each] for each in range(self._count)],
                }
            )

    def _give_up(self, name: str, limit: float) -> None:
        gathering = self._gathering[name]
        missing = gathering.missing()
        refused = [self._refused[index] for index in missing if index in self._refused]
        gathering.given_up = {
            "missing": name,
            "processes": missing,
            "limit": limit,
            "refused": refused[:_SHOWN],
        }
        for index in gathering.values:
            if index in self._members:
                _send(self._members[index], gathering.given_up)

    def _vote(self) -> None:
        """One proposal at a time: all hold, say how far they have come, and hear where it shall be."""
        if self._ballot is None and self._proposals:
            self._ballot = _Ballot(self._proposals.pop(0))
            self._tell_all({"hold": True})
        elif self._ballot is not None and len(self._ballot.counts) == self._count:
            ballot, self._ballot = self._ballot, None
            self._tell_all({"decided": ballot.proposal, "step": max(ballot.counts.values())})
            self._vote()

    def _tell_all(self, message: Message, but: int | None = None) -> None:
        for index, writer in self._members.items():
            if index != but:
                _send(writer, message)


class _Gathering:
    """What the processes have brought to one place so far."""

    def __init__(self, count: int):
        self.values: dict[int, Any] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.given_up: Message | None = None
        self._count = count

    def stop_clock(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def missing(self) -> list[int]:
        return [index for index in range(self._count) if index not in self.values]


class _Ballot:
    def __init__(self, proposal: Message):
        self.proposal = proposal
        self.counts: dict[int, int] = {}


class _Lines:
    """The lines of a connection. How long one may be is asked each time: it changes with the handshake."""

    def __init__(self, reader: asyncio.StreamReader):
        self._reader = reader
        self._rest = bytearray()

    async def next(self, limit: int) -> bytes | None:
        """The next line without its newline; None at the end, LimitError if it is longer than `limit` bytes."""
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
            raise LimitError(f"a line of more than {limit:,} bytes")
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line


class _Log:
    """Logs refused connections, one line each and at most so many in a time: strangers must not fill a disk."""

    def __init__(self) -> None:
        self._logged: deque[float] = deque()
        self._left_out = 0

    def refuse(self, peer: str, why: str) -> None:
        now = time.monotonic()
        while self._logged and now - self._logged[0] > LOG_SECONDS:
            self._logged.popleft()
        if len(self._logged) >= LOGGED:
            self._left_out += 1
            return
        self._logged.append(now)
        more = f" ({self._left_out} more before it)" if self._left_out else ""
        last = "; more of them are counted, not logged" if len(self._logged) == LOGGED else ""
        self._left_out = 0
        with suppress(OSError, ValueError):
            print(
                f"ftrain: refused a connection from {peer}: {why}{more}{last}",
                file=sys.stderr,
                flush=True,
            )


def watch_connection(connection: socket.socket) -> None:
    """Have the system end a connection soon after the other host has vanished, whether or not data is under way.

    Keepalives find it on a connection that is idle; with unacknowledged data there are none, and without a limit the
    system would send it again for a quarter of an hour. A process that is only stopped is not lost: its host answers.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    milliseconds = round(1000 * LOST_AFTER)
    options = {
        "TCP_KEEPIDLE": 5,
        "TCP_KEEPINTVL": 4,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": milliseconds,
    }
    for option, value in options.items():
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _name(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return f"{Address(*peer[:2])}" if peer else "a peer that is gone"


def _shown(text: object) -> str:
    """What a stranger calls itself, fit for a log line."""
    return (
        "".join(letter for letter in f"{text}"[:64] if letter.isalnum() or letter in ".-_")
        or "a host without name"
    )


def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    with suppress(OSError, RuntimeError):  # it is gone, which its reader finds out
        writer.write(encode(message))
