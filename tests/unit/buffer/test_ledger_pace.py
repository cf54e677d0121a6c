"""Time and turns: deadlines, what timed out, cycles, and that large leases leave the event loop to others."""

import asyncio
import random
from array import array
from pathlib import Path

import pytest

from rollstream.buffer import commits
from rollstream.buffer.state import BufferState
from rollstream.buffer.uid_memory import UidMemory
from rollstream.errors import ConflictError
from tests.unit.buffer.ledger_worlds import Clock, item, open_ledger
from tests.unit.buffer.test_ledger import reopened, take


async def test_the_next_deadline_is_found_without_looking_at_every_lease(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, group_size=1, timeout=1e6)
    await ledger.write([item(f"u{at}", at) for at in range(300)])
    state = ledger._state
    leases = [await take(ledger, 1, lease_seconds=100.0 + at) for at in range(300)]
    for lease in leases[:200]:
        await ledger.extend(lease, 1000.0)
    await ledger.ack(leases[200])
    assert state.next_deadline() == clock.now + 301.0
    assert len(state._deadlines) <= 2 * 300

    class Counted(dict):  # type: ignore[type-arg]
        looked = 0

        def values(self):  # type: ignore[no-untyped-def]
            Counted.looked += 1
            return super().values()

    state.leases = Counted(state.leases)
    for _ in range(10):
        state.next_deadline()
    clock.now += 310
    ledger.tick()
    assert Counted.looked == 0
    expired = {lease.lease_id for lease in ledger.leases() if lease.expires_in == 0}
    assert expired == set(leases[201:211])
    # First in line is what was leased first.
    assert [view.instance_id for view in ledger.candidates(limit=10)] == list(range(201, 211))
    for lease in leases[:200]:
        for _ in range(50):
            await ledger.extend(lease, 1000.0)
    assert len(state._deadlines) < 2 * len(leases) + 5000  # entries that no longer hold are thrown away
    await ledger.close()


async def test_what_timed_out_is_told_once(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, group_size=4, timeout=30.0)
    await ledger.write([item(f"u{at}", at) for at in range(3)])
    await ledger.write([item(f"whole{at}", "whole") for at in range(4)])
    assert ledger.candidates(timed_out_only=True) == []
    clock.now += 31
    ledger.tick()
    overdue = ledger.candidates(timed_out_only=True)
    assert [view.instance_id for view in overdue] == [0, 1, 2]
    assert ledger.candidates(timed_out_only=True) == []
    assert len(ledger.candidates()) == 4  # readers may have them
    await ledger.decide(drop=[(overdue[0], "timed_out")])
    await ledger.write([item("more", 1)])  # not overdue any more, until it is again
    clock.now += 31
    ledger.tick()
    assert [view.instance_id for view in ledger.candidates(timed_out_only=True)] == [1]
    lease = await take(ledger)
    await ledger.nack(lease)  # back in line, in whatever state
    assert {view.instance_id for view in ledger.candidates(timed_out_only=True)} == {1, 2}
    await ledger.close()


async def test_a_group_that_is_looked_at_often_has_one_timer(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, group_size=32, timeout=30.0)
    await ledger.set_task("own", 32, judge_from=1)
    for turn in range(10):
        clock.now += 1
        await ledger.write([item(f"u{turn}-{at}", at) for at in range(50)])
        await ledger.decide(keep=ledger.candidates())
    assert ledger.ready_groups == 0
    assert len(ledger._state._timers) == 50
    clock.now += 29
    ledger.tick()  # what came since the timer was set counts
    assert ledger.ready_groups == 0 and len(ledger._state._timers) == 50
    for _ in range(3):  # kept by its reader, each times out again
        clock.now += 31
        ledger.tick()
        assert [view.timed_out for view in ledger.candidates()] == [True] * 50
        await ledger.decide(keep=ledger.candidates())
        assert ledger.ready_groups == 0 and len(ledger._state._timers) == 50
    await ledger.close()


