"""When to try again, and after how long. Pure."""

import random
from dataclasses import dataclass

from rollstream.errors import EngineUnavailableError, TransientError

_MAX_DOUBLINGS = 30
"""2**30 times the first delay is beyond any useful maximum; keeps the power small."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with full jitter."""

    max_attempts: int
    """Tries at one rollout, the first one included."""
    delay: float
    """Seconds before the second try, at most; doubles with each further one."""
    delay_max: float
    """Seconds between tries at most."""

    def wait(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait after failed attempt number `attempt` (from 1).

        Uniform between half the back-off and all of it: spread out, but never at once.
        """
        longest = min(self.delay_max, self.delay * float(2 ** min(attempt - 1, _MAX_DOUBLINGS)))
        return longest * rng.uniform(0.5, 1.0)


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help.

    Ours say so themselves. Of others, time-outs and broken connections may pass; a group of errors is
    transient when all of its members are.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(is_transient(member) for member in error.exceptions)
    return isinstance(error, TransientError | TimeoutError | ConnectionError)


def find_unavailable(error: BaseException) -> EngineUnavailableError | None:
    """The `EngineUnavailableError` in an error or a group of errors, if there is one."""
    if isinstance(error, EngineUnavailableError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            found = find_unavailable(member)
            if found is not None:
                return found
    return None
