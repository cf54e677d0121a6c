"""Kill -9 of the buffer's server, again and again, under writers, readers with leases, and a job; a full disk."""

import asyncio
import contextlib
import random
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollstream.buffer.client import AsyncBufferClient, BufferClientError
from rollstream.engine.launch.local import reserve_port
from tests.support.buffer import BufferProcess, generator, group, item
from tests.support.until import until, wait_until

WRITERS, READERS, GROUP = 16, 3, 4

RUN = """from rollstream.buffer.client import BufferClient
    with BufferClient(data["remote_buffer_url"]) as client:
        n = 0
        while True:
            items = [
                {"uid": f"job-{n}-{r}", "instance_id": f"job-{n}", "reward": r % 2,
                 "messages": [{"role": "user", "content": "?"}]} for r in range(4)
            ]
            client.write(items)
            with open(data["stored"], "a") as file:
                file.write("".join(one["uid"] + "\\n" for one in items))
            n += 1
            time.sleep(0.02)"""


class World:
    """What writers were told is stored, and what readers were told is theirs."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.seed = seed
        self.stored: set[str] = set()
        self.acked: Counter[str] = Counter()
        self.leases: Counter[str] = Counter()
        self.over = asyncio.Event()
        self.written = asyncio.Event()

    async def write(self, writer: int) -> None:
        rng = random.Random(f"{self.seed}-{writer}")
        async with AsyncBufferClient(self.url) as client:
            number = 0
            while not self.over.is_set():
                name = f"w{writer}-{number}"
                size = rng.randrange(3000) if rng.random() < 0.8 else rng.randrange(60_000, 200_000)
                items = group(name, [n % 2 for n in range(GROUP)], pad="x" * size)
                while items:
                    batch, items = items[: (size := rng.randrange(1, GROUP + 1))], items[size:]
                    await client.write(batch)
                    self.stored |= {str(one["uid"]) for one in batch}
                number += 1

    async def read(self, reader: int) -> None:
        rng = random.Random(f"{self.seed}-r{reader}")
        consumer = f"r{reader}"
        async with AsyncBufferClient(self.url) as client:
            while not (self.written.is_set() and (await client.stats())["store"]["items"] == 0):
                lease = await client.read(max_groups=rng.randrange(1, 40), timeout=1.0, consumer=consumer)
                uids = [item["uid"] for one in lease.groups for item in one.items]
                if lease.id is None:  # what a crash left leased comes back
                    continue
                fate = rng.random()
                if fate < 0.1:
                    await client.release(consumer)  # this reader crashed, and begins anew
                elif fate < 0.15:
                    await client.nack(lease.id)
                elif fate > 0.2:  # between: it crashed, and nobody says so
                    await self._ack(client, lease.id, uids)

    async def _ack(self, client: AsyncBufferClient, lease: str, uids: list[str]) -> None:
        try:
            answer = await client.ack(lease)
        except BufferClientError as error:
            assert error.status == 409, error
            return
        assert answer["items"] == len(uids)
        self.acked.update(uids)
        self.leases[lease] += 1


async def storm(tmp_path: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    folder, of_job = tmp_path / "buffer", tmp_path / "stored"
    files = generator(tmp_path / "files", run=RUN)
    options = ("--group-size", str(GROUP), "--lease-seconds", "2", "--generators", files)
    reserved = reserve_port("127.0.0.1")  # nobody takes it between two lives of the server
    port = reserved.getsockname()[1]
    server = await asyncio.to_thread(BufferProcess, folder, *options, port=port)
    try:
        world = World(server.url, seed)
        async with AsyncBufferClient(server.url) as client:
            job = (await client.start_job({"task_type": "math", "stored": str(of_job)}))["id"]
            async with asyncio.TaskGroup() as tasks:
                writers = [tasks.create_task(world.write(number)) for number in range(WRITERS)]
                for number in range(READERS):
                    tasks.create_task(world.read(number))
                for _ in range(kills):
                    # The instant is random with respect to what the server does; nothing is waited for.
                    await asyncio.sleep(rng.uniform(0.02, 1.0))
                    await asyncio.to_thread(server.kill)
                    server = await asyncio.to_thread(BufferProcess, folder, *options, port=port)
                await until(of_job.exists)  # the job, too, has got on
                world.over.set()
                await asyncio.wait(writers)
                await client.stop_job(job)
                world.written.set()
            stats = (await client.stats())["store"]
    finally:
        await asyncio.to_thread(server.kill)
        assert server.process.stdout is not None
        server.process.stdout.close()
        reserved.close()
    told = world.stored | set(of_job.read_text().split())
    # What the job's process wrote when it was ended, it may not have noted.
    extra = {uid for uid in set(world.acked) - told if uid.startswith("job-")}
    assert len(world.stored) > kills * GROUP
    assert set(world.acked) - extra == told and len(extra) <= GROUP * (kills + 1)
    assert max(world.acked.values()) == 1, "an item was acked by two readers"
    assert max(world.leases.values()) == 1
    assert stats["items_written"] == stats["items_delivered"] == len(world.acked)
    assert (stats["items"], stats["groups_dropped"], stats["leases"]) == (0, {}, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [8, pytest.param(300, marks=pytest.mark.soak)])
async def test_nothing_acknowledged_is_lost_and_nothing_is_acked_twice(tmp_path: Path, kills: int) -> None:
    await storm(tmp_path, kills, seed=7)


SMALL_DISK = 'mount -t tmpfs -o size=16m none "$0" && echo mounted && exec sleep 600'


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[tuple[Path, Sequence[str]]]:
    """A disk of 16 MB as this process sees it, and what puts a command below it, which finds it at `place`."""
    place.mkdir()
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, str(place)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"mounted\n"
        pid = str(holder.pid)
        try:
            yield (
                Path(f"/proc/{pid}/root{place}"),
                ["nsenter", "--user", "--mount", "--preserve-credentials", "-t", pid, "--"],
            )
        finally:
            holder.kill()


class FullDisk:
    """A server on a small disk; what it acknowledged, and what it refused."""

    def __init__(self, folder: Path, below: Sequence[str]) -> None:
        self.folder, self.below = folder, below
        self.stored: list[str] = []
        self.refused: list[str] = []
        self.acked: list[str] = []
        self.start()

    def start(self) -> None:
        self.server = BufferProcess(self.folder, "--group-size", "2", below=self.below)

    def end(self) -> None:
        if self.server.process.poll() is None:
            self.server.kill()
        assert self.server.process.stdout is not None
        self.server.process.stdout.close()

    def fill(self) -> None:
        """Writes groups, by both routes, until nothing is taken."""
        # The first bodies lie in files beside the database, later ones in its rows.
        refusals, size, before = 0, 80_000, len(self.stored)
        while refusals < 8:
            number = len(self.stored) + len(self.refused)
            items = group(number, (0, 1), pad="x" * size)
            status, answer = self.server.post("/v1/items", {"items": items})
            self.note(items, status, answer)
            if status != 200:
                refusals, size = refusals + 1, size // 4
                one = item(number, 1, f"single-{number}", pad="x" * size)
                self.note([one], *self.server.post("/buffer/write", one))
        assert len(self.stored) - before > 20

    def note(self, items: list[dict[str, Any]], status: int, answer: Any) -> None:
        uids = [str(one["uid"]) for one in items]
        if status == 200:
            self.stored += uids
        else:
            assert status == 507 and "no room on the disk" in answer["error"]["message"], answer
            self.refused += uids

    def drain(self, most: int) -> None:
        """Reads and acks, so many groups at most."""
        while most > 0:
            status, answer = self.server.post("/v1/read", {"max_groups": min(most, 16)})
            assert status == 200, answer
            if not answer["groups"]:
                return
            most -= len(answer["groups"])
            got = [one["uid"] for part in answer["groups"] for one in part["items"]]
            assert self.server.post(f"/v1/leases/{answer['head']['lease']}/ack")[0] == 200
            self.acked += got

    def known(self, uids: list[str]) -> list[bool]:
        return self.server.post("/v1/uids/known", {"uids": uids})[1]["known"]  # type: ignore[no-any-return]

    def says_it_is_full(self) -> bool:
        ready = self.server.request("GET", "/ready")[0]
        full = self.server.stats()["disk_full"]
        assert full == (ready == 507) == (b"rollstream_buffer_disk_full 1.0" in self.server.get("/metrics"))
        return bool(full)


def test_a_full_disk_refuses_items_and_can_be_drained(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as (seen, below):
        disk = FullDisk(tmp_path / "disk" / "buffer", below)
        try:
            disk.fill()
            assert disk.says_it_is_full()
            assert all(disk.known(disk.stored)) and not any(disk.known(disk.refused))
            assert disk.server.log.read_text().count("no room on the disk") == 1
            disk.drain(20)
            assert not disk.says_it_is_full()  # what was delivered makes room
            disk.fill()
            other = seen / "other"
            with pytest.raises(OSError), other.open("wb", buffering=0) as file:  # and now not a byte is left
                while True:
                    file.write(b"x" * 4096)
            assert disk.server.post("/v1/read", {"max_groups": 10})[0] == 200  # a lease that a crash leaves
            disk.end()
            disk.start()
            assert disk.says_it_is_full()
            for path in ("/v1/stats", "/v1/groups?state=ready", "/v1/groups/1", "/buffer/peek"):
                assert disk.server.get(path)
            for lease in disk.server.get("/v1/leases")["leases"]:
                assert disk.server.post(f"/v1/leases/{lease['id']}/nack")[0] == 200
            disk.drain(30)
            assert disk.server.stop() == 0
            disk.end()
            disk.start()
            disk.drain(10**9)
            other.unlink()
            wait_until(lambda: disk.server.request("GET", "/ready")[0] == 200)
            assert not disk.says_it_is_full()
            disk.fill()
            disk.drain(10**9)
            halves = {uid for uid in disk.stored if uid.startswith("single-")}
            assert Counter(disk.acked) == Counter(uid for uid in disk.stored if uid not in halves)
        finally:
            disk.end()
