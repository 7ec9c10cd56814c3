"""The switchboard: the place, at the first process of a job, where all of them meet, tell and decide.

It is apart from the collectives of the devices, because those know no limits and no names: who waits there for a
process that will never come waits for ever, or is aborted without a word. Every process, the first one included, has
one connection to it, and both sides send lines of JSON.
"""

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from ftrain.cluster.addresses import Address

MOST_BYTES = 1 << 24  # of one line
Message = dict[str, Any]


class Switchboard:
    """Listens at an address until it is closed; raises OSError if it cannot."""

    def __init__(self, address: Address, count: int):
        self._count = count
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._left: set[int] = set()
        self._have_met = False  # all of them: from then on none can be replaced
        self._gathering: dict[str, _Gathering] = {}
        self._proposals: list[Message] = []
        self._ballot: _Ballot | None = None
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, address.host, address.port, limit=MOST_BYTES)
            )
        except BaseException:
            self._loop.close()
            raise
        self._thread = threading.Thread(target=self._loop.run_forever, name="ftrain-switchboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; who is still connected will find it gone."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            self._server.close()
            for writer in self._members.values():
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
        index: int | None = None
        keep_alive(writer.get_extra_info("socket"))
        with suppress(OSError, ValueError, LookupError, TypeError, asyncio.CancelledError):  # gone, or none of ours
            index = await self._welcome(reader, writer)
            while index is not None and (line := await reader.readline()):
                self._take(index, json.loads(line))
        if index is not None and index not in self._left:
            self._lose(index)
        with suppress(OSError):
            writer.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """Its number, once a process has said who it is; nothing is kept of anyone else."""
        hello = json.loads(await asyncio.wait_for(reader.readline(), 10))
        index, refusal, may_try_again = hello["hello"], None, False
        if hello["count"] != self._count:
            refusal = f"it says that the job has {hello['count']} processes, and process 0 says {self._count}"
        elif type(index) is not int or not 0 <= index < self._count:
            refusal = f"there is no process {index} in a job of {self._count}"
        elif index in self._members or index in self._left:
            refusal = f"process {index} is here already, or has been; a job is started again as a whole"
            may_try_again = True  # if that was its forerunner, this whole job is about to end, and the next to begin
        if refusal is not None:
            _send(writer, {"refused": refusal, "may_try_again": may_try_again})
            return None
        self._members[index] = writer
        _send(writer, {"welcome": index})
        return index

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
            self._tell_all({"gathered": name, "values": [gathering.values[each] for each in range(self._count)]})

    def _give_up(self, name: str, limit: float) -> None:
        gathering = self._gathering[name]
        gathering.given_up = {"missing": name, "processes": gathering.missing(), "limit": limit}
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


def keep_alive(connection: socket.socket) -> None:
    """Have a connection end within some 20 seconds when the other host vanishes without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    with suppress(OSError, RuntimeError):  # it is gone, which its reader finds out
        writer.write(json.dumps(message).encode() + b"\n")
