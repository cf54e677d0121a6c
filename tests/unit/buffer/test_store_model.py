"""The store against the reference in memory: any order of calls, clocks and restarts, on both databases."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollstream.buffer.items import InstanceId
from rollstream.buffer.store.base import JobRecord, Judged, Limits, Removal, Wanted
from rollstream.buffer.store.postgres import PostgresDatabase
from rollstream.buffer.store.sql import Database, SqlStore
from rollstream.buffer.store.sqlite import SqliteDatabase
from rollstream.errors import BufferFullError, ConflictError, NotFoundError, RollstreamError
from tests.support.postgres import PostgresServer, new_schema, postgres
from tests.support.stores import TASKS, Clock, ClockedDatabase, FixedPolicy, item
from tests.unit.buffer.reference import ReferenceStore

__all__ = ["postgres"]

T = TypeVar("T")

SHM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a sync costs nothing there
IDS: list[InstanceId] = [1, 2, "1", "two"]
JOBS = ["", "j0", "j1", "j2", "nobody's"]

items = st.builds(
    lambda **values: values,
    instance_id=st.sampled_from(IDS),
    reward=st.sampled_from([0.0, 1.0, 0.5, -1.0, None]),
    failed=st.sampled_from([False, False, False, True]),
    version=st.sampled_from([None, 0, 3, 5]),
    task=st.sampled_from([None, "math", *TASKS]),
    job=st.sampled_from([None, None, None, *JOBS[1:]]),
)
whole_groups = st.builds(
    lambda one, size: [{**one, "reward": float(n % 2), "failed": False} for n in range(size)],
    items,
    st.sampled_from([2, 3, 4, 12]),
)
wanted = st.builds(
    Wanted,
    groups=st.integers(1, 4),
    exact=st.booleans(),
    task=st.sampled_from([None, None, None, *TASKS]),
    jobs=st.sampled_from([None, None, None, (), ("",), ("j0", ""), ("j1", "nobody's")]),
    size=st.sampled_from([None, None, None, 2, 3]),
    distinct=st.booleans(),
    without=st.frozensets(st.sampled_from(IDS), max_size=1),
    skip_tasks=st.sampled_from([(), (), ("math",), ("own", "raw")]),
    min_version=st.sampled_from([None, None, 1, 4]),
    drop_stale=st.booleans(),
    consumer=st.sampled_from([None, "a", "b"]),
    read_id=st.sampled_from([None, "r1", "r2"]),
    seconds=st.sampled_from([10.0, 50.0]),
)


FINISHES = ["drop", "quarantine", "both", "back", "nothing"]
PLAIN_READS = [Wanted(groups=n, consumer="a", read_id="r1", seconds=10.0) for n in (1, 2, 4)]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, new_driver: Callable[[], Database], servers: int) -> None:
        super().__init__()
        self.new_driver, self.servers = new_driver, servers
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.stores: list[SqlStore] = []
        self.uids = self.calls = self.job_number = 0

    @initialize(
        archive=st.sampled_from([0, 100, 10_000]),
        remembered=st.sampled_from([0, 4, 1000]),
        room=st.sampled_from([15, 1000, 1000]),
    )
    def begin(self, archive: int, remembered: int, room: int) -> None:
        self.limits = Limits(items=room, archive_bytes=archive, remembered_uids=remembered)
        self.model = ReferenceStore(FixedPolicy(), self.limits)
        self.model.now = self.clock.now
        self.open()
        for name in ("a", "b", "c"):
            self.write_batch(
                [{"instance_id": name, "reward": n / 2, "task": "math", "job": None} for n in range(3)], 0
            )

    def open(self) -> None:
        for _ in range(self.servers):
            self.stores.append(
                SqlStore(ClockedDatabase(self.new_driver(), self.clock), FixedPolicy(), self.limits)
            )
        self.run(self.open_at_once())

    async def open_at_once(self) -> None:
        await asyncio.gather(*(store.open() for store in self.stores))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 200))

    @property
    def store(self) -> SqlStore:
        """Another one of the servers at each call."""
        self.calls += 1
        return self.stores[self.calls % self.servers]

    def same(self, real: Coroutine[Any, Any, T], model: Callable[[], Any]) -> T | None:
        """What the real store answers; both must raise, or none."""
        expected = error = answer = None
        try:
            expected = model()
        except RollstreamError as raised:
            error = raised
        try:
            answer = self.run(real)
        except (BufferFullError, ConflictError, NotFoundError) as raised:
            assert type(raised) is type(error), (raised, error)
        else:
            assert error is None, error
            assert answer == expected
        return answer

    def a_lease(self, data: st.DataObject, *states: str) -> str:
        leases = [key for key, lease in self.model.leases.items() if not states or lease.state in states]
        return leases[data.draw(st.integers(0, len(leases) - 1))]  # their names are chance

    def teardown(self) -> None:
        for store in self.stores:
            self.run(store.close())
        self.loop.close()

    # -- what users do

    @rule(drawn=whole_groups)
    def write_groups(self, drawn: list[dict[str, Any]]) -> None:
        self.write_batch(drawn, 0)

    @rule(drawn=st.lists(items, min_size=1, max_size=6), again=st.integers(0, 3))
    def write_items(self, drawn: list[dict[str, Any]], again: int) -> None:
        self.write_batch(drawn, again)

    def write_batch(self, drawn: list[dict[str, Any]], again: int) -> None:
        batch = []
        for values in drawn:
            self.uids += 1
            if values["job"] not in self.model.jobs and values["job"] is not None:
                values = values | {"job": "nobody's"}  # nobody writes for a job that is yet to start
            body = f"body of u{self.uids}".encode() * (1 + self.uids % 2)
            batch.append(item(f"u{self.uids}", body=body, **values))
        if again == 1:
            batch += [batch[0], item(f"u{max(1, self.uids - 20)}", 1, 1.0)]
        self.same(self.store.write(batch), lambda: self.model.write(batch))

    @precondition(lambda self: self.model.in_state("ready"))
    @rule(wanted=st.sampled_from(PLAIN_READS), then=st.sampled_from(FINISHES))
    def read(self, wanted: Wanted, then: str) -> None:
        if (lease := self.take_groups(wanted)) is not None:
            self.finish_lease(lease, then)

    @precondition(lambda self: self.model.in_state("ready"))
    @rule(wanted=wanted)
    def take(self, wanted: Wanted) -> None:
        self.take_groups(wanted)

    def take_groups(self, wanted: Wanted) -> str | None:
        looked = self.run(self.store.peek(wanted))
        assert looked == [group.seen() for group in self.model.choose(wanted)[0]]
        taken = self.run(self.store.take(wanted))
        before = [group.seen() for group in self.model.choose(wanted)[0]]
        groups, available, stale = self.model.take(wanted, taken.lease)
        assert (taken.available, taken.stale) == (available, stale)
        if groups:
            assert taken.groups == before
            return str(taken.lease)
        assert taken.lease is None and taken.groups == []
        return None

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), how=st.sampled_from(FINISHES))
    def finish(self, data: st.DataObject, how: str) -> None:
        self.finish_lease(self.a_lease(data), how)

    def finish_lease(self, lease: str, what: str) -> None:
        theirs = [group for group in self.model.groups.values() if group.lease == lease]
        removals = []
        if what in ("drop", "both"):
            removals += [Removal(group.id, "filtered") for group in theirs[:1]]
        if what in ("quarantine", "both"):
            removals += [Removal(group.id, "transform_group", "Traceback") for group in theirs[-1:]]
        if len({one.group for one in removals}) < len(removals):
            return
        back = [group.id for group in theirs] if what == "back" else []
        self.same(
            self.store.finish(lease, removals, back),
            lambda: self.model.finish(lease, removals, back),
        )

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), count=st.sampled_from([1, 1, 1, 2, 3]), tell=st.booleans(), unknown=st.booleans())
    def ack(self, data: st.DataObject, count: int, tell: bool, unknown: bool) -> None:
        leases = [self.a_lease(data) for _ in range(count)]
        if unknown and count == 3:
            leases.append("nothing")
        up_to = self.model.unread_drops(None, None, 3)[1] if tell else None
        self.same(self.store.ack(leases, reported_up_to=up_to), lambda: self.model.ack(leases, up_to))

    @precondition(lambda self: any(lease.state != "acked" for lease in self.model.leases.values()))
    @rule(data=st.data())
    def ack_one(self, data: st.DataObject) -> None:
        lease = self.a_lease(data, "out", "back")
        self.same(self.store.ack([lease]), lambda: self.model.ack([lease]))

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), what=st.sampled_from(["nack", "nack", "extend", "extend", "unknown"]))
    def use_lease(self, data: st.DataObject, what: str) -> None:
        lease = self.a_lease(data) if what != "unknown" else "nothing"
        if what == "nack":
            self.same(self.store.nack(lease), lambda: self.model.nack(lease))
        else:
            self.same(self.store.extend(lease, 40.0), lambda: self.model.extend(lease, 40.0))

    @precondition(lambda self: self.model.in_state("leased"))
    @rule(what=st.sampled_from(["a", "b", "r1", "r2"]))
    def give_back(self, what: str) -> None:
        if what in "ab":
            self.same(self.store.release(what), lambda: self.model.release(what))
        else:
            self.same(self.store.return_read(what), lambda: self.model.return_read(what))

    @precondition(lambda self: self.model.unjudged(["own", "math"]))
    @rule(data=st.data(), behind=st.sampled_from(["", "", "items", "time"]))
    def judge(self, data: st.DataObject, behind: str) -> None:
        waiting = self.model.unjudged(["own", "math"])
        assert self.run(self.store.unjudged(["own", "math"], 1000)) == [group.seen() for group in waiting]
        judged, removals = [], []
        for group in waiting:
            verdict = data.draw(st.sampled_from(["valid", "wait", "finished", "error", "dropped"]))
            if verdict in ("error", "dropped"):
                removals.append(Removal(group.id, "is_valid_group", "No" if verdict == "error" else None))
            else:
                count = len(group.items) - (behind == "items")
                timed_out = group.timed_out and behind != "time"
                judged.append(Judged(group.id, count, verdict == "valid", verdict == "finished", timed_out))
        self.same(self.store.judge(judged, removals), lambda: self.model.judge(judged, removals))

    @precondition(lambda self: self.model.in_state("quarantined"))
    @rule(what=st.sampled_from(["retry", "retry", "drop"]))
    def end_quarantine(self, what: str) -> None:
        if what == "drop":
            self.same(self.store.drop_quarantined(), self.model.drop_quarantined)
        else:
            self.same(self.store.retry(), self.model.retry)

    @rule(
        what=st.sampled_from(["job", "same job", "drop job", "reopen", "sweep", "sweep", "sweep", "time"]),
        job=st.sampled_from(JOBS),
        task=st.sampled_from(["math", "own"]),
        size=st.sampled_from([2, 4]),
        seconds=st.sampled_from([1.0, 11.0, 31.0, 400.0]),
    )
    def something_happens(self, what: str, job: str, task: str, size: int, seconds: float) -> None:
        if what == "job" and self.job_number < 3:
            id_ = f"j{self.job_number}"
            payload = {"group_size": size}
            self.save_job(
                JobRecord(id=id_, number=0, task=task, payload=payload, state="running", started=0.0)
            )
            self.job_number += 1
        elif what == "same job" and self.model.last is not None:
            self.save_job(msgspec.structs.replace(self.model.last, state="stopped", crashes=1))
        elif what == "drop job":
            self.same(self.store.drop_job(job, "replaced"), lambda: self.model.drop_job(job, "replaced"))
        elif what == "reopen":
            for store in self.stores:
                self.run(store.close())
            self.stores = []
            self.open()
        else:
            self.clock.now += seconds
            self.model.now = self.clock.now
            if what == "sweep":
                self.run(self.store.sweep())
                self.model.sweep()

    def save_job(self, job: JobRecord) -> None:
        self.same(self.store.save_job(job), lambda: self.model.save_job(job))

    # -- what always holds

    @precondition(lambda self: self.stores)
    @invariant()
    def nothing_differs(self) -> None:
        store, model = self.store, self.model
        stats = self.run(store.stats())
        assert msgspec.structs.replace(stats, disk_bytes=0) == model.stats()
        assert self.run(store.groups(limit=10_000)) == [one.seen() for one in model.groups.values()]
        leases = {lease.id: lease for lease in self.run(store.leases())}
        assert leases == {lease.id: lease for lease in model.seen_leases()}
        loaded = self.run(store.load(list(model.groups)))
        for group in model.groups.values():
            items = loaded[group.id]
            assert (None if isinstance(items, str) else items) == model.load(group)
        uids = [f"u{n}" for n in range(self.uids + 1)]
        assert self.run(store.known(uids)) == [model.known(uid) for uid in uids]

    @precondition(lambda self: self.stores)
    @rule(
        job=st.sampled_from(JOBS),
        limit=st.sampled_from([1, 3, 100]),
        state=st.sampled_from(["ready", "dropped"]),
    )
    def look_around(self, job: str, limit: int, state: str) -> None:
        store, model = self.store, self.model
        of_job = [group for group in model.groups.values() if group.job == job]
        assert self.run(store.finished(job)) == [g.instance_id for g in of_job if g.state != "open"]
        assert self.run(store.has_groups(job)) == any(group.left is None for group in of_job)
        groups = self.run(store.groups(state=state, jobs=[job], limit=limit))
        assert groups == [group.seen() for group in of_job if group.state == state][:limit]
        for task, jobs in ((None, None), ("math", None), (None, [job])):
            unread, up_to = self.run(store.unread_drops(task, jobs, limit))
            assert ([group.id for group in unread], up_to) == model.unread_drops(task, jobs, limit)
        assert self.run(store.jobs()) == list(model.jobs.values())


def run_machine(new_driver: Callable[[], Callable[[], Database]], servers: int, examples: int) -> None:
    run_state_machine_as_test(
        lambda: StoreMachine(new_driver(), servers),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.generate],  # to shrink an example takes minutes: it is short as it is
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


def examples(few: int, many: int) -> pytest.MarkDecorator:
    soak = pytest.param(many, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])
    return pytest.mark.parametrize("examples", [few, soak])


@examples(60, 3000)
def test_sqlite_against_reference(examples: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="rollstream-store-", dir=SHM))

    def new_database() -> Callable[[], Database]:
        database = Path(tempfile.mkdtemp(dir=folder))
        return lambda: SqliteDatabase(database)

    try:
        run_machine(new_database, 1, examples)
    finally:
        shutil.rmtree(folder)


@examples(15, 1000)
def test_two_servers_on_postgres_against_reference(postgres: PostgresServer, examples: int) -> None:
    def new_database() -> Callable[[], Database]:
        schema = new_schema()
        return lambda: PostgresDatabase(postgres.url, schema)

    run_machine(new_database, 2, examples)
