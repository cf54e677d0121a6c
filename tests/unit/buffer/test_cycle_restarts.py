"""What a trainer had of its cycle, and its leases' time, after restarts, kills, and a cleaned log."""

import asyncio
import contextlib
import errno
import random
import shutil
from pathlib import Path

import pytest

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.items import InstanceId
from rollstream.buffer.ledger import Ledger, LedgerSettings
from rollstream.buffer.log_records import Event, Lapse, Start
from rollstream.buffer.reads import Wanted
from rollstream.buffer.slime_routes import CONSUMER
from rollstream.buffer.state import BufferState
from rollstream.errors import ConflictError, StorageError

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
    left = {"ack": 5, "nack": 8, "extend": 5, "removed": 8}[end]
    assert (ledger.left_in_cycle, ledger.stats().groups["leased"]) == (left, 3 if end == "extend" else 0)
    await ledger.begin_cycle()
    assert ledger.left_in_cycle == 8
    ledger = await reopened(ledger, tmp_path, clock=clock, **CYCLE)
    await ledger.close()


async def test_a_log_that_does_not_say_what_came_back_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def says_nothing(self: BufferState, event: Event) -> None:
        pass

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


async def test_a_log_that_counts_instances_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_record = BufferState.start_record

    def names_instances(self: BufferState) -> Start:
        start = start_record(self)
        first = start.handed - len(start.places) + 1
        start.recent = [(*one[1:], at) for at, one in enumerate(start.places, first)]
        start.places, start.lapses = [], self._lapses
        return start

    def says_instances(self: BufferState, event: Event) -> None:
        numbers = [
            number for name, end in event.ends if end != "acked" for number in self.leases[name].groups
        ]
        event.returned = [self.groups[number].instance for number in numbers]

    clock = Clock()
    small = {**CYCLE, "segment_bytes": 1200, "groups_per_cycle": 6}
    with monkeypatch.context() as patch:
        patch.setattr(BufferState, "complete", says_instances)
        patch.setattr(BufferState, "start_record", names_instances)
        ledger = open_ledger(tmp_path, clock, **small)
        await ledger.write([item(f"u{n}", n) for n in range(9)])
        await ledger.ack(await take(ledger, 3))
        expired = await take(ledger, 2)
        two: list[tuple[str, InstanceId]] = [("default", 3), ("default", 4)]
        lapse = Lapse(0, expired, False, two)
        await ledger._commits.control(lambda: Event(lapses=[lapse], returned=[]))
        kept = await take(ledger, 1)
        await ledger.nack(await take(ledger, 2))
        await ledger.write([item(f"x{n}", 0, padding=600) for n in range(6)])
        await settle(ledger)
        await ledger.close()
    for _ in range(2):
        ledger = open_ledger(tmp_path, clock, **small)
        assert ledger.left_in_cycle == 2
        assert [view.instance_id for view in ledger.candidates(limit=2)] == [6, 7]
        await ledger.close()
    ledger = open_ledger(tmp_path, clock, **small)
    await ledger.nack(kept)
    assert ledger.left_in_cycle == 3
    await ledger.nack(expired)
    assert ledger.left_in_cycle == 3
    ledger = await reopened(ledger, tmp_path, clock=clock, **small)
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


async def _came_back(ledger: Ledger, clock: Clock, how: str) -> None:
    """Groups that were handed out before others come back, and the others are acked."""
    first = await ledger.decide(lease=ledger.candidates(limit=2), consumer="first")
    assert first is not None
    clock.now += 6
    second = await take(ledger, 2)
    if how == "nack":
        await ledger.nack(first.lease_id)
    elif how == "release":
        await ledger.release("first")
    elif how == "expire":
        clock.now += 6
        ledger.tick()
    else:
        await ledger.remove_from_lease(first.lease_id, first.groups[0], traceback="no")
        await ledger.ack(first.lease_id)
    await ledger.ack(second)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("how", ["nack", "release", "expire", "removed"])
async def test_of_as_many_instances_as_a_cycle_has_groups_one_is_always_free(
    tmp_path: Path, how: str, restarted: bool
) -> None:
    clock = Clock()
    four = {**CYCLE, "groups_per_cycle": 4}
    ledger = open_ledger(tmp_path, clock, **four)
    await ledger.write([item(f"{name}{epoch}", name) for epoch in range(8) for name in "abcd"])
    await _came_back(ledger, clock, how)
    for _ in range(3):
        if restarted and how != "expire":  # where its lease would live again
            ledger = await reopened(ledger, tmp_path, clock=clock, **four)
        lease = await ledger.decide(lease=ledger.candidates(limit=4))
        assert lease is not None and sorted(str(view.instance_id) for view in lease.groups) == [*"abcd"]
        await ledger.ack(lease.lease_id)
    await ledger.close()


async def test_what_was_out_many_times_gives_back_all_of_its_places(tmp_path: Path) -> None:
    four = {**CYCLE, "groups_per_cycle": 4}
    ledger = open_ledger(tmp_path, **four)
    await ledger.write([item(f"{name}{epoch}", name) for epoch in range(6) for name in "abcd"])
    leases = [await take(ledger, 2) for _ in range(5)]
    assert ledger.left_in_cycle == 2
    for lease in leases:
        await ledger.nack(lease)
    assert ledger.left_in_cycle == 4
    ledger = await reopened(ledger, tmp_path, **four)
    assert ledger.left_in_cycle == 4
    await ledger.close()


