"""What a trainer had of its cycle, and its leases' time, after restarts, kills, and a cleaned log."""

import asyncio
import shutil
from pathlib import Path

import pytest

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.ledger import Ledger, LedgerSettings
from rollstream.buffer.log_records import Event
from rollstream.buffer.reads import Wanted
from rollstream.buffer.slime_routes import CONSUMER
from rollstream.buffer.state import BufferState

from .ledger_worlds import Clock, durable_state, item, open_ledger
from .served import item as posted
from .served import served
from .test_ledger import reopened, settle, take

CYCLE = {"group_size": 1, "groups_per_cycle": 8, "lease_seconds": 10.0}


async def test_a_trainer_whose_answer_was_cut_off_by_a_kill_gets_its_whole_cycle(tmp_path: Path) -> None:
    settings = LedgerSettings(groups=GroupSettings(group_size=2))
    live, dead = tmp_path / "live", tmp_path / "dead"
    async with served(live, settings, max_groups_per_read=4) as buffer:
        for epoch, names in ((0, "abcdef"), (1, "cdef")):
            for name in names:
                for n in range(2):
                    await buffer.post("/buffer/write", posted(name, float(n), f"{name}-{epoch}-{n}"))
        delivery = buffer.service._delivery
        assert delivery is not None
        taken = await delivery.take(Wanted(consumer=CONSUMER, max_groups=2))
        native = await delivery.take(Wanted(consumer="native", max_groups=1))
        assert [len(one.groups) for one in (taken, native)] == [2, 1]
        shutil.copytree(live, dead)
    async with served(dead, settings, max_groups_per_read=4) as buffer:
        assert [one.consumer for one in buffer.service.ledger.leases()] == ["native"]
        await buffer.service.ledger.release("native")
        assert buffer.service.ledger.left_in_cycle == 4
        for expected in (["a", "b", "c", "d"], ["c", "d", "e", "f"]):
            _, answer = await buffer.post("/get_rollout_data", {})
            assert sorted({one["instance_id"] for one in answer["data"]["data"]}) == expected
            assert len(answer["data"]["data"]) == 8


async def test_what_expired_is_not_counted_after_a_restart_either(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, **CYCLE)
    await ledger.write([item(f"u{n}", n) for n in range(8)])
    await take(ledger, 3)
    clock.now += 11
    ledger.tick()
    assert ledger.left_in_cycle == 8
    await ledger.ack(await take(ledger, 3))
    assert ledger.left_in_cycle == 5
    ledger = await reopened(ledger, tmp_path, clock=clock, **CYCLE)
    assert ledger.left_in_cycle == 5
    late = await take(ledger, 2)
    clock.now += 11
    ledger.tick()
    await ledger.write([item("other", "other")])
    assert ledger.left_in_cycle == 5
    ledger = await reopened(ledger, tmp_path, clock=clock, **CYCLE)
    assert ledger.left_in_cycle == 3  # leases have their time again
    clock.now += 11
    ledger.tick()
    await ledger.ack(late)
    for _ in range(2):
        assert ledger.left_in_cycle == 3  # late, but its reader has them
        ledger = await reopened(ledger, tmp_path, clock=clock, **CYCLE)
    await ledger.close()


