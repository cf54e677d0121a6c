"""When so many rollouts of a generator fail that it must not go on as if all was well. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from rollstream.buffer.items import InstanceId
from rollstream.errors import DataError

_ROLLOUTS: Final = 64
_INSTANCES: Final = 16
"""So many failed before one succeeded: chance does not do that, where even a tenth of them works. Repeats of
one bad prompt fail together, so several prompts have to."""


class FailureWatch:
    """Counts how rollouts end.

    What fails is written as a failed item, which no reader ever sees; where all of them fail, readers would
    wait for ever without being told.
    """

    def __init__(self) -> None:
        self.ended = 0
        """Rollouts."""
        self.failed = 0
        self._first = ""
        self._instances: set[InstanceId] = set()
        """That failed, while none succeeded."""

    def add(self, instance_id: InstanceId, failure: Mapping[str, Any] | None) -> None:
        """One more; its `extra_info.failure` if it failed.

        Raises:
            DataError: all failed so far, and that is enough to tell.
        """
        self.ended += 1
        if failure is None:
            self._instances.clear()
            return
        self.failed += 1
        if self.failed < self.ended:
            return
        if not self._first:
            line = str(failure["error"]).strip().partition("\n")[0]
            self._first = f"instance {instance_id!r:.100}, stage {failure['stage']}: {line:.500}"
        self._instances.add(instance_id)
        if self.failed >= _ROLLOUTS and len(self._instances) >= _INSTANCES:
            raise DataError(
                f"the first {self.failed} rollouts failed, of {len(self._instances)} instances; the first "
                f"one: {self._first}. They are written as failed; the same payload again goes on behind them"
            )

    def check_end(self) -> None:
        """To be called when all rollouts have ended, if none was done before. Raises `DataError`."""
        if self.failed and self.failed == self.ended:
            all_ = f"all {self.failed} rollouts" if self.failed > 1 else "the only rollout"
            raise DataError(f"{all_} failed; the first one: {self._first}")
