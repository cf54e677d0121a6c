import asyncio
import os
import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from rollstream.agent.tools.toolbox import (
    ClassTool,
    McpEntry,
    ToolBox,
    ToolLimits,
    load_tool_file,
    load_toolbox,
)
from rollstream.errors import ConfigError

from .tools import call

SERVER = str(Path(__file__).with_name("mcp_server.py"))
SERVING = {"type": "mcp", "server": {"command": sys.executable, "args": [SERVER, "stdio"]}}
CLASS = """
from rollstream.agent.tools.base import Tool

class Own(Tool):
    def get_openai_tool_schema(self):
        return {"type": "function", "function": {"name": "own", "description": "."}}

    async def execute(self, instance_id, parameters, **kwargs):
        return "done"
"""
FUNCTION = '''
from rollstream.agent.tools.functions import function_tool

@function_tool
def now():
    """The time."""
    return "now"
'''


@pytest.fixture
def load(tmp_path: Path) -> Any:
    (tmp_path / "own.py").write_text(CLASS)
    (tmp_path / "functions.py").write_text(FUNCTION)

    def load(*entries: dict[str, Any], own: bool = True) -> ToolBox:
        tools = [*entries, *([{"class_name": f"{tmp_path}/own.py:Own"}] if own else [])]
        (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": tools}))
        return load_toolbox(
            tool_config_path=str(tmp_path / "tools.yaml"),
            function_tool_path=str(tmp_path / "functions.py"),
            limits=ToolLimits(timeout=30.0),
        )

    return load


def names(box: ToolBox) -> list[str]:
    return [schema["function"]["name"] for schema in box.schemas]


async def test_all_kinds_together(load: Any) -> None:
    box = load({"config": {**SERVING, "tool_filter": ["pid", "add"]}})
    with pytest.raises(RuntimeError, match="describe"):
        _ = box.schemas
    await asyncio.to_thread(lambda: asyncio.run(box.describe()))  # as a run prepares
    assert names(box) == ["add", "pid", "own", "now"]
    await box.describe()
    session = box.session(tools_kwargs={}, selection=None, request_id="r")
    results = await session.run([call("add", a=1), call("pid"), call("own"), call("now")])
    pid = int(results[1].text)
    assert [results[i].text for i in (0, 2, 3)] == ["2", "done", "now"]
    os.kill(pid, 0)
    assert await session.close() == {}
    await box.close()
    await box.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="closed"):
        box.session(tools_kwargs={}, selection=None, request_id="r")
    assert len(asyncio.all_tasks()) == 1


def test_the_digest_follows_what_decides(load: Any, tmp_path: Path) -> None:
    digests = [load().digest]
    assert load().digest == digests[0] and len(digests[0]) == 32
    (tmp_path / "functions.py").write_text(FUNCTION + "\n")
    digests.append(load().digest)
    (tmp_path / "own.py").write_text(CLASS.replace("done", "over"))
    digests.append(load().digest)
    with_config = {"class_name": f"{tmp_path}/own.py:Own", "config": {"a": 1, 2: {"x": None}}}
    digests.append(load(with_config, own=False).digest)
    assert len(set(digests)) == 4


async def test_the_examples_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "t")
    text = (Path(__file__).parents[4] / "docs" / "tools.md").read_text()
    python = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "functions.py").write_text(python[0])
    (tmp_path / "my_tools.py").write_text(python[1])
    settings, tools, servers = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert "tool_timeout: 60.0" in settings
    (tmp_path / "tools.yaml").write_text(tools)
    box = load_toolbox(tool_config_path="tools.yaml", function_tool_path="functions.py")
    assert names(box) == ["check_answer", "add", "web_search"]
    row = {"check_answer": {"create_kwargs": {"ground_truth": "4"}}}
    session = box.session(tools_kwargs=row, selection=None, request_id="r")
    results = await session.run(
        [call("check_answer", answer="4"), call("add", a=1), call("web_search", query="")]
    )
    assert [(result.text, result.reward) for result in results] == [
        ("right", -0.05),
        ("1", None),
        ("nothing found", None),
    ]
    assert await session.close() == {"check_answer": 1.0}
    await box.close()
    (tmp_path / "tools.yaml").write_text(servers)
    (tmp_path / "servers.json").write_text('{"mcpServers": {"a": {"command": "x"}}}')
    assert len(load_tool_file("tools.yaml")) == 3


def test_names_must_differ(load: Any, tmp_path: Path) -> None:
    twice = {"class_name": f"{tmp_path}/own.py:Own"}
    with pytest.raises(ConfigError, match="more than one tool named own"):
        load(twice)


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
def load_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TOOLS)
    (tmp_path / "servers.json").write_text(
        '{"mcpServers": {"a": {"command": "x", "args": ["1"]}, "b": {"url": "http://b"}, '
        '"c": {"command": "y", "disabled": true}}}'
    )

    def load_file(text: str) -> list[ClassTool | McpEntry]:
        (tmp_path / "tools.yaml").write_text(dedent(text))
        return load_tool_file("tools.yaml")

    return load_file


def test_classes(load_file: Any) -> None:
    echo, own, bare = load_file(
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


def test_mcp_servers(load_file: Any) -> None:
    inline, older, listed = load_file(
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
    (server,) = inline.servers
    assert (server.name, server.settings.command, inline.tool_filter) == ("python", "python", ("add",))
    assert [server.name for server in older.servers] == ["a", "b"]
    assert older.tool_filter == ("b",) and listed.tool_filter is None


@pytest.mark.parametrize(
    "entry",
    [
        "3",
        "{class_nme: a.B}",
        "{config: 3}",
        "{config: {type: remote}}",
        "{}",
        "{class_name: 'mine.py:Echoo'}",
        "{class_name: 'no.py:Echo'}",
        "{class_name: 'mine.py:NoTool'}",
        "{class_name: 'mine.py:SCHEMA'}",
        "{class_name: 'mine.py:Echo'}",
        "{class_name: 'mine.py:Leaves'}",
        "{class_name: 'mine.py:Echo', tool_schema: {type: x}}",
        "{class_name: 'mine.py:Own', mcp: {}}",
        "{config: {type: mcp}}",
        "{config: {type: mcp, rate_limit: 3}}",
        "{config: {type: mcp, server: {command: x}}, tool_schema: {}}",
        "{config: {type: mcp, server: {command: x}}, class_name: a.B}",
        "{config: {type: mcp, server: {command: x}, tool_filter: add}}",
        "{config: {type: mcp}, mcp: {mcp_servers_config_path: no.json}}",
    ],
)
def test_entries_that_cannot_be_used(load_file: Any, entry: str) -> None:
    with pytest.raises(ConfigError, match=r"multi_turn\.tool_config_path: tools\.yaml, tools\[0\]"):
        load_file(f"tools: [{entry}]")
