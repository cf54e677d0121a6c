"""R3: kill -9 of the gateway's server, again and again, under agents that repeat what was not answered."""

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow.parquet as pq
import pytest

from rollstream.buffer.client import BufferClient
from rollstream.engine.launch.local import reserve_port
from rollstream.store.export.files import decode_row
from rollstream.store.export.run import export_run
from rollstream.store.validate import validate_run
from tests.faults.runs import stub_server
from tests.support.buffer import serve_buffer
from tests.support.gateway import GatewayProcess, serve_gateway
from tests.support.processes import full_disk
from tests.support.until import PATIENCE_S

AGENTS = 8


class Agents:
    """Programs on other machines, and what they were told is stored."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.promised: dict[str, float] = {}
        self.over = asyncio.Event()

    async def run(self, agent: int) -> None:
        async with aiohttp.ClientSession() as client:
            number = 0
            while not self.over.is_set():
                await self._session(client, f"s{agent}-{number}", f"{agent} + {number // 2} =", float(number))
                number += 1

    async def _session(self, client: aiohttp.ClientSession, id: str, prompt: str, reward: float) -> None:
        """One session to its end, begun again under its id whenever its server was killed."""
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                body = {"id": id, "row": {"prompt": prompt}}
                status, info = await self._post(client, f"{self.url}/v1/sessions", body)
                assert status == 200, info
                if info["state"] == "open":
                    body = {"model": "m", "messages": info["messages"]}
                    status, answer = await self._post(client, f"{info['base_url']}/chat/completions", body)
                    assert status in (200, 404), answer
                while status == 200:
                    with contextlib.suppress(aiohttp.ClientError):
                        url = f"{self.url}/v1/sessions/{id}/finish"
                        status, info = await self._post(client, url, {"reward": reward})
                        assert status in (200, 404), info
                        if status == 200:
                            self.promised[id] = reward
                            return
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.02)

    async def _post(self, client: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
        async with client.post(url, json=body) as response:
            return response.status, await response.json()


async def storm(folder: Path, engine: str, words: list[str], kills: int) -> dict[str, float]:
    """What was promised, while the server was killed so many times."""
    rng = random.Random(kills)
    reserved = reserve_port("127.0.0.1")  # nobody takes it between two lives of the server
    port = reserved.getsockname()[1]
    server = await asyncio.to_thread(GatewayProcess, folder, engine, *words, port=port)
    agents = Agents(server.url)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(agents.run(agent)) for agent in range(AGENTS)]
            for _ in range(kills):
                # The instant is random with respect to what the server does; nothing is waited for.
                await asyncio.sleep(rng.uniform(0.0, 0.7))
                await asyncio.to_thread(server.kill)
                assert server.process.stdout is not None
                server.process.stdout.close()
                server = await asyncio.to_thread(GatewayProcess, folder, engine, *words, port=port)
            agents.over.set()
            await asyncio.wait(running)
        assert await asyncio.to_thread(server.stop) == 0, server.log.read_text()[-2000:]
    finally:
        if server.process.poll() is None:
            server.kill()
        if server.process.stdout is not None:
            server.process.stdout.close()
        reserved.close()
    return agents.promised


KILLS = [3, pytest.param(30, marks=pytest.mark.soak)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", KILLS)
async def test_every_finish_that_was_answered_is_in_the_run_directory_once(
    tmp_path: Path, kills: int
) -> None:
    folder = tmp_path / "run"
    words = ["actor_rollout_ref.rollout.n=2", "generation.save_batch_size=20"]
    with stub_server("--response-tokens", "8") as engine:
        promised = await storm(folder, engine, words, kills)
    result = validate_run(folder)
    assert result.sound, result.problems
    artifact = tmp_path / "all.parquet"
    exported = export_run(folder, "parquet", artifact)
    rows = [decode_row(row, artifact) for row in pq.read_table(artifact).to_pylist()]
    assert exported.rows == len(rows) == len(promised) > kills
    keys = Counter((row["index"], row["repeat"]) for row in rows)
    assert set(keys.values()) == {1}
    assert {row["extra"]["session"]["id"]: row["reward"] for row in rows} == promised
    indices = {row["messages"][0]["content"]: row["index"] for row in rows}
    assert len(set(indices.values())) == len(indices)


def test_a_full_disk_ends_the_server_and_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    folder, promised = tmp_path / "run", []
    with stub_server("--response-tokens", "64") as engine:
        with full_disk(after=64_000):
            server = GatewayProcess(folder, engine)
        try:
            for number in range(1000):
                body = {"id": f"s{number}", "row": {"prompt": f"{number} ="}}
                session = server.post("/v1/sessions", body)[1]
                path = "/s/" + session["base_url"].partition("/s/")[2]
                body = {"model": "m", "messages": session["messages"]}
                assert server.post(f"{path}/chat/completions", body)[0] == 200
                status, answer = server.post(f"/v1/sessions/s{number}/finish", {"reward": number})
                if status != 200:
                    break
                promised.append(f"s{number}")
            assert (status, answer["error"]["code"]) == (507, "storage")
            assert server.process.wait(PATIENCE_S) == 1, server.log.read_text()
        finally:
            if server.process.poll() is None:
                server.kill()
            assert server.process.stdout is not None
            server.process.stdout.close()
        with serve_gateway(folder, engine) as server:
            told = [server.get(f"/v1/sessions/{id}")["reward"] for id in promised]
            assert server.post(f"/v1/sessions/s{len(promised)}/finish", {})[0] == 404
    assert promised and told == list(range(len(promised)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", KILLS)
async def test_every_finish_that_was_answered_is_in_the_buffer_once(tmp_path: Path, kills: int) -> None:
    with (
        stub_server("--response-tokens", "8") as engine,
        serve_buffer(tmp_path / "buffer", "--group-size", "1", "--raw") as buffer,
    ):
        promised = await storm(tmp_path / "run", engine, ["--buffer", buffer.url], kills)
        stored: dict[str, float] = {}
        with BufferClient(buffer.url) as client:
            while (lease := client.read(max_groups=100)).groups:
                for group in lease.groups:
                    for item in group.items:
                        assert item["uid"] not in stored
                        stored[item["uid"]] = item["reward"]
                        assert len(item["response_ids"]) == len(item["response_logprobs"]) == 8
                lease.ack()
    assert stored == {f"session:{id}": reward for id, reward in promised.items()}
    assert not (tmp_path / "run").exists()
