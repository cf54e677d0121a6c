"""What servers say of their load, in their own words, and what becomes of it over replicas."""

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.base import EngineLoad
from rollstream.engine.load import (
    SGLANG_METRICS,
    VLLM_METRICS,
    LoadSum,
    ask_load,
    read_metrics,
    read_sglang_loads,
)
from rollstream.engine.sglang import SGLangEngine
from rollstream.testing.stub_faults import Faults, Latency
from rollstream.testing.stub_server import StubServer
from rollstream.trajectory import SamplingParams
from tests.support.engines import started
from tests.support.until import until

VLLM_PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 96.0
vllm:num_requests_running{engine="1",model_name="Qwen/Qwen3-8B"} 97.0
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-8B"} 3.0
vllm:num_requests_waiting{engine="1",model_name="Qwen/Qwen3-8B"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="Qwen/Qwen3-8B",reason="capacity"} 500.0
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-8B"} 0.93
vllm:kv_cache_usage_perc{engine="1",model_name="Qwen/Qwen3-8B"} 0.91
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="Qwen/Qwen3-8B"} 12.0
vllm:num_preemptions_total{engine="1",model_name="Qwen/Qwen3-8B"} 30.0
vllm:num_preemptions_created{engine="0",model_name="Qwen/Qwen3-8B"} 1.7e+09
"""


def test_vllm_with_two_data_parallel_engines() -> None:
    assert read_metrics(VLLM_PAGE, VLLM_METRICS) == EngineLoad(193, 3, 0.93, 42)
    assert read_metrics(VLLM_PAGE, SGLANG_METRICS) is None
    mute = VLLM_PAGE.replace(b"vllm:kv_cache_usage_perc", b"vllm:other")
    assert read_metrics(mute, VLLM_METRICS) == EngineLoad(193, 3, None, 42)


def test_sglang_in_all_its_words() -> None:
    page = (
        b'sglang:num_running_reqs{engine_type="unified",model_name="a} b"} 7.0\n'
        b"sglang:num_queue_reqs 5\nsglang:token_usage 0.28 1700000000000\nsglang:num_retracted_reqs 3\n"
    )
    assert read_metrics(page, SGLANG_METRICS) == EngineLoad(7, 5, 0.28, None)
    page += b"sglang:num_retracted_requests_total 9.0"
    assert read_metrics(page, SGLANG_METRICS) == EngineLoad(7, 5, 0.28, 9)
    old = [{"dp_rank": 0, "num_reqs": 9, "num_waiting_reqs": 2, "num_tokens": 7}]
    assert read_sglang_loads(orjson.dumps(old * 2)) == EngineLoad(14, 4)
    new = {"loads": [{"dp_rank": 0, "num_running_reqs": 9, "num_waiting_reqs": 2, "token_usage": 0.5}]}
    assert read_sglang_loads(orjson.dumps(new)) == EngineLoad(9, 2, 0.5)


@given(
    st.binary(max_size=200) | st.sampled_from([VLLM_PAGE]).flatmap(lambda page: st.binary().map(page.__add__))
)
def test_no_page_is_too_odd(page: bytes) -> None:
    for names in (VLLM_METRICS, SGLANG_METRICS):
        found = read_metrics(page, names)
        assert found is None or found.running >= 0
    read_sglang_loads(page)


def test_preemptions_of_replicas_that_come_and_go_only_rise() -> None:
    total = LoadSum()
    one, two = EngineLoad(1, 2, 0.5, 100), EngineLoad(3, 4, 0.7, 7)
    assert total.add([("a", one), ("b", None)]) == EngineLoad(1, 2, 0.5, 0)
    assert total.add([("a", EngineLoad(1, 2, 0.5, 103)), ("b", two)]) == EngineLoad(4, 6, 0.6, 3)
    assert total.add([("b", EngineLoad(3, 4, 0.7, 8))]) == EngineLoad(3, 4, 0.7, 4)
    # a has been restarted, b is silent about its cache
    assert total.add([("a", EngineLoad(1, 0, 0.1, 2)), ("b", EngineLoad(3, 4))]) == EngineLoad(4, 4, 0.1, 6)
    assert total.add([("a", None)]) is None
    assert total.add([("c", EngineLoad(1, 1))]) == EngineLoad(1, 1)


class Mute:
    """An engine of somebody's, without `load`."""


class Odd:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    async def load(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer == "hangs":
            await asyncio.Event().wait()
        return self.answer


@pytest.mark.parametrize(
    "engine",
    [
        Mute(),
        Odd(None),
        Odd("hangs"),
        Odd(RuntimeError("bug")),
        Odd(EngineLoad(-1, 0)),
        Odd(EngineLoad(1, 0, 93.0)),
    ],
)
@pytest.mark.virtual_time
async def test_an_engine_that_says_nothing_of_use_has_no_load(engine: object) -> None:
    assert await ask_load(engine) is None


@pytest.fixture
async def servers() -> AsyncIterator[list[StubServer]]:
    slow = Latency("fixed", 1e6)
    async with StubServer(latency=slow, max_running=2) as a, StubServer(latency=slow, max_running=2) as b:
        yield [a, b]


@pytest.mark.parametrize("metrics", [True, False])
async def test_a_pool_says_what_its_servers_say(servers: list[StubServer], metrics: bool) -> None:
    for server in servers:
        server.faults = Faults(no_metrics=not metrics)
    async with started(SGLangEngine([server.url for server in servers])) as engine:
        assert await ask_load(engine) == EngineLoad(0, 0)
        tasks = [
            asyncio.create_task(engine.generate([1], SamplingParams(4), request_id=f"r{number}"))
            for number in range(10)
        ]
        await until(lambda: sum(server.stats.in_flight for server in servers) == 10)
        assert await ask_load(engine) == EngineLoad(4, 6)
        servers[0].kill()
        await until(lambda: servers[1].stats.in_flight == 10)  # its requests have moved
        assert await ask_load(engine) == EngineLoad(2, 8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await ask_load(engine) is None
