"""Answers of the model: what an endpoint gave as a message, and the ids of calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from rollstream.chat.messages import answer_message
from rollstream.chat.parsers.base import ToolCall
from rollstream.trajectory import Message


def read_answer(given: Message | None, *, turn: int) -> tuple[Message, list[ToolCall]]:
    """The message that an endpoint gave, None for an empty one, and its calls, those that cannot be read included.

    `turn` is the number of the answer in the rollout, for ids of calls that have none.
    """
    given = given or {}
    calls = identified([_read_call(call) for call in given.get("tool_calls") or ()], bool, turn=turn)
    return answer_message(given.get("content") or "", given.get("reasoning_content"), calls), calls


def identified(calls: Sequence[ToolCall], takes: Callable[[str], bool], *, turn: int) -> list[ToolCall]:
    """Calls with ids that are unique in the answer and that `takes` takes, as `TurnTemplate.takes_call_id`.

    The model's own ids where they are; else ones of nine letters and digits, which every template takes.
    """
    given = [call.call_id for call in calls]
    if len(set(given)) == len(given) and all(one and takes(one) for one in given):
        return list(calls)
    return [replace(call, call_id=f"c{turn:04d}{at:04d}") for at, call in enumerate(calls)]


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
