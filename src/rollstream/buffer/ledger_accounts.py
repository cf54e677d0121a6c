"""What became of groups that were not delivered, and the ledger's numbers."""

import asyncio
import time
from collections.abc import Collection, Sequence

import msgspec

from rollstream.buffer.drop_file import DropLine
from rollstream.buffer.group_state import Totals
from rollstream.buffer.ledger_core import SLICE, LedgerCore
from rollstream.buffer.ledger_types import BufferStats, QuarantinedGroup
from rollstream.buffer.log_records import Event


class LedgerAccounts(LedgerCore):
    """A ledger's calls about what was set aside or dropped, and its counts."""

    def quarantined(self, limit: int | None = None, after: int = 0) -> list[QuarantinedGroup]:
        """Groups that were set aside, with the tracebacks; those numbered above `after`."""
        numbers = sorted(number for number in self._state.quarantine if number > after)[:limit]
        return [
            QuarantinedGroup(self._state.view(self._state.groups[number]), self._state.quarantine[number][0])
            for number in numbers
        ]

    async def retry_quarantined(self, numbers: Collection[int] | None = None) -> int:
        """Makes them candidates again: those numbered so, or all. Returns how many there were."""
        self._check_open()
        retried: list[int] = []

        def plan() -> Event | None:
            retried[:] = [n for n in self._state.quarantine if numbers is None or n in numbers]
            return Event(retried=list(retried)) if retried else None

        await self._commits.control(plan)
        return len(retried)

    async def drop_quarantined(self, numbers: Collection[int] | None = None) -> int:
        """Drops them, with reason `quarantined`: those numbered so, or all. Returns how many there were."""
        self._check_open()
        chosen = [n for n in self._state.quarantine if numbers is None or n in numbers]
        dropped = 0
        for at in range(0, len(chosen), SLICE):
            dropped += await self._drop_quarantined(chosen[at : at + SLICE])
        return dropped

    async def _drop_quarantined(self, numbers: Sequence[int]) -> int:
        state = self._state
        chosen = [number for number in numbers if number in state.quarantine]
        views = [(state.view(state.groups[number]), "quarantined") for number in chosen]
        drops = await asyncio.to_thread(self._describe_drops, views)
        gone: list[int] = []

        def plan() -> Event | None:
            gone[:] = [drop.group for drop in drops if drop.group in state.quarantine]
            if not gone:
                return None
            left = [drop for drop in drops if drop.group in state.quarantine]
            return Event(gone=list(gone), dropped=left, buried=self._burial(gone))

        await self._commits.control(plan)
        return len(gone)

    def dropped(self, limit: int = 1000, after: int = 0) -> list[DropLine]:
        """What left without being delivered, the oldest first, with tickets above `after`.

        What was decided at once has one ticket and comes together, also beyond the limit.
        """
        found: list[DropLine] = []
        for ticket, drop in self._state.listed:
            if ticket <= after:
                continue
            if len(found) >= limit and ticket != found[-1].ticket:
                break
            found.append(DropLine(**msgspec.structs.asdict(drop), ticket=ticket))
        return found

    # -- numbers

    def stats(self) -> BufferStats:
        """Of everything."""
        state = self._state
        first = next(state.candidates(None), None)
        dropped = state.counters.dropped
        return BufferStats(
            items=state.items,
            groups={
                "open": len(state.open),
                "ready": state.waiting_groups(),
                "leased": sum(len(lease.groups) for lease in state.leases.values() if not lease.expired),
                "quarantined": len(state.quarantine),
            },
            leases=len(state.leases),
            items_written=state.counters.items_written,
            items_delivered=state.counters.items_delivered,
            groups_delivered=state.counters.groups_delivered,
            dropped={reason: items for reason, (_, items) in dropped.items()},
            dropped_groups={reason: groups for reason, (groups, _) in dropped.items() if groups},
            bytes_live=self._live_bytes(),
            bytes_on_disk=self._log.bytes_on_disk,
            segments=len(self._log.sizes),
            known_uids=len(state.uids),
            disk_full=self._commits.full,
            lag=0.0 if first is None else max(0.0, time.time() - first.written_at),
        )

    def totals(self, task_type: str | None = None) -> Totals:
        """Of what is stored, of one task or of all."""
        if task_type is not None:
            return self._state.totals.get(task_type, Totals())
        sums = Totals()
        for totals in self._state.totals.values():
            sums.items += totals.items
            sums.groups += totals.groups
            sums.reward_sum += totals.reward_sum
            sums.rewards += totals.rewards
        return sums
