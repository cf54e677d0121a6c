"""Ledgers for tests: items, a clock that stands still, and what of a state a restart must not change."""

import math
from pathlib import Path
from typing import Any

from rollstream.buffer.group_state import RECORD
from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.items import InstanceId, Item
from rollstream.buffer.ledger import Ledger, LedgerSettings
from rollstream.buffer.state import BufferState


class Clock:
    """Monotonic seconds that a test moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def item(
    uid: str,
    instance_id: InstanceId = 1,
    reward: float | None = 0.5,
    *,
    version: int | None = None,
    task_type: str | None = None,
    rollout_id: str | None = None,
    padding: int = 0,
) -> Item:
    payload = b'{"uid":"%s","pad":"%s"}' % (uid.encode(), b"x" * padding)
    return Item(uid, instance_id, reward, version, payload, "json", task_type, rollout_id)


def settings(group_size: int = 2, **kwargs: Any) -> LedgerSettings:
    groups = GroupSettings(group_size=group_size, group_timeout_seconds=kwargs.pop("timeout", 300.0))
    return LedgerSettings(groups=groups, **kwargs)


def open_ledger(root: Path, clock: Clock | None = None, **kwargs: Any) -> Ledger:
    return Ledger.open(root, settings(**kwargs), clock=clock or Clock())


def durable_state(ledger: Ledger) -> dict[str, Any]:
    """All of a state that is the same after a restart."""
    state: BufferState = ledger._state
    lost_or_whole = {lease.id for lease in state.leases.values()}
    return {
        "groups": {
            group.number: (group.key, len(group), group.size, group.quarantined, _records(group.records))
            for group in state.groups.values()
        },
        "closed": {group.number for group in state.groups.values() if group.closed},
        "leases": {
            lease.id: (
                lease.consumer,
                lease.seconds,
                lease.granted,
                list(lease.groups),
                lease.lost,
                lease.counted,
                lease.left_out,
            )
            for lease in state.leases.values()
        },
        "handed": (state.handed, state.cycle_began, state._places_in_order()),
        "lease of": {
            group.number: group.lease for group in state.groups.values() if group.lease in lost_or_whole
        },
        "ended": {lease_id: outcome for lease_id, (outcome, _) in state.ended.items()},
        "quarantine": {number: cause for number, (cause, _) in state.quarantine.items()},
        "counts": {
            task_type: {key: packed >> 32 for key, packed in counts.items()}
            for task_type, counts in state.counts.items()
            if counts
        },
        "rollouts": {name: record for name, (record, _) in state.rollouts.items()},
        "tasks": state.tasks,
        "active": (state.active, state.active_rollout),
        "counters": state.counters,
        "next": (state.next_ticket, state.next_group, state.uids.burials),
        "uids": set().union(*state.uids._known),
        "live": {segment: size for segment, size in state.live_bytes.items() if size},
        "totals": {
            name: (one.items, one.groups, one.rewards, round(one.reward_sum, 6))
            for name, one in state.totals.items()
            if one.items
        },
        "listed": list(state.listed),
    }


def _records(records: bytearray) -> list[tuple[object, ...]]:
    return [
        tuple("nan" if isinstance(value, float) and math.isnan(value) else value for value in record)
        for record in RECORD.iter_unpack(bytes(records))
    ]
