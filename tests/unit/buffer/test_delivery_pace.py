"""A read of very many groups: on one lease, whole or not at all, and others have their turn meanwhile."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.buffer import delivery, groups
from rollstream.buffer.delivery import Delivery
from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.hooks import Hooks
from rollstream.buffer.items import parse_item
from rollstream.buffer.ledger import Ledger, LedgerSettings
from rollstream.buffer.read_forms import Rows
from rollstream.buffer.reads import Wanted
from rollstream.buffer.state import BufferState
from rollstream.errors import ConflictError, StorageFullError
from tests.unit.buffer.ledger_worlds import Clock, durable_state, item
from tests.unit.buffer.test_ledger import settle

COUNT = 2000
SETTINGS = LedgerSettings(groups=GroupSettings(group_size=1))


def opened(root: Path) -> tuple[Ledger, Delivery]:
    ledger = Ledger.open(root, SETTINGS, clock=Clock())
    hooks = Hooks.default("default")
    return ledger, Delivery(ledger, lambda task: hooks, lambda task: SETTINGS.groups)


async def filled(root: Path, count: int = COUNT) -> tuple[Ledger, Delivery]:
    ledger, reads = opened(root)
    for at in range(0, count, 1000):
        await ledger.write([item(f"u{n}", n, float(n % 2)) for n in range(at, min(at + 1000, count))])
    return ledger, reads


class Turns:
    """How much is done for groups between two turns of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most: dict[str, int] = {}
        self._now: dict[str, int] = {}
        self._monkeypatch = monkeypatch

    def count(self, place: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(place, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._now[name] = self._now.get(name, 0) + 1
            return real(*args, **kwargs)

        self._monkeypatch.setattr(place, name, counted)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(0)
            for name, done in self._now.items():
                self.most[name] = max(self.most.get(name, 0), done)
            self._now.clear()


@pytest.mark.parametrize("whole", [True, False])
async def test_a_read_of_very_many_groups_gives_way_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    ledger, reads = await filled(tmp_path)
    turns = Turns(monkeypatch)
    for place, name in (
        (delivery, "judge_rewards"),
        (BufferState, "view"),
        (BufferState, "_withdraw"),
        (BufferState, "is_held"),
        (Ledger, "_claim"),
        (Ledger, "_is_as_seen"),
    ):
        turns.count(place, name)
    beside = asyncio.create_task(turns.watch())
    taken = await reads.take(Wanted(max_groups=COUNT if whole else None, all_or_nothing=whole))
    beside.cancel()
    assert len(taken.groups) == taken.available == COUNT
    assert taken.lease is not None and ledger.stats().leases == 1
    lease = ledger.lease(taken.lease.lease_id)
    assert lease is not None and list(lease.groups) == taken.groups
    assert [view.instance_id for view in taken.groups] == list(range(COUNT))
    assert set(turns.most) == {"judge_rewards", "view", "_withdraw", "is_held", "_claim", "_is_as_seen"}
    assert max(turns.most.values()) <= 3 * delivery._AT_ONCE, turns.most
    meta = await reads.meta_info(taken)
    assert meta["finished_groups"] == list(range(COUNT)) and meta["total_samples"] == COUNT
    assert (await ledger.ack(taken.lease.lease_id)).groups == COUNT
    reads.close()
    await ledger.close()


async def test_what_is_counted_for_a_large_read_is_not_counted_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, reads = await filled(tmp_path, delivery._AT_ONCE + 1)
    threads: list[bool] = []
    real = groups.summarize_rewards

    def summarize(given: Any) -> dict[str, Any]:
        try:
            threads.append(asyncio.get_running_loop() is None)
        except RuntimeError:
            threads.append(True)
        return real(given)

    monkeypatch.setattr(delivery, "summarize_rewards", summarize)
    taken = await reads.take(Wanted())
    assert (await reads.meta_info(taken))["num_groups"] == delivery._AT_ONCE + 1
    assert threads == [True]
    reads.close()
    await ledger.close()


async def test_too_few_for_a_whole_read_are_left_where_they_are(tmp_path: Path) -> None:
    ledger, reads = await filled(tmp_path)
    before = durable_state(ledger)
    taken = await reads.take(Wanted(max_groups=COUNT + 1, all_or_nothing=True))
    assert (taken.lease, taken.groups, taken.available) == (None, [], COUNT)
    assert durable_state(ledger) == before
    reads.close()
    await ledger.close()


async def test_what_is_written_and_dropped_while_a_read_looks_around(tmp_path: Path) -> None:
    ledger, reads = await filled(tmp_path)
    await ledger.write([item(f"r{n}", f"r{n}", rollout_id="r") for n in range(COUNT // 2)])
    taking = asyncio.create_task(reads.take(Wanted()))
    await asyncio.sleep(0)  # it has judged the first of them
    await asyncio.sleep(0)
    dropping = asyncio.create_task(ledger.drop_rollout("r"))
    await ledger.write([item(f"late{n}", f"late{n}") for n in range(300)])
    taken = await taking
    dropped = await dropping
    numbers = [view.number for view in taken.groups]
    assert len(set(numbers)) == len(numbers)
    assert {view.instance_id for view in taken.groups} >= set(range(COUNT))
    assert sum(view.rollout_id == "r" for view in taken.groups) + dropped == COUNT // 2
    assert dropped > 0
    reads.close()
    await ledger.close()


@pytest.mark.parametrize("fault", ["disk", "cancelled", "released"])
async def test_a_large_read_that_fails_midway_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    ledger, reads = await filled(tmp_path)
    real = ledger.decide
    calls = 0

    async def decide(**kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 and fault == "disk":
            raise StorageFullError("no space left")
        if calls == 3 and fault == "cancelled":
            taking.cancel()
        if calls == 3 and fault == "released":
            await ledger.release("me")
        return await real(**kwargs)

    monkeypatch.setattr(ledger, "decide", decide)
    taking = asyncio.create_task(reads.take(Wanted(consumer="me")))
    done = (await asyncio.gather(taking, return_exceptions=True))[0]
    assert calls == 3
    kind = {"disk": StorageFullError, "cancelled": asyncio.CancelledError, "released": ConflictError}[fault]
    assert isinstance(done, kind)
    await settle(ledger)
    await asyncio.gather(*ledger._tasks)
    stats = ledger.stats()
    assert (stats.leases, stats.groups["ready"]) == (0, COUNT)
    assert [view.instance_id for view in ledger.candidates()] == list(range(COUNT))
    reads.close()
    await ledger.close()


async def test_parts_of_several_reads_join_to_one_list(tmp_path: Path) -> None:
    ledger, reads = opened(tmp_path)
    await ledger.write(
        [
            parse_item({"uid": f"u{n}", "instance_id": n, "messages": [{"role": "user"}], "reward": n % 2})
            for n in range(6)
        ]
    )
    bodies = []
    for at in range(3):
        taken = await reads.take(Wanted(max_groups=2))
        async with aclosing(reads.stream(taken, Rows(), first=at == 0)) as parts:
            bodies += [part.body async for part in parts]
    assert [one["uid"] for one in orjson.loads(b"[" + b"".join(bodies) + b"]")] == [f"u{n}" for n in range(6)]
    reads.close()
    await ledger.close()
