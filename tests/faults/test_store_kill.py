"""Kill -9 of processes that write, lease and ack: what was acknowledged is there, and was acked once."""

import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from rollstream.buffer.store.sql import Database
from tests.support.postgres import PostgresServer, new_schema, postgres
from tests.support.store_worker import BATCH, GROUP, body_of, new_store, open_driver

__all__ = ["postgres"]

ROOT = Path(__file__).parents[2]
KILLS = pytest.mark.parametrize("kills", [10, pytest.param(300, marks=pytest.mark.soak)])


class Worker:
    """The program of `tests.support.store_worker`, and what it said."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.store_worker", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[list[str]] = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):
                with self._said:
                    self.lines.append(line.split())
                    self._said.notify_all()

    def wait_for_lines(self, count: int) -> None:
        """So many more than there are."""
        with self._said:
            wanted = len(self.lines) + count
            assert self._said.wait_for(
                lambda: len(self.lines) >= wanted or self.process.poll() is not None, timeout=120
            )
        assert self.process.poll() is None, "it ended by itself"

    def kill(self) -> list[list[str]]:
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait() == -signal.SIGKILL
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.lines


async def check(driver: Database, said: list[list[str]]) -> None:
    tried = [uids for what, *uids in said if what == "writes"]
    wrote = {uid for what, *uids in said if what == "wrote" for uid in uids}
    acks = {lease: uids for what, lease, *uids in said if what == "acks"}
    acked = {lease for what, lease, *_ in said if what == "acked"}
    assert not any(what == "lost" for what, *_ in said)
    store = new_store(driver)
    await store.open()
    try:
        groups = await store.groups(limit=1_000_000)
        state_of: dict[str, str] = {}
        for start in range(0, len(groups), 500):
            loaded = await store.load([group.id for group in groups[start : start + 500]])
            for group in groups[start : start + 500]:
                items = loaded[group.id]
                assert not isinstance(items, str), items
                assert group.n == len(items) <= GROUP
                for one in items:
                    assert one.uid not in state_of, "stored twice"
                    assert one.body == body_of(one.uid)
                    state_of[one.uid] = group.state
        assert wrote <= state_of.keys(), "an acknowledged item is lost"
        assert {sum(uid in state_of for uid in batch) for batch in tried} <= {0, BATCH}
        delivered = {uid for uid, state in state_of.items() if state == "delivered"}
        done = Counter(uid for lease in acked for uid in acks[lease])
        assert max(done.values(), default=1) == 1, "acked twice"
        assert done and done.keys() <= delivered
        assert delivered <= done.keys() | {uid for uids in acks.values() for uid in uids}
        stats = await store.stats()
        assert stats.items_written == len(state_of)
        assert stats.items_delivered == len(delivered)
        assert stats.items == sum(state not in ("delivered", "dropped") for state in state_of.values())
        assert stats.leases == len(await store.leases())
    finally:
        await store.close()


@KILLS
@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_kills_of_a_store_on_sqlite(tmp_path: Path, kills: int) -> None:
    chance = random.Random()
    said: list[list[str]] = []
    for turn in range(kills):
        worker = Worker("sqlite", str(tmp_path), f"w.{turn}")
        worker.wait_for_lines(chance.randrange(1, 1500))
        said += worker.kill()
    await check(open_driver("sqlite", str(tmp_path)), said)


@KILLS
@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_kills_of_one_of_two_stores_on_postgres(postgres: PostgresServer, kills: int) -> None:
    chance = random.Random()
    where = ("postgres", postgres.url, new_schema())
    workers = {name: Worker(*where, f"{name}.0") for name in "ab"}
    said: list[list[str]] = []
    for turn in range(kills):
        victim = chance.choice("ab")
        workers[victim].wait_for_lines(chance.randrange(1, 800))
        said += workers[victim].kill()
        workers[victim] = Worker(*where, f"{victim}.{turn + 1}")
    for worker in workers.values():
        worker.wait_for_lines(100)
        said += worker.kill()
    await check(open_driver(*where), said)


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_kills_of_postgres(postgres: PostgresServer, kills: int) -> None:
    chance = random.Random()
    where = ("postgres", postgres.url, new_schema())
    workers = [Worker(*where, f"{name}.0") for name in "ab"]
    for _ in range(kills):
        for worker in workers:
            worker.wait_for_lines(chance.randrange(1, 500))
        postgres.kill()
        postgres.start()
    for worker in workers:
        worker.wait_for_lines(500)  # they go on by themselves
    said = [line for worker in workers for line in worker.kill()]
    await check(open_driver(*where), said)
