"""Readers that wait until there is something for them."""

import time
from collections.abc import Callable

from rollstream.buffer.delivery import Delivery
from rollstream.buffer.exchange import Exchange, GoneError, RefusalError
from rollstream.buffer.generators import Rollouts
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.metrics import RequestMetrics
from rollstream.buffer.reader_notices import failures_of
from rollstream.buffer.reads import Taken, Wanted
from rollstream.buffer.rollout_record import RolloutFailure

_LOOK_S = 1.0
"""A reader that waits is looked after this often: whether it is there, whether the server ends."""

_TOLD_AGAIN_S = 60.0
"""A reader that waits for what others may bring hears of the same failure this often: at once would be as if
nobody could wait any more, never would leave a second reader of the same name without a word."""

_TOLD = 1000
"""Readers and failures that are remembered."""

_Told = tuple[str | None, str | None, tuple[str | None, ...] | None, str, int, bool]
"""Reader, and failure: a later crash of a generator is another one."""


class WaitingReads:
    """Takes groups for requests.

    Args:
        ledger: what is kept.
        delivery: its reads.
        rollouts: its generators; who waits for what one of them would bring is told that it fails.
        metrics: counted here.
        closing: whether the server ends; who waits is sent away.
    """

    def __init__(
        self,
        ledger: Ledger,
        delivery: Delivery,
        rollouts: Rollouts,
        metrics: RequestMetrics,
        closing: Callable[[], bool],
    ) -> None:
        self._ledger = ledger
        self._delivery = delivery
        self._rollouts = rollouts
        self._metrics = metrics
        self._closing = closing
        self._told: dict[_Told, float] = {}
        """When an empty answer told a reader of a failure, monotonic; the last ones are at the end."""

    async def take(
        self, exchange: Exchange, wanted: Callable[[], Wanted], seconds: float
    ) -> tuple[Taken, Wanted]:
        """Groups, as soon as there are some; none where there are none in time, or a generator fails.

        A failure of what was asked for ends the wait once, and then once a minute.

        Args:
            exchange: whose they are.
            wanted: what it asks for, as things stand.
            seconds: to wait at most.

        Returns:
            What it got, with all that was dropped meanwhile, and what was asked for last.

        Raises:
            GoneError: the reader went away.
            RefusalError: the server ends.
        """
        ends = time.monotonic() + seconds
        dropped = []
        told = dict(self._told)  # as it was: of a new failure all who wait are told
        self._metrics.waiting_reads += 1
        try:
            while True:
                seen = self._ledger.version
                asked = wanted()
                taken = await self._delivery.take(asked)
                dropped += taken.dropped
                if taken.groups or not await self._changed(exchange, asked, seen, ends, told):
                    break
        finally:
            self._metrics.waiting_reads -= 1
        if not taken.groups:
            self._note_told(asked)
        taken.dropped = dropped
        return taken, asked

    async def _changed(
        self, exchange: Exchange, asked: Wanted, seen: int, ends: float, told: dict[_Told, float]
    ) -> bool:
        """Whether it is worth while to look again."""
        while (left := ends - time.monotonic()) > 0 and not self._has_news(asked, told):
            changed = await self._ledger.wait_for_candidates(min(left, _LOOK_S), seen)
            if exchange.lost:
                raise GoneError
            if self._closing():
                raise closing_refusal()
            if changed:
                return True
        return False

    def _has_news(self, asked: Wanted, told: dict[_Told, float]) -> bool:
        """Whether something fails that this reader was not told of a moment ago."""
        now = time.monotonic()
        return any(
            now - told.get(_key(asked, one), float("-inf")) >= _TOLD_AGAIN_S
            for one in failures_of(self._rollouts, asked.task_type, asked.rollouts)
        )

    def _note_told(self, asked: Wanted) -> None:
        for one in failures_of(self._rollouts, asked.task_type, asked.rollouts):
            key = _key(asked, one)
            self._told.pop(key, None)
            self._told[key] = time.monotonic()
        while len(self._told) > _TOLD:
            del self._told[next(iter(self._told))]


def _key(asked: Wanted, failure: RolloutFailure) -> _Told:
    rollouts = None if asked.rollouts is None else tuple(asked.rollouts)
    return (
        *(asked.consumer, asked.task_type, rollouts),
        *(failure.rollout_id, failure.crashes, failure.final),
    )


def closing_refusal() -> RefusalError:
    """For who waits when the server ends."""
    return RefusalError("the server ends", status=503, code="closing", headers={"retry-after": "1"})
