"""A bar that follows the reading of files."""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")
_EVERY = 256  # items between two updates, which cost more than an item


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C as an exception, so that nothing is left half done; otherwise it ends a command at once.

    What is imported should be so before, as an exception could be lost in an import. A SIGINT that is ignored, as in
    the background of a script, stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Bar:
    """How much of the bytes of `paths` has been read: on a terminal, and on the standard error."""

    def __init__(self, verb: str, paths: Sequence[Path]):
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
            redirect_stdout=sys.stdout.isatty(),  # what is printed stands above the bar, but must still reach a pipe
        )
        self._verb, self._count, self._before = verb, 0, 0
        self._sizes = {path: path.stat().st_size for path in paths}
        self._task = self._progress.add_task(verb, total=sum(self._sizes.values()) or 1, count="")

    def follow(
        self, path: Path, items: Iterable[Item], size: Callable[[Item], int]
    ) -> Iterator[Item]:
        """The same items of a file, of `size` bytes of it each."""
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
        """All of a file has been read."""
        self._before += self._sizes[path]
        self._update(path, 0)

    def _update(self, path: Path, done: int) -> None:
        if self._shown:
            now = self._before + min(done, self._sizes[path])  # sizes may be of what was compressed
            count = f"{self._count:,}" if self._count else ""
            self._progress.update(
                self._task, completed=now, count=count, description=f"{self._verb} {path.name}"
            )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._progress.stop()
