"""Recovery: errors of a device or a connection after which a run can go on from its newest checkpoint."""

import jax

RETRIED = ("ABORTED", "UNAVAILABLE")  # the codes of errors that may not come again


def can_be_retried(error: BaseException) -> bool:
    """Whether this is an error of the runtime that says that it may go away.

    >>> can_be_retried(jax.errors.JaxRuntimeError("UNAVAILABLE: connection lost"))
    True
    """
    return isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith(RETRIED)


def check_recoveries(most: int) -> None:
    if not isinstance(most, int) or most < 0:
        raise ValueError(f"recoveries must be a whole number >= 0, got {most!r}")


class Recoveries:
    """Counts the recoveries of a run; as long as it gets further each time, they may go on."""

    def __init__(self, most: int):
        check_recoveries(most)
        self._most, self._left, self._furthest = most, most, -1

    def allow(self, error: BaseException, step: int) -> bool:
        """Whether to recover from `error`, which came after `step`."""
        if not can_be_retried(error):
            return False
        if step > self._furthest:
            self._furthest, self._left = step, self._most
        self._left -= 1
        if self._left < 0 and self._most:
            error.add_note(f"{self._most} recoveries did not get beyond step {self._furthest}")
        return self._left >= 0
