"""Processes that train together until one of them is killed; then the others have to end by themselves."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ftrain.launching import Job, Screen
from ftrain.launching.group import Group
from ftrain.launching.signals import open_mailbox
from ftrain.launching.starting import environments, open_lifeline

POLL = 0.001  # seconds


class KilledGroup(Group):
    """A group of which one process can be killed while the others are left alone."""

    @property
    def is_whole(self) -> bool:
        """Whether none of the processes has ended."""
        return self.running == len(self.accounts)

    def kill_one(self, rank: int) -> bool:
        """Kill a process and wait until it is gone; False if it ended in another way before."""
        process = self._processes[rank]
        process.kill()
        while process.account.running:
            self.look(POLL)
        return process.account.code == -signal.SIGKILL

    def wait(self, patience: float) -> list[int]:
        """Wait for the end of all processes, and answer which of them did not end by themselves.

        From the first end on, the others have `patience` seconds; one that needs more has to write where it is, and is
        killed.
        """
        deadline = None
        while self.running and (deadline is None or time.monotonic() < deadline):
            self.look(POLL)
            if deadline is None and not self.is_whole:
                deadline = time.monotonic() + patience
        late = [account.index for account in self.accounts if account.running]
        self.end(hanging=late)
        while self.running:
            self.look(POLL)
        return late


@contextmanager
def open_group(command: Sequence[str], processes: int, output: Path) -> Iterator[KilledGroup]:
    """Start so many processes of a command, on ports that are free; what they print is added to a file.

    Behind this none of them is left, nor if this process itself is killed: they notice.
    """
    with ExitStack() as stack:
        lifeline = stack.enter_context(open_lifeline())
        file = stack.enter_context(open(output, "ab"))
        screen = Screen(file.fileno(), file.fileno())
        stack.callback(screen.close)
        mailbox = stack.enter_context(open_mailbox(()))  # signals stay with whoever handles them
        hang_timeout = (
            Job.hang_timeout if processes > 1 else 0.0
        )  # of a single process, its config's
        surroundings = environments(processes, hang_timeout=hang_timeout)
        group = KilledGroup(
            command, surroundings, lifeline=lifeline, screen=screen, mailbox=mailbox
        )
        stack.callback(group.close)
        yield group
