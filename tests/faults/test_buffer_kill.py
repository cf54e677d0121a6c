"""Kill -9 of the buffer's server, again and again, under writers, readers with leases, and a job; a full disk."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from rollstream.buffer.client import AsyncBufferClient, BufferClientError
from rollstream.engine.launch_process import reserve_port
from tests.support.buffer import BufferProcess, generator, group, serve_buffer
from tests.support.until import until

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
                items = group(name, [n % 2 for n in range(GROUP)], pad="x" * rng.randrange(3000))
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
async def test_nothing_acknowledged_is_lost_and_nothing_is_acked_twice(tmp_path: Path) -> None:
    await storm(tmp_path, 8, seed=7)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_nothing_acknowledged_is_lost_over_300_kills(tmp_path: Path) -> None:
    await storm(tmp_path, 300, seed=8)


SMALL_DISK = 'mount -t tmpfs -o size=8m none "$0" && exec "$@"'


def test_a_full_disk_refuses_writes_and_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    below = ["unshare", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, str(disk)]
    with serve_buffer(disk / "buffer", "--group-size", "2", below=below) as server:
        other = Path(f"/proc/{server.process.pid}/root{disk}/other")
        other.write_bytes(b"x" * 2_000_000)
        stored: list[str] = []
        refused: list[str] = []
        for number in range(400):
            items = group(number, (0, 1), pad="x" * 10_000)
            path = "/buffer/write" if number % 2 else "/v1/items"
            for body in items if number % 2 else [{"items": items}]:
                status, answer = server.post(path, body)
                uids = [one["uid"] for one in body.get("items") or [body]]
                if status == 200:
                    stored += uids
                else:
                    assert status == 507 and "no room on the disk" in answer["error"]["message"], answer
                    refused += uids
        assert refused and len(stored) > 10
        assert server.request("GET", "/health")[0] == 200
        answers = [server.post("/v1/uids/known", {"uids": uids})[1]["known"] for uids in (stored, refused)]
        assert all(answers[0]) and not any(answers[1])
        acked: set[str] = set()
        assert server.post("/v1/read", {"max_groups": 2})[0] in (200, 507)  # a lease is written, too
        for path in ("/v1/stats", "/v1/groups?state=ready", "/v1/groups/1", "/buffer/peek", "/metrics"):
            assert server.get(path)
        other.unlink()
        assert server.request("GET", "/ready")[0] == 200
        assert server.post("/v1/items", {"items": group("last", (0, 1))})[0] == 200
        for lease in server.get("/v1/leases")["leases"]:
            assert server.post(f"/v1/leases/{lease['id']}/nack")[0] == 200
        while (read := server.post("/v1/read", {})[1])["groups"]:
            got = {one["uid"] for part in read["groups"] for one in part["items"]}
            assert not got & acked
            acked |= got
            assert server.post(f"/v1/leases/{read['head']['lease']}/ack")[0] == 200
        halves = {uid for uid in stored if uid not in acked}
        assert acked - {"'last'-0", "'last'-1"} <= set(stored) and len(halves) <= len(refused)