@pytest.mark.parametrize("end", ["nack", "release", "expire", "removed", "ack"])
async def test_the_count_outlives_a_cleaning_that_puts_items_behind_what_was_leased(
    tmp_path: Path, end: str
) -> None:
    clock = Clock()
    small = {**CYCLE, "segment_bytes": 2000, "remember_uids": 10, "groups_per_cycle": 100}
    ledger = open_ledger(tmp_path, clock, **small)
    await ledger.write([item(f"u{n}", n) for n in range(4)])
    lease = await ledger.decide(lease=ledger.candidates(limit=3), consumer="me")
    assert lease is not None
    for turn in range(10):
        if turn == 4 and end == "nack":
            await ledger.nack(lease.lease_id)
        elif turn == 4 and end == "release":
            await ledger.release("me")
        elif turn == 4 and end == "expire":
            clock.now += 11
            ledger.tick()
        elif turn == 4 and end == "removed":
            await ledger.remove_from_lease(lease.lease_id, lease.groups[1], traceback="no")
        elif turn == 4:
            await ledger.ack(lease.lease_id)
        # Of few names: an instance that was handed out twice has an earlier place, too.
        await ledger.write([item(f"x{turn}-{n}", f"x{n}", padding=300) for n in range(3)])
        names = {f"x{n}" for n in range(3)}
        views = [view for view in ledger._state.candidates() if view.instance[1] in names]
        views = views or [group for group in ledger._state.groups.values() if group.instance[1] in names]
        await ledger.decide(drop=[(ledger._state.view(group), "no") for group in views])
        await settle(ledger)
        ledger = await reopened(ledger, tmp_path, clock=clock, **small)
    counted = {"nack": 0, "release": 0, "expire": 3, "removed": 2, "ack": 3}[end]
    assert ledger.left_in_cycle == 100 - counted
    assert min(ledger._log.sizes) > 3
    await ledger.close()


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("end", ["ack", "nack", "extend", "removed"])
async def test_a_lease_that_expires_while_its_end_is_being_written(
    tmp_path: Path, end: str, steps: int
) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, **CYCLE)
    await ledger.write([item(f"u{n}", n) for n in range(8)])
    lease = await ledger.decide(lease=ledger.candidates(limit=3))
    assert lease is not None
    name = lease.lease_id
    calls = {
        "ack": lambda: ledger.ack(name),
        "nack": lambda: ledger.nack(name),
        "extend": lambda: ledger.extend(name, 5000.0),
        "removed": lambda: ledger.remove_from_lease(name, lease.groups[1], traceback="no"),
    }
    asked = asyncio.ensure_future(calls[end]())
    for _ in range(steps):
        await asyncio.sleep(0)
    clock.now += 11
    ledger.tick()
    await asked
    await ledger.write([item("more", "more")])
    await ledger.begin_cycle()
    left = {"ack": 5, "nack": 8, "extend": 5, "removed": 8}[end]
    assert (ledger._state.handed, ledger.stats().groups["leased"]) == (8 - left, 3 if end == "extend" else 0)
    ledger = await reopened(ledger, tmp_path, clock=clock, **CYCLE)
    await ledger.close()


async def test_a_log_that_does_not_say_what_came_back_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def says_nothing(self: BufferState, event: Event) -> None:
        self._untold.clear()

    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr(BufferState, "complete", says_nothing)
        ledger = open_ledger(tmp_path, clock, **CYCLE)
        await ledger.write([item(f"u{n}", n) for n in range(8)])
        await take(ledger, 3)
        await ledger.nack(await take(ledger, 2))
        clock.now += 11
        ledger.tick()
        await ledger.ack(await take(ledger, 2))  # the first one's
        before = durable_state(ledger)
        await ledger.close()
    for _ in range(2):
        ledger = open_ledger(tmp_path, clock, **CYCLE)
        assert durable_state(ledger) == before and ledger.left_in_cycle == 6
        await ledger.close()


async def test_an_extended_lease_has_its_time_again_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    small = {"group_size": 1, "lease_seconds": 10.0, "segment_bytes": 2000, "remember_uids": 10}
    ledger = open_ledger(tmp_path, clock, **small)
    await ledger.write([item("u", "u")])
    lease = await take(ledger)
    ticket = ledger._state.next_ticket
    assert await ledger.extend(lease) == 10.0
    assert ledger._state.next_ticket == ticket  # nothing that a log read anew would not know
    assert await ledger.extend(lease, 7200.0) == 7200.0
    for turn in range(8):
        ledger = await reopened(ledger, tmp_path, clock=clock, **small)
        assert _expires_in(ledger, lease) == 7200.0
        await ledger.write([item(f"x{turn}-{n}", f"{turn}-{n}", padding=300) for n in range(9)])
        await ledger.ack(await take(ledger))
        await settle(ledger)
    assert min(ledger._log.sizes) > 3
    await ledger.extend(lease)
    ledger = await reopened(ledger, tmp_path, clock=clock, **small)
    assert _expires_in(ledger, lease) == 10.0
    await ledger.close()


def _expires_in(ledger: Ledger, lease_id: str) -> float:
    lease = ledger.lease(lease_id)
    assert lease is not None
    return lease.expires_in
