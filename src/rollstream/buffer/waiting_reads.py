"""Readers that wait until there is something for them."""

import time
from collections.abc import Callable

from rollstream.buffer.delivery import Delivery
from rollstream.buffer.exchange import Exchange, GoneError, RefusalError
from rollstream.buffer.generators import Rollouts
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.metrics import RequestMetrics
from rollstream.buffer.reads import Taken, Wanted

_LOOK_S = 1.0
"""A reader that waits is looked after this often: whether it is there, whether the server ends."""


class WaitingReads:
    """Takes groups for requests.

    Args:
        ledger: what is kept.
        delivery: its reads.
        rollouts: its generators; while one fails, nobody waits for what it would bring.
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

    async def take(
        self, exchange: Exchange, wanted: Callable[[], Wanted], seconds: float
    ) -> tuple[Taken, Wanted]:
        """Groups, as soon as there are some; none where there are none in time.

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
        self._metrics.waiting_reads += 1
        try:
            while True:
                seen = self._ledger.version
                asked = wanted()
                taken = await self._delivery.take(asked)
                dropped += taken.dropped
                if taken.groups or not await self._changed(exchange, seen, ends):
                    break
        finally:
            self._metrics.waiting_reads -= 1
        taken.dropped = dropped
        return taken, asked

    async def _changed(self, exchange: Exchange, seen: int, ends: float) -> bool:
        """Whether it is worth while to look again."""
        while (left := ends - time.monotonic()) > 0 and not self._rollouts.failures():
            changed = await self._ledger.wait_for_candidates(min(left, _LOOK_S), seen)
            if exchange.lost:
                raise GoneError
            if self._closing():
                raise closing_refusal()
            if changed:
                return True
        return False


def closing_refusal() -> RefusalError:
    """For who waits when the server ends."""
    return RefusalError("the server ends", status=503, code="closing", headers={"retry-after": "1"})
