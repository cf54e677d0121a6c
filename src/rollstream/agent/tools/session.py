"""The tools of one rollout."""

import asyncio
import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from rollstream.agent.tools.base import ToolError
from rollstream.agent.tools.calls import Calls, CallsRefusedError, Outcome, run_to_its_end
from rollstream.agent.tools.config_file import ClassTool
from rollstream.agent.tools.functions import FunctionTool
from rollstream.agent.tools.keywords import accepted
from rollstream.agent.tools.limits import ToolLimits
from rollstream.agent.tools.result import ToolFailure, ToolResult, read_result, read_reward
from rollstream.agent.tools.row_arguments import RowArguments
from rollstream.agent.tools.text import clean_text, error_line, error_text, truncate_text
from rollstream.chat.parsers.base import ToolCall
from rollstream.chat.tool_schema import ToolSchema
from rollstream.errors import TransientError

ERROR_CHARACTERS = 1000
"""Of what an exception says: enough for a message, too little for a dump of data to fill the context."""
NAME_CHARACTERS = 80
"""Of a name that the model made up."""

ReportFailure = Callable[[str, str, BaseException | None], None]
"""Told what failed (request id and tool), the text for the model, and the exception if there was one."""


@dataclasses.dataclass(slots=True, eq=False)
class _Instance:
    """A class tool's instance in this rollout."""

    tool: ClassTool
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Held while it is created; calls of the same turn wait for that."""
    id: Any = None
    """None until it is created."""
    attempts: int = 0
    """To create it, that have ended."""
    failure: ToolResult | None = None
    """How the last attempt to create it failed."""


class ToolSession:
    """Runs the calls of one rollout, and ends what they began.

    Attributes:
        tool_s: Seconds that `run` took, all together.
        calls: Calls so far.
        errors: Those of them with an error.
    """

    def __init__(
        self,
        tools: Mapping[str, FunctionTool | ClassTool],
        *,
        calls: Calls,
        limits: ToolLimits,
        arguments: Mapping[str, RowArguments],
        request_id: str,
        report: ReportFailure,
    ) -> None:
        """See `ToolBox.session`."""
        self._tools = tools
        self._calls = calls
        self._limits = limits
        self._arguments = arguments
        self._request_id = request_id
        self._report = report
        self._instances: dict[str, _Instance] = {}
        self._unknown: dict[str, ClassTool] = {}
        """By id: instances whose `create` did not end, so that there may be something to release."""
        self._ending: asyncio.Task[dict[str, float]] | None = None
        self.tool_s = 0.0
        self.calls = 0
        self.errors = 0

    @property
    def schemas(self) -> list[ToolSchema]:
        """OpenAI schemas of this rollout's tools, in order."""
        return [tool.schema for tool in self._tools.values()]

    async def run(self, calls: Sequence[ToolCall], **context: Any) -> list[ToolResult]:
        """Runs the calls of one turn.

        Args:
            calls: All of them run, some at once; they begin in this order.
            context: Given to `execute` of class tools by name, where they take it; of `messages`, each
                gets a copy of its own.

        Returns:
            The results, in the same order. Whatever a tool does becomes one.

        Raises:
            CancelledError: The caller was cancelled.
            TransientError: So many calls of other tools hang that none is made, or the toolbox was closed
                meanwhile: there is no result that would be true. Other calls of this turn are cancelled.
        """
        if self._ending is not None:
            raise RuntimeError("the tool session is closed")
        results: list[ToolResult | None] = [None] * len(calls)
        waiting = iter(enumerate(calls))

        async def work() -> None:
            for position, call in waiting:
                results[position] = await self._run_one(call, context)

        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(calls), self._limits.max_parallel_calls)):
                    group.create_task(work())
        except ExceptionGroup as refusals:  # they all say the same
            raise refusals.exceptions[0] from None
        finally:
            self.tool_s += time.monotonic() - began
        done = [result for result in results if result is not None]
        self.calls += len(done)
        self.errors += sum(result.error is not None for result in done)
        return done

    async def close(self) -> dict[str, float]:
        """Asks each instance for its reward, then releases it; also when the caller is being cancelled.

        It takes at most twice the timeout, waiting for a thread excluded. Calling it again gives the same.

        Returns:
            Rewards by tool, of those that gave one.

        Raises:
            CancelledError: The caller was cancelled meanwhile; everything is released all the same.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await run_to_its_end(self._ending)

    async def _run_one(self, call: ToolCall, context: Mapping[str, Any]) -> ToolResult:
        tool = self._tools.get(call.name)
        if call.error is not None or call.arguments is None:
            return self._failed(call.name, "bad_arguments", f"Error: {call.error or 'no arguments'}")
        if tool is None:
            known = f"Available tools: {', '.join(self._tools)}." if self._tools else "There are no tools."
            name = call.name[:NAME_CHARACTERS]
            return self._failed(name, "unknown_tool", f"Error: unknown tool {name!r}. {known}")
        arguments = copy.deepcopy(call.arguments)  # what the tool does to it is not in the conversation
        if isinstance(tool, ClassTool):
            return await self._run_class(tool, arguments, context)
        try:
            tool.signature.bind(**arguments)
        except TypeError as error:
            takes = ", ".join(tool.signature.parameters) or "none"
            said = f"Error: {tool.name}: {error_text(error, ERROR_CHARACTERS)}. Its parameters: {takes}."
            return self._failed(tool.name, "bad_arguments", said)
        outcome = await self._calls.run(
            partial(tool.function, **arguments),
            name=tool.name,
            seconds=self._limits.timeout,
            read=self._read,
        )
        return self._result(tool.name, outcome)

    async def _run_class(
        self, tool: ClassTool, arguments: dict[str, Any], context: Mapping[str, Any]
    ) -> ToolResult:
        instance = self._instances.setdefault(tool.name, _Instance(tool))
        seconds = self._limits.timeout
        attempts = instance.attempts
        async with instance.lock:
            if instance.id is None and instance.attempts > attempts and instance.failure is not None:
                return dataclasses.replace(instance.failure)  # of a call that this one waited for
            if instance.id is None:
                created = await self._create(tool, instance)
                seconds -= created.seconds
                if instance.id is None:
                    instance.failure = self._result(tool.name, created)
                    return instance.failure
        row = self._arguments.get(tool.name, RowArguments())
        keywords = accepted(tool.tool.execute, {**row.execute_kwargs, **context})
        if "messages" in context and "messages" in keywords:  # the conversation's own, which is stored
            keywords["messages"] = copy.deepcopy(keywords["messages"])
        outcome = await self._calls.run(
            partial(tool.tool.execute, instance.id, arguments, **keywords),
            name=tool.name,
            seconds=seconds,
            read=self._read,
        )
        return self._result(tool.name, outcome)

    async def _create(self, tool: ClassTool, instance: _Instance) -> Outcome:
        given = uuid4().hex
        row = self._arguments.get(tool.name, RowArguments())
        offered = {**row.create_kwargs, "create_kwargs": dict(row.create_kwargs), "instance_id": given}
        self._unknown[given] = tool
        create = partial(tool.tool.create, **accepted(tool.tool.create, offered))
        try:
            outcome = await self._calls.run(create, name=tool.name, seconds=self._limits.timeout)
        except TransientError:  # it did not begin
            del self._unknown[given]
            raise
        instance.attempts += 1
        if outcome.timed_out:
            return outcome
        del self._unknown[given]
        if outcome.error is None:
            value = outcome.value
            identifier = value[0] if isinstance(value, tuple) and value else value
            instance.id = given if identifier is None or identifier == () else identifier
        return outcome

    async def _end(self) -> dict[str, float]:
        created = [instance for instance in self._instances.values() if instance.id is not None]
        rewards = await asyncio.gather(
            *(self._end_instance(instance.tool, instance.id) for instance in created),
            *(self._release(tool, identifier) for identifier, tool in self._unknown.items()),
        )
        self._instances.clear()
        self._unknown.clear()
        return {
            instance.tool.name: reward
            for instance, reward in zip(created, rewards, strict=False)
            if reward is not None
        }

    async def _end_instance(self, tool: ClassTool, identifier: Any) -> float | None:
        reward: float | None = await self._end_call(tool, "calc_reward", identifier, read_reward)
        await self._release(tool, identifier)
        return reward

    async def _release(self, tool: ClassTool, identifier: Any) -> None:
        await self._end_call(tool, "release", identifier, None)

    async def _end_call(
        self, tool: ClassTool, name: str, identifier: Any, read: Callable[[Any], Any] | None
    ) -> Any:
        method = getattr(tool.tool, name)
        row = self._arguments.get(tool.name, RowArguments())
        keywords = accepted(method, getattr(row, f"{name}_kwargs"))
        what = f"{tool.name}.{name}"
        outcome = await self._calls.run(
            partial(method, identifier, **keywords),
            name=what,
            seconds=self._limits.timeout,
            read=read,
            ends=True,
        )
        if outcome.error is None and not outcome.timed_out:
            return outcome.value
        self._result(what, outcome)
        return None

    def _read(self, value: Any) -> ToolResult:
        return read_result(value, self._limits)

    def _result(self, name: str, outcome: Outcome) -> ToolResult:
        if outcome.timed_out:
            said = f"Error: {name} did not answer within {self._limits.timeout:g} seconds."
            return self._failed(name, "timeout", said)
        match outcome.error:
            case None:
                result: ToolResult = outcome.value
                return result
            case ToolError() as error:
                said = f"Error: {error_text(error, self._limits.max_response_length)}"
            case CallsRefusedError() as error:
                said = f"Error: {error}"
            case error:
                said = f"Error: {error_line(error, ERROR_CHARACTERS)}"
        return self._failed(name, "exception", said, error)

    def _failed(
        self, name: str, failure: ToolFailure, said: str, error: BaseException | None = None
    ) -> ToolResult:
        self._report(f"{self._request_id}: {name}", said, error)
        text = truncate_text(clean_text(said), self._limits.max_response_length, "right")
        return ToolResult(text, error=failure)
