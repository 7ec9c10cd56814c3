"""How a job ends: what to say of it, and the code to exit with."""

import signal
from collections.abc import Sequence
from typing import NamedTuple

from ftrain.launching.account import Account
from ftrain.launching.contract import PEER_FAILED
from ftrain.launching.diagnosis import Failure
from ftrain.launching.signals import StopRequests
from ftrain.launching.summary import History, count

_OF_A_SIGNAL = 128  # added to its number, as a shell does


class Ending(NamedTuple):
    text: str
    code: int
    failed: bool = False  # whether the failure of the last attempt belongs to the story


def end_well(accounts: Sequence[Account], history: History, requests: StopRequests) -> Ending:
    """After an attempt in which every process exited with 0: the job is done, or stopped as somebody asked."""
    told = next((account.stopped for account in accounts if account.stopped is not None), None)
    asked = requests.asked.name if requests.asked is not None else None
    if told is None and (asked is None or all(account.done for account in accounts)):
        return Ending(history.describe_done(len(accounts)), 0)
    return Ending(history.describe_stop(asked or told or ""), 0)


def end_asked(
    accounts: Sequence[Account], failure: Failure, history: History, requests: StopRequests
) -> Ending | None:
    """After an attempt that failed: how the job ends if it was asked to stop, or None if it was not."""
    if requests.asked is None:
        return None
    stopped = history.describe_stop(requests.asked.name)
    if requests.insisted is not None:
        return Ending(f"{stopped}, at once by a second signal", _OF_A_SIGNAL + requests.insisted)
    if _died_of_the_request(accounts):
        early = count(sum(account.fell for account in accounts), "process")
        return Ending(f"{stopped}: {early} ended without saving", _OF_A_SIGNAL + requests.asked)
    return Ending(
        f"{stopped}, but not in good order", accounts[failure.process].exit_code, failed=True
    )


def _died_of_the_request(accounts: Sequence[Account]) -> bool:
    """Whether processes ended by the signal that asked them to stop, as before they handle it, and nothing else did."""
    killed = [
        account for account in accounts if account.code == -signal.SIGTERM and not account.forced
    ]
    harmless = (0, -signal.SIGTERM, PEER_FAILED)
    return bool(killed) and all(account.forced or account.code in harmless for account in accounts)
