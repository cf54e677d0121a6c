"""Tools of the tests."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

from rollstream.agent.tools.base import OpenAIFunctionToolSchema, Tool
from rollstream.agent.tools.functions import FunctionTool, load_function_tools
from rollstream.agent.tools.session import ClassTool, ToolLimits
from rollstream.agent.tools.toolbox import ToolBox
from rollstream.chat.parsers.base import ToolCall


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, "")


def schema(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "."}}


def class_tool(tool: Callable[..., Tool], name: str = "it", **config: Any) -> ClassTool:
    made = tool(config=config, tool_schema=OpenAIFunctionToolSchema(schema(name)))
    return ClassTool(name, made, schema(name), [name])


def function_of(function: Callable[..., Any]) -> FunctionTool:
    """A function as a tool, without a file."""
    name = function.__name__
    return FunctionTool(name, function, schema(name), inspect.signature(function))


def functions(folder: Path, source: str) -> list[FunctionTool]:
    file = folder / "functions.py"
    file.write_text("from rollstream.agent.tools.functions import function_tool\n" + dedent(source))
    return load_function_tools(file)


@asynccontextmanager
async def opened(tools: Sequence[Any], **limits: Any) -> AsyncIterator[ToolBox]:
    box = ToolBox(tools, ToolLimits(**limits))
    await box.describe()
    try:
        yield box
    finally:
        await box.close()


class Recorder(Tool):
    """Notes what is done to it; does what `config` says."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self.log: list[tuple[Any, ...]] = []
        self.begun = asyncio.Event()
        self.let_go = threading.Event()

    async def _do(self, what: str, identifier: Any, kwargs: Any) -> None:
        self.log.append((what, identifier, kwargs))
        behaviour = self.config.get(what)
        if behaviour == "raise":
            raise ValueError(what)
        if behaviour == "exit":
            raise SystemExit(what)
        if behaviour == "hang":
            self.begun.set()
            await asyncio.Event().wait()
        if behaviour == "hang in a thread":
            self.begun.set()
            await asyncio.to_thread(self.let_go.wait)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        await self._do("create", instance_id, kwargs)
        assert instance_id is not None
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await self._do("execute", instance_id, kwargs)
        return parameters

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        await self._do("calc_reward", instance_id, kwargs)
        return self.config.get("reward", 1)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._do("release", instance_id, kwargs)

    @property
    def done(self) -> list[str]:
        return [entry[0] for entry in self.log]