@pytest.mark.parametrize("seed", range(8))
async def test_no_instance_twice_among_those_that_a_cycle_delivers(tmp_path: Path, seed: int) -> None:
    """Reads of several groups at once, some given back, some taken out: what is acked counts."""
    chance = random.Random(seed)
    cycle = 4
    ledger = open_ledger(tmp_path, group_size=1, groups_per_cycle=cycle)
    numbers = [at % 7 for at in range(70)]
    chance.shuffle(numbers)
    await ledger.write([item(f"u{at}", number) for at, number in enumerate(numbers)])
    delivered: list[object] = []
    stuck = 0
    while stuck < 5:
        lease = await ledger.decide(lease=ledger.candidates(limit=chance.choice([1, 2, 3, 4, 6])))
        stuck = 0 if lease else stuck + 1
        if lease is None:
            continue
        what = chance.choice(["ack", "ack", "nack", "remove"])
        groups = list(lease.groups)
        if what == "nack":
            await ledger.nack(lease.lease_id)
            continue
        if what == "remove":
            await ledger.remove_from_lease(lease.lease_id, groups.pop(), reason="filtered")
        if groups:
            await ledger.ack(lease.lease_id)
        delivered += [view.instance_id for view in groups]
    for at in range(len(delivered) - cycle + 1):
        window = delivered[at : at + cycle]
        assert len(set(window)) == cycle, (at, window)
    assert len(delivered) > 30
    await ledger.close()


@pytest.mark.parametrize("first", ["AB", "BA"])
async def test_a_whole_cycle_can_be_read_at_once_again_and_again(tmp_path: Path, first: str) -> None:
    """Held is what would come twice at its place of this read, not at the read's first place."""
    ledger = open_ledger(tmp_path, group_size=1, groups_per_cycle=2)
    await ledger.write([item(f"{at}{name}", name) for at in range(4) for name in ("AB" if at else first)])
    for _ in range(4):
        lease = await ledger.decide(lease=ledger.candidates(limit=2))
        assert lease is not None and len(lease.groups) == 2
        await ledger.ack(lease.lease_id)
    await ledger.close()


async def test_what_was_given_back_takes_no_place_in_a_cycle(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, group_size=1, groups_per_cycle=3)
    await ledger.write([item(f"{at}{name}", name) for at in range(2) for name in "ABCD"])
    first = await take(ledger, 1)  # A
    for _ in range(5):  # B, given back: A must not come again for that
        await ledger.nack(await take(ledger, 1))
    await ledger.ack(first)
    seen = [view.instance_id for view in ledger.candidates(limit=2)]
    assert seen == ["B", "C"]
    ledger = await reopened(ledger, tmp_path, group_size=1, groups_per_cycle=3)
    assert "A" not in [view.instance_id for view in ledger.candidates(limit=2)]
    await ledger.close()


async def test_an_ack_of_many_groups_gives_way_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "_BURIED_AT_ONCE", 500)
    ledger = open_ledger(tmp_path, group_size=1)
    count = 5000
    await ledger.write([item(f"u{at}", at) for at in range(count)])
    lease = await take(ledger)
    turns: list[int] = [0]
    largest = [0]
    real = BufferState.remove

    def remove(self: BufferState, number: int) -> None:
        turns[-1] += 1
        real(self, number)

    buried: list[int] = []
    bury = UidMemory.bury

    def burying(self: UidMemory, first: int, uids: "array[int]") -> None:
        buried.append(len(uids))
        turns[-1] += 1
        bury(self, first, uids)

    monkeypatch.setattr(BufferState, "remove", remove)
    monkeypatch.setattr(UidMemory, "bury", burying)

    async def others() -> None:
        while True:
            await asyncio.sleep(0)
            largest[0] = max(largest[0], turns[-1])
            turns.append(0)

    beside = asyncio.create_task(others())
    result = await ledger.ack(lease)
    assert ledger.stats().items == 0  # all of it is applied when the ack is answered
    beside.cancel()
    assert (result.groups, result.items) == (count, count)
    assert 0 < largest[0] <= commits._BATCH_ITEMS
    assert buried == [500] * 10
    assert all(ledger.knows(f"u{at}" for at in range(count))) and ledger._state.uids.burials == count
    assert (await ledger.ack(lease)).repeated
    ledger = await reopened(ledger, tmp_path, group_size=1)
    assert all(ledger.knows(f"u{at}" for at in range(count))) and ledger._state.uids.burials == count
    assert ledger.stats().items_delivered == count
    await ledger.close()


async def test_what_is_asked_while_a_large_ack_is_applied(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, group_size=1)
    await ledger.write([item(f"u{at}", at) for at in range(3000)])
    lease = await take(ledger, 2900)
    acking = asyncio.create_task(ledger.ack(lease))
    written = 0
    while not acking.done():
        ledger.stats(), ledger.candidates(limit=5), ledger.tick()
        ledger.submit([item(f"beside{written}", f"beside{written}")])
        written += 1
        await asyncio.sleep(0)
        if ledger.lease(lease) is None and not acking.done():
            with pytest.raises(ConflictError):
                await ledger.nack(lease)
    assert acking.result().groups == 2900
    await ledger.write([item("last")])
    assert ledger.stats().items == 100 + written + 1
    ledger = await reopened(ledger, tmp_path, group_size=1)
    await ledger.close()
