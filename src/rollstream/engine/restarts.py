"""When a replica that ended is started again. Decides; owns no task and no clock."""

_SERVED_WELL_S = 10.0
"""What breaks by its configuration or by what it is asked breaks sooner; who served for so long before it
ended is started again without delay."""


class Restarts:
    """The pauses before the starts of one replica: doubling while it keeps ending soon.

    Args:
        first: seconds before the first restart.
        longest: seconds between restarts at most.
        most_failures: starts in a row that may end without the replica ever having been healthy.
    """

    def __init__(self, *, first: float, longest: float, most_failures: int) -> None:
        self._first = first
        self._longest = max(first, longest)
        self._most_failures = most_failures
        self._next = first
        self.failures = 0
        """Failed starts in a row."""

    def after_serving(self, seconds: float) -> float:
        """It was healthy for so long, and ended: seconds to wait."""
        self.failures = 0
        if seconds >= _SERVED_WELL_S:
            self._next = self._first
        return self._pause()

    def after_failed_start(self) -> float | None:
        """It never became healthy: seconds to wait; None when it is to be given up."""
        self.failures += 1
        return None if self.failures > self._most_failures else self._pause()

    def _pause(self) -> float:
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause
