"""Leases that change after they were given: they grow, items of theirs are left out."""

from pathlib import Path

import pytest

from rollstream.buffer.ledger import GroupView, Ledger
from tests.unit.buffer.ledger_worlds import Clock, durable_state, item, open_ledger
from tests.unit.buffer.test_ledger import reopened, settle, take

SMALL = {"segment_bytes": 2000, "remember_uids": 10}


async def churn(ledger: Ledger, name: str, groups: int = 12) -> None:
    """Writes, reads and acks so much that old segments are cleaned."""
    await ledger.write([item(f"{name}{n}", f"{name}{n}", padding=300) for n in range(groups)])
    await ledger.ack(await take(ledger))
    await settle(ledger)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("growth", [1, 3])
async def test_a_lease_that_grew_outlives_restarts_and_cleaning(
    tmp_path: Path, growth: int, restarted: bool
) -> None:
    ledger = open_ledger(tmp_path, group_size=1, **SMALL)
    await ledger.write([item(f"u{at}", at) for at in range(10)])
    lease_id: str | None = None
    held: list[GroupView] = []
    for step in range(growth + 1):
        lease = await ledger.decide(lease=ledger.candidates(limit=2), into=lease_id)
        assert lease is not None and len(lease.groups) == 2
        lease_id = lease.lease_id
        held += lease.groups
        await ledger.write([item(f"w{step}-{n}", f"w{step}-{n}", padding=300) for n in range(8)])
    assert lease_id is not None
    numbers = sorted(view.number for view in held)
    if restarted:  # before its first record is cleaned away
        ledger = await reopened(ledger, tmp_path, group_size=1, **SMALL)
    for turn in range(12):
        await churn(ledger, f"x{turn}-", 3)
        before = durable_state(ledger)
        await ledger.close()
        ledger = open_ledger(tmp_path, group_size=1, **SMALL)
        after = durable_state(ledger)
        for state in (before, after):  # a set of groups: their order may be another one
            assert sorted(state["leases"][lease_id][3]) == numbers
            state["leases"][lease_id][3].sort()
        assert after == before
    assert min(ledger._log.sizes) > growth + 2
    assert (await ledger.ack(lease_id)).groups == len(held)
    await ledger.close()


async def test_a_lease_whose_items_were_left_out_outlives_cleaning(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, group_size=1, **SMALL)
    await ledger.write([item("a", 1), item("b", 2)])
    views = ledger.candidates()
    lease_id = await take(ledger)
    await ledger.write([item(f"w{n}", f"w{n}", padding=300) for n in range(8)])
    await ledger.leave_out(lease_id, [(views[0], ["a"], "filtered")])
    for turn in range(10):  # its first record goes earlier than that of the item
        await churn(ledger, f"x{turn}-", 2)
        ledger = await reopened(ledger, tmp_path, group_size=1, **SMALL)
        assert ledger.lease(lease_id) is not None
    assert min(ledger._log.sizes) > 2
    assert (await ledger.ack(lease_id)).groups == 2
    assert ledger.stats().dropped == {"filtered": 1}
    await ledger.close()


async def test_a_lease_that_is_gone_or_has_expired_does_not_grow(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, group_size=1)
    await ledger.write([item(f"u{at}", at) for at in range(10)])
    first = await ledger.decide(lease=ledger.candidates(limit=2), lease_seconds=10)
    assert first is not None
    clock.now += 11
    ledger.tick()
    assert await ledger.decide(lease=ledger.candidates(limit=4)[2:], into=first.lease_id) is None
    await ledger.nack(first.lease_id)
    assert await ledger.decide(lease=ledger.candidates(limit=4)[2:], into=first.lease_id) is None
    assert ledger.stats().groups["leased"] == 0 and len(ledger.candidates()) == 10
    await ledger.close()
