"""Leases of an answer that is being sent: they last as long as its reader takes more of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from rollstream.buffer.ledger import Ledger
from rollstream.errors import ConflictError, NotFoundError

_LOOKS = 3
"""In the time of a lease."""


@asynccontextmanager
async def renewed(
    ledger: Ledger, leases: Sequence[str], seconds: float, progress: Callable[[], int]
) -> AsyncIterator[None]:
    """Extends leases inside the block, unless their reader has stopped: then they end in their time.

    Args:
        ledger: has them.
        leases: ids; may grow meanwhile.
        seconds: of a lease.
        progress: what the reader has taken; another number than before means that it is there.
    """
    task = asyncio.create_task(_renew(ledger, leases, seconds, progress), name="buffer-leases")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _renew(ledger: Ledger, leases: Sequence[str], seconds: float, progress: Callable[[], int]) -> None:
    seen = progress()
    while True:
        await asyncio.sleep(seconds / _LOOKS)
        now = progress()
        if now == seen:
            continue
        seen = now
        for lease in list(leases):
            if not ledger.has_lease(lease):  # nothing was left of it
                continue
            try:
                await ledger.extend(lease, seconds)
            except (ConflictError, NotFoundError):  # who acks it is told
                return
