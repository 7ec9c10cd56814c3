"""Lines of text files, and rows: the features of one line, with its place for messages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ftrain.cli.data.errors import DataCommandError
from ftrain.cli.data.progress import Bar

MAX_LINE_BYTES = 1 << 26  # of a line or a row of a table, by default; 64 MiB


class Row(NamedTuple):
    """One record to be: its place in a file, and its features as `encode_example` takes them."""

    where: str
    features: dict[str, Any]


def read_lines(bar: Bar, path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[str]:
    """Every line of a file with its end, each up to `max_line_bytes`.

    They are decoded one by one, so that an error has the right number.
    """
    with open(path, "rb") as file:
        lines = iter(lambda: file.readline(max_line_bytes + 1), b"")
        for number, line in enumerate(bar.follow(path, lines, len), start=1):
            if len(line) > max_line_bytes:
                raise DataCommandError(
                    f"{path}: line {number} has more than {max_line_bytes} bytes; raise the limit with "
                    "--max-record-bytes if it is meant to be so long"
                )
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                found = f"byte {error.start + 1} is {line[error.start] if error.start < len(line) else 0:#04x}"
                raise DataCommandError(
                    f"{path}: line {number} is no UTF-8 ({found}); convert it to that"
                ) from None
