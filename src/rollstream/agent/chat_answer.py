"""The answer of an engine that speaks messages, as the agent room has answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from rollstream.chat.parsers.base import ToolCall
from rollstream.trajectory import Message


def read_answer(message: Message | None, *, turn: int) -> Message:
    """The message as chat templates want it: arguments of calls as mappings; as text if they are none.

    Args:
        message: as the endpoint gave it; None is an answer with nothing in it.
        turn: which answer of the rollout it is, for ids of calls.
    """
    given = message or {"role": "assistant", "content": ""}
    answer: Message = {"role": "assistant", "content": given.get("content") or ""}
    if given.get("reasoning_content"):
        answer["reasoning_content"] = given["reasoning_content"]
    calls = [_read_call(call) for call in given.get("tool_calls") or ()]
    if calls or "reasoning_content" in answer:
        answer["content"] = answer["content"].strip()
    if calls:
        answer["tool_calls"] = [openai_call(call) for call in identified(calls, bool, turn=turn)]
    return answer


def calls_of(message: Message) -> list[ToolCall]:
    """The tool calls of a message from `read_answer`, those that cannot be read included."""
    return [_read_call(call) for call in message.get("tool_calls") or ()]


def identified(calls: Sequence[ToolCall], takes: Callable[[str], bool], *, turn: int) -> list[ToolCall]:
    """Calls with ids that are unique in the answer and that `takes` takes, as `TurnTemplate.takes_call_id`.

    The model's own ids where they are; else ones of nine letters and digits, which every template takes.
    """
    given = [call.call_id for call in calls]
    if len(set(given)) == len(given) and all(one and takes(one) for one in given):
        return list(calls)
    return [replace(call, call_id=f"c{turn:04d}{at:04d}") for at, call in enumerate(calls)]


def openai_call(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's form; arguments as a mapping, as chat templates want it. As text if unreadable."""
    arguments = call.text if call.arguments is None else call.arguments
    return {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": arguments}}


def _read_call(call: dict[str, Any]) -> ToolCall:
    name, arguments, call_id = call["function"]["name"], call["function"]["arguments"], call.get("id") or None
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    try:
        value = orjson.loads(text or "{}")  # a call without arguments: some endpoints send nothing
    except orjson.JSONDecodeError as error:
        return ToolCall(name, None, text, f"the arguments are not valid JSON ({error})", call_id)
    if not isinstance(value, dict):
        return ToolCall(name, None, text, "the arguments must be a JSON object", call_id)
    return ToolCall(name, value, text, call_id=call_id)
