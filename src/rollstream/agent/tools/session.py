"""The tools of one rollout: its calls, and what tools say as bounded text that can be stored."""

import asyncio
import copy
import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from uuid import uuid4

import msgspec
import numpy as np

from rollstream.agent.tools.base import ToolError
from rollstream.agent.tools.functions import FunctionTool
from rollstream.aio import finish_despite_cancellation
from rollstream.chat.parsers.base import ToolCall
from rollstream.chat.tool_schema import ArgumentCheck, ToolSchema
from rollstream.errors import DataError, TransientError, unknown_name
from rollstream.surrogates import replace_in_text
from rollstream.user_calls import CallResult, CallsRefusedError, UserCalls

TruncateSide = Literal["left", "right", "middle"]
"""Which side of a text that is too long is cut off, as verl names it."""

ToolFailure = Literal["unknown_tool", "bad_arguments", "exception", "timeout"]
"""Why a call has no result. The text tells the model."""

MAX_METRICS = 64
"""Metrics of one call that are kept; more than this is data, which belongs elsewhere."""
METRIC_CHARACTERS = 200
"""Of a metric that is no number."""
ERROR_CHARACTERS = 1000
"""Of what an exception says: enough for a message, too little for a dump of data to fill the context."""
NAME_CHARACTERS = 80
"""Of a name that the model made up."""

_MARKERS: dict[TruncateSide, str] = {
    "left": "(truncated)...",
    "right": "...(truncated)",
    "middle": "...(truncated)...",
}
"""verl's, word for word: models may have been trained with them."""

ReportFailure = Callable[[str, str, BaseException | None], None]
"""Told what failed (request id and tool), the text for the model, and the exception if there was one."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits of `actor_rollout_ref.rollout.multi_turn`."""

    max_parallel_calls: int = 8
    """Calls at once in one rollout, > 0. All calls of a turn run, in the order of their texts."""
    max_response_length: int = 4096
    """Characters of one result that the model sees, > 0."""
    truncate_side: TruncateSide = "middle"
    """What a longer result loses."""
    timeout: float = 60.0
    """Seconds for one call, making the instance included, and for each `calc_reward` and `release`; > 0.
    Waiting for another call to end does not count."""


@dataclass(slots=True)
class ToolResult:
    """How one call ended."""

    text: str
    """What the model sees: truncated, storable as UTF-8."""
    images: list[Any] = field(default_factory=list)
    """As the tool gave them; those of MCP servers are `data:` URLs."""
    reward: float | None = None
    """Of this call; finite. None: the tool said nothing."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """What else the tool said: finite numbers, short texts, booleans, None."""
    error: ToolFailure | None = None
    """None: it went well."""


@dataclass(frozen=True, slots=True)
class ClassTool:
    """A tool of a class, made."""

    name: str
    tool: Any
    """See `rollstream.agent.tools.base.Tool`; one of verl's own classes serves as well."""
    schema: ToolSchema
    identity: list[Any]
    """What decides what it does: class, source, configuration."""


@dataclass(slots=True, eq=False)
class _Instance:
    """A rollout's use of a class tool."""

    tool: ClassTool
    identifier: Any
    """The one given; then what `create` said."""
    created: CallResult | None = None
    """How `create` ended; None if it did not, so that there may be something to release."""
    creating: asyncio.Task[CallResult] = field(init=False)


class RowArguments(msgspec.Struct, forbid_unknown_fields=True):
    """A row's keyword arguments for a tool. A Parquet column has all keys in all rows: None is nothing."""

    create_kwargs: dict[str, Any] | None = None
    execute_kwargs: dict[str, Any] | None = None
    calc_reward_kwargs: dict[str, Any] | None = None
    release_kwargs: dict[str, Any] | None = None


def read_row_arguments(tools_kwargs: Mapping[str, Any]) -> dict[str, RowArguments]:
    """Reads `tools_kwargs` of a row, by tool. Raises `DataError`: an unknown key, or a value of another shape."""
    read = {}
    for name, arguments in tools_kwargs.items():
        try:
            read[name] = msgspec.convert(arguments or {}, RowArguments)
        except msgspec.ValidationError as error:
            raise DataError(f"tools_kwargs.{name}: {error}") from error
    return read