async def test_a_lease_gives_back_its_own_place_not_that_of_a_newer_one(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, **{**CYCLE, "groups_per_cycle": 3})
    await ledger.write([item(f"{name}{epoch}", name) for epoch in range(3) for name in "abc"])
    older = await take(ledger, 1)
    await ledger.ack(await take(ledger, 2))
    await ledger.ack(await take(ledger, 1))  # a again
    await ledger.nack(older)
    assert [view.instance_id for view in ledger.candidates(limit=1)] == ["b"]
    await ledger.close()


async def test_what_an_earlier_trainer_gives_back_leaves_the_cycle_as_it_is(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, **CYCLE)
    await ledger.write([item(f"u{n}", n) for n in range(12)])
    earlier = await take(ledger, 3)
    await ledger.begin_cycle()
    await ledger.ack(await take(ledger, 2))
    for _ in range(2):
        assert ledger.left_in_cycle == 6
        ledger = await reopened(ledger, tmp_path, **CYCLE)
    await ledger.nack(earlier)
    for _ in range(2):
        assert ledger.left_in_cycle == 6
        ledger = await reopened(ledger, tmp_path, **CYCLE)
    await ledger.close()


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("seed", range(4))
async def test_reads_never_starve(tmp_path: Path, seed: int, count: int) -> None:
    """As many instances as a cycle has groups, each with some in line: a read of a cycle gives a cycle."""
    chance = random.Random(seed)
    clock = Clock()
    world = {**CYCLE, "groups_per_cycle": count, "segment_bytes": 4000, "remember_uids": 100}
    ledger = open_ledger(tmp_path, clock, **world)
    ways = ["ack", "ack", "nack", "wait", "removed", "quarantine", "retry", "begin", "again"]
    leases: list[str] = []
    written = 0
    for _ in range(120):
        in_line = {group.instance[1] for group in ledger._state.groups.values() if group.waiting}
        missing = [name for name in range(count) if name not in in_line]
        await ledger.write([item(f"u{written + at}", name) for at, name in enumerate(missing)])
        written += len(missing)
        most = chance.randint(1, count)
        lease = await ledger.decide(lease=ledger.candidates(limit=most))
        assert lease is not None and len(lease.groups) == most
        assert len({view.instance_id for view in lease.groups}) == most
        leases.append(lease.lease_id)
        clock.now += chance.choice([0, 0, 1, 4])
        ledger.tick()
        what = chance.choice(ways)
        if what in ("ack", "nack"):
            name = leases.pop(chance.randrange(len(leases)))
            with contextlib.suppress(ConflictError):
                await (ledger.ack(name) if what == "ack" else ledger.nack(name))
        elif what == "removed":
            with contextlib.suppress(ConflictError):
                await ledger.remove_from_lease(lease.lease_id, lease.groups[-1], traceback="no")
        elif what == "quarantine":
            await ledger.decide(quarantine=[(view, "no") for view in ledger.candidates(limit=1)])
        elif what == "retry":
            await ledger.retry_quarantined()
        elif what == "begin":
            await ledger.begin_cycle()
        elif what == "again":
            ledger = await reopened(ledger, tmp_path, clock=clock, **world)
    await ledger.close()


@pytest.mark.parametrize("other", [False, True])
async def test_what_a_kill_leaves_untold_is_not_believed_later(tmp_path: Path, other: bool) -> None:
    """Expiry is in memory; a segment that begins then must not tell it once it has become the oldest."""
    clock = Clock()
    small = {**CYCLE, "segment_bytes": 2000, "remember_uids": 10, "groups_per_cycle": 100}
    ledger = open_ledger(tmp_path / "live", clock, **small)
    await ledger.write([item(f"u{n}", n) for n in range(4)])
    lease = await take(ledger, 3)
    clock.now += 11
    ledger.tick()
    while ledger._log.head == 0:
        name = f"p{ledger._state.next_ticket}"
        await ledger.write([item(name, name, padding=300)])
    shutil.copytree(tmp_path / "live", tmp_path / "dead")
    await ledger.close()
    ledger = open_ledger(tmp_path / "dead", clock, **small)
    counted = 3
    if other:
        ours = [view for view in ledger.candidates() if view.instance_id == 3]
        assert await ledger.decide(lease=ours) is not None
        counted = 4
    await ledger.ack(lease)
    for turn in range(6):
        await ledger.write([item(f"x{turn}-{n}", f"x{n}", padding=300) for n in range(3)])
        padding = [view for view in ledger.candidates() if isinstance(view.instance_id, str)]
        await ledger.decide(drop=[(view, "no") for view in padding])
        ledger = await reopened(ledger, tmp_path / "dead", clock=clock, **small)
        assert ledger.left_in_cycle == 100 - counted
    assert min(ledger._log.sizes) > 1
    await ledger.close()


async def test_a_late_ack_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, **{**CYCLE, "groups_per_cycle": 3})
    await ledger.write([item(f"u{n}", n) for n in range(3)])
    lease = await take(ledger, 2)
    clock.now += 11
    ledger.tick()

    def fails(batch: object) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(ledger._log, "_write", fails)
        with pytest.raises(StorageError):
            await ledger.ack(lease)
    assert ledger.left_in_cycle == 3
    assert [view.instance_id for view in ledger.candidates()] == [0, 1, 2]
    await ledger.ack(lease)
    assert ledger.left_in_cycle == 1
    ledger = await reopened(ledger, tmp_path, clock=clock, **{**CYCLE, "groups_per_cycle": 3})
    await ledger.close()
