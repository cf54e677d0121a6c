"""Leases of an answer that is being sent: they last as long as its reader takes more of it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rollstream.buffer.exchange import Exchange
from rollstream.buffer.ledger import Ledger
from rollstream.errors import ConflictError, NotFoundError

_LOG = logging.getLogger(__name__)

_LOOKS = 3
"""In the time of a lease."""


@asynccontextmanager
async def renewed(
    ledger: Ledger, leases: Sequence[str], seconds: float, exchange: Exchange
) -> AsyncIterator[None]:
    """Extends leases inside the block, as long as their reader takes more of the answer.

    A reader that takes nothing until its leases have ended is cut off: its groups are for others by then, and
    what it holds of the server is freed. One that has all it was given keeps them: it waits for the server,
    where a hook takes long or groups are large.

    Args:
        ledger: has them.
        leases: ids; may grow meanwhile.
        seconds: of a lease.
        exchange: the answer.
    """
    task = asyncio.create_task(_renew(ledger, leases, seconds, exchange), name="buffer-leases")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _renew(ledger: Ledger, leases: Sequence[str], seconds: float, exchange: Exchange) -> None:
    seen, stalled, lost = exchange.confirmed, 0, False
    while True:
        await asyncio.sleep(seconds / _LOOKS)
        now = exchange.confirmed
        if now == seen and exchange.unconfirmed:
            stalled += 1
            # Not before its time is over: the client may have been given more of it, to train in between.
            if stalled >= _LOOKS and not any(ledger.expires_in(lease) for lease in leases):
                _LOG.warning("%s: its reader took nothing for %g s and is cut off", exchange.path, seconds)
                exchange.cut_off()
                return
            continue
        seen, stalled = now, 0
        for lease in list(leases):
            if lost or not ledger.has_lease(lease):  # nothing was left of it
                continue
            try:
                ledger.renew(lease)  # not `extend`: its client may have been given more by now
            except (ConflictError, NotFoundError):  # who acks it is told
                lost = True
