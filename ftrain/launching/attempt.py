"""One attempt: a group of processes from its start to the end of the last one."""

import time
from collections.abc import Callable

from ftrain.launching.account import Account
from ftrain.launching.diagnosis import Failure, find_cause, find_hang, find_overdue
from ftrain.launching.group import Group
from ftrain.launching.signals import StopRequests
from ftrain.launching.summary import count

_PATIENCE = 10.0  # seconds until whoever asked for a stop is told what it waits for
_POLL = 0.02  # seconds; a process that ends without a word is noticed in that time


class Attempt:
    """Watches a group. After the first process that fails or hangs it ends the others; a signal stops all of them."""

    def __init__(
        self, group: Group, requests: StopRequests, hang_timeout: float, say: Callable[[str], None]
    ):
        self._group, self._requests, self._hang_timeout, self._say = (
            group,
            requests,
            hang_timeout,
            say,
        )
        self._asked = self._insisted = False  # whether the processes know of these requests
        self._asked_at: float | None = None  # until somebody was told that it takes long
        self._hang: Failure | None = None
        self.noticed_at: float | None = None  # the first failure

    @property
    def accounts(self) -> list[Account]:
        return self._group.accounts

    @property
    def running(self) -> int:
        return self._group.running

    @property
    def reached(self) -> int | None:
        """The furthest step that any process has taken."""
        moved = (
            each.furthest
            for each in self.accounts
            if each.began is not None and each.furthest > each.began
        )
        return max(moved, default=None)

    def look(self) -> bool:
        """Wait a little and see to what happened; False once all processes have ended."""
        self._group.look(_POLL)
        self._obey()
        if self.noticed_at is None:
            self._examine()
        return self._group.running > 0

    def failure(self) -> Failure | None:
        """Why it failed, once all processes have ended; None if it did not."""
        if not any(account.fell for account in self.accounts):
            return None
        explained = any(account.told_own_failure and account.fell for account in self.accounts)
        return self._hang if self._hang is not None and not explained else find_cause(self.accounts)

    def _obey(self) -> None:
        self._requests.update()
        if self._requests.insisted and not self._insisted:
            self._asked = self._insisted = True
            self._say(f"{self._requests.insisted.name}: ending {self._shown_running()} at once")
            self._group.kill()
        elif self._requests.asked and not self._asked:
            self._asked = True
            asking = f"asking {self._shown_running()} to save and stop; once more to stop at once"
            self._say(f"{self._requests.asked.name}: {asking}")
            self._group.ask_to_stop()
            self._asked_at = time.monotonic()
        elif (
            self._asked_at is not None
            and time.monotonic() - self._asked_at > _PATIENCE
            and self.running
        ):
            self._asked_at = None
            self._say(f"still waiting for {self._shown_waiting()}; once more to stop at once")

    def _examine(self) -> None:
        """Look for the first failure."""
        now = time.monotonic()
        fallen = [account for account in self.accounts if account.fell]
        overdue = find_overdue(self.accounts, now, self._hang_timeout)
        if not fallen and not overdue:
            return
        self.noticed_at = now
        hanging = {account.index for account in overdue}
        if all(account.hung for account in fallen):  # also if there are none
            halted = self._group.halted()
            self._hang = find_hang(self.accounts, now, halted)
            is_certain = (
                self._hang.process in halted or self.accounts[self._hang.process].busy is not None
            )
            # only where it is who hangs has to be seen; the others wait for it, and one that is halted is nowhere
            hanging = (
                {self._hang.process} if is_certain else {*hanging, self._hang.process}
            ) - halted
        self._group.end(hanging)

    def _shown_waiting(self) -> str:
        halted = self._group.halted()
        names = [
            f"{each.index}{' (stopped by a signal)' * (each.index in halted)}"
            for each in self.accounts
            if each.running
        ]
        return f"process{'es' * (len(names) > 1)} {', '.join(names)}"

    def _shown_running(self) -> str:
        return count(self.running, "process")
