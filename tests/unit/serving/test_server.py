import asyncio
import socket

import pytest

from rollstream.errors import ConfigError
from rollstream.serving.app import Server
from rollstream.testing.scripted import ScriptedEngine
from tests.unit.serving.served import Client, eventually, served_model

GENERATE = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}


async def test_a_stop_answers_who_waits_with_503() -> None:
    engine = ScriptedEngine(latency=1e6)
    await engine.start()
    server = Server(engine, served_model(), port=0)
    client = Client(await server.start())
    paused = asyncio.create_task(client.post("/generate", {**GENERATE, "rid": "a"}))
    await eventually(lambda: engine.in_flight == 1)
    stream = asyncio.create_task(client.post("/v1/completions", {"prompt": "1", "stream": True}))
    await eventually(lambda: engine.in_flight == 2)
    await server.stop()
    for task in (paused, stream):
        status, answer = await task
        assert (status, answer["error"]["message"]) == (503, "the server is shutting down")
    with pytest.raises(OSError):
        await client.get("/health")
    await client.session.close()
    assert not engine.started


async def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await Server(ScriptedEngine(), served_model(), port=port).start()


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("no such host.invalid", 0)])
async def test_an_impossible_address_is_named(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        await Server(ScriptedEngine(), served_model(), host=host, port=port).start()


async def test_everybody_is_let_in_only_when_asked_for() -> None:
    with pytest.raises(ConfigError, match="API key"):
        await Server(ScriptedEngine(), served_model(), host="0.0.0.0", port=0).start()
    for options in ({"api_key": "secret"}, {"insecure": True}):
        server = Server(ScriptedEngine(), served_model(), host="0.0.0.0", port=0, **options)  # type: ignore[arg-type]
        await server.start()
        await server.stop()


async def test_the_url_of_other_addresses() -> None:
    server = Server(ScriptedEngine(), served_model(), host="localhost", port=0)
    url = await server.start()
    await server.stop()
    assert url.startswith("http://localhost:")
