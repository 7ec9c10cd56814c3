"""Lines out of pieces of a stream."""


class LineCutter:
    """Cuts a stream into lines. One longer than `limit` bytes comes in parts of that size, as if they were lines."""

    def __init__(self, limit: int):
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, without their newlines."""
        self._rest += data
        if b"\n" not in data and len(self._rest) <= self._limit:
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        whole = (
            max(0, len(rest) - 1) // self._limit * self._limit
        )  # of an unfinished line, what is too long to wait
        self._rest = bytearray(rest[whole:])
        return [part for line in lines for part in self._parts(line)] + (
            self._parts(rest[:whole]) if whole else []
        )

    def end(self) -> list[bytes]:
        """The last line, if it had no newline."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [rest] if rest else []

    def _parts(self, line: bytes) -> list[bytes]:
        return [line[at : at + self._limit] for at in range(0, len(line), self._limit)] or [b""]