def select_tools(selection: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The tools of a row, in the order that `extra_info.tool_selection` has; nothing in it means all, as in verl.

    Raises `DataError`: it is no list, or names an unknown tool.
    """
    if isinstance(selection, str | Mapping):
        raise DataError(f"extra_info.tool_selection is {selection!r}, want a list of tool names")
    for name in () if selection is None else selection:
        if name not in known:
            raise DataError(f"extra_info.tool_selection: {unknown_name('tool', name, known)}")
    return list(dict.fromkeys(known if selection is None or len(selection) == 0 else selection))


class ToolSession:
    """Runs the calls of one rollout, and ends what they began."""

    def __init__(
        self,
        tools: Mapping[str, FunctionTool | ClassTool],
        *,
        checks: Mapping[str, ArgumentCheck],
        calls: UserCalls,
        limits: ToolLimits,
        arguments: Mapping[str, RowArguments],
        request_id: str,
        report: ReportFailure,
    ) -> None:
        """See `ToolBox.session`."""
        self._tools = tools
        self._checks = checks
        self._calls = calls
        self._limits = limits
        self._arguments = arguments
        self._request_id = request_id
        self._report = report
        self._current: dict[str, _Instance] = {}
        """By tool. Calls of the same turn wait for its `create`; one that fails is tried again in the next turn."""
        self._instances: list[_Instance] = []
        """All whose `create` began."""
        self._ending: asyncio.Task[dict[str, float]] | None = None

    @property
    def schemas(self) -> list[ToolSchema]:
        """OpenAI schemas of this rollout's tools, in order."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def is_stateless(self) -> bool:
        """Whether no call depends on the calls before. A function does not know whose calls it answers."""
        tools = self._tools.values()
        return all(isinstance(one, FunctionTool) or getattr(one.tool, "stateless", False) for one in tools)

    async def run(self, calls: Sequence[ToolCall], **context: Any) -> list[ToolResult]:
        """Runs the calls of one turn, some at once; they begin in this order, and so do the results stand.

        Whatever a tool does becomes a result. `context` is given to `execute` of class tools by name, where they
        take it; of `messages`, each gets a copy of its own. Raises `TransientError`: the toolbox was closed
        meanwhile, so there is no result that would be true.
        """
        if self._ending is not None:
            raise RuntimeError("the tool session is closed")
        slots = asyncio.Semaphore(self._limits.max_parallel_calls)

        async def run_one(call: ToolCall) -> ToolResult:
            async with slots:
                return await self._run_one(call, context)

        if len(calls) == 1:
            return [await run_one(calls[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run_one(call)) for call in calls]
        except ExceptionGroup as refusals:  # they all say the same
            raise refusals.exceptions[0] from None
        return [task.result() for task in tasks]

    async def close(self) -> dict[str, float]:
        """Asks each instance for its reward, then releases it, also when the caller is being cancelled.

        Gives the rewards by tool, of those that gave one; again when called again. It takes at most twice the
        timeout, waiting for a thread excluded.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await finish_despite_cancellation(self._ending)

    async def _run_one(self, call: ToolCall, context: Mapping[str, Any]) -> ToolResult:
        name, tool = call.name, self._tools.get(call.name)
        if call.error is not None or call.arguments is None:
            return self._failed(name, "bad_arguments", call.error or "no arguments")
        if tool is None:
            known = f"Available tools: {', '.join(self._tools)}." if self._tools else "There are no tools."
            name = name[:NAME_CHARACTERS]
            return self._failed(name, "unknown_tool", f"unknown tool {name!r}. {known}")
        if (misfit := self._checks[name].misfit(call.arguments)) is not None:
            return self._failed(name, "bad_arguments", f"{name}: {misfit[:ERROR_CHARACTERS]}.")
        arguments = copy.deepcopy(call.arguments)  # what the tool does to it is not in the conversation
        seconds = self._limits.timeout
        if isinstance(tool, ClassTool):
            instance = self._current.get(name)
            begins = instance is None
            if instance is None:
                instance = self._current[name] = _Instance(tool, uuid4().hex)
                instance.creating = asyncio.create_task(self._create(instance))
            created = await instance.creating
            if not _went_well(created):
                if self._current.get(name) is instance:
                    del self._current[name]
                return self._result(name, created)
            seconds -= created.seconds if begins else 0
            execute = tool.tool.execute
            keywords = accepted(execute, {**self._of_row(tool, "execute"), **context})
            if "messages" in context and "messages" in keywords:  # the conversation's own, which is stored
                keywords["messages"] = copy.deepcopy(keywords["messages"])
            made = partial(execute, instance.identifier, arguments, **keywords)
        else:
            try:
                tool.signature.bind(**arguments)
            except TypeError as error:
                takes = ", ".join(tool.signature.parameters) or "none"
                return self._failed(name, "bad_arguments", f"{name}: {error}. Its parameters: {takes}.")
            made = partial(tool.function, **arguments)
        read = partial(read_result, limits=self._limits)
        return self._result(name, await self._calls.run(made, name=name, seconds=seconds, read=read))

    async def _create(self, instance: _Instance) -> CallResult:
        tool, row = instance.tool, self._of_row(instance.tool, "create")
        offered = {**row, "create_kwargs": dict(row), "instance_id": instance.identifier}
        create = partial(tool.tool.create, **accepted(tool.tool.create, offered))
        self._instances.append(instance)
        try:
            outcome = await self._calls.run(create, name=tool.name, seconds=self._limits.timeout)
        except TransientError:  # it did not begin
            self._instances.remove(instance)
            raise
        if not outcome.timed_out:
            value, instance.created = outcome.value, outcome
            if isinstance(value, tuple):
                value = value[0] if value else None
            instance.identifier = instance.identifier if value is None else value
        return outcome

    async def _end(self) -> dict[str, float]:
        rewards = await asyncio.gather(*map(self._end_instance, self._instances))
        ended = zip(self._instances, rewards, strict=True)
        return {instance.tool.name: reward for instance, reward in ended if reward is not None}

    async def _end_instance(self, instance: _Instance) -> float | None:
        reward: float | None = None
        if instance.created is not None:
            if not _went_well(instance.created):
                return None
            reward = await self._end_call(instance, "calc_reward", read_reward)
        await self._end_call(instance, "release", None)
        return reward

    async def _end_call(self, instance: _Instance, name: str, read: Callable[[Any], Any] | None) -> Any:
        method = getattr(instance.tool.tool, name)
        call = partial(method, instance.identifier, **accepted(method, self._of_row(instance.tool, name)))
        # A name of its own: calls that hang do not keep others from their end.
        what = f"{instance.tool.name}.{name}"
        try:
            outcome = await self._calls.run(call, name=what, seconds=self._limits.timeout, read=read)
        except TransientError as error:
            outcome = CallResult(error=error)
        if _went_well(outcome):
            return outcome.value
        self._result(what, outcome)
        return None

    def _of_row(self, tool: ClassTool, method: str) -> Mapping[str, Any]:
        return getattr(self._arguments.get(tool.name), f"{method}_kwargs", None) or {}

    def _result(self, name: str, outcome: CallResult) -> ToolResult:
        if outcome.timed_out:
            said = f"{name} did not answer within {self._limits.timeout:g} seconds."
            return self._failed(name, "timeout", said)
        match error := outcome.error:
            case None:
                result: ToolResult = outcome.value
                return result
            case ToolError() | CallsRefusedError():
                said = _text_of(error)
            case _:
                said = error_line(error, ERROR_CHARACTERS)
        return self._failed(name, "exception", said, error)

    def _failed(
        self, name: str, failure: ToolFailure, said: str, error: BaseException | None = None
    ) -> ToolResult:
        said = f"Error: {said}"
        self._report(f"{self._request_id}: {name}", said, error)
        return ToolResult(to_text(said, self._limits.max_response_length, "right"), error=failure)


def accepted(method: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the offered keyword arguments that a method takes.

    Tools differ in what they take: verl's newer ones `create_kwargs`, its older ones each item by name, some
    anything. All are offered everything.
    """
    try:
        parameters = inspect.signature(method).parameters
    except ValueError:  # written in C, without a signature to look at
        return dict(offered)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def _went_well(outcome: CallResult) -> bool:
    return outcome.error is None and not outcome.timed_out


def read_result(value: Any, limits: ToolLimits) -> ToolResult:
    """Reads what a tool returned: a response, or a tuple of response, reward and metrics.

    A response is a `ToolResponse` (or anything with its fields), text, bytes, a dict, or whatever has a text.

    Raises:
        TypeError: A tuple of another length, a generator, or images that are no list.
        NotImplementedError: A video.
        Exception: Whatever the value itself raises when it is looked at.
    """
    reward = metrics = None
    if isinstance(value, tuple):
        if not 1 <= len(value) <= 3:
            raise TypeError(f"the tool returned a tuple of {len(value)}, want (response, reward, metrics)")
        value, reward, metrics = (*value, None, None)[:3]
    result = ToolResult("", reward=read_reward(reward))
    if isinstance(metrics, Mapping):
        result.metrics = {_short(name): _metric(metrics[name]) for name in [*metrics][:MAX_METRICS]}
    if all(hasattr(value, name) for name in ("text", "image", "video")):
        if value.video:
            raise NotImplementedError("the tool returned a video, which no agent loop can show to a model")
        if value.image is not None and not isinstance(value.image, list):
            raise TypeError(f"the tool returned {type(value.image).__name__} as image, want a list")
        result.images = [image for image in value.image or [] if image is not None]
        value = "" if value.text is None else value.text
    result.text = to_text(value, limits.max_response_length, limits.truncate_side)
    return result


def read_reward(value: Any) -> float | None:
    """A reward as a finite number, or None; one that is neither a number nor None is logged."""
    if value is None:
        return None
    try:
        reward = float(value)
    except Exception:
        reward = math.nan
    if math.isfinite(reward):
        return reward
    logger.warning("a tool gave a reward that is no finite number (%s); taken as none", type(value).__name__)
    return None


def _metric(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | np.number):
        return float(value) if math.isfinite(value) else None
    return _short(value)


def _short(value: Any) -> str:
    try:
        return to_text(value, METRIC_CHARACTERS, "right")
    except Exception as error:
        return error_line(error, METRIC_CHARACTERS)


def truncate_text(text: str, max_length: int, side: TruncateSide) -> str:
    """Cuts a text to exactly `max_length` characters, > 0, the marker that says so included, if it is longer.

    `left` cuts the beginning off, `right` the end, `middle` keeps half of both. When the marker would fill
    `max_length`, nothing marks the cut.
    """
    if len(text) <= max_length:
        return text
    marker = _MARKERS[side] if len(_MARKERS[side]) < max_length else ""
    keep = max_length - len(marker)
    head = {"left": 0, "right": keep, "middle": keep // 2}[side]
    return text[:head] + marker + text[len(text) - (keep - head) :]


def to_text(value: Any, max_length: int, side: TruncateSide) -> str:
    """Any value as text for the model, truncated.

    Text stays as it is, bytes are read as UTF-8, a dict becomes JSON, everything else what `str` makes of it.

    Raises:
        TypeError: A generator, which would say nothing.
        Exception: Whatever the value's own `__str__` raises.
    """
    if isinstance(value, bytes | bytearray):
        text = value.decode("utf-8", "replace")
    elif isinstance(value, dict):
        text = json.dumps(value, ensure_ascii=False, default=str)
    elif inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise TypeError("the tool returned a generator, want text or a ToolResponse")
    else:  # of a subclass of `str`, too, whatever it overrides
        text = str.__str__(value if isinstance(value, str) else str(value))
    return replace_in_text(truncate_text(text, max_length, side))


def error_line(error: BaseException, max_length: int) -> str:
    """`ValueError: what it says`, in one line of at most `max_length` characters. Never raises."""
    said = " ".join(_text_of(error)[:max_length].split())
    line = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return truncate_text(line, max_length, "right")


def _text_of(error: BaseException) -> str:
    try:
        return replace_in_text(str.__str__(str(error)))
    except BaseException:  # a __str__ of the user's
        return "(its text cannot be read)"
