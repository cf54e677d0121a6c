"""Kill -9 of the buffer's server, again and again, under writers and readers with leases."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from rollstream.buffer.async_client import AsyncBufferClient, Backoff
from rollstream.buffer.client_wire import BufferClientError, BufferUnavailableError
from tests.integration.buffer_servers import BufferProcess

WRITERS, READERS, KILLS, GROUP = 32, 3, 30, 4
OPTIONS = ("--group-size", str(GROUP), "--lease-seconds", "2")
PATIENT = Backoff(first=0.02, longest=0.2, give_up_after=120.0)


class World:
    """What writers were told is stored, and what readers were told is theirs."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stored: set[str] = set()
        self.acked: Counter[str] = Counter()
        self.leases: Counter[str] = Counter()
        self.refused_acks = 0
        self.over = asyncio.Event()
        self.written = asyncio.Event()

    async def write(self, writer: int) -> None:
        rng = random.Random(writer)
        async with AsyncBufferClient(
            self.url, backoff=PATIENT, encoding=rng.choice(["json", "msgpack"])
        ) as client:
            number = 0
            while not self.over.is_set():
                name = f"w{writer}-{number}"
                items = [
                    {
                        "uid": f"{name}-{n}",
                        "instance_id": name,
                        "messages": [{"role": "user", "content": "x" * rng.randrange(3000)}],
                        "reward": n % 2,
                    }
                    for n in range(GROUP)
                ]
                while items:
                    batch, items = items[: (size := rng.randrange(1, GROUP + 1))], items[size:]
                    await client.write(batch)
                    self.stored |= {str(one["uid"]) for one in batch}
                number += 1

    async def read(self, reader: int) -> None:
        rng = random.Random(1000 + reader)
        consumer = f"r{reader}"
        async with AsyncBufferClient(self.url, backoff=PATIENT) as client:
            empty = 0
            while empty < 3:
                try:
                    lease = await client.read(max_groups=rng.randrange(1, 40), timeout=1.0, consumer=consumer)
                    uids = [item["uid"] async for group in lease for item in group.items]
                except BufferUnavailableError:
                    continue  # it broke while it streamed: its groups go back
                if lease.id is None:
                    # Leases that were lost by a crash of the server or a reader come back within 2 s.
                    empty = empty + 1 if self.written.is_set() else 0
                    continue
                empty = 0
                fate = rng.random()
                if fate < 0.1:
                    await client.release(consumer)  # this reader crashed, and begins anew
                elif fate < 0.15:
                    await client.nack(lease.id)
                elif fate < 0.2:
                    pass  # it crashed, and nobody says so
                else:
                    await self._ack(client, lease.id, uids)

    async def _ack(self, client: AsyncBufferClient, lease: str, uids: list[str]) -> None:
        try:
            answer = await client.ack(lease)
        except BufferClientError as error:
            assert error.status == 409, error
            self.refused_acks += 1
            return
        assert answer["items"] in (0, len(uids)) if answer["repeated"] else answer["items"] == len(uids)
        self.acked.update(uids)
        self.leases[lease] += 1


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_nothing_acknowledged_is_lost_and_nothing_is_acked_twice(tmp_path: Path) -> None:
    rng = random.Random(7)
    folder = tmp_path / "buffer"
    server = await asyncio.to_thread(BufferProcess, folder, *OPTIONS)
    try:
        world = World(server.url)
        async with asyncio.TaskGroup() as tasks:
            writers = [tasks.create_task(world.write(number)) for number in range(WRITERS)]
            for number in range(READERS):
                tasks.create_task(world.read(number))
            for _ in range(KILLS):
                # The instant is random with respect to what the server does; nothing is waited for.
                await asyncio.sleep(rng.uniform(0.02, 0.5))
                port = server.port
                await asyncio.to_thread(server.kill)
                server = await asyncio.to_thread(BufferProcess, folder, *OPTIONS, port=port)
            world.over.set()
            await asyncio.wait(writers)
            world.written.set()
        async with AsyncBufferClient(server.url) as client:
            stats = await client.stats()
    finally:
        await asyncio.to_thread(server.kill)
    assert len(world.stored) > 30 * GROUP
    assert set(world.acked) == world.stored
    assert max(world.acked.values()) == 1, "an item was acked by two readers"
    assert max(world.leases.values()) == 1
    assert (stats["items"], stats["items_delivered"]) == (0, len(world.stored))
    assert stats["items_written"] == len(world.stored) and stats["dropped"] == {}
