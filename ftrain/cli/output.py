"""What commands print: tables, numbers with units, and a progress bar."""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

if TYPE_CHECKING:
    from rich.table import Table

Item = TypeVar("Item")
_WIDE = 300  # columns of a file or a pipe, so that nothing is cut or wrapped
_EVERY = 256  # items between two updates: an update costs more than an item


def print_table(table: "Table") -> None:
    """Print a table, as wide as the terminal; in full to a file or a pipe."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    console.print(table)


def show_bytes(count: float) -> str:
    """Return a number of bytes with a unit.

    >>> show_bytes(1_234_567)
    '1.23 MB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def show_number(value: float) -> str:
    """Return a number with four digits."""
    return f"{value:.4g}"


def track_items(items: Sequence[Item], verb: str, *, quiet: bool = False) -> Iterable[Item]:
    """Yield items with a progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    errors = Console(stderr=True)
    disable = quiet or not errors.is_terminal
    return track(items, verb, console=errors, transient=True, disable=disable)


class ReadProgress:
    """Shows on stderr, if that is a terminal, how many bytes of `paths` have been read."""

    def __init__(self, verb: str, paths: Sequence[Path]):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        self._shown = console.is_terminal
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        ]
        self._progress = Progress(
            *columns,
            TextColumn("{task.fields[count]}"),
            console=console,
            transient=True,
            disable=not self._shown,
            # Print above the bar on a terminal, but leave a piped stdout alone.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._verb = verb
        self._count = 0
        self._before = 0
        self._sizes = {path: path.stat().st_size for path in paths}
        self._task = self._progress.add_task(verb, total=sum(self._sizes.values()) or 1, count="")

    def follow(
        self, path: Path, items: Iterable[Item], size: Callable[[Item], int]
    ) -> Iterator[Item]:
        """Yield the items of a file; `size` returns the bytes of the file that an item takes."""
        if not self._shown:
            yield from items
        else:
            done = 0
            for number, item in enumerate(items):
                if number % _EVERY == 0:
                    self._update(path, done)
                yield item
                done += size(item)
                self._count += 1
        self.finish(path)

    def finish(self, path: Path) -> None:
        """Count all of a file as read."""
        self._before += self._sizes[path]
        self._update(path, 0)

    def _update(self, path: Path, done: int) -> None:
        if self._shown:
            # `done` may count uncompressed bytes, beyond the size of the file.
            now = self._before + min(done, self._sizes[path])
            count = f"{self._count:,}" if self._count else ""
            self._progress.update(
                self._task, completed=now, count=count, description=f"{self._verb} {path.name}"
            )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._progress.stop()


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C into KeyboardInterrupt, so that temporary files are removed.

    Import modules before, because an import may swallow the exception. An ignored SIGINT, as in the
    background of a script, stays ignored.
    """
    import rich.progress  # noqa: F401 - else ReadProgress would import it in the block

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
