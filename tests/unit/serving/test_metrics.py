"""`/metrics` and `/get_load`: what clients of SGLang and vLLM read there is what the engine says."""

import asyncio

import aiohttp

from rollstream.engine.base import EngineLoad
from rollstream.engine.load import SGLANG_METRICS, VLLM_METRICS, read_metrics, read_sglang_loads
from rollstream.testing.scripted import ScriptedEngine
from tests.unit.serving.served import Client, eventually, serving


class BusyEngine(ScriptedEngine):
    said: EngineLoad | None = EngineLoad(3, 4, 0.5, 6)

    async def load(self) -> EngineLoad | None:
        return self.said


async def page(client: Client, path: str) -> bytes:
    async with aiohttp.request("GET", client.url + path) as response:
        assert response.status == 200
        return await response.read()


async def test_both_kinds_of_clients_read_the_same() -> None:
    engine = BusyEngine()
    async with serving(engine) as client:
        metrics = await page(client, "/metrics")
        for names in (SGLANG_METRICS, VLLM_METRICS):
            assert read_metrics(metrics, names) == engine.said
        engine.said = EngineLoad(3, 4)
        metrics = await page(client, "/metrics")
        assert read_metrics(metrics, VLLM_METRICS) == engine.said
        engine.said = None
        metrics = await page(client, "/metrics")
        assert read_metrics(metrics, SGLANG_METRICS) is None


async def test_the_load_route_counts_what_the_engine_queues() -> None:
    engine = BusyEngine(latency=1e6)
    async with serving(engine) as client:
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
        tasks = [asyncio.create_task(client.post("/generate", body)) for _ in range(7)]
        await eventually(lambda: engine.in_flight == 7)
        assert read_sglang_loads(await page(client, "/get_load")) == EngineLoad(3, 4)
        await client.post("/abort_request", {"rid": "", "abort_all": True})
        await asyncio.gather(*tasks)
