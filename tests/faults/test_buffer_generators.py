"""Generation goes on where it was, whoever is killed: every (instance, epoch, repeat) exactly once."""

import asyncio
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from rollstream.buffer.async_client import AsyncBufferClient, Backoff, BufferUnavailableError
from rollstream.buffer.generation_plan import make_uid
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.engine.launch_guard import marked
from rollstream.testing.scripted import ScriptedRequest
from rollstream.testing.stub_faults import Latency
from rollstream.testing.stub_server import StubServer
from rollstream.testing.text_rules import answer_by_text
from tests.integration.buffer_servers import BufferProcess

TOKENIZER = load_tokenizer(str(MODEL_PATH))
INSTANCES, EPOCHS, REPEATS = 40, 2, 4
PATIENCE_S = 240.0


def sometimes_right(prompt: str, request: ScriptedRequest) -> str:
    a, b = re.findall(r"(\d+) \+ (\d+)", prompt)[-1]
    assert request.sampling.seed is not None
    return str(int(a) + int(b) + request.sampling.seed % 2)


@pytest.mark.slow
@pytest.mark.timeout(900)  # each start of a generator costs some eight seconds of a CPU
async def test_server_and_generator_may_be_killed_at_any_instant(tmp_path: Path) -> None:
    file = tmp_path / "input.jsonl"
    rows = [{"prompt": f"{i} + {i} =", "label": str(2 * i)} for i in range(INSTANCES)]
    file.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    rng = random.Random(5)
    delivered: Counter[str] = Counter()
    stub = StubServer(answer_by_text(TOKENIZER, sometimes_right), latency=Latency("fixed", 0.15))
    folder = tmp_path / "buffer"
    options = ("--generators", "builtin")
    server = await asyncio.to_thread(BufferProcess, folder, *options)
    url, port = server.url, server.port
    try:
        async with stub as engine, AsyncBufferClient(url, backoff=Backoff(0.05, 0.5, PATIENCE_S)) as client:
            record = await client.start_rollout(
                {
                    "task_type": "math",
                    "remote_engine_url": engine.url,
                    "input_file": str(file),
                    "num_repeat_per_sample": REPEATS,
                    "num_epoch": EPOCHS,
                    "num_process": 8,
                    "sampling_params": {"max_tokens": 16, "seed": 3},
                    "tokenizer_path": str(MODEL_PATH),
                }
            )
            rollout_id = record["rollout_id"]
            done = asyncio.Event()
            reading = asyncio.create_task(read(client, delivered, done))
            mark = f"buffer-{rollout_id}"
            for victim in ("server", "generator", "server"):
                at = engine.stats.answered + rng.randrange(20, 90)
                await until(lambda at=at: engine.stats.answered >= at)  # type: ignore[misc]
                if victim == "generator":
                    os.kill(rng.choice(sorted(marked(mark))), signal.SIGKILL)  # or its guard
                else:
                    await asyncio.to_thread(server.kill)
                    server = await asyncio.to_thread(BufferProcess, folder, *options, port=port)
            async with asyncio.timeout(PATIENCE_S):
                while (await client.stats())["rollout"] is not None:
                    await asyncio.sleep(0.2)
            done.set()
            await reading
            dropped = await all_dropped(client)
            stats, leases = await client.stats(), await client.leases()
            asked = engine.stats.answered
    finally:
        code = await asyncio.to_thread(server.stop)
    assert code == 0
    wanted = {
        make_uid(rollout_id, i, epoch, repeat)
        for i in range(INSTANCES)
        for epoch in range(EPOCHS)
        for repeat in range(REPEATS)
    }
    assert leases == [], "groups wait for the end of a lease that nobody knows of"
    assert delivered + dropped == Counter(wanted)
    assert stats["items_written"] == len(wanted) and stats["failures"] == []
    # Work repeated is at most what was in flight at each kill.
    assert asked <= len(wanted) + 3 * 8
    assert not marked(mark)


async def read(client: AsyncBufferClient, delivered: Counter[str], done: asyncio.Event) -> None:
    while True:
        last = done.is_set()
        try:
            lease = await client.read(max_groups=3, timeout=0.3, consumer="trainer")
            async with lease:
                if lease.id is None and last:
                    return
                uids = [item["uid"] async for group in lease for item in group.items]
                await lease.ack()  # again and again until the server is back
        except BufferUnavailableError:  # killed while it answered: the groups come again
            continue
        delivered.update(uids)


async def all_dropped(client: AsyncBufferClient) -> Counter[str]:
    answer = await client._call("GET", "/v1/dropped?limit=10000")
    return Counter(uid for one in orjson.loads(answer)["dropped"] for uid in one["uids"])


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
