"""What went wrong in a group of processes: who hangs, and who was the first to fail."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ftrain.launching.account import Account
from ftrain.launching.contract import TRANSIENT, USER_ERROR

_SENT_BY_SOMEONE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_SLOW_END = 1.0  # seconds
_LONGEST_REASON = 300  # characters
Nature = Literal["mistake", "error", "transient", "signal", "hang", "peer"]


@dataclass(frozen=True)
class Failure:
    """Why a group ended: the process at fault, what is known of it, and what kind of fault it is."""

    process: int
    nature: Nature  # a mistake comes again at every restart; a transient error may not
    story: str


def find_overdue(accounts: Sequence[Account], now: float, timeout: float) -> list[Account]:
    """The processes that hang: no sign of life for `timeout` seconds.

    One that is done may have to wait for the others before it can end; it hangs if none of them shows any either.
    """
    newest = max(
        (account.sign_at if account.running else account.ended_at or 0.0) for account in accounts
    )
    return [
        account
        for account in accounts
        if account.running
        and now - (max(newest, account.sign_at) if account.done else account.sign_at) > timeout
    ]


def find_hang(accounts: Sequence[Account], now: float, halted: Collection[int] = ()) -> Failure:
    """The process that the others wait for, when some hang.

    One that is `halted` by a signal is it for certain. Else it is one that began something else than a step, such as a
    hook, and has not ended it; or the one with the lowest step or, of several, with the oldest sign of life.
    """
    suspects = [
        account for account in accounts if (account.running or account.hung) and not account.done
    ]
    suspects = suspects or [account for account in accounts if account.running or account.hung]
    behind = min(
        suspects,
        key=lambda account: (
            account.index not in halted,
            account.busy is None,
            _step(account),
            account.sign_at,
        ),
    )
    others = [account for account in suspects if account is not behind]
    silence = f"no sign of life for {now - behind.sign_at:.1f} s"
    evidence = f"it is stopped by a signal, {silence}" if behind.index in halted else silence
    if behind.busy is not None and behind.index not in halted:
        evidence += f", in {behind.busy}"
    elif others and behind.index not in halted:
        ahead = all(_step(account) > _step(behind) for account in others)
        evidence += (
            ", its step is the lowest"
            if ahead
            else ", and of those with the lowest step it is silent longest"
        )
    return Failure(
        behind.index, "hang", f"process {behind.index} hung {_where(behind)} ({evidence})"
    )


def find_cause(accounts: Sequence[Account]) -> Failure:
    """Of processes that have all ended, some of them not well: the one that did so first for a reason of its own."""
    own = [account for account in accounts if account.fell_by_itself]
    if own:
        return _explain(min(own, key=_moment_of_failure))
    fallen = [account for account in accounts if account.fell]
    witness = min(fallen, key=lambda account: (account.forced, account.ended_at or 0.0))
    blamed = witness.failed.because if witness.failed is not None else None
    if blamed is None or blamed >= len(accounts):
        story = f"process {witness.index} lost another process {_where(witness)}{_said(witness)}"
        return Failure(witness.index, "peer", story)
    story = f"process {witness.index} lost process {blamed} {_where(witness)}{_said(witness)}"
    return Failure(blamed, "peer", story)


def _moment_of_failure(account: Account) -> float:
    """When it failed, as far as can be told.

    Of one that ended without a word, others may notice that it is gone, and say so, before the system has done away
    with its last thread. Only an abort may itself be the answer to what happened to others.
    """
    silent = account.failed is None and account.signal != "SIGABRT"
    return (account.ended_at or 0.0) - (_SLOW_END if silent else 0.0)


def _explain(account: Account) -> Failure:
    who, where, said = f"process {account.index}", _where(account), _said(account)
    if account.code == USER_ERROR or (account.failed is not None and not account.failed.retry):
        return Failure(
            account.index,
            "mistake",
            f"{who} failed {where}{said or f' with exit code {account.code}'}",
        )
    if account.hung:
        return Failure(account.index, "hang", f"{who} hung {where}{said}")
    if (
        account.signal is not None and not said
    ):  # what it said is the reason, and the signal only how it went
        verb = "killed" if account.signal in _SENT_BY_SOMEONE else "ended"
        return Failure(account.index, "signal", f"{who} was {verb} by {account.signal} {where}")
    nature: Nature = "transient" if account.code == TRANSIENT else "error"
    return Failure(
        account.index, nature, f"{who} failed {where}{said or f' with exit code {account.code}'}"
    )


def _step(account: Account) -> int:
    return -1 if account.step is None else account.step


def _where(account: Account) -> str:
    return "before its first step" if account.step is None else f"at step {account.step:,}"


def _said(account: Account) -> str:
    """What it gave as its reason, on one line."""
    if account.failed is None:
        return ""
    words = " ".join(account.failed.message.split())
    words = words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]}..."
    return ": " + ": ".join(part for part in (account.failed.kind, words) if part)
