"""A group of processes that live and die together."""

import selectors
import time
from collections.abc import Collection, Mapping, Sequence

from ftrain.launching.account import Account
from ftrain.launching.output import OutputReader
from ftrain.launching.process import Process
from ftrain.launching.screen import Screen
from ftrain.launching.signals import Mailbox

GRACE = 3.0  # seconds that the others have to end by themselves after one failed
LAST_WORDS = 2.0  # seconds that a hanging process has to write where it is
_LONG_PAUSE = (
    1.0  # seconds between two looks after which the supervisor itself must have been held up
)


class Group:
    """Starts one process for each environment; closing it leaves none of them, nor of their children."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        lifeline: int,
        screen: Screen,
        mailbox: Mailbox,
    ):
        self._processes: list[Process] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(mailbox, selectors.EVENT_READ)
        self._looked_at = time.monotonic()
        self._output: OutputReader | None = None
        try:
            for index, environment in enumerate(environments):
                process = Process(index, command, environment, lifeline)
                self._processes.append(process)
                self._selector.register(process.progress, selectors.EVENT_READ, process)
            self._output = OutputReader([process.outputs for process in self._processes], screen)
        except BaseException:
            self.close()
            raise

    @property
    def accounts(self) -> list[Account]:
        return [process.account for process in self._processes]

    @property
    def running(self) -> int:
        return sum(account.running for account in self.accounts)

    def look(self, timeout: float) -> None:
        """Take in messages and ends, and kill what is due. Waits for at most `timeout` seconds, and not for mail."""
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, Process) and not key.data.hear():
                self._selector.unregister(key.fd)
        self._excuse_pause()
        for process in self._processes:
            process.reap()
            process.kill_when_due(self._looked_at)

    def halted(self) -> set[int]:
        """The processes that a signal has stopped, to be continued."""
        return {process.account.index for process in self._processes if process.is_halted()}

    def ask_to_stop(self) -> None:
        for process in self._processes:
            process.ask_to_stop()

    def end(self, hanging: Collection[int] = ()) -> None:
        """End them: those that hang after a last word, the others after a time in which they may do so themselves."""
        for process in self._processes:
            if process.account.index in hanging:
                process.abort(LAST_WORDS)
            else:
                process.kill_in(GRACE)

    def kill(self) -> None:
        """End them at once."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """Leave none of them, and nothing unsaid that they have printed."""
        for process in self._processes:
            process.finish()
        if self._output is not None:
            self._output.close()
        for process in self._processes:
            process.close()
        self._selector.close()

    def _excuse_pause(self) -> None:
        """If the supervisor itself was stopped for a while, nobody was silent in that time."""
        pause, self._looked_at = time.monotonic() - self._looked_at, time.monotonic()
        if pause > _LONG_PAUSE:
            for account in self.accounts:
                account.sign_at = min(self._looked_at, account.sign_at + pause)
