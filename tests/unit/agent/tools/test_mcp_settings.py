from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.agent.tools.mcp import load_mcp_servers, read_mcp_server
from rollstream.errors import ConfigError


def test_what_other_programs_write_is_read() -> None:
    server = read_mcp_server(
        "a",
        {"type": "stdio", "command": "npx", "args": ["-y", 3], "env": {"A": 1}, "alwaysAllow": ["x"]},
        "here",
    )
    assert server is not None
    assert (server.name, server.command, server.args, server.env) == ("a", "npx", ("-y", "3"), {"A": "1"})
    remote = read_mcp_server("", {"type": "http", "url": "http://x", "headers": {"K": "secret"}}, "here")
    assert remote is not None and remote.name == "http://x" and remote.headers == {"K": "secret"}
    assert "secret" not in repr(remote) and "secret" not in repr(remote.identity)
    assert read_mcp_server("a", {"command": "x", "disabled": True}, "here") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs either command"),
        ({"command": "x", "url": "y"}, "needs either command"),
        ({"comand": "x"}, "unknown key 'comand'; did you mean command?"),
        ({"url": "x", "type": "sse"}, "transport 'sse' is not supported"),
        ({"command": "x", "transport": "http"}, "transport 'http' is not supported"),
        ({"command": "x", "args": "y"}, "args is 'y', want a list"),
        ({"command": ["x"]}, r"command is \['x'\], want text"),
        ({"command": "x", "env": ["A=1"]}, "env must be a mapping"),
        ({"url": "x", "headers": {"A": [1]}}, "headers must be a mapping"),
        ([], "is no mapping"),
    ],
)
def test_settings_that_cannot_be_used(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: ?.*{message}"):
        read_mcp_server("a", settings, "here")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "needs mcpServers"),
        (b'{"mcpServers": []}', "needs mcpServers"),
        (b'{"mcpServers": {}}', "has no server that is not disabled"),
        (orjson.dumps({"mcpServers": {"a": {}}}), r"servers\.json, a: needs either"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "servers.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^here: .*{message}"):
        load_mcp_servers(file, "here")
