"""LoRA adapters as weights of servers, with the stub: which is loaded when, and which answers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from rollstream.demo import MODEL_PATH
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.openvino import OpenVINOEngine
from rollstream.engine.sglang import SGLangEngine
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.trajectory import SamplingParams
from tests.support.engines import started

SAMPLING = SamplingParams(4, seed=1)


def adapter(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


@pytest.fixture
async def server() -> AsyncIterator[StubServer]:
    async with StubServer(model=StubModel(adapters=2)) as server:
        yield server


async def test_requests_are_answered_under_the_newest_adapter(server: StubServer, tmp_path: Path) -> None:
    async with started(SGLangEngine([server.url])) as engine:
        assert engine.capabilities.adapters == 2
        for version in (3, 4, 4):  # the folder of a version may be written anew
            source = adapter(tmp_path / str(version))
            await engine.update_weights(source, version)
            assert list(server.adapters.values()) == [source]
            answer = await engine.generate([1], SAMPLING, request_id="a")
            assert answer.policy_versions == [(0, version)]
        await engine.update_weights("/whole/weights", 5)
        assert not server.adapters
        assert (await engine.generate([1], SAMPLING, request_id="a")).policy_versions == [(0, 5)]


async def test_a_server_that_was_started_anew_gets_its_adapter_again(
    server: StubServer, tmp_path: Path
) -> None:
    async with started(SGLangEngine([server.url])) as engine:
        source = adapter(tmp_path / "1")
        await engine.update_weights(source, 1)
        server.adapters.clear()
        with pytest.raises(EngineUnavailableError, match="started anew"):  # which nobody is charged for
            await engine.generate([1], SAMPLING, request_id="a")
        assert await engine.health()
        answer = await engine.generate([1], SAMPLING, request_id="a")
        assert answer.policy_versions == [(0, 1)] and source in server.adapters.values()
        with pytest.raises(EngineError, match="vocab"):  # the request's own fault
            await engine.generate([600], SAMPLING, request_id="a")


async def test_engines_that_take_no_adapters_say_so(tmp_path: Path) -> None:
    source = adapter(tmp_path / "1")
    async with StubServer() as server, started(SGLangEngine([server.url])) as engine:
        with pytest.raises(EngineError, match="takes no LoRA adapter"):
            await engine.update_weights(source, 1)
    async with started(OpenVINOEngine(MODEL_PATH, log_path=tmp_path / "log")) as embedded:
        with pytest.raises(EngineError, match="takes no LoRA adapter"):
            await embedded.update_weights(source, 1)


async def test_adapters_are_there_as_long_as_rollouts_are_pinned_to_them(
    server: StubServer, tmp_path: Path
) -> None:
    async with started(ContinuingEngine(SGLangEngine([server.url]))) as engine:
        with pytest.raises(ConfigError, match="under 3 LoRA adapters at once"):
            engine.pin_weights(3)
        engine.pin_weights(2)
        for version in (1, 2, 3):
            with engine.pinned("a"):
                await engine.update_weights(adapter(tmp_path / str(version)), version)
                server.adapters.clear()  # it is started anew: what is asked for is loaded again
                with pytest.raises(EngineUnavailableError):
                    await engine.generate([1], SAMPLING, request_id="b")
                assert await engine.health()
                for name, expected in (("a", version - 1), ("a.1", version - 1), ("b", version)):
                    answer = await engine.generate([1], SAMPLING, request_id=name)
                    assert answer.policy_versions == [(0, expected)]
                wanted = {str(tmp_path / str(one)) for one in (version - 1, version) if one}
                assert {*server.adapters.values()} == wanted


async def test_a_pinned_request_does_not_wait_for_an_update(server: StubServer, tmp_path: Path) -> None:
    async with started(ContinuingEngine(SGLangEngine([server.url]))) as engine:
        engine.pin_weights(2)
        await engine.update_weights(adapter(tmp_path / "1"), 1)
        with engine.pinned("a"):
            asked, go_on, load = asyncio.Event(), asyncio.Event(), server._routes["/load_lora_adapter"]

            async def late(request: web.BaseRequest) -> web.StreamResponse:
                asked.set()
                await go_on.wait()
                return await load(request)

            server._routes["/load_lora_adapter"] = late
            update = asyncio.create_task(engine.update_weights(adapter(tmp_path / "2"), 2))
            await asked.wait()
            assert (await engine.generate([1], SAMPLING, request_id="a")).policy_versions == [(0, 1)]
            go_on.set()
            await update
