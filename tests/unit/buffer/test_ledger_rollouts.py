"""Groups belong to a rollout: what another one wrote is never filled up, resized or counted by this one."""

import asyncio
from pathlib import Path

import pytest

from rollstream.buffer import rollout_facts
from rollstream.buffer.groups import MAX_GROUP_SIZE, GroupSettings
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.rollout_record import RolloutRecord, read_count
from rollstream.errors import ConfigError
from tests.unit.buffer.ledger_worlds import Clock, item, open_ledger
from tests.unit.buffer.test_ledger import reopened, settle, take


def rollout(name: str, task_type: str = "math", started_at: float = 1.0) -> RolloutRecord:
    return RolloutRecord(name, task_type, {"task_type": task_type}, "running", started_at)


async def begin(ledger: Ledger, name: str, group_size: int = 4, started_at: float = 1.0) -> None:
    await ledger.save_rollout(rollout(name, started_at=started_at))
    await ledger.set_task("math", group_size)


async def test_a_replaced_rollouts_groups_are_not_filled_by_the_next_one(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    await begin(ledger, "A")
    await ledger.write([item(f"old{n}", 5) for n in range(3)])
    await begin(ledger, "B")
    await ledger.write([item(f"new{n}", 5) for n in range(4)])
    (view,) = ledger.candidates(rollouts=("B", None))
    assert (view.rollout_id, view.size) == ("B", 4)
    assert ledger.candidates(rollouts=("A",)) == []  # three of four, as before
    await ledger.write([item("old3", 5, task_type="math", rollout_id="A")])  # its writer was not done
    assert [one.rollout_id for one in ledger.candidates(rollouts=("A",))] == ["A"]
    assert [one.rollout_id for one in ledger.candidates()] == ["B"]  # no instance twice in one read
    ledger = await reopened(ledger, tmp_path)
    assert [one.rollout_id for one in ledger.candidates(rollouts=("A",))] == ["A"]
    await ledger.close()


async def test_another_group_size_is_not_for_a_replaced_rollout(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    await begin(ledger, "A", 8)
    await ledger.write([item(f"old{n}", 5) for n in range(5)])
    await begin(ledger, "B", 4)
    await ledger.write([item("without", 6, task_type="math", rollout_id="A")])
    assert ledger.candidates() == []  # five of eight are not whole because B's groups have four
    ledger = await reopened(ledger, tmp_path)
    assert ledger.candidates() == []
    await ledger.write([item(f"old{n}", 5, rollout_id="A") for n in range(5, 8)])
    assert [(view.size, view.group_size) for view in ledger.candidates()] == [(8, 8)]
    await ledger.close()


@pytest.mark.parametrize("churned", [False, True])
@pytest.mark.parametrize("how", ["sealed", "leased", "quarantined", "filled", "replaced"])
async def test_a_group_that_was_resized_has_its_size_after_restarts(
    tmp_path: Path, how: str, churned: bool
) -> None:
    """Its items were written when groups had another size; a cleaning puts them behind what resized it."""
    small = {"group_size": 16, "segment_bytes": 2000, "remember_uids": 10}
    ledger = open_ledger(tmp_path, **small)
    await ledger.save_rollout(rollout("A"))
    written = 12 if how == "sealed" else 5
    await ledger.write([item(f"u{n}", 5, task_type="math", rollout_id="A") for n in range(written)])
    await ledger.set_task("math", 8, judge_from=4)
    (view,) = ledger.candidates()
    if how == "leased":
        await take(ledger)
    elif how == "quarantined":
        await ledger.decide(quarantine=[(view, "no")])
    elif how == "filled":
        await ledger.write([item(f"v{n}", 5) for n in range(3)])
    elif how == "replaced":
        await begin(ledger, "B", 3)
    for turn in range(4):
        for part in range(4 if churned else 0):
            name = f"{turn}-{part}"
            await ledger.write([item(f"{name}-{n}", name, padding=99, task_type="x") for n in range(16)])
            lease = await ledger.decide(lease=ledger.candidates(task_type="x"))
            assert lease is not None
            await ledger.ack(lease.lease_id)
            await settle(ledger)
        ledger = await reopened(ledger, tmp_path, **small)
        group = ledger._state.view(ledger._state.groups[view.number])
        assert (group.size, group.group_size) == (8 if how == "filled" else written, 8)
    assert not churned or min(ledger._log.sizes) > 3
    await ledger.close()


async def test_a_group_that_is_short_keeps_its_size_when_the_servers_is_another(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, group_size=8)
    await ledger.write([item(f"u{n}") for n in range(3)])
    await ledger.close()
    ledger = open_ledger(tmp_path, clock, group_size=4)  # an open one follows the server's
    clock.now += 301
    ledger.tick()
    await take(ledger)
    ledger = await reopened(ledger, tmp_path, clock=clock, group_size=4)
    (lease,) = ledger.leases()
    assert [(view.size, view.group_size) for view in lease.groups] == [(3, 4)]
    ledger = await reopened(ledger, tmp_path, clock=clock, group_size=4)
    await ledger.close()


async def test_drop_rollout(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, segment_bytes=4000)
    await begin(ledger, "A", 2)
    await ledger.write([item(f"a{at}", at // 2) for at in range(1201)])
    lease = await take(ledger, 1)
    await begin(ledger, "B", 2)
    await ledger.write([item("b0", 1), item("b1", 1)])
    assert ledger.has_groups("A") and not ledger.has_groups("never")
    assert await ledger.drop_rollout("A") == 600  # one of them is open still
    assert ledger.stats().dropped == {"replaced": 1199}
    assert [view.rollout_id for view in ledger.candidates()] == ["B"]
    assert (await ledger.ack(lease)).groups == 1
    assert not ledger.has_groups("A")
    ledger = await reopened(ledger, tmp_path, segment_bytes=4000)
    assert await ledger.drop_rollout("A") == 0
    assert len(ledger.dropped(limit=10_000)) == 600
    await ledger.close()


async def test_which_rollout_is_the_newest_does_not_depend_on_the_clock(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    await begin(ledger, "A", 2, started_at=2000.0)
    await ledger.write([item("a0"), item("a1")])
    await begin(ledger, "B", 2, started_at=1000.0)  # the clock was put back
    await ledger.write([item("b0"), item("b1")])
    for _ in range(2):
        assert ledger.active_rollout == "B"
        assert ledger.finished_counts("B") == {1: 1}
        assert ledger.finished_counts("A") == {}
        ledger = await reopened(ledger, tmp_path)
    await ledger.close()


async def test_items_in_the_batch_that_begins_a_rollout_belong_to_it(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, group_size=1)
    await ledger.save_rollout(rollout("A", "default"))
    began = asyncio.ensure_future(ledger.save_rollout(rollout("B", "default")))
    await asyncio.sleep(0)
    await asyncio.gather(began, ledger.write([item("x")]))
    assert [view.rollout_id for view in ledger.candidates()] == ["B"]
    assert ledger.finished_counts("B") == {1: 1}
    ledger = await reopened(ledger, tmp_path, group_size=1)
    assert ledger.finished_counts("B") == {1: 1}
    await ledger.close()


async def test_nothing_is_counted_outside_a_rollout(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, group_size=1, segment_bytes=4000)
    for at in range(20):
        await ledger.write([item(f"{at}-{n}", f"{at}-{n}", task_type=f"t{at}") for n in range(20)])
        await ledger.ack(await take(ledger))
    await settle(ledger)
    state = ledger._state
    assert (state.counts, state.totals, state._ready, state._returned) == ({}, {}, {}, {})
    await ledger.close()


async def test_the_oldest_rollouts_that_ended_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_facts, "KEPT_ROLLOUTS", 3)
    ledger = open_ledger(tmp_path, group_size=2, segment_bytes=2000)
    forgotten: list[str] = []
    for at in range(8):
        record = RolloutRecord(f"r{at}", "t", {}, "running", 1.0, number=at)
        forgotten += await ledger.save_rollout(record)
        if at == 1:
            await ledger.write([item("kept", task_type="t")])  # r1 has something stored: it stays
        ended = RolloutRecord(f"r{at}", "t", {}, "finished", 1.0, number=at)
        forgotten += await ledger.save_rollout(ended)
    assert forgotten == ["r0", "r2", "r3", "r4", "r5"]
    assert sorted(one.rollout_id for one in ledger.rollouts()) == ["r1", "r6", "r7"]
    ledger = await reopened(ledger, tmp_path, group_size=2, segment_bytes=2000)
    await ledger.drop_rollout("r1")
    assert await ledger.save_rollout(RolloutRecord("r8", "t", {}, "running", 1.0, number=8)) == ["r1"]
    await ledger.close()


async def test_group_sizes_are_bounded(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, Clock())
    for size in (0, MAX_GROUP_SIZE + 1, 2**32, 10**18 - 1):
        with pytest.raises(ConfigError, match="group_size"):
            await ledger.set_task("big", size)
        with pytest.raises(ConfigError, match="group_size"):
            GroupSettings(group_size=size)
    for text in (str(2**32), 9**18, MAX_GROUP_SIZE + 1):
        with pytest.raises(ConfigError, match="num_repeat_per_sample"):
            read_count({"num_repeat_per_sample": text}, "num_repeat_per_sample", 1)
    assert read_count({"max_tokens": 200_000}, "max_tokens", 1, most=2**31 - 1) == 200_000
    await ledger.set_task("big", MAX_GROUP_SIZE)
    await ledger.close()
