"""What is done with leases."""

import asyncio
import logging
import secrets
import time
from array import array
from collections.abc import Sequence

from rollstream.buffer.group_state import GroupView, LeaseState
from rollstream.buffer.ledger_core import SLICE, LedgerCore, tail_of
from rollstream.buffer.ledger_types import AckResult, Lease
from rollstream.buffer.log_records import Dropped, Event, LeftOut
from rollstream.errors import ConflictError, NotFoundError, RollstreamError

logger = logging.getLogger(__name__)


class LedgerLeases(LedgerCore):
    """A ledger's calls that name a lease, or whose it is."""

    def leases(self, consumer: str | None = None) -> list[Lease]:
        """Those that are not acked, nor lost as a whole; of one consumer, if it is given."""
        leases = self._state.leases.values()
        return [self._view_lease(lease) for lease in leases if consumer in (None, lease.consumer)]

    def lease(self, lease_id: str) -> Lease | None:
        """One of them."""
        lease = self._state.leases.get(lease_id)
        return None if lease is None else self._view_lease(lease)

    def expires_in(self, lease_id: str) -> float:
        """Seconds that are left of a lease; 0 when it has expired, or there is none."""
        lease = self._state.leases.get(lease_id)
        return 0.0 if lease is None or lease.expired else max(0.0, lease.deadline - self._clock())

    def has_lease(self, lease_id: str) -> bool:
        """Whether there is one, however large, that is not acked, given back, or lost as a whole."""
        return lease_id in self._state.leases

    async def ack(self, lease_id: str) -> AckResult:
        """The groups of the lease are where they belong: they leave the buffer. Again is success again.

        Raises:
            ConflictError: the lease had expired and its groups went elsewhere, or it was given back.
            NotFoundError: there is no such lease.
            StorageError: see `write`.
        """
        (result,) = await self.ack_all([lease_id])
        return result

    async def ack_all(self, lease_ids: Sequence[str]) -> list[AckResult]:
        """Acks leases together: all are acked, or none is, also when the process is killed meanwhile.

        Raises what `ack` does, of any of them; then none was acked.
        """
        self._check_open()
        state = self._state
        held = [lease for name in lease_ids if (lease := state.leases.get(name)) is not None]
        numbers = [number for lease in held for number in lease.groups]
        uids = await self._gather_uids(numbers)
        results: list[AckResult] = []

        def plan() -> Event | None:
            nonlocal uids
            found = [self._find_lease(name, "acked") for name in lease_ids]
            leases = [lease for lease in found if lease is not None]
            results[:] = [
                AckResult(name, 0, 0, repeated=True) if lease is None else self._acked(lease)
                for name, lease in zip(lease_ids, found, strict=True)
            ]
            gone = [number for lease in leases for number in lease.groups]
            if gone != numbers:
                uids = self._burial(gone)[1]
            left_out = [left for lease in leases for left in lease.left_out]
            items = len(uids) // 8 - sum(len(left.uids) for left in left_out)
            if not leases:
                return None
            return Event(
                ends=[(lease.id, "acked") for lease in leases],
                gone=gone,
                buried=(state.uids.burials, uids),
                dropped=[self._describe_left_out(left) for left in left_out],
                delivered=(len(gone), items),
            )

        await self._commits.control(plan)
        return results

    def _acked(self, lease: LeaseState) -> AckResult:
        groups = self._state.groups
        return AckResult(lease.id, len(lease.groups), sum(len(groups[number]) for number in lease.groups))

    async def nack(self, lease_id: str) -> None:
        """The groups of the lease are candidates again, first in line. Again is success again.

        Raises:
            ConflictError: it was acked.
            NotFoundError: there is no such lease.
        """
        self._check_open()

        def plan() -> Event | None:
            lease = self._state.leases.get(lease_id)
            if lease is None and self._state.ended.get(lease_id, ("", 0))[0] in ("returned", "lost"):
                return None
            if lease is None and self._find_lease(lease_id, "given back") is None:
                raise ConflictError(f"lease {lease_id} was acked: its groups are gone")
            return Event(ends=[(lease_id, "returned")])

        await self._commits.control(plan)

    async def extend(self, lease_id: str, seconds: float | None = None) -> float:
        """Gives the lease so much time from now on (default: its own), also when it has just expired.

        After a restart it has as much again. Returns the seconds. Raises as `ack` does.
        """
        self._check_open()
        lease = self._find_extendable(lease_id)
        granted = lease.seconds if seconds is None else seconds
        if granted == lease.granted:  # as the log has it
            self.renew(lease_id)
            return granted

        def plan() -> Event:
            self._find_extendable(lease_id)
            return Event(extended=[(lease_id, granted)])

        await self._commits.control(plan)
        return granted

    def renew(self, lease_id: str) -> None:
        """Gives the lease once more what it was given last; nothing is written. Raises as `ack` does."""
        self._check_open()
        lease = self._find_extendable(lease_id)
        self._state.revive(lease, self._clock() + lease.granted)
        self._arm()

    def _find_extendable(self, lease_id: str) -> LeaseState:
        lease = self._state.leases.get(lease_id)
        if lease is None:
            self._find_lease(lease_id, "extended")
            raise ConflictError(f"lease {lease_id} was acked: there is nothing to extend")
        groups = self._state.groups
        if lease.lost or (lease.expired and any(groups[number].claimed for number in lease.groups)):
            raise ConflictError(_lost(lease_id))
        return lease

    async def release(self, consumer: str) -> int:
        """Gives back all that a consumer holds, as one that begins anew does. Returns how many groups."""
        self._check_open()
        groups = 0

        def plan() -> Event | None:
            nonlocal groups
            held = [lease for lease in self._state.leases.values() if lease.consumer == consumer]
            groups = sum(len(lease.groups) for lease in held)
            return Event(ends=[(lease.id, "returned") for lease in reversed(held)]) if held else None

        await self._commits.control(plan)
        return groups

    async def return_read(self, read_id: str) -> None:
        """Gives back what a read took: one that is tried again, since its answer was lost.

        Raises:
            StorageError: see `write`.
        """
        self._check_open()
        if any(_is_of_read(lease_id, read_id) for lease_id in self._state.leases):

            def plan() -> Event | None:
                held = [lease_id for lease_id in self._state.leases if _is_of_read(lease_id, read_id)]
                return Event(ends=[(lease_id, "returned") for lease_id in reversed(held)]) if held else None

            await self._commits.control(plan)

    async def leave_out(
        self, lease_id: str, left_out: Sequence[tuple[GroupView, Sequence[str], str]]
    ) -> None:
        """These items (uids) of leased groups were not given to the reader, each with the reason.

        Counted and listed when the lease is acked. Raises `NotFoundError`, `ConflictError`.
        """
        self._check_open()
        notes = [LeftOut(view.number, reason, list(uids)) for view, uids, reason in left_out if uids]

        def plan() -> Event | None:
            if self._find_lease(lease_id, "changed") is None:
                raise ConflictError(f"lease {lease_id} was acked: its groups are gone")
            return Event(left_out=(lease_id, notes)) if notes else None

        await self._commits.control(plan)

    async def remove_from_lease(
        self, lease_id: str, group: GroupView, traceback: str | None = None, reason: str | None = None
    ) -> None:
        """A leased group turned out not to be deliverable.

        Args:
            lease_id: its lease, which goes on without it.
            group: which.
            traceback: what went wrong: the group goes to quarantine.
            reason: the group is dropped with it. One of the two has to be given.

        Raises:
            ConflictError: the lease does not hold the group.
            NotFoundError: there is no such lease.
        """
        self._check_open()
        if (traceback is None) == (reason is None):
            raise ValueError("give either a traceback or a reason")
        number = group.number
        drops: list[Dropped] = []
        if reason is not None:
            drops = await asyncio.to_thread(self._describe_drops, [(group, reason)])

        def plan() -> Event | None:
            lease = self._find_lease(lease_id, "changed")
            if lease is None or number not in lease.groups or self._state.groups[number].claimed:
                raise ConflictError(f"lease {lease_id} does not hold group {number}")
            event = Event(released=[(lease_id, number)])
            if traceback is not None:
                event.quarantined = [(number, tail_of(traceback))]
            else:
                event.gone, event.dropped, event.buried = [number], drops, self._burial([number])
            return event

        await self._commits.control(plan)

    def _find_lease(self, lease_id: str, verb: str) -> LeaseState | None:
        """The lease; None: it was acked. Raises what `ack` raises."""
        lease = self._state.leases.get(lease_id)
        if lease is not None:
            if lease.lost:
                raise ConflictError(_lost(lease_id))
            return lease
        outcome = self._state.ended.get(lease_id)
        if outcome is None:
            raise NotFoundError(f"there is no lease {lease_id}")
        if outcome[0] == "acked":
            return None
        if outcome[0] == "lost":
            raise ConflictError(_lost(lease_id))
        raise ConflictError(f"lease {lease_id} was given back: it can't be {verb}; its groups are read anew")

    def _view_lease(self, lease: LeaseState, numbers: Sequence[int] | None = None) -> Lease:
        """As it is now, with all of its groups or with some."""
        groups = self._state.groups
        some = lease.groups if numbers is None else [number for number in numbers if number in lease.groups]
        return Lease(
            lease.id,
            lease.consumer,
            lease.seconds,
            tuple(self._state.view(groups[number]) for number in some),
            0.0 if lease.expired else max(0.0, lease.deadline - self._clock()),
        )

    async def _gather_uids(self, numbers: Sequence[int]) -> bytes:
        """Of leased groups, which are closed: what is written to bury them, made some at a time."""
        groups, uids = self._state.groups, array("Q")
        for at in range(0, len(numbers), SLICE):
            if at:
                await asyncio.sleep(0)
            for number in numbers[at : at + SLICE]:
                if number in groups:
                    uids.extend(groups[number].uids())
        return uids.tobytes()

    def _describe_left_out(self, left: LeftOut) -> Dropped:
        task_type, _, instance_id = self._state.groups[left.group].key
        return Dropped(
            left.group, task_type, instance_id, left.reason, left.uids, [], time.time(), whole=False
        )

    async def _return_quietly(self, lease_id: str) -> None:
        try:
            await self.nack(lease_id)
        except RollstreamError as error:
            logger.warning("lease %s of a reader that went away stays until it expires: %s", lease_id, error)


def lease_of_read(read_id: str) -> str:
    """An id for a lease of this read; a new one each time: the read may be tried again."""
    return f"{read_id}.{secrets.token_hex(4)}"


def _is_of_read(lease_id: str, read_id: str) -> bool:
    return lease_id.startswith(read_id + ".")


def _lost(lease_id: str) -> str:
    return (
        f"lease {lease_id} had expired and groups of it were handed out anew, or dropped: what was read "
        "under it must not count. Ask for more time (lease_seconds, extend) where a step takes long."
    )
