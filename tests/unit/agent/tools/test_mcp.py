import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollstream.agent.tools.base import ToolError
from rollstream.agent.tools.mcp import (
    McpServer,
    McpServerSettings,
    McpTool,
    load_mcp_servers,
)
from rollstream.engine.launch.local import reserve_port
from rollstream.errors import ConfigError
from tests.support.processes import is_running
from tests.support.until import until

SERVER = str(Path(__file__).with_name("mcp_server.py"))
NAMES = ["add", "pid", "fail", "leave", "sleep", "draw", "secret"]


def stdio(*args: str, **settings: Any) -> McpServer:
    command = {"command": sys.executable, "args": (SERVER, *(args or ("stdio",)))}
    return McpServer(McpServerSettings(**{**command, **settings}), "tools[0]", "test")


async def run(server: McpServer, name: str, **arguments: Any) -> Any:
    tool = McpTool(server, {"type": "function", "function": {"name": name}})
    return await tool.execute("id", arguments)


@pytest.fixture
async def server() -> AsyncIterator[McpServer]:
    server = stdio(env={"TEST_SECRET": "open"})
    yield server
    await server.close()


async def test_results(server: McpServer) -> None:
    assert (await run(server, "add", a=3, b=4)).text == "7"
    assert (await run(server, "secret")).text == "open"
    drawn = await run(server, "draw")
    assert drawn.text == "a pixel"
    assert drawn.image[0].startswith("data:image/png;base64,iVBOR")
    with pytest.raises(ToolError, match="on purpose"):
        await run(server, "fail")
    with pytest.raises(ToolError, match="validation error"):
        await run(server, "add", a="no number")
    with pytest.raises(ToolError, match="nothing"):
        await run(server, "nothing")
    assert (await run(server, "add", a=1)).text == "2"


async def test_one_process_serves_all_and_ends_with_close(server: McpServer) -> None:
    pids = {result.text for result in await asyncio.gather(*(run(server, "pid") for _ in range(20)))}
    assert len(pids) == 1
    pid = int(pids.pop())
    await server.close()
    assert not is_running(pid)
    await server.close()
    with pytest.raises(ToolError, match="closed"):
        await run(server, "pid")
    assert len(asyncio.all_tasks()) == 1


async def test_a_server_that_dies_in_a_call_is_started_for_the_next(server: McpServer) -> None:
    before = (await run(server, "pid")).text
    beside = asyncio.create_task(run(server, "sleep"))
    with pytest.raises(ToolError, match=r"test failed: .*its standard error ends: .*leaving"):
        await run(server, "leave")
    with pytest.raises(ToolError, match="test failed"):
        await beside
    after = (await run(server, "pid")).text
    assert after != before


async def test_a_call_that_is_given_up_leaves_the_session_usable(server: McpServer) -> None:
    before = (await run(server, "pid")).text
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await run(server, "sleep")
    assert (await run(server, "pid")).text == before


STUBBORN = "trap '' TERM; echo $$ | tee $0 >&2; while :; do sleep 1; done"
"""Neither the end of its input nor SIGTERM ends it."""


async def test_closing_while_it_connects_ends_the_process(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    server = stdio(command="sh", args=("-c", STUBBORN, str(file)))
    calling = asyncio.create_task(run(server, "add", a=1))
    pid = int(await until(lambda: file.exists() and file.read_text().strip()))
    assert is_running(pid)
    await server.close()
    with pytest.raises(ToolError, match="ended while it was being connected"):
        await calling
    await until(lambda: not is_running(pid))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": "no-such-command-at-all"}, "FileNotFoundError"),
        ({"args": ("-c", "import sys; sys.exit('so it ends')")}, "standard error ends: so it ends"),
        ({"command": None, "args": (), "url": "http://127.0.0.1:9/mcp"}, "127.0.0.1:9/mcp|onnect"),
    ],
)
async def test_a_server_that_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"tools\[0\]: the MCP server test cannot be used \(.*({message})"):
        await stdio(**settings).list_tools()
    assert len(asyncio.all_tasks()) == 1


@contextmanager
def serving(port: int) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/mcp", timeout=60)
            except urllib.error.HTTPError:
                break  # it answers
            except urllib.error.URLError:
                assert process.poll() is None
                time.sleep(0.02)
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def port() -> Iterator[int]:
    """Nobody else takes it, also between two servers."""
    with reserve_port("127.0.0.1") as reserved:
        yield reserved.getsockname()[1]


async def test_streamable_http(port: int) -> None:
    settings = McpServerSettings(url=f"http://127.0.0.1:{port}/mcp", headers={"Authorization": "x"})
    server = McpServer(settings, "tools[0]", "test")
    with serving(port) as pid:
        assert [schema["function"]["name"] for schema in await server.list_tools()] == NAMES
        answers = await asyncio.gather(*(run(server, "add", a=i) for i in range(10)))
        assert [answer.text for answer in answers] == [str(i + 1) for i in range(10)]
        assert (await run(server, "pid")).text == str(pid)
        with pytest.raises(ToolError, match="on purpose"):
            await run(server, "fail")
    with pytest.raises(ToolError, match="test failed"):
        await run(server, "pid")
    with serving(port) as pid:
        assert (await run(server, "pid")).text == str(pid)
        await server.close()
    assert len(asyncio.all_tasks()) == 1


def test_what_other_programs_write_is_read(tmp_path: Path) -> None:
    servers = {
        "a": {"type": "stdio", "command": "npx", "args": ["-y", 3], "env": {"A": 1}, "alwaysAllow": ["x"]},
        "b": {"type": "http", "url": "http://x", "headers": {"K": "secret"}},
        "c": {"disabled": True},
    }
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers, "other": 1}))
    read = load_mcp_servers(tmp_path / "servers.json", "here")
    assert (read["a"].command, read["a"].args, read["a"].env) == ("npx", ("-y", 3), {"A": 1})
    assert read["b"].headers == {"K": "secret"} and "secret" not in repr(read["b"].identity)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"command": "x", "url": "y"},
        {"comand": "x"},
        {"url": "x", "type": "sse"},
        {"command": "x", "transport": "http"},
        {"command": "x", "args": "y"},
        {"command": ["x"]},
        {"command": "x", "env": ["A=1"]},
        {"url": "x", "headers": {"A": [1]}},
        [],
    ],
)
def test_settings_that_cannot_be_used(settings: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings, McpServerSettings)


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"mcpServers": []}', b'{"mcpServers": {}}', b'{"mcpServers": {"a": {}}}'],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "servers.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"here: .*servers\.json"):
        load_mcp_servers(file, "here")
