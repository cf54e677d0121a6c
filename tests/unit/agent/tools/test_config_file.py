from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from rollstream.agent.tools.toolbox import ClassTool, McpEntry, load_tool_file
from rollstream.errors import ConfigError

TOOLS = '''
from rollstream.agent.tools.base import Tool

SCHEMA = {"type": "function", "function": {"name": "own", "description": "."}}

class Echo(Tool):
    async def execute(self, instance_id, parameters, **kwargs):
        return self.config["prefix"]

class Own(Echo):
    def get_openai_tool_schema(self):
        return SCHEMA

class Leaves(Own):
    def __init__(self, config, tool_schema):
        raise SystemExit(3)

class NoTool:
    def execute(self): ...

class Bare:
    """A tool without the base class."""

    def __init__(self, config, tool_schema):
        self.tool_schema = SCHEMA

    def create(self): ...
    def execute(self): ...
    def calc_reward(self): ...
    def release(self): ...
'''


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TOOLS)
    (tmp_path / "servers.json").write_text(
        '{"mcpServers": {"a": {"command": "x", "args": ["1"]}, "b": {"url": "http://b"}, '
        '"c": {"command": "y", "disabled": true}}}'
    )

    def load(text: str) -> list[ClassTool | McpEntry]:
        (tmp_path / "tools.yaml").write_text(dedent(text))
        return load_tool_file("tools.yaml")

    return load


def test_classes(load: Any) -> None:
    echo, own, bare = load(
        """
        tools:
          - class_name: mine.py:Echo
            config: {type: native, prefix: a}
            tool_schema: {type: function, function: {name: echo, description: Says it.}}
          - class_name: mine.py:Own
          - class_name: mine.py:Bare
        """
    )
    assert (echo.name, own.name, bare.name) == ("echo", "own", "own")
    assert echo.tool.config == {"type": "native", "prefix": "a"}
    assert echo.schema == {"type": "function", "function": {"name": "echo", "description": "Says it."}}
    assert type(own.schema) is dict and own.schema["function"]["name"] == "own"


def test_the_identity_is_of_class_source_and_config(load: Any, tmp_path: Path) -> None:
    entry = "tools: [{class_name: '%s:Own', config: {prefix: %s}}]"
    identities = [load(entry % ("mine.py", "a"))[0].identity]
    (tmp_path / "moved.py").write_text(TOOLS)
    assert load(entry % ("moved.py", "a"))[0].identity == identities[0]
    identities.append(load(entry % ("mine.py", "b"))[0].identity)
    (tmp_path / "moved.py").write_text(TOOLS + "\n")
    identities.append(load(entry % ("moved.py", "a"))[0].identity)
    identities.append(load("tools: [{class_name: 'mine.py:Bare', config: {prefix: a}}]")[0].identity)
    assert len({repr(identity) for identity in identities}) == 4


def test_mcp_servers(load: Any) -> None:
    inline, older, listed = load(
        """
        tools:
          - config:
              type: mcp
              server: {command: python, args: [-m, x, 3], env: {A: 1}, cwd: /tmp}
              tool_filter: [add]
          - class_name: verl.tools.mcp_base_tool.MCPBaseTool
            config: {type: mcp}
            mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [b]}
          - config: {type: mcp, mcp_servers_config_path: servers.json}
        """
    )
    settings = inline.servers[0].settings
    assert (settings.name, settings.command, settings.args) == ("python", "python", ("-m", "x", "3"))
    assert (settings.env, settings.cwd, inline.tool_filter) == ({"A": "1"}, "/tmp", ("add",))
    assert [server.settings.name for server in older.servers] == ["a", "b"]
    assert older.tool_filter == ("b",) and listed.tool_filter is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("3", r"3 is no mapping"),
        ("{class_nme: a.B}", "unknown key 'class_nme'; did you mean class_name?"),
        ("{config: 3}", "config is 3"),
        ("{config: {type: remote}}", "config.type is 'remote', want native or mcp"),
        ("{}", "needs class_name"),
        ("{class_name: 'mine.py:Echoo'}", r"class_name: mine\.py has no Echoo; did you mean Echo"),
        ("{class_name: 'no.py:Echo'}", "class_name: no such file: no.py"),
        ("{class_name: no.such.Echo}", "no.such cannot be imported"),
        ("{class_name: 'mine.py:NoTool'}", "NoTool is no tool class; subclass rollstream"),
        ("{class_name: 'mine.py:SCHEMA'}", "SCHEMA is no tool class"),
        ("{class_name: 'mine.py:Echo'}", "Echo cannot be made .*Echo has no schema: give tool_schema"),
        ("{class_name: 'mine.py:Leaves'}", r"Leaves cannot be made \(SystemExit: 3\)"),
        ("{class_name: 'mine.py:Echo', tool_schema: {type: x}}", "tool_schema.type is 'x'"),
        ("{class_name: 'mine.py:Own', mcp: {}}", "mcp is for entries with config.type: mcp"),
        ("{config: {type: mcp}}", "needs either config.server or mcp_servers_config_path"),
        ("{config: {type: mcp, rate_limit: 3}}", "unknown key 'rate_limit'"),
        ("{config: {type: mcp, server: 3}}", "3 is no mapping with command or url"),
        ("{config: {type: mcp, server: {command: x}}, tool_schema: {}}", "leave tool_schema out"),
        ("{config: {type: mcp, server: {command: x}}, class_name: a.B}", "class_name cannot be chosen"),
        (
            "{config: {type: mcp, server: {command: x}, tool_filter: add}}",
            "tool_filter is 'add', want a list",
        ),
        ("{config: {type: mcp}, mcp: {mcp_servers_config_path: no.json}}", "no such file: no.json"),
    ],
)
def test_entries_that_cannot_be_used(load: Any, entry: str, message: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"multi_turn\.tool_config_path: tools\.yaml, tools\[0\].*{message}"
    ):
        load(f"tools: [{entry}]")


def test_without_the_mcp_package(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollstream\[mcp\]'"):
        load("tools: [{config: {type: mcp, server: {command: x}}}]")
